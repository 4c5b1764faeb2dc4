"""Know before renting: memory, time and cost of a run, estimated from its configuration. No framework, no device.

`fits` answers for one configuration and one GPU in under a few milliseconds.
"""

from lockstep.core.plan.estimate import Estimate, fits
from lockstep.core.plan.gpus import GPUS, Gpu, gpu_named

__all__ = ["GPUS", "Estimate", "Gpu", "fits", "gpu_named"]
