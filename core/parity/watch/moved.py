"""Find weights that changed outside of `optimizer.step()`: elsewhere in the block, or between two steps.

Loss, gradients and update do not show such a change, because each is judged from the weights of its own moment.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from lockstep.core.parity.measures.verdict import Finding
from lockstep.core.parity.watch import cause
from lockstep.core.parity.watch.findings import exact, few
from lockstep.core.parity.watch.listen import Pending

BASIS = "only optimizer.step() changes weights; if the loop changes them too, declare weights_change=True"

Read = Callable[[str], Any]


def around_the_update(pending: Pending, now: Read) -> tuple[list[Finding], dict[str, bytes]]:
    """Compare the weights at both ends of the block with those right before and right after the optimizers' steps.

    now: function that reads a weight by name at the end of the block.
    Returns the findings, and a digest of each weight at the end. If two optimizers hold a weight, only its value at the
    end is compared.
    """
    holders = Counter(name for one in pending.before if one for name in one.params)
    begun = {n: w for one in pending.before if one for n, w in one.params.items() if holders[n] == 1}
    left = {**pending.params} | {n: w for one in pending.after if one for n, w in one.params.items()}
    early = [name for name, weight in begun.items() if digest(weight) != digest(pending.params[name])]
    narrowed = [name for name in early if is_narrow(begun[name]) and not is_narrow(pending.params[name])]
    ended: dict[str, bytes] = {}
    late: list[str] = []
    narrow: list[str] = []
    for name, weight in left.items():
        found = now(name)
        ended[name] = digest(found)
        if ended[name] != digest(weight):
            late.append(name)
            narrow += [name] if is_narrow(found) and not is_narrow(weight) else []
    return [
        finding("begin of the update", early, narrowed, len(begun)),
        finding("end of the step", late, narrow, len(left)),
    ], ended


def since_last_step(ended: Mapping[str, bytes], params: Mapping[str, Any], dtypes: Mapping[str, str]) -> Finding:
    """Compare the weights at the beginning of the block with digests from the end of the block before.

    dtypes: name → dtype of the weight in the model.
    """
    moved = [name for name, weight in params.items() if ended.get(name) != digest(weight)]
    narrow = [name for name in moved if dtypes[name] == "float32" and is_narrow(params[name])]
    return finding("begin of the step", moved, narrow, len(params))


def finding(when: str, moved: list[str], narrow: list[str], count: int) -> Finding:
    """Build the finding of weights that changed.

    when: place in the step, for the finding's name.
    narrow: the weights among `moved` that now hold only bf16 numbers.
    count: number of weights compared.
    """
    note = few(moved) if moved else ""
    if narrow:
        note += "; only bf16 numbers are left" + ("" if len(narrow) == len(moved) else f" in {few(narrow)}")
    return exact("weights", when, len(moved), max(count, 1), BASIS, note, "state")


def is_narrow(weight: Any) -> bool:
    """Return whether all numbers of FP32 weights are exact in bf16. For sharded weights, this rank's part is read."""
    return cause.is_narrow(getattr(weight, "local", weight), 16)


def digest(weight: Any) -> bytes:
    """Return a digest of a weight's bits. For sharded weights, this rank's part is read."""
    held: np.ndarray = getattr(weight, "local", weight)
    return hashlib.blake2b(np.ascontiguousarray(held).data, digest_size=16).digest()
