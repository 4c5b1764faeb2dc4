"""`deterministic = true`: a run computes the same bits every time, or is refused.

torch is set to use deterministic algorithms, and to raise an error for an operation that has none. Environment
variables set the same for cuBLAS and NCCL before they start. `refusal` lists the cases that neither covers.

Deterministic without a switch:

- element-wise optimizers, and the products of Muon
- torchao's FP8, which consists of torch's products and maxima
- bitsandbytes' blockwise kernels: each block of 256 is independent, and the atomics are in `max_unorm`, which is unused
- Liger's loss head: one program per row, and torch's products
- gloo, for a fixed number of ranks
- FlexAttention's backward: it has no atomic sums, and Inductor generates its reductions

Deterministic by torch's switch:

- `index_add` and `index_put`, as in torch's loss head and in an embedding compiled by Inductor
- the backward pass of flash and memory-efficient attention
- Inductor's choice of kernels, which is then not made by measured time
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from lockstep.core.backend import Batch, NotSupported
from lockstep.core.config.schema import RunConfig
from lockstep.core.errors import UserError
from lockstep.torch_backend.programs import Programs

# Environment variables to set before CUDA or NCCL starts: name → (value, other accepted values). With several
# workspaces, cuBLAS may use any of them (https://docs.nvidia.com/cuda/cublas, results reproducibility). NCCL's ring
# sums in the order of ranks. Its NVLS sums in the network switch in any order (NVIDIA/nccl#1497), and by default NCCL
# chooses an algorithm by time.
CUBLAS, NCCL = "CUBLAS_WORKSPACE_CONFIG", "NCCL_ALGO"
PINNED = {CUBLAS: (":4096:8", (":4096:8", ":16:8")), NCCL: ("Ring", ("Ring", "ring", "RING"))}

# Number of measurements of the cost.
PAIRS = 5

_on = False  # True if a session of this process has switched the mode on.
_suspended = False
_loose = False  # True if a session of this process has computed on CUDA without these settings.


def check_deterministic(config: RunConfig, device: torch.device) -> None:
    """Set the environment variables that a deterministic run needs.

    Raises UserError, in one line, if the run cannot be deterministic here.
    """
    if not config.deterministic:
        return
    if why := refusal(config, device.type):
        raise UserError(f"deterministic = true: {why}")
    for name in _needed(config, device.type):
        value, accepted = PINNED[name]
        found = os.environ.get(name)
        if found is None and not _loose:
            os.environ[name] = value
        elif found not in accepted:
            raise UserError(
                f"deterministic = true needs {name}={value} in the environment before CUDA starts, and it is "
                f"{found or 'not set'}; start again with it"
            )


def _needed(config: RunConfig, device: str) -> list[str]:
    if device != "cuda":
        return []
    return [CUBLAS, NCCL] if config.train.ranks > 1 else [CUBLAS]


def refusal(config: RunConfig, device: str) -> str | None:
    """Return the setting that has no deterministic kernel on a kind of device, and an alternative; None if all have."""
    if device != "cuda":
        return None
    if why := config.attention.chosen.not_deterministic:
        return f"attention.kernel = {config.attention.kernel!r}: {why}"
    if why := config.loss.chosen.not_deterministic:
        return f"loss.head = {config.loss.head!r}: {why}"
    return None


def switch(config: RunConfig, device: torch.device) -> None:
    """Turn torch's deterministic mode on, or off if this process had turned it on.

    The mode is global to the process. Raises UserError as `check_deterministic` does.
    """
    global _on, _loose
    check_deterministic(config, device)
    _loose |= device.type == "cuda" and not config.deterministic
    if config.deterministic or _on:
        _turn(config.deterministic)
    _on = config.deterministic


def _turn(on: bool) -> None:
    import torch._inductor.config as inductor

    torch.use_deterministic_algorithms(on, warn_only=False)
    torch.backends.cudnn.deterministic = on
    torch.backends.cudnn.benchmark = False
    # torch.use_deterministic_algorithms also sets this in the versions that were tested.
    inductor.deterministic = on


@contextmanager
def _without() -> Iterator[None]:
    global _suspended
    _turn(False)
    _suspended = True
    try:
        yield
    finally:
        _turn(True)
        _suspended = False


NO_KERNEL = re.compile(r"(\S+) does not have a deterministic implementation")


@contextmanager
def guarded(session: Programs, micro: Batch) -> Iterator[None]:
    """Raise UserError with the operation's name if torch refuses a non-deterministic operation inside the context.

    Also raises UserError if other code has switched off the mode of a deterministic run.
    """
    if not session.config.deterministic or _suspended:
        yield
        return
    if not torch.are_deterministic_algorithms_enabled() or torch.is_deterministic_algorithms_warn_only_enabled():
        raise UserError("deterministic = true, but torch's deterministic mode was switched off in this process")
    try:
        yield
    except RuntimeError as error:
        if found := NO_KERNEL.search(str(error)):
            version = torch.__version__.split("+")[0]
            raise UserError(
                f"deterministic = true: {found[1]} has no deterministic kernel on {session.device.type} in torch "
                f"{version}; it is used {_place(session, micro)}"
            ) from error
        if CUBLAS in str(error):
            raise UserError(
                f"deterministic = true: cuBLAS was in use before {CUBLAS} was set; start again with "
                f"{CUBLAS}={PINNED[CUBLAS][0]} in the environment"
            ) from error
        raise


def _place(session: Programs, micro: Batch) -> str:
    """Describe the operation's place in the step, found by an eager run that records the taps before the error."""
    if session.root is not None:
        return "in a program over sharded weights; parallel.strategy = 'ddp' shows the place"
    forward: list[str] = []
    backward: list[str] = []

    def tap(name: str, value: torch.Tensor) -> torch.Tensor:
        forward.append(name)
        if value.requires_grad:
            value.register_hook(lambda _: backward.append(name))
        return value

    inputs = *session.to_device(micro), session.total_weight(micro), *session.documents(micro)
    try:
        loss = session._through(tap, *inputs)
    except RuntimeError:
        return f"in the forward pass, after {forward[-1]}" if forward else "at the start of the forward pass"
    try:
        torch.autograd.grad(loss, list(session.parameters.values()), allow_unused=True)
    except RuntimeError:
        where = f"after the gradient of {backward[-1]}" if backward else "at its start"
        return f"in the backward pass, {where}"
    return "by the compiled program alone; compile.enabled = false runs without it"


def costs(session: Programs, accumulate: Callable[[], object]) -> Sequence[float]:
    """Return PAIRS measurements of: time of `accumulate` / its time without the deterministic mode.

    The two are measured in turn. Raises NotSupported if the program is a CUDA graph.
    """
    if session.replays:
        raise NotSupported("CUDA graphs of the step without it would take as much memory again")

    def seconds() -> float:
        started = time.perf_counter()
        accumulate()
        if session.device.type == "cuda":
            torch.cuda.synchronize(session.device)
        return time.perf_counter() - started

    seconds()
    with _without():
        seconds()
    found = []
    for _ in range(PAIRS):
        taken = seconds()
        with _without():
            found.append(taken / seconds())
    session.optimizer.zero_grad(set_to_none=True)
    return tuple(found)
