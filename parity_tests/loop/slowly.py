"""`lockstep` with a pause after each step of the torch trainer, so that a signal arrives during the run."""

import sys
import time


def main() -> int:
    from lockstep.core.backend import Batch, StepRecord
    from lockstep.scripts import cli
    from lockstep.torch_backend.session import TorchSession

    step = TorchSession.step

    def slow_step(self: TorchSession, batch: Batch, *, norms: bool = False) -> StepRecord:
        record = step(self, batch, norms=norms)
        time.sleep(0.15)
        return record

    TorchSession.step = slow_step  # type: ignore[method-assign]
    return cli.run(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
