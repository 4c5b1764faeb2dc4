"""Measure the smallest error that one check of one step finds, stage by stage. Writes docs/results/smallest_effect.md.

    python -m lockstep.scripts.studies.smallest_effect [RECIPE…]

One honest step of the quickstart model after some training is recorded and judged. Then every local comparison is
repeated with an error planted only in the candidate's tensor, and the error is shrunk until the check no longer finds
it:

scale:    the whole tensor times 1 + δ. element: one element, as large as the tensor's rms, times 1 + δ. Both are
          rounded to bf16 if the tensor was.
bf16:     the tensor rounded to bf16: found or not, and by how much its worst measure passes its bound.

Scale and element have two columns each: by norms of the whole tensor alone, and with the bounds on elements too
(core/parity/measures/peak_bounds.py).
"""

from __future__ import annotations

import os
import platform
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import numpy as np
import torch
import tyro

from lockstep.core.config.file import load_config
from lockstep.core.parity.evidence.gather import gather
from lockstep.core.parity.evidence.loss_weights import uneven_weights
from lockstep.core.parity.judge import local, update
from lockstep.core.parity.judge.judge import Reference, judge
from lockstep.core.parity.measures import calibrated_bounds, compare
from lockstep.core.parity.measures.distances import distances
from lockstep.core.parity.measures.peaks import Norms
from lockstep.core.parity.measures.verdict import Finding
from lockstep.core.parity.reference.stages import place
from lockstep.core.run.data import RunData
from lockstep.jax_backend.backend import JaxBackend
from lockstep.scripts.studies.repository import ROOT
from lockstep.torch_backend.backend import TorchBackend

Recipe = Literal["fp32/eager", "bf16/eager", "bf16/compiled"]
RECIPES: dict[Recipe, tuple[str, str]] = {
    "fp32/eager": ("fp32", "false"),
    "bf16/eager": ("bf16", "false"),
    "bf16/compiled": ("bf16", "true"),
}
TRAINED_STEPS = 20
SMALLEST, LARGEST = 1e-9, 1e3

Sides = tuple[np.ndarray, np.ndarray, np.ndarray]


@dataclass(frozen=True)
class Comparison:
    """A local comparison that held: candidate, twin and truth, and its bounds."""

    finding: Finding
    kind: str
    size: int
    sides: Sides


class Kept(compare.Comparison):
    """A comparison that is kept, with its tensors, if it is local and holds."""

    found: ClassVar[list[Comparison]] = []

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._parts: list[Sides] = []

    def add(self, c: np.ndarray, w: np.ndarray, t: np.ndarray) -> None:
        """Keep a copy of each part."""
        super().add(c, w, t)
        self._parts.append((c.ravel().copy(), w.ravel().copy(), t.ravel().copy()))

    def finding(self, noise: Callable[[], Norms] | None = None) -> Finding:
        """Keep the whole."""
        found = super().finding(noise)
        if found.ok and found.scope == "local":
            c, w, t = (np.concatenate(side).reshape(self._shape) for side in zip(*self._parts, strict=True))
            self.found.append(Comparison(found, self._kind, self._size, (c, w, t)))
        return found


def comparisons(recipe: Recipe) -> list[Comparison]:
    """Return every local comparison of a checked step of the quickstart model, after some training."""
    policy, compiled = RECIPES[recipe]
    torch._dynamo.reset()
    settings = {"precision.policy": policy, "compile.enabled": compiled, "compile.scope": "model", "device": "cpu"}
    config = load_config(ROOT / "configs/quickstart.toml", settings)
    data = RunData.open(config)
    session = TorchBackend().open(config)
    for step in range(1, TRAINED_STEPS + 1):
        session.step(data.batch(step))
    Kept.found.clear()
    for module in (compare, local, update):
        vars(module)["Comparison"] = Kept
    reference = Reference.open(JaxBackend(), config)
    check = judge(gather(session, config, uneven_weights(data.batch(TRAINED_STEPS + 1), 0)), reference)
    assert check.verdict == "agreed", check.origin
    return list(Kept.found)


def strain(c: np.ndarray, one: Comparison, recipe: str) -> float:
    """Return the worst measure / its bound with `c` as the candidate's tensor; above 1 the error is found."""
    _, w, t = one.sides
    d = distances(c, w, t, np.float32)
    return max(m.strain for m in calibrated_bounds.measures(recipe, one.kind, d, one.size))


@contextmanager
def of_norms_alone() -> Iterator[None]:
    """Remove the bounds on elements, rows, columns and bits while the block runs."""
    measured = calibrated_bounds.table
    plain = {r: {k: replace(e, sharp=None) for k, e in kinds.items()} for r, kinds in measured().items()}
    calibrated_bounds.table = lambda: plain  # type: ignore[assignment]
    try:
        yield
    finally:
        calibrated_bounds.table = measured


def smallest(one: Comparison, recipe: str, plant: Callable[[np.ndarray, float], np.ndarray]) -> float:
    """Return the smallest δ that is found, to 5 %; infinite if the largest is not."""
    c = one.sides[0]
    if strain(plant(c, LARGEST), one, recipe) <= 1:
        return float("inf")
    low, high = SMALLEST, LARGEST
    while high / low > 1.05:
        middle = float(np.sqrt(low * high))
        low, high = (low, middle) if strain(plant(c, middle), one, recipe) > 1 else (middle, high)
    return high


def in_its_format(x: np.ndarray, c: np.ndarray) -> np.ndarray:
    """Cast `x` to the dtype of `c`, rounded to bf16 if `c` is, so that the fault lies before the rounding."""
    made = x.astype(c.dtype)
    return rounded(made) if is_rounded(c) else made


def is_rounded(c: np.ndarray) -> bool:
    """Return whether all its values are bf16 numbers."""
    return np.array_equal(rounded(c), c)


def before_rounding(c: np.ndarray) -> np.ndarray:
    """Draw numbers that round to `c`, uniformly within half an ulp of bf16 if `c` is rounded to bf16."""
    wide = c.astype(np.float64)
    if not is_rounded(c):
        return wide
    half = np.where(wide == 0, 0.0, np.ldexp(0.5, np.frexp(wide)[1] - 8))
    return wide + np.random.default_rng(0).uniform(-0.5, 0.5, c.shape) * half


def scaled(c: np.ndarray, delta: float) -> np.ndarray:
    """Multiply all elements by 1 + δ."""
    return in_its_format(before_rounding(c) * (1 + delta), c)


def one_element(c: np.ndarray, delta: float) -> np.ndarray:
    """Change the element nearest to the rms by δ of itself."""
    wrong = c.astype(np.float64).ravel()
    rms = float(np.sqrt(np.mean(wrong**2)))
    at = int(np.argmin(np.abs(np.abs(wrong) - rms)))
    wrong[at] *= 1 + delta
    return in_its_format(wrong.reshape(c.shape), c)


def rounded(c: np.ndarray) -> np.ndarray:
    """Round to bf16."""
    return torch.from_numpy(np.ascontiguousarray(c, np.float32)).bfloat16().float().numpy()


def _place(finding: Finding) -> tuple[int, int, int]:
    return place(finding.stage, finding.phase, None if finding.layer is None else 0)


def row(name: str, found: list[Comparison], recipe: str) -> str:
    """Return the line of one stage and phase: the worst of its tensors."""
    wanted = [one for one in found if np.any(one.sides[2])]
    if not wanted:
        return f"| {name} | {len(found)} | | | | | |"
    plants = scaled, one_element
    scale, element = (percent(max(smallest(one, recipe, plant) for one in wanted)) for plant in plants)
    with of_norms_alone():
        before = [percent(max(smallest(one, recipe, plant) for one in wanted)) for plant in plants]
    passes = [strain(rounded(one.sides[0]), one, recipe) for one in wanted]
    already = [np.array_equal(rounded(one.sides[0]), one.sides[0]) for one in wanted]
    seen = sum(s > 1 for s in passes)
    told = "already bf16" if all(already) else f"{seen} of {len(passes)}, ×{min(passes):.3g} … ×{max(passes):.3g}"
    return f"| {name} | {len(found)} | {before[0]} | {scale} | {before[1]} | {element} | {told} |"


def percent(value: float) -> str:
    """Format a share in per cent."""
    return "not found" if value == float("inf") else f"{100 * value:.2g} %"


def section(recipe: Recipe) -> list[str]:
    """Return the table of one recipe."""
    groups: dict[str, list[Comparison]] = defaultdict(list)
    for one in comparisons(recipe):
        f = one.finding
        # Attention's three gradients differ in how much cancels; elsewhere a stage's tensors are alike.
        part = f", to {one.kind.rpartition('/')[2]}" if (f.stage, f.phase) == ("attn", "backward") else ""
        groups[f"{f.stage} | {f.phase}{part}"].append(one)
    order = sorted(groups, key=lambda key: _place(groups[key][0].finding))
    lines = [
        f"## {recipe}",
        "",
        "| stage | phase | tensors | scale error: norms alone | now | one element: norms alone | now "
        "| one rounding to bf16: found in, strain |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for key in order:
        lines.append(row(key, groups[key], recipe))
        print(lines[-1], flush=True)
    return [*lines, ""]


def main(recipes: Annotated[tuple[Recipe, ...], tyro.conf.Positional] = tuple(RECIPES)) -> None:
    """Write the page of some recipes."""
    lines = [
        "# The smallest effect that one check finds",
        "",
        f"Made by `python -m lockstep.scripts.studies.smallest_effect` on the quickstart model after {TRAINED_STEPS} "
        "steps, "
        "torch "
        f"{torch.__version__.split('+')[0]}, {platform.machine()} {platform.system()} CPU. Each figure is that of the "
        "*worst* tensor of a stage: every tensor of it is found at that size. `scale error`: the whole tensor "
        "times 1 + δ. `one element`: a single element of the tensor's rms off by δ of itself; both "
        "rounded to bf16 where the tensor is. The strain of a rounding "
        "is its worst measure over its bound; above 1 is found. `norms alone`: by excess, gain and distance of the "
        "whole tensor; `now`: with bounds on elements, rows, columns and bits as well (docs/guide/numerics.md). Before "
        "it accuses, a check measures the noise of the stage as well, which is left out here.",
        "",
        "The session's work on a gradient *after* its program made it (scaling in accumulation, a lost bit) is held "
        "to 16 ulp of FP32 at any precision: a scale error of 2e-6. Backward rows are errors inside the program.",
        "",
    ]
    for recipe in recipes:
        lines += section(recipe)
    (ROOT / "docs/results/smallest_effect.md").write_text("\n".join(lines))


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
