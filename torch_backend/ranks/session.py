"""Several ranks behind one session: rank 0 leads, the others run the same methods on sessions of their own.

Launched by torchrun, its processes are the ranks. Otherwise rank 0 starts the others itself, on this machine. Each
command is sent to every follower (torch_backend/ranks/worker.py), which answers when it is done: what was raised, or
what it gave. Rank 0 finds out which one failed or hangs (torch_backend/ranks/controller.py).
"""

from __future__ import annotations

import pickle
import sys
import weakref
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.core.backend import Arrays, Batch, Gradients, RankReport, State, StepRecord
from lockstep.core.config.schema import RunConfig
from lockstep.core.errors import UserError
from lockstep.core.parity.evidence.observations import Observation
from lockstep.core.run.launch import launched, require_ranks
from lockstep.torch_backend.checkpoint import WritingTorch
from lockstep.torch_backend.device import resolve_device
from lockstep.torch_backend.ranks.controller import World, ranks_of
from lockstep.torch_backend.ranks.node_check import look_round, token
from lockstep.torch_backend.ranks.worker import Member, OpensRanks
from lockstep.torch_backend.session import TorchSession

_numbers = count()


def open_ranked(backend: OpensRanks, config: RunConfig) -> RankedSession:
    """A session over `config.train.ranks` ranks, each of which opens `backend`.

    Raises:
        UserError: the backend cannot be opened in another process, or ranks do not fit what torchrun launched.
        RankError: a rank could not open it.
    """
    place = launched()
    if place is not None:
        require_ranks(config.train.ranks)
        if place[0] > 0:
            raise UserError("torchrun launches lockstep train and parity; other commands start their ranks themselves")
    pickled, file = _portable(backend)
    world = ranks_of(config.train.ranks, resolve_device(config).type == "cuda")
    return RankedSession(world, backend, config, pickled, file)


def _portable(backend: OpensRanks) -> tuple[bytes, str | None]:
    """The backend as bytes, and the file that must be imported before they are read, if it was one (FILE.py:NAME)."""
    module = sys.modules.get(type(backend).__module__)
    loaded = getattr(module, "__spec__", None)
    file = loaded.origin if loaded is not None and loaded.name.startswith("lockstep_candidate_") else None
    try:
        return pickle.dumps(backend), file
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise UserError(f"{type(backend).__name__} cannot be opened on other ranks: {error}") from error


class RankedSession:
    """A session of core/backend.py over several ranks, held by rank 0.

    A batch whose micro-batches cannot be shared evenly (a check's single one) is computed by rank 0 alone.
    """

    def __init__(self, world: World, backend: OpensRanks, config: RunConfig, pickled: bytes, file: str | None) -> None:
        self.config = config
        self._world, self._number = world, next(_numbers)

        def own() -> Member:
            session = backend.open_rank(config)
            session.join_ranks()
            return Member(session)

        self._mine, _ = world.do("open", self._number, (pickled, file, config), own, asked="open the run")
        world.be_patient_for(config.parallel.timeout_seconds)
        world.open.add(self)
        # Whoever lets go of a session without closing it need not keep the other ranks' alive.
        self._closed = weakref.finalize(self, world.dropped.append, self._number)

    @property
    def own(self) -> TorchSession:
        """The session of rank 0."""
        return self._mine.session

    def state(self) -> State:
        """A copy of rank 0's state, or of what all ranks hold together."""
        state: State = self._look("state")
        return state

    def load(self, state: State) -> None:
        """Every rank takes the state over. Raises ValueError if names or shapes are not the model's."""
        self._do("load", state)

    def restore(self, folder: Path, step: int, scalars: Mapping[str, float]) -> None:
        """Every rank reads what it holds from a checkpoint's folder. Raises ValueError as `load` does."""
        self._do("restore", folder, step, scalars)

    def require_shared(self, folder: Path) -> None:
        """Raise UserError unless every rank sees this folder, where each writes its part of a checkpoint, and is alike.

        Alike: the same sources of Lockstep, and the same torch.
        """
        folder = folder.resolve()
        with token(folder) as name:
            mine, others = self._world.do(
                "look_round", self._number, (folder / name,), lambda: look_round(folder / name)
            )
        for rank, found in enumerate(others, 1):
            if not found.sees:
                raise UserError(
                    f"rank {rank} on {found.host} does not see {folder}: it must lie where all nodes have it, by the "
                    "same name; every rank writes its part of a checkpoint there"
                )
            if found.code != mine.code:
                raise UserError(
                    f"rank {rank} on {found.host} does not run what rank 0 on {mine.host} does: {found.torch} and "
                    f"Lockstep {found.code[:12]} there, {mine.torch} and {mine.code[:12]} here"
                )

    def write(self, folder: Path) -> WritingTorch:
        """Begin to write the state, each rank its share; `wait` is for all of them."""
        own = partial(self._mine.write, folder)
        return self._world.do("write_beside", self._number, (folder,), own)[0]

    def random_state(self) -> dict[str, np.ndarray]:
        """States of torch's random number generators, by `RANK/NAME`."""
        mine, others = self._world.do("random_state", self._number, (), self._mine.random_state)
        return {f"{rank}/{name}": a for rank, found in enumerate((mine, *others)) for name, a in found.items()}

    def set_random_state(self, states: Arrays) -> None:
        """Take over what `random_state` gave. A rank that there was not then keeps its own."""
        by_rank: list[dict[str, np.ndarray]] = [{} for _ in range(self._world.ranks)]
        for key, state in states.items():
            rank, _, name = key.rpartition("/")
            if int(rank or 0) < len(by_rank):
                by_rank[int(rank or 0)][name] = state
        self._do("set_random_state", by_rank)

    def step(self, batch: Batch, *, norms: bool = False) -> StepRecord:
        """One optimizer step on every rank. Raises ValueError for a batch that ranks cannot share."""
        record: StepRecord = self._step("step", batch, norms)
        return record

    def gradients(self, batch: Batch) -> Gradients:
        """Per-token NLL, loss and gradients of `batch`, reduced over ranks if they share it."""
        if not self._shared(batch) and self.own.root is None:
            return self.own.gradients(batch)
        found: Gradients = self._do("gradients", batch)
        return found

    def step_and_gradients(self, batch: Batch, *, norms: bool = False) -> tuple[StepRecord, Gradients | None]:
        """`step`, and the gradients that it made before clipping."""
        found: tuple[StepRecord, Gradients | None] = self._step("step_and_gradients", batch, norms)
        return found

    def costs_of_determinism(self, batch: Batch) -> Sequence[float]:
        """Time of forward and backward pass on every rank / time without `deterministic = true`, as rank 0 sees it."""
        self._require_shared(batch)
        found: Sequence[float] = self._do("costs_of_determinism", batch)
        return found

    def rank_gradients(self, batch: Batch) -> list[Arrays]:
        """Gradients of each micro-batch of `batch` by itself, made by the rank whose share it is and not reduced."""
        self._require_shared(batch)
        own = partial(self._mine.own_gradients, batch)
        mine, others = self._world.do("own_gradients", self._number, (batch,), own, self._mine)
        return [found for of_rank in (mine, *others) for found in of_rank]

    def rank_reports(self) -> list[RankReport]:
        """What each rank says of the last step, rank 0 first."""
        mine, others = self._world.do("report", self._number, (), self._mine.report, self._mine)
        return [mine, *others]

    def observe(self, batch: Batch, taps: Sequence[str]) -> Arrays:
        """As rank 0's session."""
        found: Arrays = self._look("observe", batch, taps)
        return found

    def sketch(self, batch: Batch) -> dict[str, Observation]:
        """As rank 0's session."""
        found: dict[str, Observation] = self._look("sketch", batch)
        return found

    def run_stage(self, stage: str, inputs: Arrays) -> Arrays:
        """As rank 0's session, from the inputs alone."""
        return self.own.run_stage(stage, inputs)

    def evaluate(self, batch: Batch, policy: str | None = None) -> Arrays:
        """As rank 0's session."""
        found: Arrays = self._look("evaluate", batch, policy)
        return found

    def attention_logits(self, batch: Batch) -> np.ndarray:
        """As rank 0's session."""
        found: np.ndarray = self._look("attention_logits", batch)
        return found

    def seconds_of_step(self) -> Mapping[str, float]:
        """As rank 0 spent them."""
        return self.own.seconds_of_step()

    def memory(self) -> Mapping[str, float]:
        """As rank 0 uses it."""
        return self.own.memory()

    def next_token_logits(self, tokens: np.ndarray) -> np.ndarray:
        """As rank 0's session."""
        found: np.ndarray = self._look("next_token_logits", tokens)
        return found

    def close(self) -> None:
        """Close rank 0's session; the others let theirs go with the next command, or with this process."""
        self._closed()
        self._world.open.discard(self)
        self.own.close()

    def _step(self, what: str, batch: Batch, norms: bool) -> Any:
        self._require_shared(batch)
        # Norms of whole weights rank 0 computes alone.
        of_all = norms and self.own.root is not None
        return self._do(what, batch, of_all, own=(batch, norms))

    def _look(self, what: str, *arguments: Any) -> Any:
        """A method of rank 0's session that changes nothing; where the weights are cut all ranks take part."""
        if self.own.root is None:
            return getattr(self.own, what)(*arguments)
        return self._do("look", what, *arguments)

    def _do(self, what: str, *arguments: Any, own: Sequence[Any] | None = None) -> Any:
        """A member's method on every rank; `own`: other arguments for rank 0."""
        mine = getattr(self._mine, what)
        said = arguments[0] if what == "look" else what
        asked = f"{what.replace('_', ' ')} {self.own.steps_done + 1}" if what.startswith("step") else said
        return self._world.do(
            what, self._number, arguments, lambda: mine(*(own or arguments)), self._mine, f"`{asked}`"
        )[0]

    def _shared(self, batch: Batch) -> bool:
        assert self.own.ranks is not None
        return self.own.ranks.shares(batch.cut(self.config.train))

    def _require_shared(self, batch: Batch) -> None:
        if not self._shared(batch):
            raise ValueError(
                f"a batch of {len(batch.tokens)} sequences gives no equal number of micro-batches to each of "
                f"{self._world.ranks} ranks"
            )
