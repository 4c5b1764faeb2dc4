"""Train two run files for some steps, the first with several seeds, and report whether their loss curves agree.

    python -m lockstep.scripts.studies.two_curves best_bf16.toml best_fp8.toml --steps 256 --seeds 3 --json curves.json

Runs in the JSON are not repeated: with --minutes it stops in time, and the next call continues. Ends 0 if the curves
agree within the seed-to-seed spread, 1 if not, 2 if runs are still missing.
"""

from __future__ import annotations

import hashlib
import json
import math
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from lockstep.core.errors import UserError
from lockstep.scripts.shared.arguments import check_file, parse

if TYPE_CHECKING:
    from lockstep.core.config.schema import RunConfig

PATHS = Annotated[Path | None, tyro.conf.Positional, tyro.conf.arg(help_behavior_hint="(required)")]


@dataclass
class TwoCurves:
    """Train two run files from the same seed, the first from others too, and compare their loss curves."""

    first: PATHS = None
    """run file, trained with every seed"""
    second: PATHS = None
    """run file, trained with seed 0"""
    steps: int = 256
    """number of steps of each run"""
    seeds: int = 3
    """number of seeds of the weights and of the order of samples"""
    minutes: float = 0.0
    """time limit: start no run that would end after it; 0 = no limit"""
    json: Annotated[Path, tyro.conf.arg(metavar="FILE")] = Path("curves.json")
    """file of the curves"""


def main(argv: list[str]) -> int:
    """Train the missing runs, and compare."""
    from lockstep.core.bench.curves import compare, in_words
    from lockstep.core.config.file import load_config
    from lockstep.core.files.atomic import write_atomically

    started = time.monotonic()
    options, given = parse(TwoCurves, "two_curves", argv, with_settings=True, shown=_bears_on_it)
    if options.first is None or options.second is None:
        raise UserError("command line: name two run files: python -m lockstep.scripts.studies.two_curves FIRST SECOND")
    if options.steps < 1 or options.seeds < 3:
        raise UserError("command line: steps must be at least 1, and seeds at least 3 for a spread")
    if not (math.isfinite(options.minutes) and options.minutes >= 0):
        raise UserError(f"command line: minutes = {options.minutes}: must be a number of at least 0")
    check_file("json", options.json)
    kept = _kept(options.json)
    jobs = [("first", options.first, seed) for seed in range(options.seeds)] + [("second", options.second, 0)]
    longest, curves = 0.0, {}
    for which, path, seed in jobs:
        seeds = {"seed": str(seed), "data.seed": str(seed)}
        config = load_config(path, {**given, **seeds})
        key = f"{_of_curve(config)}/{options.steps}"
        if key not in kept:
            began = time.monotonic()
            if options.minutes and began - started + longest > 60 * options.minutes:
                raise UserError(f"time limit reached before {which} with seed {seed}; repeat the command to continue")
            kept[key] = train(config, options.steps)
            longest = max(longest, time.monotonic() - began)
            write_atomically(options.json, [(json.dumps(kept, indent=1) + "\n").encode()])
        curves[which, seed] = kept[key]
        print(f"{which}, seed {seed}: {kept[key][0]:.4f} → {kept[key][-1]:.4f}", flush=True)
    found = compare({seed: curves["first", seed] for seed in range(options.seeds)}, curves["second", 0], 0)
    print("\n".join(in_words(found)))
    return 0 if found["agreed"] else 1


def _bears_on_it(key: str) -> bool:
    return key in ("seed", "device") or key.startswith(("train.", "data."))


def _of_curve(config: RunConfig) -> str:
    """Return the digest of the settings that a curve depends on."""
    dumped = config.model_dump_json(exclude={"name", "eval", "checkpoint", "parity", "log"})
    return hashlib.sha256(dumped.encode()).hexdigest()[:16]


def _kept(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text()) if path.exists() else {}
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read the curves in {path}: {error}") from error
    if not isinstance(found, dict):
        raise UserError(f"{path} holds no curves of lockstep.scripts.studies.two_curves; name another file")
    return found


def train(config: RunConfig, steps: int) -> list[float]:
    """Return losses of the first `steps` real steps of a run, each on its own batch of the run's data."""
    from lockstep.core.run.data import RunData
    from lockstep.torch_backend.backend import TorchBackend

    data, session = RunData.open(config), TorchBackend().open(config)
    try:
        return [session.step(data.batch(step + 1)).loss for step in range(steps)]
    finally:
        session.close()


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except UserError as error:
        print("\n".join(f"two_curves: {line}" for line in error.lines), file=sys.stderr)
        sys.exit(2)
