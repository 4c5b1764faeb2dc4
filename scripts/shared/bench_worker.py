"""A job of `lockstep bench` in a process of its own: JSON in by stdin, JSON out to the file that the argument names.

Jobs: `device` (facts and versions), `floor` (rates and bandwidth), `row` (a row's steps).
"""

from __future__ import annotations

import json
import sys
import traceback
from pathlib import Path
from typing import Any

from lockstep.core.bench.suite import in_one_line
from lockstep.core.config.schema import RunConfig
from lockstep.core.errors import UserError


def answer(job: dict[str, Any]) -> dict[str, Any]:
    """Return the job's result with status `measured`, or another status with a reason in one line."""
    import torch

    from lockstep.torch_backend.tools.bench import device_facts, measure_floor, measure_steps, versions

    try:
        if job["job"] == "device":
            found = {"device": device_facts(), "versions": versions()}
        elif job["job"] == "floor":
            found = {"floor": measure_floor()}
        else:
            config = RunConfig.model_validate(job["config"])
            found = measure_steps(config, job["warmup"], job["repeat"])
        return {"status": "measured", **found}
    except UserError as error:
        return {"status": "refused", "reason": in_one_line(str(error))}
    except Exception as error:
        traceback.print_exc()
        # The compiler wraps an error that occurs while it tries out kernels.
        if isinstance(error, torch.OutOfMemoryError | MemoryError) or "out of memory" in str(error):
            return {"status": "out_of_memory", "reason": in_one_line(str(error).split(" GPU ")[0])}
        message = next(iter(str(error).strip().splitlines()), "")
        return {"status": "failed", "reason": in_one_line(f"{type(error).__name__}: {message}")}


def main() -> None:
    """Read the job, write the answer."""
    found = answer(json.load(sys.stdin))
    Path(sys.argv[1]).write_text(json.dumps(found, allow_nan=False))


if __name__ == "__main__":
    main()
