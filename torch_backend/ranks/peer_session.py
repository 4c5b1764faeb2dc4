"""The session of one rank among its peers: every rank has one, and all ranks make the same calls on theirs.

A method that communicates is watched for failures of other ranks (torch_backend/ranks/peers.py). Under DDP every rank
holds all weights, so a method that only reads them runs on each rank without communication, with the same result. With
sharded weights, all ranks take part in every method that needs weights.
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
        """Open the session of this rank, before it joins the process group."""
        ...


def open_among_peers(backend: OpensRanks, config: RunConfig) -> PeerSession:
    """Open this rank's session. Raises UserError unless the process has joined `config.train.ranks` ranks."""
    if (peers := joined()) is None:
        raise UserError(f"train.ranks = {config.train.ranks}: this process is not one of the ranks of a launch")
    return PeerSession(peers, backend, config)


class PeerSession:
    """A session of core/backend.py on each of several ranks.

    If the micro-batches of a batch cannot be distributed evenly, as for a check's single one, each rank computes all.
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
        # Digests of the last taps that were recorded by rank (`each_its_own`).
        self._seen: dict[str, str] = {}
        # Digests of the last step's gradients, by parameter, if every rank has whole gradients.
        self._sums: dict[str, str] = {}

    @contextmanager
    def each_its_own(self) -> Iterator[None]:
        """Make streams pass each rank only its own part while the context is active.

        With sharded weights, each rank receives its rows of weights, moments and gradients. Tensors that all ranks have
        go to rank 0 alone.
        """
        self._by_rank = True
        try:
            yield
        finally:
            self._by_rank = False

    @collects
    def state(self) -> State:
        """Return a copy of the state; if it is sharded, gather it from all ranks."""
        found = Collected()
        return found.state(self.stream_state(found))

    def stream_state(self, take: Take) -> State:
        """Pass each tensor of `state` to `take`; return the state without tensors."""
        return self._look("state", lambda: self._giving(StreamsState, "state", take, partial(stream_state, self.own)))

    def load(self, state: State) -> None:
        """Load a state. Raises ValueError if names or shapes are not the model's."""
        self._do("load", lambda: self.own.load(state), together=False)

    def restore(self, folder: Path, step: int, scalars: Mapping[str, float]) -> None:
        """Read this rank's part of a state from a checkpoint's folder. Raises ValueError as `load` does."""
        self._do("restore", lambda: self.own.restore(folder, step, scalars), together=False)

    def update_counts(self) -> Mapping[str, int]:
        """Return this rank's counts of updates, by parameter."""
        return self.own.update_counts()

    def state_checksums(self) -> Mapping[str, float]:
        """Return checksums of this rank's part of the state."""
        return self.own.state_checksums()

    def require_shared(self, folder: Path) -> None:
        """Raise UserError unless every rank finds this folder, and has the same sources of Lockstep and the same torch.

        folder: the path on rank 0; every rank writes its part of a checkpoint there.
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
                    f"rank {rank} on {one.host} does not see {folder.resolve()}: all nodes must have this folder "
                    "at the same path; every rank writes its part of a checkpoint there"
                )
            if one.code != mine.code:
                raise UserError(
                    f"rank {rank} on {one.host} does not run the same software as rank 0 on {mine.host}: {one.torch} "
                    f"and Lockstep {one.code[:12]} there, {mine.torch} and {mine.code[:12]} here"
                )

    def _node_reports(self, file: Path | None) -> list[Any]:
        seen = Path(self.peers.of_first(lambda: str(file)))
        return self.peers.gather(node_report(seen), "find the run's folder")

    def write(self, folder: Path) -> WritingTorch:
        """Start to write this rank's part of the state; every rank calls `wait` of the result."""
        return self._do("write", lambda: self.own.write(folder), together=False)

    def random_state(self) -> dict[str, np.ndarray]:
        """Return the states of all ranks' random number generators, by `RANK/NAME`."""
        found = self.peers.gather(self.own.random_state(), "gather the random states")
        return {f"{rank}/{name}": a for rank, states in enumerate(found) for name, a in states.items()}

    def set_random_state(self, states: Arrays) -> None:
        """Set this rank's random number generators from its entries in a result of `random_state`, if there are any."""
        found = {key.rpartition("/"): state for key, state in states.items()}
        self.own.set_random_state({n: a for (rank, _, n), a in found.items() if int(rank or 0) == self.peers.rank})

    def step(self, batch: Batch, *, norms: bool = False) -> StepRecord:
        """Run one optimizer step. Raises ValueError if the micro-batches cannot be distributed evenly over ranks."""
        norms = norms and self._wanted
        record: StepRecord = self._step(batch, lambda: self.own.step(batch, norms=norms))
        return record

    @collects
    def gradients(self, batch: Batch) -> Gradients:
        """Return per-token NLL, loss and gradients of `batch`, reduced over ranks if they share it."""
        found = Collected()
        return found.gradients(self.stream_gradients(batch, found))

    def stream_gradients(self, batch: Batch, take: Take) -> Gradients:
        """Pass each gradient of `gradients` to `take`; return NLL and loss."""

        def own() -> Gradients:
            of_own = partial(stream_gradients, self.own, batch)
            return self._giving(StreamsGradients, "gradients", take, of_own)

        if not self._shared(batch) and self.own.root is None:
            return own()
        return self._do("gradients", own)

    @collects
    def step_and_gradients(self, batch: Batch, *, norms: bool = False) -> tuple[StepRecord, Gradients | None]:
        """Run `step`, and also return its gradients before clipping."""
        taken = Collected()
        record, found = self.stream_step(batch, taken, norms=norms)
        return record, None if found is None else taken.gradients(found)

    def stream_step(self, batch: Batch, take: Take, *, norms: bool = False) -> tuple[StepRecord, Gradients | None]:
        """Run `step_and_gradients`, and pass the gradients to `take` instead of returning them."""
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
        """Run `step`, and also return observations of its gradients before clipping."""
        norms = norms and self._wanted
        found: tuple[StepRecord, Mapping[str, Observation] | None] = self._step(
            batch, lambda: self.own.step_and_sketches(batch, norms=norms)
        )
        return found

    def keep_inputs(self) -> None:
        """Make each rank keep the inputs of its programs in the next step."""
        self.own.keep_inputs()

    def inputs_kept(self) -> Arrays:
        """Return the inputs kept on all ranks by name, concatenated along B in the order of ranks."""
        found = self.peers.gather(self.own.inputs_kept(), "gather the step's inputs")
        return {name: np.concatenate([of_rank[name] for of_rank in found]) for name in found[0]}

    def costs_of_determinism(self, batch: Batch) -> Sequence[float]:
        """Return time of a pass / time without `deterministic = true`, several times; all ranks run the passes."""
        self._require_shared(batch)
        return self._do("costs of determinism", lambda: self.own.costs_of_determinism(batch))

    def rank_gradients(self, batch: Batch) -> list[Arrays]:
        """Return the gradients of each single micro-batch before any reduction, from the rank that computes it.

        Rank 0 returns those of all ranks, any other rank only its own.
        """
        found: dict[int, dict[str, np.ndarray]] = {}

        def take(number: int, name: str, gradient: np.ndarray) -> None:
            found.setdefault(number, {})[name] = gradient

        self.stream_rank_gradients(batch, take)
        return [arrays for of_rank in self.peers.to_first(found) for arrays in of_rank.values()]

    def stream_rank_gradients(self, batch: Batch, take: Callable[[int, str, np.ndarray], None]) -> None:
        """Pass each gradient of `rank_gradients` to `take(micro-batch's number, name, gradient)` on its own rank."""
        self._require_shared(batch)
        ranks = self.own.ranks
        assert ranks is not None
        # Use the base class's distribution: the session's own may have the fault that a check searches.
        mine = Sharing.share(ranks, batch.cut(self.config.train))

        def own() -> None:
            for number, micro in enumerate(mine, len(mine) * ranks.rank):
                self.own.stream_own_gradients(micro, lambda _, name, gradient: take(number, name, gradient))  # noqa: B023

        self._do("own gradients", own, self.own.root is not None)

    def rank_reports(self) -> list[RankReport]:
        """Return each rank's report on the last step, in the order of ranks."""
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
        """Return taps of a micro-batch, as `Observes.observe` does."""
        return self._look("observe", lambda: self.own.observe(batch, taps))

    def stream_taps(self, batch: Batch, taps: Sequence[str], take: Take) -> None:
        """Pass each tensor of `observe` to `take`."""
        of_own = partial(stream_taps, self.own, batch, taps)
        if self._by_rank:
            self._seen = {}
        self._look("observe", lambda: self._giving(StreamsTaps, "observe", self._noting(take), of_own))

    def sketch(self, batch: Batch) -> dict[str, Observation]:
        """Return sketches of a micro-batch, as `Observes.sketch` does."""
        return self._look("sketch", lambda: self.own.sketch(batch))

    def run_stage(self, stage: str, inputs: Arrays) -> Arrays:
        """Execute a stage on this rank, as `Observes.run_stage` does."""
        return self.own.run_stage(stage, inputs)

    def evaluate(self, batch: Batch, policy: str | None = None) -> Arrays:
        """Return per-token scores, as `Observes.evaluate` does."""
        return self._look("evaluate", lambda: self.own.evaluate(batch, policy))

    def attention_logits(self, batch: Batch) -> np.ndarray:
        """Return the largest attention logits, as `Observes.attention_logits` does."""
        return self._look("attention logits", lambda: self.own.attention_logits(batch))

    def seconds_of_step(self) -> Mapping[str, float]:
        """Return this rank's seconds of the last step, by part."""
        return self.own.seconds_of_step()

    def seconds_compiling(self) -> float:
        """Return the seconds that torch.compile has taken on this rank."""
        return self.own.seconds_compiling()

    def memory(self) -> Mapping[str, float]:
        """Return this rank's memory in bytes."""
        return self.own.memory()

    def next_token_logits(self, tokens: np.ndarray) -> np.ndarray:
        """Return logits (V,), as `Observes.next_token_logits` does."""
        return self._look("next token logits", lambda: self.own.next_token_logits(tokens))

    def cached_logits(self, tokens: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """Return logits (n, V), as `Observes.cached_logits` does."""
        return self.own.cached_logits(tokens, lengths)

    def decoder(self) -> Callable[[np.ndarray], np.ndarray]:
        """Return a function from tokens to logits, as `Observes.decoder` does."""
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
        """True if this rank must compute norms: rank 0, or every rank if the weights are sharded."""
        return self.peers.rank == 0 or self.own.root is not None

    def _giving(self, streams: type[Any], method: str, take: Take, call: Callable[[Take], T]) -> T:
        """Run `call` with a `take` that follows `each_its_own`.

        streams, method: the protocol and method by which this rank's session streams its parts. If it has none, it
        streams whole tensors, and `take` receives this rank's rows of them.
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
        """Return a `take` that records the digest of each tap that must be equal on all ranks, and passes on some.

        With sharded weights, only parameter gradients of this rank are passed on; else rank 0 passes on all taps.

        These are not equal on all ranks, and have no digest: gradients with sharded weights, which are zero except on
        rank 0; gradients on a GPU, unless the run is deterministic; and all taps if Inductor selects kernels by
        measured time, which may differ by rank.
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
        """Return a `take` that records the digest of each whole gradient, and passes the gradient on."""
        if not self._by_rank or self.own.root is not None:
            return give

        def note(kind: str, name: str, array: np.ndarray) -> None:
            self._sums[name] = _digest(array)
            give(kind, name, array)

        return note

    def _look(self, what: str, own: Callable[[], T]) -> T:
        """Run a call that changes no state: on this rank alone, or on all ranks if the weights are sharded."""
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
    """Ignore a tensor that rank 0 also has."""
