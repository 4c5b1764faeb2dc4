"""Measure the figures of docs/guide/assert_honest.md; run by hand.

python -m lockstep.parity_tests.honest.many clean 12 [KIND …]    honest pairs on 12 seeds: false alarms
python -m lockstep.parity_tests.honest.many close                the verdicts of torch.testing.assert_close
python -m lockstep.parity_tests.honest.many effects              the smallest fault that is found
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lockstep import NotHonest, assert_honest
from lockstep.core.parity.honest.report import Report
from lockstep.parity_tests.honest.kinds import (
    ALL,
    HEADS,
    KINDS,
    Inputs,
    Kind,
    attention,
    attention_wide,
    inputs_of,
    normal,
    rms_norm,
    rms_norm_wide,
    wide,
)
from lockstep.parity_tests.honest.wrong import WRONG, changed

SEEDS = 5


def report_of(kind: Kind, dtype: str, seed: int) -> Report:
    """Return the report of a pair on inputs of one seed."""
    try:
        return assert_honest(kind.mine, kind.plain, inputs_of(kind, seed), dtype, seed=seed, **kind.options)
    except NotHonest as found:
        return found.report


def clean(seeds: int, names: Sequence[str]) -> None:
    """Print the number of false alarms on honest pairs, and the largest share of each bound that they reach."""
    made, wrong = 0, Counter[str]()
    for name in names or list(KINDS):
        for dtype in KINDS[name].dtypes:
            most: dict[str, float] = {}
            for seed in range(seeds):
                report = report_of(KINDS[name], dtype, seed)
                made += 1
                if not report.ok:
                    wrong[f"{name}, {dtype}"] += 1
                    print(report)
                for one in report.results:
                    for m in one.measured.measures if one.measured else ():
                        most[m.name] = max(most.get(m.name, 0.0), m.strain)
            print(
                f"{name + ', ' + dtype:45}", "  ".join(f"{key} {value:.2f}" for key, value in most.items()), flush=True
            )
    print(f"{sum(wrong.values())} of {made} accused: {dict(wrong)}")


def close() -> None:
    """Print how many results of honest and of wrong pairs torch.testing.assert_close accepts."""
    for dtype in ALL:
        honest = [one for kind in KINDS.values() if dtype in kind.dtypes for one in report_of(kind, dtype, 0).results]
        wrong = [
            one
            for kind, names in WRONG.values()
            if dtype in kind.dtypes
            for one in report_of(kind, dtype, 1).results
            if one.name in names
        ]
        for words, results in (("honest", honest), ("wrong", wrong)):
            said = [one.default[0] for one in results if one.default]
            accused = sum(not one.ok for one in results)
            print(f"{dtype} {words}: {len(results)} results, {accused} accused; assert_close lets {sum(said)} through")


def effects() -> None:
    """Print, for each fault of the first gradient, the smallest size that is found with all of SEEDS seeds."""
    pairs: dict[str, tuple[Callable[..., Tensor], Inputs]] = {
        "RMS norm": (rms_norm, normal((5, 33, 64), (64,))),
        "RMS norm, one rounding": (rms_norm_wide, normal((5, 33, 64), (64,))),
        "attention": (attention, HEADS),
        "attention, one rounding": (attention_wide, HEADS),
    }

    def longer(by: float) -> Callable[..., tuple[Tensor, ...]]:
        return lambda g, *others: ((wide(g) * (1 + by)).to(g.dtype), *others)

    def one_wrong(by: float) -> Callable[..., tuple[Tensor, ...]]:
        def change(g: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
            at = g.abs().flatten().median(0).indices
            g.view(-1)[at] *= 1 + by
            return g, *others

        return change

    def one_row(by: float) -> Callable[..., tuple[Tensor, ...]]:
        def change(g: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
            g.view(-1, g.shape[-1])[7] *= 1 + by
            return g, *others

        return change

    sizes = [a * 10.0**-b for b in range(7, -1, -1) for a in (1, 2, 5)]
    for name, (plain, inputs) in pairs.items():
        for fault, change in (("length", longer), ("one row", one_row), ("one number", one_wrong)):
            for dtype in ALL:
                for size in sizes:
                    kind = Kind(changed(plain, change(size)), plain, inputs)
                    if all(not report_of(kind, dtype, seed).ok for seed in range(SEEDS)):
                        print(f"{name:25} {fault:12} {dtype} {size:g}", flush=True)
                        break


if __name__ == "__main__":
    torch.set_num_threads(1)
    what, *rest = sys.argv[1:]
    if what == "clean":
        clean(int(rest[0]), rest[1:])
    else:
        {"close": close, "effects": effects}[what]()
