"""Detect a run whose bf16 products are so slow on this CPU that FP32 trains faster: one line, or none.

python -m lockstep.scripts.shared.slow_products CONFIG    prints the line, or nothing; scripts/quickstart.sh reads it
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lockstep.core.backend import Backend
    from lockstep.core.config.schema import RunConfig

# On a CPU with bf16 instructions, bf16 products take 0.5 to 2 times as long as FP32's; without them, 20 to 130 times.
SLOW = 5.0
# Half a minute of products at the 3 GFLOP/s of a core without the instructions. A shorter run is not measured.
WORTH_A_LINE = 1e11


def slow_products(config: RunConfig, backend: Backend) -> str | None:
    """Return one line on a run whose bf16 products are slow on this CPU; None if they are fast or the run is short."""
    from lockstep.core.backend import NotSupported
    from lockstep.core.capabilities import MultipliesSlowly, ask
    from lockstep.core.components.precision import FORMATS
    from lockstep.core.model.budget import flops_per_token

    train = config.train
    if not FORMATS[config.precision.operand].own_instructions:
        return None
    tokens = train.steps * train.batch_size * train.longest
    if tokens * flops_per_token(config.model, train.longest)["6N"] < WORTH_A_LINE:
        return None
    try:
        factor = ask(backend, MultipliesSlowly).bf16_slowdown(config)
    except NotSupported:
        return None
    return f"bf16 products take {factor:.0f} times FP32's time on this CPU" if factor >= SLOW else None


def main(config: Path) -> int:
    """Print the line for a run file."""
    from lockstep.core.config.file import load_config
    from lockstep.scripts.shared.backends import TRAINER, open_named

    words = slow_products(load_config(config, {}), open_named(TRAINER))
    if words:
        print(words)
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
