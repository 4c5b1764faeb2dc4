"""The model and optimizer of a torch session, and the programs that run the model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor, nn

from lockstep.core.backend import Batch
from lockstep.core.config.schema import RunConfig
from lockstep.core.train.loss_scale import SCALE
from lockstep.torch_backend import program_cache
from lockstep.torch_backend.model import Rope, Tap, Transformer, no_tap
from lockstep.torch_backend.precision import Policy
from lockstep.torch_backend.ranks.sharded_tensors import (
    Root,
)
from lockstep.torch_backend.ranks.sharing import Sharing
from lockstep.torch_backend.switches import INDUCTOR, Switches
from lockstep.torch_backend.tools import compile_ahead
from lockstep.torch_backend.tools.compile_time import COMPILE_TIME
from lockstep.torch_backend.tools.nvtx import Trace
from lockstep.torch_backend.tools.sketch import (
    Kept,
    lift,
    sketch,
    statistics,
)
from lockstep.torch_backend.tools.step_timer import StepTimer
from lockstep.torch_backend.upload import on_device

Tensors = Mapping[str, Tensor]
# torch.compile's limit of compilations of one function.
SESSIONS = 64


def _of_array(
    program: Callable[..., Any], tokens: Tensor, targets: Tensor, weights: Tensor, total: Tensor, *others: Any
) -> Any:
    """Call `program` with `total`, of shape (1,), as a scalar."""
    return program(tokens, targets, weights, total.reshape(()), *others)


class Tapping(NamedTuple):
    """A tap, the tensors that it recorded by name, and terms whose sum is the start of the backward pass."""

    tap: Tap
    seen: dict[str, Any]
    ends: list[Tensor]


def _is_of(name: str, block: str) -> bool:
    """Return whether a tensor belongs to a block, such as `blocks.3`; every tensor belongs to `""`."""
    return not block or name.startswith(f"{block}.")


def _part(tensors: Tensors, block: str) -> dict[str, Tensor]:
    """Return a block's tensors; their names lack the block's name: `.attn.q`."""
    return {name.removeprefix(block): tensor for name, tensor in tensors.items() if _is_of(name, block)}


class Programs:
    """The model, optimizer and settings of one run, with the programs of a micro-batch.

    model: the model, with weights in the stream dtype. parameters: its parameters by canonical name. policy: the casts
    in force. ranks: distribution of batches over ranks, None for one rank. root: the outermost module of sharded
    weights, else None. scalars: as in `State`. step_timer: timer of the parts of a step. trace: names of these parts
    for a profiler (torch_backend/tools/nvtx.py).
    """

    config: RunConfig
    device: torch.device
    switches: Switches
    policy: Policy
    model: Transformer
    parameters: dict[str, nn.Parameter]
    optimizer: torch.optim.Optimizer
    ranks: Sharing | None
    root: Root | None
    scalars: dict[str, float]
    steps_done: int
    step_timer: StepTimer
    trace: Trace
    # (tap of the whole model, name of a block) → the block's own tap, if blocks have taps of their own.
    _taps_of_blocks: Mapping[tuple[Tap, str], Tap]

    def build_program(self) -> Any:
        """Compile the forward pass: the whole model, or one program for all blocks and one for the chunked head.

        With one program for all blocks, the code between blocks runs eagerly. Passes without gradients run the blocks
        eagerly too: a sample or a score would compile a program for each length and policy.
        """
        if self.config.compile.scope == "model":
            return self.compiled_loss(self.micro_loss)
        for block in self.model.blocks:
            block.forward = self._of_block(block.forward)
        if self.model.fused_loss is not None and not self.config.loss.of_library:
            self.model.fused_loss = self.compiled(self.model.fused_loss)
        return self.micro_loss

    def compiled(self, program: Any) -> Any:
        """Compile `program` with torch.compile and the run's settings."""
        config = self.config.compile
        COMPILE_TIME.count()
        # A process may open many sessions (a replay, a bisection), and each compiles the same functions.
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, SESSIONS)
        # A tap in a recomputed part records only in the forward pass.
        torch._dynamo.config.skip_fwd_side_effects_in_bwd_under_checkpoint = True
        options: Any = None
        if config.backend == "inductor":
            compile_ahead.begin(self.device.type)
            # By default Inductor removes a cast to bf16 and back inside a fusion, which would remove the rounding of
            # the head's operands.
            options = {"emulate_precision_casts": True, **INDUCTOR, **torch._inductor.list_mode_options(config.mode)}
            if self.policy.stream == torch.float64:
                # Inductor's CUDA kernels that reduce along both axes have FP32 sums for every dtype
                # (torch/_inductor/codegen/triton.py, `codegen_body`). With FP64 operands Triton rejects them.
                options["triton.mix_order_reduction"] = False
            options |= program_cache.options_of(type(self))
        made: Any = torch.compile(program, fullgraph=True, dynamic=False, backend=config.backend, options=options)
        if config.backend != "inductor":
            return made
        settings = {"activation_memory_budget": self.config.recompute.memory_budget}
        settings |= program_cache.settings_of(type(self))
        # DDP requires a module.
        module = isinstance(program, nn.Module)
        inner = made.forward if module else made

        def run(*arguments: Any) -> Any:
            with torch._functorch.config.patch(settings):
                return inner(*arguments)

        if not module:
            return run
        made.forward = run
        return made

    def compiled_loss(self, program: Any) -> Any:
        """Compile `program`, whose arguments begin with tokens, targets, weights and total.

        `total` is passed as a tensor of shape (1,). For a 0-d FP64 tensor on the CPU, torch.compile creates a symbol,
        because `item()` may read it. It then finds no reader (torch/fx/passes/_tensorify_python_scalars.py) and traces
        the whole program again.
        """
        made = self.compiled(partial(_of_array, program))

        def run(tokens: Tensor, targets: Tensor, weights: Tensor, total: Tensor, *others: Any) -> Any:
            return made(tokens, targets, weights, total.reshape(1), *others)

        return run

    def micro_loss(
        self, tokens: Tensor, targets: Tensor, weights: Tensor, total: Tensor, *documents: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return Σ weight·loss / total of a micro-batch, and per-token losses (B, S).

        documents: result of `documents`, (B, S) or absent.
        """
        return self.model.loss(tokens, targets, weights, total, self.policy, *documents)

    def tapped_micro_loss(
        self,
        wanted: frozenset[str],
        tokens: Tensor,
        targets: Tensor,
        weights: Tensor,
        total: Tensor,
        rows: Tensor | None,
        probes: Tensors,
        given: Tensors,
        *documents: Tensor,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss of a micro-batch and its taps; the gradient of a probe is the gradient of its tap.

        Args:
            wanted: names of the taps to record.
            tokens: tokens (B, S).
            targets: targets (B, S).
            weights: loss weights (B, S).
            total: divisor of the loss.
            rows: the sequences to record and probe; None for all. If given, a zero is also added to each tensor that is
                not probed, so that gradients are summed in the same order for every choice of names.
            probes: name of a tap → zeros that are added to it.
            given: gradients of taps. The backward pass begins at these taps; if empty, at the loss.
            documents: document ids (B, S), or absent.
        """

        def tapping(of: str) -> Tapping:
            shown = {name.removeprefix(of) for name in wanted if _is_of(name, of)}
            zeros, begins = _part(probes, of), _part(given, of)
            seen: dict[str, Tensor] = {}
            ends: list[Tensor] = []

            def tap(name: str, value: Tensor) -> Tensor:
                if name not in zeros:
                    value = value if rows is None else value + total.new_zeros((), dtype=value.dtype)
                else:
                    zero = zeros[name].to(value.dtype)
                    all_rows = rows is None or zero.shape == value.shape
                    value = value + zero if all_rows else value.index_add(0, cast(Tensor, rows), zero)
                # A recomputed tensor is tapped twice. The first time is that of the forward pass.
                if name in shown and name not in seen:
                    # A copy. If two outputs share memory, AOTAutograd makes one of them again outside the program, as a
                    # view of the other (`OutputType.alias_of_intermediate`), and a custom function between them loses
                    # its backward pass.
                    seen[name] = value.detach().clone() if rows is None else value.detach()[rows]
                if name in begins:
                    part = value if rows is None else value[rows]
                    ends.append((part.to(begins[name].dtype) * begins[name]).sum())
                return value

            return Tapping(tap, seen, ends)

        loss, seen, ends = self._observed_loss(tapping, tokens, targets, weights, total, *documents)
        return torch.stack(ends).sum() if ends else loss, seen

    def sketched_micro_loss(
        self,
        tokens: Tensor,
        targets: Tensor,
        weights: Tensor,
        total: Tensor,
        rows: Tensor,
        probes: Tensors,
        table: Tensor,
        *documents: Tensor,
    ) -> tuple[Tensor, dict[str, Kept]]:
        """Return the loss of a micro-batch, and the sketch and statistics of each tap's sequences `rows`.

        Sᵀ·probe is added to each tap. The probe is a zero of shape (K,), and its gradient is the sketch of the tap's
        gradient. table: signs of the sketch.
        """

        def tapping(of: str) -> Tapping:
            zeros = _part(probes, of)
            seen: dict[str, Kept] = {}

            def tap(name: str, value: Tensor) -> Tensor:
                if name in zeros:
                    part = value.detach()[rows]
                    value = value.index_add(0, rows, lift(zeros[name], tuple(part.shape), table).to(value.dtype))
                    seen[name] = sketch(part, table=table), statistics(part)
                return value

            return Tapping(tap, seen, [])

        loss, seen, _ = self._observed_loss(tapping, tokens, targets, weights, total, *documents)
        return loss, seen

    def _observed_loss(
        self, tapping: Callable[[str], Tapping], *inputs: Tensor
    ) -> tuple[Tensor, dict[str, Any], list[Tensor]]:
        """Return the loss of `micro_loss`, the recorded tensors by name, and the `ends` of all taps.

        tapping: creates the tap of a block, such as `blocks.3`, or of the whole model, `""`.

        If blocks are compiled one by one, each block has its own tap, and names lack the block's: `.attn.q`. Then one
        program serves all blocks, as without taps. Any other tap set on the model, such as a mutant's, receives full
        names.
        """
        whole = tapping("")
        if not self.config.compile.enabled or self._compiles_whole:
            return self._through(whole.tap, *inputs), whole.seen, whole.ends
        blocks = {name: tapping(name) for name in (f"blocks.{i}" for i in range(len(self.model.blocks)))}
        self._taps_of_blocks = {(whole.tap, name): own.tap for name, own in blocks.items()}
        try:
            loss = self._through(whole.tap, *inputs)
        finally:
            self._taps_of_blocks = {}
        for block, own in blocks.items():
            whole.seen.update({f"{block}{name}": value for name, value in own.seen.items()})
            whole.ends.extend(own.ends)
        return loss, whole.seen, whole.ends

    def _of_block(self, eager: Any) -> Any:
        """Return a block's `forward`, compiled for passes with gradients; it uses the block's own tap, if any."""
        compiled = self.compiled(eager)

        def block(x_BSD: Tensor, rope: Rope, policy: Policy, tap: Tap, name: str) -> Any:
            own = self._taps_of_blocks.get((tap, name))
            forward = compiled if torch.is_grad_enabled() else eager
            return forward(x_BSD, rope, policy, *((tap, name) if own is None else (own, "")))

        return block

    def _through(
        self, tap: Tap, tokens: Tensor, targets: Tensor, weights: Tensor, total: Tensor, *documents: Tensor
    ) -> Tensor:
        """Compute the loss of `micro_loss` with `tap` set on the model."""
        self.model.tap = tap
        try:
            loss, _ = self.micro_loss(tokens, targets, weights, total, *documents)
        finally:
            self.model.tap = no_tap
        return loss

    @property
    def replays(self) -> bool:
        """True if the program is a CUDA graph."""
        return self.device.type == "cuda" and self.config.compile.enabled and self.config.compile.mode != "default"

    @property
    def scale(self) -> float:
        """The loss scale; 1 unless the policy is fp16."""
        return self.scalars.get(SCALE, 1.0)

    def unscaled(self, gradient: Tensor) -> Tensor:
        """Divide a gradient by the loss scale; return the same tensor if the scale is 1."""
        return gradient if self.scale == 1 else gradient / self.scale

    def total_weight(self, batch: Batch) -> Tensor:
        """Return Σ weight over a batch / loss scale, a float64 scalar on the device: the divisor of the loss.

        The loss scale multiplies every gradient. It is a power of two, so it rounds nothing.
        """
        total = float(batch.weights.sum(dtype=np.float64)) / self.scale
        # The scalar is filled on the device: a copy to the device would block the host.
        return torch.full((), total, dtype=torch.float64, device=self.device)

    def to_device(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """Return tokens (B, S) and targets (B, S) as int64, weights (B, S) in the stream dtype, on the device."""
        tokens, targets, weights = on_device(batch, ("tokens", "targets", "weights"), self.device)
        return tokens, targets, weights.to(self.policy.stream)

    def documents(self, batch: Batch) -> tuple[Tensor, ...]:
        """Return a tuple with document ids (B, S), int64 on the device, if attention uses them; else ().

        Raises ValueError if attention uses documents and the batch has none.
        """
        found = batch.documents_for(self.config.attention)
        return () if found is None else tuple(on_device(batch, ("documents",), self.device))

    def _run(self, program: Any, *inputs: Any) -> Any:
        """Run a program that reads the model's weights; every rank takes part if the weights are sharded."""
        self.switches.require()
        return program(*inputs) if self.ranks is None else self.ranks.run(program, *inputs)

    @contextmanager
    def _declaring(self, policy: str) -> Iterator[None]:
        """Set torch's switches as another policy declares them, while the context is active."""
        own, other = self.switches, Switches(policy, self.device)
        if other.declared == own.declared:
            yield
            return
        own.require()
        self.switches = other
        try:
            other.set()
            yield
        finally:
            self.switches = own
            own.set()

    def _grads(self, loss: Tensor, wanted: Sequence[Tensor]) -> Sequence[Tensor | None]:
        if self.ranks is None:
            return torch.autograd.grad(loss, wanted, allow_unused=True)
        return self.ranks.grads(loss, wanted)

    def _total_alone(self, batch: Batch) -> Tensor:
        """Return `total_weight` for a loss that counts only on rank 0."""
        total = self.total_weight(batch)
        return total if self.ranks is None else self.ranks.total(total)

    @property
    def _compiles_whole(self) -> bool:
        """True if torch.compile compiles a program of the whole model, not block by block."""
        return self.config.compile.enabled and self.config.compile.scope == "model"

    def _programs_made(self) -> int:
        """Return the number of graphs that torch.compile has compiled in this process."""
        if not self.config.compile.enabled:
            return 0
        from torch._dynamo.utils import counters

        return counters["stats"]["unique_graphs"]
