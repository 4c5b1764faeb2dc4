"""The session of one rank among its peers: every rank holds one, and makes the same calls on it.

A method in which ranks meet is watched (torch_backend/ranks/peers.py). Each rank computes by itself what needs no
other: whole weights are on every rank under DDP, so reading them gives the same everywhere. Where weights are cut over
ranks, all take part in whatever needs them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np

from lockstep.core.backend import Arrays, Batch, Gradients, NotSupported, RankReport, State, StepRecord
from lockstep.core.capabilities import (
    StreamsGradients,
    StreamsState,
    StreamsStepGradients,
    StreamsTaps,
    Take,
    ask_stream,
    collects,
)
from lockstep.core.config.schema import RunConfig
from lockstep.core.errors import UserError
from lockstep.core.files.shared_folder import token
from lockstep.core.model.names import GRADIENT
from lockstep.core.parity.evidence.observations import Observation
from lockstep.core.parity.judge.update import flat
from lockstep.core.streams import Collected, step_stream, stream_gradients, stream_state, stream_taps
from lockstep.core.train.finite import NotFinite
from lockstep.torch_backend.checkpoint import WritingTorch
from lockstep.torch_backend.device import processor
from lockstep.torch_backend.ranks.node_check import node_report
from lockstep.torch_backend.ranks.peers import Peers, joined
from lockstep.torch_backend.ranks.sharded_tensors import rows_of
from lockstep.torch_backend.ranks.sharing import Sharing
from lockstep.torch_backend.session import TorchSession

T = TypeVar("T")


class OpensRanks(Protocol):
    """A backend that opens the session of one rank."""

    def open_rank(self, config: RunConfig) -> TorchSession:
        """Open the session of this rank, before it joins the others."""
        ...


def open_among_peers(backend: OpensRanks, config: RunConfig) -> PeerSession:
    """Open this rank's session. Raises UserError unless the process has joined `config.train.ranks` ranks."""
    if (peers := joined()) is None:
        raise UserError(f"train.ranks = {config.train.ranks}: this process is not one of the ranks of a launch")
    return PeerSession(peers, backend, config)


class PeerSession:
    """A session of core/backend.py on each of several ranks.

    A batch whose micro-batches cannot be shared evenly (a check's single one) is computed by each rank alone.
    """

    def __init__(self, peers: Peers, backend: OpensRanks, config: RunConfig) -> None:
        if config.train.ranks != peers.count:
            raise UserError(f"train.ranks = {config.train.ranks}, but there are {peers.count} ranks: make them equal")
        self.config, self.peers = config, peers

        def opened() -> TorchSession:
            session = backend.open_rank(config)
            session.join_ranks()
            return session

        self.own: TorchSession = peers.do("open the run", opened, None, together=True)
        peers.be_patient_for(config.parallel.timeout_seconds)
        self._record: StepRecord | None = None
        self._by_rank = False
        # Digests of the last taps of which each rank was given its own part.
        self._seen: dict[str, str] = {}
        # Digests of the last step's gradients, by parameter, where every rank has whole ones.
        self._sums: dict[str, str] = {}

    @contextmanager
    def each_its_own(self) -> Iterator[None]:
        """Make streams give each rank what it holds, and rank 0 everything, while the block runs.

        A rank is given its rows of weights, moments and gradients that are sharded over ranks, and nothing of the rest.
        """
        self._by_rank = True
        try:
            yield
        finally:
            self._by_rank = False

    @collects
    def state(self) -> State:
        """Return a copy of the state, gathered from all ranks where it is cut."""
        found = Collected()
        return found.state(self.stream_state(found))

    def stream_state(self, take: Take) -> State:
        """Hand each tensor of `state` to `take`."""
        return self._look("state", lambda: self._giving(StreamsState, "state", take, partial(stream_state, self.own)))

    def load(self, state: State) -> None:
        """Take the state over. Raises ValueError if names or shapes are not the model's."""
        self._do("load", lambda: self.own.load(state), together=False)

    def restore(self, folder: Path, step: int, scalars: Mapping[str, float]) -> None:
        """Read what this rank holds from a checkpoint's folder. Raises ValueError as `load` does."""
        self._do("restore", lambda: self.own.restore(folder, step, scalars), together=False)

    def update_counts(self) -> Mapping[str, int]:
        """Return the counts of this rank's optimizer."""
        return self.own.update_counts()

    def state_checksums(self) -> Mapping[str, float]:
        """Return those of what this rank holds."""
        return self.own.state_checksums()

    def require_shared(self, folder: Path) -> None:
        """Raise UserError unless every rank sees this folder, where each writes its part of a checkpoint, and is alike.

        folder: rank 0's. Alike: the same sources of Lockstep, and the same torch.
        """
        if self.peers.rank == 0:
            with token(folder.resolve()) as name:
                found = self._node_reports(folder.resolve() / name)
        else:
            found = self._node_reports(None)
        mine, *others = found
        for rank, one in enumerate(others, 1):
            if not one.sees:
                raise UserError(
                    f"rank {rank} on {one.host} does not see {folder.resolve()}: it must lie where all nodes have it, "
                    "by the same name; every rank writes its part of a checkpoint there"
                )
            if one.code != mine.code:
                raise UserError(
                    f"rank {rank} on {one.host} does not run what rank 0 on {mine.host} does: {one.torch} and "
                    f"Lockstep {one.code[:12]} there, {mine.torch} and {mine.code[:12]} here"
                )

    def _node_reports(self, file: Path | None) -> list[Any]:
        seen = Path(self.peers.of_first(lambda: str(file)))
        return self.peers.gather(node_report(seen), "look for the run's folder")

    def write(self, folder: Path) -> WritingTorch:
        """Start to write this rank's share of the state; every rank waits for the result."""
        return self._do("write", lambda: self.own.write(folder), together=False)

    def random_state(self) -> dict[str, np.ndarray]:
        """Return the states of all ranks' random number generators, by `RANK/NAME`."""
        found = self.peers.gather(self.own.random_state(), "gather the random states")
        return {f"{rank}/{name}": a for rank, states in enumerate(found) for name, a in states.items()}

    def set_random_state(self, states: Arrays) -> None:
        """Take over this rank's part of what `random_state` gave, if it is there."""
        found = {key.rpartition("/"): state for key, state in states.items()}
        self.own.set_random_state({n: a for (rank, _, n), a in found.items() if int(rank or 0) == self.peers.rank})

    def step(self, batch: Batch, *, norms: bool = False) -> StepRecord:
        """Make one optimizer step. Raises ValueError for a batch that ranks cannot share."""
        norms = norms and self._wanted
        record: StepRecord = self._step(batch, lambda: self.own.step(batch, norms=norms))
        return record

    @collects
    def gradients(self, batch: Batch) -> Gradients:
        """Return per-token NLL, loss and gradients of `batch`, reduced over ranks if they share it."""
        found = Collected()
        return found.gradients(self.stream_gradients(batch, found))

    def stream_gradients(self, batch: Batch, take: Take) -> Gradients:
        """Hand each gradient of `gradients` to `take`."""

        def own() -> Gradients:
            of_own = partial(stream_gradients, self.own, batch)
            return self._giving(StreamsGradients, "gradients", take, of_own)

        if not self._shared(batch) and self.own.root is None:
            return own()
        return self._do("gradients", own)

    @collects
    def step_and_gradients(self, batch: Batch, *, norms: bool = False) -> tuple[StepRecord, Gradients | None]:
        """Run `step`, and return also the gradients that it made before clipping."""
        taken = Collected()
        record, found = self.stream_step(batch, taken, norms=norms)
        return record, None if found is None else taken.gradients(found)

    def stream_step(self, batch: Batch, take: Take, *, norms: bool = False) -> tuple[StepRecord, Gradients | None]:
        """Run `step_and_gradients`, with the gradients handed to `take`."""
        norms = norms and self._wanted
        self._sums = {}

        def own() -> tuple[StepRecord, Gradients | None]:
            step = step_stream(self.own)

            def noted(give: Take) -> tuple[StepRecord, Gradients | None]:
                return step(batch, self._noting_sums(give), norms)

            return self._giving(StreamsStepGradients, "step_and_gradients", take, noted)

        found: tuple[StepRecord, Gradients | None] = self._step(batch, own)
        return found

    def step_and_sketches(
        self, batch: Batch, *, norms: bool = False
    ) -> tuple[StepRecord, Mapping[str, Observation] | None]:
        """Run `step`, and return also the observations of its gradients before clipping."""
        norms = norms and self._wanted
        found: tuple[StepRecord, Mapping[str, Observation] | None] = self._step(
            batch, lambda: self.own.step_and_sketches(batch, norms=norms)
        )
        return found

    def keep_inputs(self) -> None:
        """Make each rank keep the inputs of its programs in the next step."""
        self.own.keep_inputs()

    def inputs_kept(self) -> Arrays:
        """Return the inputs kept on all ranks, whose shares follow each other in the batch."""
        found = self.peers.gather(self.own.inputs_kept(), "gather what the step was given")
        return {name: np.concatenate([of_rank[name] for of_rank in found]) for name in found[0]}

    def costs_of_determinism(self, batch: Batch) -> Sequence[float]:
        """Return times of a pass on every rank / times without `deterministic = true`, on this one."""
        self._require_shared(batch)
        return self._do("costs of determinism", lambda: self.own.costs_of_determinism(batch))

    def rank_gradients(self, batch: Batch) -> list[Arrays]:
        """Return the gradients of each micro-batch by itself, unreduced, from the rank whose share it is.

        Rank 0 returns those of all ranks; another rank its own.
        """
        found: dict[int, dict[str, np.ndarray]] = {}

        def take(number: int, name: str, gradient: np.ndarray) -> None:
            found.setdefault(number, {})[name] = gradient

        self.stream_rank_gradients(batch, take)
        return [arrays for of_rank in self.peers.to_first(found) for arrays in of_rank.values()]

    def stream_rank_gradients(self, batch: Batch, take: Callable[[int, str, np.ndarray], None]) -> None:
        """Hand each gradient of `rank_gradients` to `take` on the rank that made it, with its micro-batch's number."""
        self._require_shared(batch)
        ranks = self.own.ranks
        assert ranks is not None
        # Not by the session's own sharing, which may be the fault.
        mine = Sharing.share(ranks, batch.cut(self.config.train))

        def own() -> None:
            for number, micro in enumerate(mine, len(mine) * ranks.rank):
                self.own.stream_own_gradients(micro, lambda _, name, gradient: take(number, name, gradient))  # noqa: B023

        self._do("own gradients", own, self.own.root is not None)

    def rank_reports(self) -> list[RankReport]:
        """Return each rank's report on the last step, rank 0 first."""
        assert self._record is not None
        digests: dict[str, str] = {}

        def take(kind: str, name: str, array: np.ndarray) -> None:
            digests[f"{kind}/{name}"] = _digest(array)

        by_rank, self._by_rank = self._by_rank, False
        try:
            state = self.stream_state(take)
        finally:
            self._by_rank = by_rank
        digests |= {name: _digest(array) for name, array in flat(state).items()}
        report = RankReport(self._record, digests, self._seen, processor(self.own.device), self._sums)
        return self.peers.gather(report, "report on the step")

    @collects
    def observe(self, batch: Batch, taps: Sequence[str]) -> Arrays:
        """Return what the session of one rank returns."""
        return self._look("observe", lambda: self.own.observe(batch, taps))

    def stream_taps(self, batch: Batch, taps: Sequence[str], take: Take) -> None:
        """Hand each tensor of `observe` to `take`."""
        of_own = partial(stream_taps, self.own, batch, taps)
        if self._by_rank:
            self._seen = {}
        self._look("observe", lambda: self._giving(StreamsTaps, "observe", self._noting(take), of_own))

    def sketch(self, batch: Batch) -> dict[str, Observation]:
        """Return what the session of one rank returns."""
        return self._look("sketch", lambda: self.own.sketch(batch))

    def run_stage(self, stage: str, inputs: Arrays) -> Arrays:
        """Return what the session of one rank returns, from the inputs alone."""
        return self.own.run_stage(stage, inputs)

    def evaluate(self, batch: Batch, policy: str | None = None) -> Arrays:
        """Return what the session of one rank returns."""
        return self._look("evaluate", lambda: self.own.evaluate(batch, policy))

    def attention_logits(self, batch: Batch) -> np.ndarray:
        """Return what the session of one rank returns."""
        return self._look("attention logits", lambda: self.own.attention_logits(batch))

    def seconds_of_step(self) -> Mapping[str, float]:
        """Return this rank's seconds."""
        return self.own.seconds_of_step()

    def memory(self) -> Mapping[str, float]:
        """Return this rank's memory."""
        return self.own.memory()

    def next_token_logits(self, tokens: np.ndarray) -> np.ndarray:
        """Return what the session of one rank returns."""
        return self._look("next token logits", lambda: self.own.next_token_logits(tokens))

    def cached_logits(self, tokens: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """Return what the session of one rank returns."""
        return self.own.cached_logits(tokens, lengths)

    def decoder(self) -> Callable[[np.ndarray], np.ndarray]:
        """Return what the session of one rank returns."""
        return self.own.decoder()

    def close(self) -> None:
        """Close this rank's session."""
        self.own.close()

    def _step(self, batch: Batch, own: Callable[[], Any]) -> Any:
        self._require_shared(batch)
        try:
            made = self.peers.do(f"`step {self.own.steps_done + 1}`", own, self.own.ranks, together=True, step=True)
        except NotFinite as found:
            self._record = found.record
            raise
        self._record = made[0] if isinstance(made, tuple) else made
        return made

    @property
    def _wanted(self) -> bool:
        """Return whether this rank computes what rank 0 reports: norms of whole weights are equal on all ranks."""
        return self.peers.rank == 0 or self.own.root is not None

    def _giving(self, streams: type[Any], method: str, take: Take, call: Callable[[Take], T]) -> T:
        """Run `call`, which hands tensors over, with the function that takes them, as `each_its_own` describes.

        streams, method: how the session of this rank shows its parts; one that shows whole tensors is cut.
        """
        if not self._by_rank:
            return call(take)
        if self.own.root is None:
            return call(take if self.peers.rank == 0 or streams is StreamsTaps else _drop)

        def cut(kind: str, name: str, array: np.ndarray) -> None:
            p = self.own.parameters.get(name.removeprefix(GRADIENT))
            take(kind, name, array if p is None or array.shape != tuple(p.shape) else array[rows_of(p)])

        try:
            ask_stream(self.own, streams, method)
        except NotSupported:
            return call(cut)
        with self.own.showing_parts():
            return call(take)

    def _noting(self, take: Take) -> Take:
        """Return a `take` that notes the digest of each tap that all ranks compute alike, and gives on this rank's.

        Where weights are cut, the gradients of all but rank 0 are zero. On a GPU sums of a backward pass vary, unless
        the run is deterministic; and Inductor chooses a GPU's kernels by time, each rank its own.
        """
        if not self._by_rank:
            return take
        on_cpu, compiled = self.own.device.type == "cpu", self.config.compile
        by_time = compiled.enabled and (not on_cpu or "autotune" in compiled.mode)
        sharded, first = self.own.root is not None, self.peers.rank == 0
        backward = not sharded and (on_cpu or self.config.deterministic)

        def note(kind: str, name: str, array: np.ndarray) -> None:
            if not by_time and (backward or not name.startswith(GRADIENT)):
                self._seen[name] = _digest(array)
            if first or (sharded and name.removeprefix(GRADIENT) in self.own.parameters):
                take(kind, name, array)

        return note

    def _noting_sums(self, give: Take) -> Take:
        """Return a `take` that notes each gradient's digest, alike on ranks with whole weights, and gives it on."""
        if not self._by_rank or self.own.root is not None:
            return give

        def note(kind: str, name: str, array: np.ndarray) -> None:
            self._sums[name] = _digest(array)
            give(kind, name, array)

        return note

    def _look(self, what: str, own: Callable[[], T]) -> T:
        """Run something that changes nothing: on this rank alone, or on all ranks where the weights are sharded."""
        return own() if self.own.root is None else self._do(what, own)

    def _do(self, what: str, own: Callable[[], T], together: bool = True) -> T:
        return self.peers.do(f"`{what}`", own, self.own.ranks, together)

    def _shared(self, batch: Batch) -> bool:
        assert self.own.ranks is not None
        return self.own.ranks.shares(batch.cut(self.config.train))

    def _require_shared(self, batch: Batch) -> None:
        if not self._shared(batch):
            raise ValueError(
                f"a batch of {len(batch.tokens)} sequences gives no equal number of micro-batches to each of "
                f"{self.peers.count} ranks"
            )


def _digest(array: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(array).view(np.uint8).reshape(-1).data).hexdigest()


def _drop(kind: str, name: str, array: np.ndarray) -> None:
    """Take a tensor that rank 0 has as well."""
