"""Measure how far clean logits are from their twins': logits from a cache, and the largest error of a forward pass.

    python -m lockstep.scripts.studies.clean_logits                  64 shapes of each policy: some minutes each
    python -m lockstep.scripts.studies.clean_logits bf16 --draws 8

Every draw is a clean torch session of a random shape (scripts/studies/clean_runs.py), at its initial weights and after
training. The bounds of sampling and top-1 in core/parity/judge/cached_logits.py and evaluation.py follow from the
extremes of the first three quarters of the draws; the last quarter is held out.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

from lockstep.scripts.studies.repository import ROOT

os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(ROOT / ".cache/jax"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")

import numpy as np
import tyro

from lockstep.core.backend import Batch
from lockstep.core.config.schema import RunConfig
from lockstep.core.files.jsonl import JsonLines, scan_lines
from lockstep.core.parity.evidence.cached_logits import sampled_logits
from lockstep.core.parity.evidence.evaluation import LOGITS
from lockstep.core.parity.judge.cached_logits import MADE, carried
from lockstep.core.parity.measures.compare import Reference
from lockstep.core.parity.measures.distances import FLOOR_ULPS, distances
from lockstep.core.parity.measures.scatter import scatter
from lockstep.core.parity.reference.side_by_side import passes
from lockstep.scripts.studies.clean_runs import draw_batch, draw_config, initial_state, open_reference
from lockstep.torch_backend.backend import TorchBackend
from lockstep.torch_backend.session import TorchSession

POLICIES = ("bf16", "fp16", "fp32")
# Steps of training before each of a draw's checks.
TRAINED = (0, 8, 40)


@dataclass(frozen=True)
class Clean:
    """A check of a clean session.

    sampled, numbers: by place, the excess of the logits that sampling computes there, and their approximate number of
    independent errors. furthest: largest error of a forward pass's logits / the twin's largest error, floored as a
    norm's, over `tokens` tokens.
    """

    policy: str
    draw: int
    trained: int
    sampled: dict[str, float]
    numbers: dict[str, int]
    furthest: float
    tokens: int


def checks(policy: str, draw: int) -> Iterator[Clean]:
    """Compare the logits of one shape with its reference's, at weights after more and more training steps."""
    config = draw_config(draw, f"{policy}/eager")
    reference = open_reference(config)
    rng = np.random.default_rng([draw, 5])
    with closing(TorchBackend().open_rank(config)) as session:
        session.load(initial_state(config, draw))
        for trained in TRAINED:
            while session.steps_done < trained:
                session.step(draw_batch(config, rng))
            micro = draw_batch(config, rng).rows(slice(config.train.micro_batch_size))
            yield check(session, config, reference, micro, policy, draw)


def check(
    session: TorchSession, config: RunConfig, reference: Reference, micro: Batch, policy: str, draw: int
) -> Clean:
    """Compare one micro-batch's logits, and the logits that sampling computes in its first sequence."""
    (made,) = passes(reference, session.state(), micro, [LOGITS])
    twin, truth = made.twin.astype(np.float64), made.truth
    shown = session.observe(micro, [LOGITS])[LOGITS]
    found = sampled_logits(session, config, micro, {LOGITS: shown}, [])
    sampled, numbers = {}, {}
    for (logits, lengths), _, _ in MADE:
        at = found[lengths] - 1
        w, t = made.twin[0, at], truth[0, at]
        sampled[logits] = distances(found[logits], w, t, reference.stream).excess
        numbers[logits] = carried(w, t)
    least = FLOOR_ULPS * float(np.finfo(reference.stream).eps) * np.abs(truth).max()
    furthest = float(np.abs(shown - truth).max() / max(np.abs(twin - truth).max(), least))
    return Clean(policy, draw, session.steps_done, sampled, numbers, furthest, micro.tokens.size)


def told(rows: list[Clean]) -> str:
    """Return the extremes of a policy's rows in a line, for the rows that set the bounds and for the held-out rows."""
    draws = sorted({row.draw for row in rows})
    first = set(draws[: math.ceil(len(draws) * 3 / 4)])
    parts = [extremes("set", [row for row in rows if row.draw in first])]
    held_out = [row for row in rows if row.draw not in first]
    return f"{rows[0].policy}: " + "; ".join([*parts, *([extremes("held out", held_out)] if held_out else [])])


def extremes(what: str, rows: list[Clean]) -> str:
    """Return the extremes of some rows in words."""
    places = {}
    for place in rows[0].sampled:
        of_many = math.exp(max(abs(math.log(row.sampled[place])) / scatter(row.numbers[place]) for row in rows))
        places[place] = f"{place} {max(row.sampled[place] for row in rows):.3f}, of many numbers ×/÷ {of_many:.3f}"
    furthest = max(row.furthest for row in rows)
    return (
        f"{what}: {len(rows)} checks of {len({row.draw for row in rows})} shapes; largest excess: "
        f"{'; '.join(places.values())}; largest single error {furthest:.3f}"
    )


@dataclass
class CleanLogits:
    """Measure the policies that are named, or all."""

    policies: Annotated[tuple[str, ...], tyro.conf.Positional] = POLICIES
    """precision policies that sample in their own precision"""
    draws: int = 64
    """number of random shapes of each policy"""
    samples: Path | None = None
    """file of the checks; a draw that the file has is not run again"""


def main() -> None:
    """Measure, and print the extremes of each policy."""
    options = tyro.cli(CleanLogits)
    kept = scan_lines(options.samples) if options.samples and options.samples.exists() else ()
    rows = [Clean(**{k: v for k, v in line.value.items() if k != "crc32"}) for line in kept if line.value]
    done = {(row.policy, row.draw) for row in rows}
    for policy in options.policies:
        for draw in range(options.draws):
            if (policy, draw) in done:
                continue
            made = list(checks(policy, draw))
            rows += made
            if options.samples:
                with closing(JsonLines(options.samples)) as lines:
                    for one in made:
                        lines.append(asdict(one))
            print(json.dumps([asdict(one) for one in made]), file=sys.stderr, flush=True)
        print(told([row for row in rows if row.policy == policy]), flush=True)


if __name__ == "__main__":
    main()
