"""The session of one rank among its peers: every rank holds one, and makes the same calls on it.

A method in which ranks meet is watched (torch_backend/ranks/peers.py). What needs no other rank each computes by
itself: whole weights are on every rank under DDP, so a look at them is the same everywhere. Where weights are cut over
ranks, all take part in whatever needs them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np

from lockstep.core.backend import Arrays, Batch, Gradients, RankReport, State, StepRecord
from lockstep.core.config.schema import RunConfig
from lockstep.core.errors import UserError
from lockstep.core.parity.evidence.observations import Observation
from lockstep.core.parity.judge.update import flat
from lockstep.core.train.finite import NotFinite
from lockstep.torch_backend.checkpoint import WritingTorch
from lockstep.torch_backend.ranks.node_check import place_of_rank, token
from lockstep.torch_backend.ranks.peers import Peers, joined
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

    def state(self) -> State:
        """A copy of the state, gathered from all ranks where it is cut."""
        return self._look("state", self.own.state)

    def load(self, state: State) -> None:
        """Take the state over. Raises ValueError if names or shapes are not the model's."""
        self._do("load", lambda: self.own.load(state), together=False)

    def restore(self, folder: Path, step: int, scalars: Mapping[str, float]) -> None:
        """Read what this rank holds from a checkpoint's folder. Raises ValueError as `load` does."""
        self._do("restore", lambda: self.own.restore(folder, step, scalars), together=False)

    def require_shared(self, folder: Path) -> None:
        """Raise UserError unless every rank sees this folder, where each writes its part of a checkpoint, and is alike.

        folder: rank 0's. Alike: the same sources of Lockstep, and the same torch.
        """
        if self.peers.rank == 0:
            with token(folder.resolve()) as name:
                found = self._place_of_rank(folder.resolve() / name)
        else:
            found = self._place_of_rank(None)
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

    def _place_of_rank(self, file: Path | None) -> list[Any]:
        seen = Path(self.peers.of_first(lambda: str(file)))
        return self.peers.gather(place_of_rank(seen), "look for the run's folder")

    def write(self, folder: Path) -> WritingTorch:
        """Begin to write this rank's share of the state; every rank waits for what it gives."""
        return self._do("write", lambda: self.own.write(folder), together=False)

    def random_state(self) -> dict[str, np.ndarray]:
        """States of all ranks' random number generators, by `RANK/NAME`."""
        found = self.peers.gather(self.own.random_state(), "gather the random states")
        return {f"{rank}/{name}": a for rank, states in enumerate(found) for name, a in states.items()}

    def set_random_state(self, states: Arrays) -> None:
        """Take over this rank's part of what `random_state` gave, if it is there."""
        found = {key.rpartition("/"): state for key, state in states.items()}
        self.own.set_random_state({n: a for (rank, _, n), a in found.items() if int(rank or 0) == self.peers.rank})

    def step(self, batch: Batch, *, norms: bool = False) -> StepRecord:
        """One optimizer step. Raises ValueError for a batch that ranks cannot share."""
        norms = norms and self._wanted
        record: StepRecord = self._step(batch, lambda: self.own.step(batch, norms=norms))
        return record

    def gradients(self, batch: Batch) -> Gradients:
        """Per-token NLL, loss and gradients of `batch`, reduced over ranks if they share it."""
        if not self._shared(batch) and self.own.root is None:
            return self.own.gradients(batch)
        return self._do("gradients", lambda: self.own.gradients(batch))

    def step_and_gradients(self, batch: Batch, *, norms: bool = False) -> tuple[StepRecord, Gradients | None]:
        """`step`, and the gradients that it made before clipping."""
        norms = norms and self._wanted
        found: tuple[StepRecord, Gradients | None] = self._step(
            batch, lambda: self.own.step_and_gradients(batch, norms=norms)
        )
        return found

    def step_and_sketches(
        self, batch: Batch, *, norms: bool = False
    ) -> tuple[StepRecord, Mapping[str, Observation] | None]:
        """`step`, and the observations of its gradients before clipping."""
        norms = norms and self._wanted
        found: tuple[StepRecord, Mapping[str, Observation] | None] = self._step(
            batch, lambda: self.own.step_and_sketches(batch, norms=norms)
        )
        return found

    def costs_of_determinism(self, batch: Batch) -> Sequence[float]:
        """Time of a forward and backward pass on every rank / time without `deterministic = true`, on this one."""
        self._require_shared(batch)
        return self._do("costs of determinism", lambda: self.own.costs_of_determinism(batch))

    def rank_gradients(self, batch: Batch) -> list[Arrays]:
        """Gradients of each micro-batch of `batch` by itself, made by the rank whose share it is and not reduced.

        Of all ranks on rank 0; elsewhere this rank's.
        """
        self._require_shared(batch)
        ranks = self.own.ranks
        assert ranks is not None
        # Not as the session shares them, which may be what is wrong.
        mine = Sharing.share(ranks, batch.cut(self.config.train))
        found = self._do(
            "own gradients", lambda: [self.own.own_gradients(micro) for micro in mine], self.own.root is not None
        )
        return [one for of_rank in self.peers.to_first(found) for one in of_rank]

    def rank_reports(self) -> list[RankReport]:
        """Return each rank's report on the last step, rank 0 first."""
        assert self._record is not None
        state = flat(self.state())
        digests = {name: hashlib.sha256(array.tobytes()).hexdigest() for name, array in state.items()}
        return self.peers.gather(RankReport(self._record, digests), "report on the step")

    def observe(self, batch: Batch, taps: Sequence[str]) -> Arrays:
        """As the session of one rank."""
        return self._look("observe", lambda: self.own.observe(batch, taps))

    def sketch(self, batch: Batch) -> dict[str, Observation]:
        """As the session of one rank."""
        return self._look("sketch", lambda: self.own.sketch(batch))

    def run_stage(self, stage: str, inputs: Arrays) -> Arrays:
        """As the session of one rank, from the inputs alone."""
        return self.own.run_stage(stage, inputs)

    def evaluate(self, batch: Batch, policy: str | None = None) -> Arrays:
        """As the session of one rank."""
        return self._look("evaluate", lambda: self.own.evaluate(batch, policy))

    def attention_logits(self, batch: Batch) -> np.ndarray:
        """As the session of one rank."""
        return self._look("attention logits", lambda: self.own.attention_logits(batch))

    def seconds_of_step(self) -> Mapping[str, float]:
        """As this rank spent them."""
        return self.own.seconds_of_step()

    def memory(self) -> Mapping[str, float]:
        """As this rank uses it."""
        return self.own.memory()

    def next_token_logits(self, tokens: np.ndarray) -> np.ndarray:
        """As the session of one rank."""
        return self._look("next token logits", lambda: self.own.next_token_logits(tokens))

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

    def _look(self, what: str, own: Callable[[], T]) -> T:
        """Something that changes nothing: on this rank alone, or on all where the weights are cut."""
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
