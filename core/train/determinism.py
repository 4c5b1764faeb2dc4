"""The start of a deterministic run: its first step, repeated from one state, must give the same bits.

With `deterministic = true`, a session refuses operations without a deterministic kernel
(torch_backend/tools/deterministic.py). It relies on the declarations of libraries, so they are tested before the
training. Equal bits are guaranteed only on one machine, with one number of threads and one set of versions, so a run
cannot be continued elsewhere.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from lockstep.core.backend import Batch, Gradients, NotSupported, Session
from lockstep.core.capabilities import MeasuresDeterminism, ask
from lockstep.core.checkpoint.random_state import random_state, restore_random_state
from lockstep.core.config.schema import RunConfig, flatten
from lockstep.core.errors import UserError
from lockstep.core.run.directory import RunDir
from lockstep.core.run.ranks import ONE, Ranks

# The cost is not measured if it needs a compilation of more than this many seconds.
AFFORDABLE = 60.0
# The key in run.json, and the row's name in the table.
PROOF = "deterministic"
# Number of names that a line lists.
LISTED = 4
# Settings that a resume may change (core/run/resume.py), and that change the order of sums.
SETTINGS = ("train.ranks", "train.micro_batch_size", "parallel.bucket_mb")
# Packages whose version does not change the bits of a step.
NO_MATTER = ("lockstep", "python", "tokenizers")


@dataclass(frozen=True)
class Proof:
    """The results of the checks at the start of a deterministic run.

    step: the repeated step. gradients: number of gradients with equal bits; the losses were equal too. costs: several
    measurements of (time of forward and backward pass of one micro-batch per rank / time without the setting); empty if
    it was not measured. unmeasured: the reason, or "".
    """

    step: int
    gradients: int
    costs: Sequence[float] = ()
    unmeasured: str = ""

    def __str__(self) -> str:
        same = f"step {self.step} repeated bit for bit (loss, {self.gradients} gradients)"
        if not self.costs:
            return f"{same}; its cost was not measured: {self.unmeasured}"
        pairs = f"{min(self.costs):.2f} to {max(self.costs):.2f} in {len(self.costs)} pairs"
        return (
            f"{statistics.median(self.costs):.2f}× the time of a step (measured: {pairs}, forward and backward of a "
            f"micro-batch); {same}"
        )


def place(config: RunConfig, about: Mapping[str, Any], versions: Mapping[str, str]) -> dict[str, Any]:
    """Return the facts that bits depend on, besides settings that a resume cannot change.

    about: the backend's description. versions: by library.
    """
    settings = flatten(config.model_dump())
    found = {"device": about.get("device"), "threads": about.get("threads")}
    found |= {key: settings[key] for key in SETTINGS}
    return found | {name: version for name, version in versions.items() if name not in NO_MATTER}


def require_same_place(run: RunDir, now: Mapping[str, Any]) -> None:
    """Raise UserError if the run was proven with other facts than `now` (a result of `place`)."""
    if moved := moves(run.info.get(PROOF, {}).get("where", now), now):
        raise UserError(f"{run.path}: a deterministic run continues only under the same conditions: {moved}")


def prove_run(
    run: RunDir,
    session: Session,
    batch: Batch,
    step: int,
    about: Mapping[str, Any],
    versions: Mapping[str, str],
    ranks: Ranks = ONE,
) -> Mapping[str, Any]:
    """Prove step `step` of a deterministic run, record the proof in run.json, and return `about` with a line on it.

    Rank 0 calls it, and the other ranks call `prove`. Raises UserError as `prove` does.
    """
    proof = prove(run.config, session, batch, step, ranks)
    in_force = {**about["in_force"], PROOF: str(proof)}
    where = place(run.config, about, versions)
    run.update_info(in_force=in_force, **{PROOF: {"where": where, **asdict(proof)}})
    return {**about, "in_force": in_force}


def moves(then: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """List the differences between two results of `place`, as text; "" if there are none."""
    keys = {**then, **now}
    return "; ".join(f"{k} was {then.get(k)}, is {now.get(k)}" for k in keys if then.get(k) != now.get(k))


def prove(config: RunConfig, session: Session, batch: Batch, step: int, ranks: Ranks = ONE) -> Proof:
    """Repeat the forward and backward pass of `batch`, and measure the cost of determinism; the state stays.

    Every rank calls it. Raises UserError with the names of parameters if a bit differs, or if the session has no
    gradients.
    """
    random = random_state(session)
    try:
        found, compiling = _repeated(config, session, batch)
    except NotSupported as reason:
        raise UserError(f"deterministic = true: the first step cannot be repeated: {reason}") from None
    one, other = found
    if said := differences(one, other):
        raise UserError(f"deterministic = true: step {step}, repeated from the same state, gave other bits: {said}")
    costs, why = _costs(config, session, batch, ranks.of_first(lambda: compiling))
    restore_random_state(session, random)
    return Proof(step, len(one.grads), costs, why)


def _repeated(config: RunConfig, session: Session, batch: Batch) -> tuple[tuple[Gradients, Gradients], float]:
    """Compute the step's gradients twice; return both, and the seconds by which the first call exceeds the last."""
    random = random_state(session)
    if config.train.ranks > 1:
        # Each rank first computes a micro-batch without communication, so that a refusal does not block other ranks.
        session.gradients(batch.cut(config.train)[0])
    # CUDA graphs are recorded in their first pass.
    calls = 3 if config.compile.mode == "reduce-overhead" else 2
    found: list[Gradients] = []
    seconds = []
    for _ in range(calls):
        restore_random_state(session, random)
        started = time.perf_counter()
        found = [*found[-1:], session.gradients(batch)]
        seconds.append(time.perf_counter() - started)
    return (found[0], found[1]), seconds[0] - seconds[-1]


def differences(one: Gradients, other: Gradients) -> str:
    """List the parts of a step whose bits differ, as text; "" if there are none."""
    said = []
    # Compare bits: with ==, NaN differs from itself, and −0 equals 0.
    if one.loss.hex() != other.loss.hex() or one.nll.tobytes() != other.nll.tobytes():
        said.append("the loss")
    names = [n for n in {**one.grads, **other.grads} if n not in one.grads or n not in other.grads]
    names += [n for n in one.grads if n in other.grads and one.grads[n].tobytes() != other.grads[n].tobytes()]
    if names:
        said.append(f"gradients of {_listed(names)}")
    return " and ".join(said)


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return ", ".join(names[:LISTED]) + more


def _costs(config: RunConfig, session: Session, batch: Batch, compiling: float) -> tuple[Sequence[float], str]:
    if config.compile.enabled and compiling > AFFORDABLE:
        return (), f"compiling the step once more would take about {compiling:.0f} s"
    try:
        share = config.train.ranks * config.train.micro_batch_of(batch.tokens.shape[1])
        return ask(session, MeasuresDeterminism).costs_of_determinism(batch.rows(slice(share))), ""
    except NotSupported as reason:
        return (), str(reason)
