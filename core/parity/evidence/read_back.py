"""Read back a step's inputs from the device, and count where they differ from the step's batch.

The digest in a step's record is that of the batch given to the session. Before the program reads it, it is copied to
pinned memory, transferred, and cut into micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from lockstep.core.backend import Batch, NotSupported, Session
from lockstep.core.capabilities import ReadsBack, ask

WHAT = "the inputs of the step's program, read back from its device"


def reading_back(session: Session, missing: list[str]) -> Callable[[Batch], dict[str, int]]:
    """Request that the next step keep its program's inputs. Returns a function that counts differences from a batch.

    The function returns array → number of differing elements. If the session does not show its inputs, it returns
    nothing, and `missing` receives the reason.
    """
    try:
        shows = ask(session, ReadsBack)
        shows.keep_inputs()
    except NotSupported as reason:
        missing.append(f"{WHAT}: {reason}")
        return lambda batch: {}

    def counted(batch: Batch) -> dict[str, int]:
        kept = shows.inputs_kept()
        if not kept:
            missing.append(f"{WHAT}: the step kept no inputs")
        return {name: _mismatches(array, batch.arrays[name]) for name, array in kept.items()}

    return counted


def _mismatches(array: np.ndarray, due: np.ndarray) -> int:
    return int(np.count_nonzero(array != due)) if array.shape == due.shape else due.size
