"""The cases of the rehearsal: every lever by itself, eager and compiled, and the planned runs on H100s."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from lockstep.core.components.attention_kernels import ATTENTION_KERNELS, AUTO
from lockstep.core.components.loss_heads import LOSS_HEADS
from lockstep.core.components.optimizers import OPTIMIZERS
from lockstep.core.components.precision import POLICIES
from lockstep.core.config.schema import PARTS

LEVERS, RUNS = "levers", "runs"
# More memory than any case takes, so that a case shows its need where a real device would fail.
BOUNDLESS = 400_000_000_000
# Every case by itself: two blocks of the 1.24B model at full width, two micro-batches.
TWO_BLOCKS = {
    "device": "cuda",
    "model.layers": "2",
    "train.batch_size": "32",
    "train.micro_batch_size": "16",
    "train.curriculum": "",
    "log.norms_every": "0",
}
EAGER = {"compile.enabled": "false"}
# `auto` takes cuDNN's attention on an H100, which cannot run here. Flash attention keeps tensors of the same sizes.
ATTENTION = {"bf16": "flash", "fp16": "flash", "fp32": "efficient", "tf32": "efficient", "fp64": "math"}
# The trainer's refusal of torch's own head under a torch without it.
NEEDS_TORCH = "needs torch 2.13"
CASTS = ("autocast", "residual=bf16", "logits=bf16", "residual=bf16, norm=bf16, linear=bf16, logits=bf16")

# Known reasons of a failed requirement, by the case's name, for `eager`, `compiled` or both.
KNOWN = {
    "head liger": "Liger-Kernel reads counts of targets on the host (ops/fused_linear_cross_entropy.py, item)",
    "head cce": "cut-cross-entropy reads from the device the number of targets once a micro-batch",
    "optimizer adamw8bit, bitsandbytes": "bitsandbytes waits after each parameter (optim/optimizer.py, sync_gpu)",
    "recompute norms, attention": "the program keeps each block's output of the attention kernel",
}


@dataclass(frozen=True)
class Case:
    """A configuration.

    run: its run file. settings: changes to it, dotted key → text. memory: of the device, in bytes. length: tokens per
    sequence of the step, if not `train.sequence_length`. ranks: processes, joined by a stand-in for NCCL. refused:
    words of the trainer's refusal if it must not run. not_shown: why the stand-in cannot run it.
    """

    name: str
    group: str
    settings: Mapping[str, str] = field(default_factory=dict)
    run: str = "configs/llama-1b.toml"
    memory: int | None = BOUNDLESS
    length: int | None = None
    refused: str = ""
    not_shown: str = ""

    @property
    def ranks(self) -> int:
        """Processes that share the step."""
        return int(self.settings.get("train.ranks", "1"))

    @property
    def known(self) -> str:
        """The known reason why it fails the page's requirements; empty without one."""
        of_both = KNOWN.get(self.name.removeprefix("eager: ").removeprefix("compiled: "), "")
        return KNOWN.get(self.name, of_both)

    def asked(self) -> dict[str, Any]:
        """Return the JSON that worker.py is given."""
        return {"run": self.run, "settings": dict(self.settings), "length": self.length}


def cases() -> tuple[Case, ...]:
    """Return all cases, the cheapest first."""
    levers = tuple(_levers())
    eager = [replace(c, name=f"eager: {c.name}", settings={**c.settings, **EAGER}) for c in levers]
    # A case that does not run eagerly is not compiled either.
    tried = [c for c in levers if not c.not_shown and c.refused in ("", NEEDS_TORCH)]
    compiled = [replace(c, name=f"compiled: {c.name}") for c in tried]
    return (*eager, *compiled, *_modes(), *_runs())


def _lever(name: str, *, refused: str = "", not_shown: str = "", **settings: str) -> Case:
    """Return a case of TWO_BLOCKS; settings: keys with `__` for the dot."""
    own = {key.replace("__", "."): value for key, value in settings.items()}
    kernel = {"attention.kernel": ATTENTION[POLICIES[own.get("precision.policy", "bf16")].operand]}
    return Case(name, LEVERS, TWO_BLOCKS | kernel | own, refused=refused, not_shown=not_shown)


def _levers() -> Iterator[Case]:
    for policy in POLICIES:
        yield _lever(f"policy {policy}", precision__policy=policy)
    yield _lever("policy fp32, written-out attention", precision__policy="fp32", attention__kernel="math")
    for head in LOSS_HEADS.values():
        # A head that reads values on the host cannot be in a program of the whole model.
        scope = {"compile__scope": "blocks"} if head.reads_on_host else {}
        older = NEEDS_TORCH if head.name == "torch" else ""
        if head.name != "chunked":
            yield _lever(f"head {head.name}", refused=older, loss__head=head.name, **scope)
    yield _lever("head chunked, chunk 1024", loss__chunk="1024")
    yield _lever("head chunked, chunk 16384", loss__chunk="16384")
    yield _lever("head chunked, z-loss", loss__z_loss="1e-4")
    yield _lever("untied head", model__tied="false")
    for optimizer in OPTIMIZERS:
        if optimizer != "adamw":
            yield _lever(f"optimizer {optimizer}", optim__name=optimizer)
    yield _lever("optimizer adamw8bit, bitsandbytes", optim__name="adamw8bit", optim__eight_bit="bitsandbytes")
    yield _lever("optimizer adamw, not fused", optim__fused="false")
    for kernel in (one for one in ATTENTION_KERNELS.values() if not one.only_cpu):
        cudnn = "cuDNN's own checks of the device" if kernel is AUTO or kernel.needs == "cudnn" else ""
        missing = "is not installed" if kernel.needs == "fa3" else ""
        if kernel.name != "flash":
            yield _lever(f"attention {kernel.name}", refused=missing, not_shown=cudnn, attention__kernel=kernel.name)
    yield _lever("attention flash, grouped by the kernel", refused="attention.grouped", attention__grouped="kernel")
    documents = {"attention__document_mask": "true", "attention__reset_positions": "true"}
    for masked in ("efficient", "flex"):
        yield _lever(f"document mask, {masked}", attention__kernel=masked, **documents)
    for part in PARTS:
        yield _lever(f"recompute {part}", recompute__parts=part)
    yield _lever("recompute block, products kept", recompute__parts="block", recompute__keep_products="true")
    yield _lever("recompute norms, attention", recompute__parts="norms,attention")
    for plan in CASTS:
        yield _lever(f"casts {plan}", precision__casts=plan)
    yield _lever("deterministic", deterministic="true")
    yield from _families()


def _families() -> Iterator[Case]:
    """Yield two blocks of each family but Llama, at their own widths, on one device."""
    for name in ("gpt2-124m", "qwen2.5-0.5b", "qwen3-0.6b", "mistral-7b", "gemma-2-2b"):
        own = TWO_BLOCKS | {"train.ranks": "1", "parallel.strategy": "ddp", "recompute.parts": ""}
        own |= {"attention.kernel": "flash"}
        if name in ("mistral-7b", "gemma-2-2b"):
            # With their windows; Gemma 2's scores are capped as well.
            kernel = "flex" if name == "mistral-7b" else "math"
            own |= {"attention.kernel": kernel, "train.batch_size": "4", "train.micro_batch_size": "2"}
            own |= {"train.sequence_length": "2048"}
        yield Case(f"family {name}", LEVERS, own, f"configs/families/{name}.toml")


def _modes() -> Iterator[Case]:
    for scope in ("model", "blocks"):
        for mode in ("default", "reduce-overhead", "max-autotune"):
            if (scope, mode) not in (("model", "default"), ("blocks", "max-autotune")):
                name = f"compiled: {scope}, {mode}"
                yield _lever(name, compile__scope=scope, compile__mode=mode)
    yield _lever("compiled: blocks, recompute block", compile__scope="blocks", recompute__parts="block")
    yield _lever("compiled: memory budget 0.5", recompute__memory_budget="0.5")


def _runs() -> Iterator[Case]:
    flash = {"attention.kernel": "flash", "log.norms_every": "0", "device": "cuda"}
    step = flash | {"train.batch_size": "64", "train.curriculum": ""}
    for policy in ("bf16", "fp8_tensorwise", "fp8_rowwise", "fp8_delayed"):
        yield Case(f"1.24B, [64, 2048], {policy}", RUNS, step | {"precision.policy": policy}, memory=None)
    for policy in ("bf16", "fp8_tensorwise", "fp8_delayed"):
        own = {"precision.policy": policy, "loss.head": "one_kernel"}
        yield Case(f"1.24B, [64, 2048], {policy}, head one_kernel", RUNS, step | own, memory=None)
    yield Case("1.24B, [64, 2048], bf16, block by block", RUNS, step | {"compile.scope": "blocks"})
    residual = {"precision.casts": "residual=bf16"}
    yield Case("1.24B, [64, 2048], residual=bf16", RUNS, step | residual, memory=None)
    laptop = "configs/rollout/laptop.toml"
    yield Case("rollout/laptop on a GPU", RUNS, flash, laptop, memory=None)
    one = "configs/rollout/h100x1.toml"
    yield Case("rollout/h100x1, 2048 tokens", RUNS, flash, one, memory=None, length=2048)
    yield Case("rollout/h100x1, 4096 tokens", RUNS, flash, one, memory=None, length=4096)
    for ranks in (2, 8):
        own = flash | {"train.ranks": str(ranks)}
        yield Case(f"rollout/h100x{ranks}, 2048 tokens", RUNS, own, f"configs/rollout/h100x{ranks}.toml", memory=None)
