"""The ranks that train one model, and one judgement for all of them.

On a check, every rank copies what it holds, rank 0 judges, and all get its verdict. Ranks wait for each other in
`put_together` and `told_to_all` alone. Both stand at the end of a step, and every rank calls them whatever it could not
read: a failure on one is reported with its number.

Data-parallel ranks must hold equal bits: digests of what each holds whole are compared, and a rank that differs is
named. Tensors that are cut over ranks are put together on rank 0, one at a time.
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
from lockstep.core.parity.watch import judge
from lockstep.core.parity.watch.listen import Pending
from lockstep.core.parity.watch.snapshot import Snapshot, array_of, share_equal
from lockstep.core.parity.watch.uncovered import Uncovered, WatchCheck, reason

# Placeholder for a tensor that this rank does not judge.
DROPPED = np.empty(0)
GRADIENTS = "gradients of"
# If one rank has at least this share of the squared error, the fault is there.
NEARLY_ALL = 0.99
# Bytes of a message between ranks.
MESSAGE = 2**26
# Moment and kind of what was read → stage and phase of the finding, in the order of a step.
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
    """A rank's part of a tensor that is sharded over ranks.

    local: its numbers. ranks: the layout of ranks, an array of their numbers. dims: for each axis of the layout, the
    axis of the tensor that is cut over it, or None where each rank holds the same.
    """

    local: np.ndarray
    ranks: np.ndarray
    dims: tuple[int | None, ...]

    def whole(self, parts: Mapping[int, np.ndarray]) -> np.ndarray:
        """Join the tensor from the parts of all ranks by their numbers."""
        return _joined(self.ranks, self.dims, parts)


# The layout of a sharded gradient: one rank's part, and the shapes of all parts.
Layout = tuple[Cut, Mapping[int, tuple[int, ...]]]


def _joined(ranks: np.ndarray, dims: tuple[int | None, ...], parts: Mapping[int, np.ndarray]) -> np.ndarray:
    if not dims:
        return parts[int(ranks)]
    if dims[0] is None:
        return _joined(ranks[0], dims[1:], parts)
    return np.concatenate([_joined(row, dims[1:], parts) for row in ranks], axis=dims[0])


class Ranks(Protocol):
    """The ranks that train a model together.

    members: their numbers in the whole job. gathers: a check is given the batches of all. divisor: what the sum of all
    ranks' gradients is divided by. apart: why they no longer meet; empty while they do. A collective call raises
    UserError where they do not.
    """

    rank: int
    apart: str
    members: Sequence[int]
    gathers: bool
    divisor: float

    def gather(self, mine: Any) -> list[Any]:
        """Return every rank's object, in the order of `members`, on rank 0. A collective call; empty on other ranks."""
        ...

    def of_first(self, mine: Any) -> Any:
        """Return rank 0's object. A collective call."""
        ...

    def judged(self, mine: Any) -> Any:
        """Return rank 0's object, which the other ranks wait for while rank 0 judges. A collective call."""
        ...

    def portable(self, batch: Any) -> Any:
        """Return a copy of a batch that another rank can read. Raises UserError for one that has no such copy."""
        ...

    def part(self, tensor: Any) -> Cut:
        """Copy this rank's part of a tensor that is cut. Raises UserError for a layout that cannot be put together."""
        ...


@dataclass(frozen=True)
class Gathered:
    """The batches of all ranks, in their order; under accumulation, each the list of a rank's micro-batches."""

    batches: Sequence[Any]


@dataclass
class Reading:
    """The reading of a step on one rank.

    digests: moment and kind → name → digest, of tensors that this rank holds whole.
    """

    ranks: Ranks | None
    digests: dict[str, dict[str, bytes]] = field(default_factory=dict)

    def at(self, moment: str) -> Callable[..., Any]:
        """Return a function `(kind, name, tensor, make)` that reads at this moment of the step, without waiting."""

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
    """A rank's part of a check. cut: places of the tensors of which it has a part."""

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
    """Send rank 0 what all ranks read of a step. A collective call.

    Returns None on the other ranks, and where one of them read nothing. The loss is the sum of the ranks' over the
    divisor of their gradients.
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
                # The other ranks wait for the next message, even if this one fails.
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
        uncovered.skip("step", "not every rank came to it")
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
        basis = "each optimizer's step() ran as often on every rank"
        note = f"optimizer.step() ran {fired} times on rank 0, {', '.join(others)}"
        pending.between.append(judge.exact("step_count", "ranks", len(others), len(shares), basis, note, "update"))
    return pending


def owner_of(broken: Sequence[str], c: Arrays, w: Arrays, layouts: Mapping[str, Layout]) -> str:
    """Return a note if one rank's parts alone are off in all broken gradients. c, w: gradients, and the twin's."""
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
    return f"in what rank {owners.pop()} holds alone" if len(owners) == 1 else ""


def _in_messages(places: Mapping[str, Cut]) -> list[list[str]]:
    """Group the places of parts that are sent at once: as many as fit into a message, but one at least."""
    found: list[list[str]] = []
    size = MESSAGE
    for place, cut in places.items():
        if size + cut.local.nbytes > MESSAGE:
            found, size = [*found, []], 0
        found[-1].append(place)
        size += cut.local.nbytes
    return found


def _arrays(pending: Pending) -> dict[str, tuple[dict[str, Any], str]]:
    """Return every array that a step holds: its place in words → where it stands."""
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
    """List why links are not judged: once, with the ranks where it is so unless it is so on all."""
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
    """Compare what ranks hold, link by link: tensors that all of them have whole must have equal bits."""
    for moment, (stage, phase) in LINKS.items():
        held = [one.get(moment, {}) for one in digests]
        names = [name for name in held[0] if all(name in one for one in held)]
        if not names:
            continue
        apart: dict[int, list[str]] = {}
        for name in names:
            counts = Counter(one[name] for one in held)
            # The bits that most ranks have; if two are equally common, those of rank 0.
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
        yield judge.exact(stage, "ranks", sum(map(len, apart.values())), len(names), basis, note, phase)


def told_to_all(ranks: Ranks, check: WatchCheck, judged: bool) -> tuple[WatchCheck, bool]:
    """Return rank 0's check, and whether any check of it judged gradients. A collective call."""
    found, judged = ranks.judged((check, judged))
    return (found if ranks.rank else check), judged
