// Stands in for the header of this name: it tells NVIDIA's compiler about the host's, and a plain C compiler nothing.
#pragma once
