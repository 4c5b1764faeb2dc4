"""The memory of one matrix product."""

from __future__ import annotations

from lockstep.core.plan.phase import Tape
from lockstep.core.plan.sizes import Sizes


def multiply(tape: Tape, z: Sizes, rows: int, inner: int, columns: int, **made: float) -> None:
    """Make a narrow product (rows, columns) of operands with `inner` as common size; made: its name and bytes."""
    if not z.by_fp32 or z.fp8:
        tape.make(**made)
        return
    tape.make(fp32_operands=4.0 * inner * (rows + columns))
    tape.make(fp32_product=4.0 * rows * columns)
    tape.free("fp32_operands")
    tape.make(**made)
    tape.free("fp32_product")
