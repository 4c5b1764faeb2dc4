"""`deterministic = true`: the same bits every time, or no run.

torch is set to use deterministic algorithms and to raise where it has none; cuBLAS and NCCL are set so in the
environment, before they start. Cases that neither declares stand in `refusal`, with their source.

Deterministic by themselves: elementwise optimizers and Muon's products; torchao's FP8 (torch's products and maxima);
bitsandbytes' blockwise kernels (a block of 256 by itself; its atomics belong to `max_unorm`, which is not used);
Liger's head (one program a row, torch's products); gloo for a number of ranks. By torch's switch: `index_add` and
`index_put` (the head of torch, an embedding left to Inductor), flash and memory-efficient attention's backward,
Inductor's choice of kernels, which is then never made by time. FlexAttention's backward adds nothing atomically, and
its reductions are Inductor's.
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

# Variables of the environment that must be set before CUDA or NCCL starts: the value, and which others will do. With
# more than one workspace cuBLAS may take any (https://docs.nvidia.com/cuda/cublas, results reproducibility). A ring
# adds in the order of its ranks; NVLS adds in the switch, in any order (NVIDIA/nccl#1497), and what NCCL would choose
# is by time.
CUBLAS, NCCL = "CUBLAS_WORKSPACE_CONFIG", "NCCL_ALGO"
PINNED = {CUBLAS: (":4096:8", (":4096:8", ":16:8")), NCCL: ("Ring", ("Ring", "ring", "RING"))}

# How often the cost is measured.
PAIRS = 5

_on = False  # True if a session of this process has switched the mode on.
_suspended = False
_loose = False  # True if a session of this process has computed on CUDA without these settings.


def check_deterministic(config: RunConfig, device: torch.device) -> None:
    """Set what the environment must say. Raises UserError, in one line, if the run cannot be deterministic here."""
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
    """Name what of the run has no deterministic kernel on a kind of device, and what has; None if nothing is known."""
    if device != "cuda":
        return None
    if why := config.attention.chosen.not_deterministic:
        return f"attention.kernel = {config.attention.kernel!r}: {why}"
    if why := config.loss.chosen.not_deterministic:
        return f"loss.head = {config.loss.head!r}: {why}"
    return None


def switch(config: RunConfig, device: torch.device) -> None:
    """Turn torch's deterministic mode on or, if this process had turned it on, off. For the process, as torch has it.

    Raises UserError as `check_deterministic` does.
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
    # The call above reports it too, in the versions that were tried.
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
    """Turn torch's refusal of an operation into a UserError with its name, while a micro-batch is computed.

    Raises UserError as well if the mode of a deterministic run was switched off elsewhere.
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
    """Name the operation's place in the step: run it eagerly once more, noting the taps that are passed."""
    if session.root is not None:
        return "in a program over weights that are cut; parallel.strategy = 'ddp' would say where"
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
    """Return the time of `accumulate` / its time without the mode, one after the other: PAIRS times.

    Raises NotSupported where the program is a CUDA graph.
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
