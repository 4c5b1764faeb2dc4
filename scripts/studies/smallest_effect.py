"""The smallest error that one check of one step finds, stage by stage. Writes docs/results/smallest_effect.md.

python -m lockstep.scripts.studies.smallest_effect

One honest step of the quickstart model after some training is gathered and judged. Then every local comparison is made
again with an error planted in the candidate's tensor alone, and the error is shrunk until the check no longer sees it:

scale:    the whole tensor times 1 + δ. element: one element, of the size of the tensor's rms, off by δ of itself.
bf16:     the tensor rounded to bf16: found or not, and by how much its worst measure passes its bound.
"""

from __future__ import annotations

import os
import platform
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import numpy as np
import torch

from lockstep.core.config.file import load_config
from lockstep.core.parity.evidence.gather import gather, uneven_weights
from lockstep.core.parity.judge.judge import Reference, judge
from lockstep.core.parity.judge.over_steps import OverSteps
from lockstep.core.parity.measures import calibrated_bounds
from lockstep.core.parity.measures.distances import distances
from lockstep.core.parity.measures.verdict import Finding
from lockstep.core.parity.reference.stages import place
from lockstep.core.run.data import RunData
from lockstep.jax_backend.backend import JaxBackend
from lockstep.scripts.studies.repository import ROOT
from lockstep.torch_backend.backend import TorchBackend

RECIPES = {"fp32/eager": ("fp32", "false"), "bf16/eager": ("bf16", "false"), "bf16/compiled": ("bf16", "true")}
TRAINED_STEPS = 20
SMALLEST, LARGEST = 1e-9, 1e3

Sides = tuple[np.ndarray, np.ndarray, np.ndarray]


@dataclass(frozen=True)
class Comparison:
    """A local comparison that held: candidate, twin and truth, and what it is bound by."""

    finding: Finding
    kind: str
    size: int
    sides: Sides


class Collector(OverSteps):
    """Keeps every local comparison of a check instead of summing it."""

    def __init__(self, recipe: str) -> None:
        super().__init__(recipe)
        self.found: list[Comparison] = []

    def add(
        self,
        found: Finding,
        kind: str,
        size: int,
        sides: Sides,
        stream: type[np.floating],
        gain_difference: float,
    ) -> None:
        """Keep one."""
        self.found.append(Comparison(found, kind, size, sides))

    def findings(self) -> Iterator[Finding]:
        """Nothing is summed."""
        return iter(())


def comparisons(recipe: str) -> list[Comparison]:
    """Every local comparison of a checked step of the quickstart model, after some training."""
    policy, compiled = RECIPES[recipe]
    torch._dynamo.reset()
    settings = {"precision.policy": policy, "compile.enabled": compiled, "device": "cpu"}
    config = load_config(ROOT / "configs/quickstart.toml", settings)
    data = RunData.open(config)
    session = TorchBackend().open(config)
    for step in range(1, TRAINED_STEPS + 1):
        session.step(data.batch(step))
    collector = Collector(recipe)
    reference = replace(Reference.open(JaxBackend(), config), over_steps=collector)
    check = judge(gather(session, config, uneven_weights(data.batch(TRAINED_STEPS + 1), 0)), reference)
    assert check.verdict == "agreed", check.origin
    return collector.found


def strain(c: np.ndarray, one: Comparison, recipe: str) -> float:
    """How far the worst measure passes its bound with `c` in the candidate's place; above 1 is found."""
    _, w, t = one.sides
    d = distances(c, w, t, np.float32)
    return max(m.strain for m in calibrated_bounds.measures(recipe, one.kind, d, one.size))


def smallest(one: Comparison, recipe: str, plant: Callable[[np.ndarray, float], np.ndarray]) -> float:
    """The smallest δ that is found, to 2 %; infinite if the largest is not."""
    c = one.sides[0]
    if strain(plant(c, LARGEST), one, recipe) <= 1:
        return float("inf")
    low, high = SMALLEST, LARGEST
    while high / low > 1.02:
        middle = float(np.sqrt(low * high))
        low, high = (low, middle) if strain(plant(c, middle), one, recipe) > 1 else (middle, high)
    return high


def scaled(c: np.ndarray, delta: float) -> np.ndarray:
    """All elements too long by δ."""
    return c.astype(np.float64) * (1 + delta)


def one_element(c: np.ndarray, delta: float) -> np.ndarray:
    """The element nearest to the rms, off by δ of itself."""
    wrong = c.astype(np.float64).ravel()
    rms = float(np.sqrt(np.mean(wrong**2)))
    at = int(np.argmin(np.abs(np.abs(wrong) - rms)))
    wrong[at] *= 1 + delta
    return wrong.reshape(c.shape)


def rounded(c: np.ndarray) -> np.ndarray:
    """Rounded to bf16."""
    return torch.from_numpy(np.ascontiguousarray(c, np.float32)).bfloat16().float().numpy()


def _place(finding: Finding) -> tuple[int, int, int]:
    return place(finding.stage, finding.phase, None if finding.layer is None else 0)


def row(name: str, found: list[Comparison], recipe: str) -> str:
    """One stage and phase: the worst of its tensors."""
    wanted = [one for one in found if np.any(one.sides[2])]
    if not wanted:
        return f"| {name} | {len(found)} | | | |"
    scale = max(smallest(one, recipe, scaled) for one in wanted)
    element = max(smallest(one, recipe, one_element) for one in wanted)
    passes = [strain(rounded(one.sides[0]), one, recipe) for one in wanted]
    already = [np.array_equal(rounded(one.sides[0]), one.sides[0]) for one in wanted]
    seen = sum(s > 1 for s in passes)
    told = "already bf16" if all(already) else f"{seen} of {len(passes)}, ×{min(passes):.3g} … ×{max(passes):.3g}"
    return f"| {name} | {len(found)} | {percent(scale)} | {percent(element)} | {told} |"


def percent(value: float) -> str:
    """A share in per cent."""
    return "not found" if value == float("inf") else f"{100 * value:.2g} %"


def section(recipe: str) -> list[str]:
    """The table of one recipe."""
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
        "| stage | phase | tensors | scale error | one element | one rounding to bf16: found in, strain |",
        "|---|---|---|---|---|---|",
    ]
    for key in order:
        lines.append(row(key, groups[key], recipe))
        print(lines[-1], flush=True)
    return [*lines, ""]


def main() -> None:
    """Every recipe."""
    lines = [
        "# The smallest effect that one check finds",
        "",
        f"Made by `python -m lockstep.scripts.studies.smallest_effect` on the quickstart model after {TRAINED_STEPS} "
        "steps, "
        "torch "
        f"{torch.__version__.split('+')[0]}, {platform.machine()} {platform.system()} CPU. Each figure is that of the "
        "*worst* tensor of a stage: every tensor of it is found at that size. `scale error`: the whole tensor "
        "times 1 + δ. `one element`: a single element of the tensor's rms off by δ of itself. The strain of a rounding "
        "is its worst measure over its bound; above 1 is found.",
        "",
        "The session's work on a gradient *after* its program made it (scaling in accumulation, a lost bit) is held "
        "to 16 ulp of FP32 at any precision: a scale error of 2e-6. Backward rows are errors inside the program.",
        "",
    ]
    for recipe in RECIPES:
        lines += section(recipe)
    (ROOT / "docs/results/smallest_effect.md").write_text("\n".join(lines))


if __name__ == "__main__":
    main()
