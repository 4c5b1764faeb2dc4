"""Combine the readings of all ranks that train one model into one judgement.

On a check, every rank copies what it holds, rank 0 judges, and all ranks receive its verdict. Collective calls occur
only in `put_together` and `told_to_all`, at the end of a step. Every rank calls them even after an error. The error is
reported with its rank.

Data-parallel ranks must hold equal bits. Each rank computes digests of its unsharded tensors, the digests are compared,
and a rank that differs is named. Sharded tensors are assembled on rank 0, one at a time.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np

from lockstep.core.backend import Arrays
from lockstep.core.parity.measures.verdict import Finding
from lockstep.core.parity.watch.findings import exact
from lockstep.core.parity.watch.listen import Pending
from lockstep.core.parity.watch.snapshot import Snapshot, array_of, share_equal
from lockstep.core.parity.watch.uncovered import Uncovered, WatchCheck, reason

# Placeholder for a tensor that this rank does not need.
DROPPED = np.empty(0)
GRADIENTS = "gradients of"
# Share of the squared error. A rank with at least this share is named as the place of the fault.
NEARLY_ALL = 0.99
# Largest message between ranks, in bytes.
MESSAGE = 2**26
# Moment and kind of reading → stage and phase of the finding, in the order of a step.
LINKS = {
    "before/weights": ("weights", "state"),
    "update/moments": ("moments", "state"),
    "backward/gradients": ("reduction", "backward"),
    "update/gradients": ("clip_coefficient", "update"),
    "after/moments": ("moments", "update"),
    "after/weights": ("update", "update"),
}


@dataclass
class Cut:
    """A rank's part of a sharded tensor.

    local: the numbers of this rank.
    ranks: the layout, an array of rank numbers.
    dims: for each axis of the layout, the axis of the tensor that is sharded over it, or None if it is replicated.
    """

    local: np.ndarray
    ranks: np.ndarray
    dims: tuple[int | None, ...]

    def whole(self, parts: Mapping[int, np.ndarray]) -> np.ndarray:
        """Join the whole tensor. parts: rank → its numbers, in the shape of the rank's part."""
        return _joined(self.ranks, self.dims, parts)


# The layout of a sharded gradient: one rank's part, and rank → shape of its part.
Layout = tuple[Cut, Mapping[int, tuple[int, ...]]]


def _joined(ranks: np.ndarray, dims: tuple[int | None, ...], parts: Mapping[int, np.ndarray]) -> np.ndarray:
    if not dims:
        return parts[int(ranks)]
    if dims[0] is None:
        return _joined(ranks[0], dims[1:], parts)
    return np.concatenate([_joined(row, dims[1:], parts) for row in ranks], axis=dims[0])


class Ranks(Protocol):
    """The ranks that train a model together.

    rank: number of this rank, 0 for the one that judges.
    apart: the reason why collective calls are no longer possible; empty while they are.
    members: their numbers in the whole job.
    gathers: a check needs the batches of all ranks.
    divisor: divisor of the sum of all ranks' gradients.
    Collective calls raise UserError if they fail.
    """

    rank: int
    apart: str
    members: Sequence[int]
    gathers: bool
    divisor: float

    def gather(self, mine: Any) -> list[Any]:
        """Return every rank's object on rank 0, in the order of `members`; an empty list on other ranks.

        A collective call.
        """
        ...

    def of_first(self, mine: Any) -> Any:
        """Return rank 0's object. A collective call."""
        ...

    def judged(self, mine: Any) -> Any:
        """Return rank 0's object, for which the other ranks wait while rank 0 judges. A collective call."""
        ...

    def portable(self, batch: Any) -> Any:
        """Return a copy of a batch that can be sent to another rank. Raises UserError if that is impossible."""
        ...

    def part(self, tensor: Any) -> Cut:
        """Copy this rank's part of a sharded tensor. Raises UserError for an unsupported layout."""
        ...


@dataclass(frozen=True)
class Gathered:
    """The batches of all ranks, in their order. Under gradient accumulation each is a list of micro-batches."""

    batches: Sequence[Any]


@dataclass
class Reading:
    """The reading of a step on one rank.

    digests: moment and kind → name → digest, for tensors that are not sharded.
    """

    ranks: Ranks | None
    digests: dict[str, dict[str, bytes]] = field(default_factory=dict)

    def at(self, moment: str) -> Callable[..., Any]:
        """Return a function `(kind, name, tensor, make)` that reads a tensor now, without a collective call."""

        def read(kind: str, name: str, tensor: Any, make: Callable[[Any], np.ndarray] = array_of) -> Any:
            if self.ranks is None:
                return make(tensor)
            if hasattr(tensor, "device_mesh"):
                return self.ranks.part(tensor)
            found = make(tensor)
            own = kind in ("weights", "gradients")
            digest = hashlib.blake2b(found.tobytes(), digest_size=16).digest()
            held = self.digests.setdefault(f"{moment}/{kind if own else 'moments'}", {})
            held[name if own else f"{kind}/{name}"] = digest
            return DROPPED if self.ranks.rank else found

        return read


@dataclass(frozen=True)
class Share:
    """A rank's contribution to a check.

    digests: as in `Reading`.
    between: findings of this rank about weights and moments between two steps.
    fired: number of steps of each optimizer.
    cut: places of the sharded tensors.
    """

    number: int
    batch: Any
    loss: float | None
    skipped: Mapping[str, Sequence[str]]
    digests: Mapping[str, Mapping[str, bytes]]
    between: Sequence[Finding]
    fired: Sequence[int]
    cut: Sequence[str]


def put_together(
    ranks: Ranks, number: int, pending: Pending | None, uncovered: Uncovered, reading: Reading
) -> Pending | None:
    """Send to rank 0 what all ranks read in a step. A collective call.

    Returns the step on rank 0, and None on the other ranks, or if a rank read nothing. The loss is the sum of the
    ranks' losses, over the divisor of their gradients.
    """
    batch = None
    if pending is not None and ranks.gathers:
        try:
            batch = ranks.portable(pending.batch)
        except Exception as error:
            uncovered.skip("loss and gradients", reason(error))
    held = _arrays(pending) if pending is not None else {}
    places = {place: cut for place, (arrays, name) in held.items() if isinstance(cut := arrays[name], Cut)}
    loss, between, fired = (pending.loss, pending.between, pending.fired) if pending is not None else (None, [], [])
    shares = ranks.gather(
        Share(number, batch, loss, dict(uncovered.skipped), reading.digests, between, fired, list(places))
    )
    for few in ranks.of_first(_in_messages({p: c for p, c in places.items() if all(p in s.cut for s in shares)})):
        parts = dict(zip(ranks.members, ranks.gather([places[place].local for place in few]), strict=False))
        for i, place in enumerate(few):
            arrays, name = held[place]
            cut, arrays[name] = places.pop(place), DROPPED
            if ranks.rank == 0:
                # The other ranks wait for the next message, even after an error with this one.
                try:
                    if place == f"{GRADIENTS} {name}" and pending is not None:
                        pending.layouts[name] = cut, {rank: found[i].shape for rank, found in parts.items()}
                    arrays[name] = cut.whole({rank: found[i] for rank, found in parts.items()})
                except Exception as error:
                    uncovered.skip("step", f"{place}: {reason(error)}")
    if ranks.rank:
        return None
    _reasons([replace(shares[0], skipped=dict(uncovered.skipped)), *shares[1:]], uncovered)
    if pending is None or any(share.number != number for share in shares):
        uncovered.skip("step", "not every rank reached it")
        return None
    if places:
        uncovered.skip("step", f"not every rank has read {next(iter(places))}")
    if "step" in uncovered.skipped:
        return None
    for before in pending.before:
        if before is not None:
            share_equal(before.params, pending.params)
            share_equal(before.grads, pending.grads)
    losses = [share.loss for share in shares if share.loss is not None]
    pending.loss = sum(losses) / ranks.divisor if len(losses) == len(shares) else None
    if ranks.gathers:
        pending.batch = Gathered([share.batch for share in shares])
    pending.between[:] = [
        replace(f, note=f"rank {rank}" + (f": {f.note}" if f.note else "")) if not f.ok else f
        for rank, share in enumerate(shares)
        for f in share.between
        if rank == 0 or not f.ok
    ]
    pending.between.extend(differences([share.digests for share in shares]))
    if others := [f"{share.fired} on rank {rank}" for rank, share in enumerate(shares) if share.fired != fired]:
        basis = "each optimizer's step() ran equally often on every rank"
        note = f"optimizer.step() ran {fired} times on rank 0, {', '.join(others)}"
        pending.between.append(exact("step_count", "ranks", len(others), len(shares), basis, note, "update"))
    return pending


def owner_of(broken: Sequence[str], c: Arrays, w: Arrays, layouts: Mapping[str, Layout]) -> str:
    """Return a note if in all broken gradients only the part of one rank is wrong; else an empty string.

    c: gradients of the candidate. w: those of the twin. layouts: by name.
    """
    owners = set()
    for name in broken:
        if name not in layouts:
            return ""
        cut, shapes = layouts[name]
        held = cut.whole({rank: np.full(shape, rank) for rank, shape in shapes.items()})
        error = np.square(c[name].astype(np.float64) - w[name])
        by_rank = {rank: float(error[held == rank].sum()) for rank in shapes}
        worst = max(by_rank, key=lambda rank: by_rank[rank])
        if not by_rank[worst] > NEARLY_ALL * sum(by_rank.values()):
            return ""
        owners.add(worst)
    return f"only in the part of rank {owners.pop()}" if len(owners) == 1 else ""


def _in_messages(places: Mapping[str, Cut]) -> list[list[str]]:
    """Group the places of the parts by message: as many as fit into MESSAGE bytes, at least one."""
    found: list[list[str]] = []
    size = MESSAGE
    for place, cut in places.items():
        if size + cut.local.nbytes > MESSAGE:
            found, size = [*found, []], 0
        found[-1].append(place)
        size += cut.local.nbytes
    return found


def _arrays(pending: Pending) -> dict[str, tuple[dict[str, Any], str]]:
    """Return every array of a step: its place in words → the mapping that holds it, and its name there."""
    found: dict[str, tuple[dict[str, Any], str]] = {}

    def add(moment: str, arrays: Any) -> None:
        for name in arrays:
            found[f"{moment} {name}"] = arrays, name

    def add_snapshot(moment: str, one: Snapshot | None) -> None:
        if one is not None:
            add(f"weights {moment}", one.params)
            add(f"gradients {moment}", one.grads)
            for kind, by_name in one.moments.items():
                add(f"{kind} {moment}", by_name)

    add("weights of", pending.params)
    add(GRADIENTS, pending.grads)
    for i, (before, after) in enumerate(zip(pending.before, pending.after, strict=True)):
        add_snapshot(f"before the update by optimizer {i} of", before)
        add_snapshot(f"after the update by optimizer {i} of", after)
    return found


def _reasons(shares: Sequence[Share], uncovered: Uncovered) -> None:
    """List each reason why a link is not judged once, with the ranks it applies to unless it applies to all."""
    held: dict[tuple[str, str], list[int]] = {}
    for rank, share in enumerate(shares):
        for link, whys in share.skipped.items():
            for why in whys:
                held.setdefault((link, why), []).append(rank)
    uncovered.skipped.clear()
    for (link, why), ranks in held.items():
        where = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}: "
        uncovered.skip(link, why if len(ranks) == len(shares) else where + why)


def differences(digests: Sequence[Mapping[str, Mapping[str, bytes]]]) -> Iterator[Finding]:
    """Compare what the ranks hold, link by link: unsharded tensors must have equal bits on all ranks."""
    for moment, (stage, phase) in LINKS.items():
        held = [one.get(moment, {}) for one in digests]
        names = [name for name in held[0] if all(name in one for one in held)]
        if not names:
            continue
        apart: dict[int, list[str]] = {}
        for name in names:
            counts = Counter(one[name] for one in held)
            # The bits that most ranks have. If two are equally common, those of rank 0.
            usual = max(counts, key=lambda digest: (counts[digest], digest == held[0][name]))
            for rank, one in enumerate(held):
                if one[name] != usual:
                    apart.setdefault(rank, []).append(name)
        note = "; ".join(
            f"rank {rank} differs in {len(found)} of {len(names)} tensors: {', '.join(found[:3])}"
            f"{', …' if len(found) > 3 else ''}"
            for rank, found in apart.items()
        )
        basis = f"equal bits on {len(held)} ranks ({moment.replace('/', ': ')})"
        yield exact(stage, "ranks", sum(map(len, apart.values())), len(names), basis, note, phase)


def told_to_all(ranks: Ranks, check: WatchCheck, judged: bool) -> tuple[WatchCheck, bool]:
    """Return rank 0's check, and whether any of its checks judged gradients. A collective call."""
    found, judged = ranks.judged((check, judged))
    return (found if ranks.rank else check), judged
