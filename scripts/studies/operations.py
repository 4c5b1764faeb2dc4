"""`watch(operations=True)` on planted faults beside torch's DebugMode, on clean runs, and its cost.

    python -m lockstep.scripts.studies.operations            docs/results/operations.jsonl and .md
    python -m lockstep.scripts.studies.operations --page     the page alone, from the finished lines
    python -m lockstep.scripts.studies.operations --device cuda    on a GPU: operations_cuda.jsonl and .md

A fault replaces a kernel of torch in all layers, or a module's forward. A second, correct kernel, in FP64 and rounded
once, stands beside each: a check that cannot tell it from the wrong one finds differences, not faults.
"""

from __future__ import annotations

import itertools
import json
import os
import platform
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
import tyro
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._debug_mode import DebugMode

import lockstep
from lockstep.scripts.studies.repository import ROOT
from lockstep.scripts.studies.wrong_kernels import (
    KERNELS,
    by_tanh,
    kernel,
    narrow_softmax,
    only_in,
    other_epsilon,
    without_bias,
)

# By device: its page, and its lines beside it under the same name.
PAGES = {"cpu": ROOT / "docs/results/operations.md", "cuda": ROOT / "docs/results/operations_cuda.md"}
VOCAB, WIDTH, HEADS, LAYERS, LENGTH, ROWS = 499, 64, 4, 3, 48, 4
TRAINS = ("fp32", "autocast", "bf16 weights")
CHECKS = 4

Row = dict[str, Any]
Batch = dict[str, Tensor]


def gpt2(attention: str = "eager", **other: Any) -> nn.Module:
    """Build Hugging Face's GPT-2 with GELU by erf, non-zero biases, and activations as large as trained ones."""
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"vocab_size": VOCAB, "n_positions": LENGTH, "n_embd": WIDTH, "n_layer": LAYERS, "n_head": HEADS}
    config = GPT2Config(
        attn_implementation=attention, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
        activation_function="gelu", **sizes | other,
    )  # fmt: skip
    model = GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"
    for name, p in model.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(p, std=0.02)
        elif name.endswith("c_fc.weight"):
            nn.init.normal_(p, std=1 / p.shape[0] ** 0.5)
    return model


def llama(attention: str) -> nn.Module:
    """Build Hugging Face's Llama."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=WIDTH, intermediate_size=3 * WIDTH, num_hidden_layers=LAYERS,
        num_attention_heads=HEADS, num_key_value_heads=HEADS // 2, max_position_embeddings=LENGTH,
        attn_implementation=attention, bos_token_id=0, eos_token_id=0, pad_token_id=None,
    )  # fmt: skip
    return LlamaForCausalLM(config)


class Plain(nn.Module):
    """A GPT of torch.nn's own modules, its attention a TransformerEncoderLayer's."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                WIDTH, HEADS, 4 * WIDTH, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
            )
            for _ in range(LAYERS)
        )
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB)

    def forward(self, input_ids: Tensor) -> Tensor:
        """Return logits."""
        x = self.embed(input_ids)
        mask = nn.Transformer.generate_square_subsequent_mask(input_ids.shape[1], dtype=x.dtype)
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        logits: Tensor = self.head(self.norm(x))
        return logits


def loss_of(model: Any, batch: Batch) -> Tensor:
    """Return the cross-entropy of the next token."""
    out = model(input_ids=batch["input_ids"])
    logits = out if isinstance(out, Tensor) else out.logits
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), batch["input_ids"][:, 1:].flatten())


MODELS: dict[str, Callable[[], nn.Module]] = {
    "GPT-2, eager attention": lambda: gpt2("eager"),
    "GPT-2, SDPA": lambda: gpt2("sdpa"),
    "Llama, eager attention": lambda: llama("eager"),
    "Llama, SDPA": lambda: llama("sdpa"),
    "torch.nn alone": Plain,
}


def batches(count: int, rows: int = ROWS, length: int = LENGTH, vocab: int = VOCAB) -> list[Batch]:
    """Draw random tokens."""
    generator = torch.Generator().manual_seed(0)
    return [{"input_ids": torch.randint(vocab, (rows, length), generator=generator)} for _ in range(count)]


def on(device: str, data: list[Batch]) -> list[Batch]:
    """Copy batches to a device."""
    return [{name: x.to(device) for name, x in batch.items()} for batch in data]


def watched(
    model: nn.Module,
    trains: str,
    data: list[Batch],
    operations: bool | int,
    during: AbstractContextManager[Any],
    device: str,
) -> lockstep.Watcher:
    """Train one step per batch, each checked."""
    model = (model.bfloat16() if trains == "bf16 weights" else model).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    watcher = lockstep.watch(
        model, optimizer, loss=loss_of, every=1, operations=operations,
        precision="bf16" if trains == "autocast" else None, on_alarm=lambda check: None,
    )  # fmt: skip
    with during:
        for batch in on(device, data):
            with torch.autocast(device, torch.bfloat16, enabled=trains == "autocast"):
                loss = loss_of(model, batch)
            loss.backward()
            with watcher.step(batch, loss):
                optimizer.step()
            optimizer.zero_grad()
    return watcher


# A fault that is not a kernel: a change of the model, or a context around the step.
PATCHES: dict[str, tuple[str, Callable[..., Any] | None]] = {
    "missing bias, forward replaced": ("transformer.h.1.mlp.c_fc", without_bias),
    "epsilon, forward replaced": ("transformer.h.1.ln_2", other_epsilon),
    "GELU by tanh, forward replaced": ("transformer.h.1.mlp.act", by_tanh),
    "softmax of a copy in bf16": ("", None),
}


def planted(fault: str, device: str) -> tuple[nn.Module, AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Return a model, and the contexts in which it is wrong, and correct by another kernel."""
    torch.manual_seed(0)
    model = gpt2()
    if fault in KERNELS:
        return model, kernel(fault, device=device), kernel(fault, right=True, device=device)
    path, forward = PATCHES[fault]
    if forward is None:
        return model, narrow_softmax(), nullcontext()
    only_in(model.get_submodule(path), forward)
    return model, nullcontext(), nullcontext()


def faults(device: str) -> Iterator[Row]:
    """Yield each fault under each precision: the findings of `watch` with and without operations, and of DebugMode."""
    for trains in ("fp32", "autocast"):
        for fault in (*KERNELS, *PATCHES):
            row: Row = {"study": "fault", "fault": fault, "trains": trains}
            model, wrong, _ = planted(fault, device)
            check = watched(model, trains, batches(1), True, wrong, device).checks[0]
            origin = check.origin
            row |= {"verdict": check.verdict, "operations": check.to_json()["operations"]}
            row["named"] = sorted({f"{f.stage} at {f.tap}" for f in check.findings if not f.ok})
            if origin is not None:
                worst = origin.worst
                row |= {"operation": origin.stage, "module": origin.tap, "phase": origin.phase, "note": origin.note}
                row |= {"measure": worst.name, "value": worst.value, "bound": worst.high}
            model, wrong, _ = planted(fault, device)
            alone = watched(model, trains, batches(1), False, wrong, device)
            row["without operations"] = alone.headline
            if fault in KERNELS:
                model, _, right = planted(fault, device)
                row["another right kernel"] = watched(model, trains, batches(1), True, right, device).verdict
            row["DebugMode"] = debug_mode(fault, trains, device)
            print(json.dumps(row)[:300], flush=True)
            yield row


def debug_mode(fault: str, trains: str, device: str) -> Row:
    """Compare hashes of a clean run with those of a wrong run, and of a run by another correct kernel."""

    def logs(model: nn.Module, during: AbstractContextManager[Any]) -> list[Any]:
        # norm and XOR, as DebugMode's documentation uses them for bits.
        hashes = DebugMode.log_tensor_hashes(hash_fn=["norm", "hash_tensor"])
        with during, DebugMode(record_nn_module=True) as mode, hashes:
            with torch.autocast(device, torch.bfloat16, enabled=trains == "autocast"):
                loss = loss_of(model, on(device, batches(1))[0])
            loss.backward()
        return list(mode.logs)

    def against(found: list[Any]) -> str:
        try:
            differing = DebugMode.check_hash_mismatches(first, found)
        except ValueError as error:
            return f"ValueError: {error}"
        return f"{len(differing)} hashes, the first of {differing[0]['call']}" if differing else "none"

    torch.manual_seed(0)
    first = logs(gpt2().to(device), nullcontext())
    torch.manual_seed(0)
    again = logs(gpt2().to(device), nullcontext())
    model, wrong, _ = planted(fault, device)
    found = {"clean": against(again), "wrong": against(logs(model.to(device), wrong))}
    if fault in KERNELS:
        model, _, right = planted(fault, device)
        found["another right kernel"] = against(logs(model.to(device), right))
    return found


def clean(device: str) -> Iterator[Row]:
    """Yield clean runs with their accusations."""
    for name, make in MODELS.items():
        for trains in TRAINS:
            torch.manual_seed(1)
            watcher = watched(make(), trains, batches(CHECKS), True, nullcontext(), device)
            accused = sorted({f"{f.stage} ({f.phase})" for c in watcher.checks for f in c.findings if not f.ok})
            counts = [c.to_json()["operations"] or {} for c in watcher.checks]
            row = {
                "study": "clean", "model": name, "trains": trains, "checks": len(watcher.checks),
                "agreed": sum(c.verdict == "agreed" for c in watcher.checks), "accused": accused,
                "judged": sum(c.get("now", 0) for c in counts), "of": counts[-1].get("of"),
                "ways": counts[-1].get("ways"),
                "left out": sorted({x for c in watcher.checks for x in c.not_covered if "operations:" in x}),
                "headline": watcher.headline,
            }  # fmt: skip
            print(json.dumps(row)[:300], flush=True)
            yield row


COSTS: dict[str, tuple[Callable[[], nn.Module], int, int, int]] = {
    "GPT-2 of this page": (lambda: gpt2("sdpa"), ROWS, LENGTH, VOCAB),
    "GPT-2, 41M, 12 layers": (
        lambda: gpt2("sdpa", vocab_size=50257, n_positions=1024, n_embd=384, n_layer=12, n_head=6), 1, 128, 50257,
    ),
}  # fmt: skip


def cost(device: str) -> Iterator[Row]:
    """Yield the seconds of the first check, which compiles, of the last check, and of an unchecked step."""
    for name, (make, rows, length, vocab) in COSTS.items():
        for trains in ("fp32", "autocast"):
            torch.manual_seed(1)
            data = on(device, batches(3, rows, length, vocab))
            model = make().to(device)
            started = time.perf_counter()
            for batch in data:
                with torch.autocast(device, torch.bfloat16, enabled=trains == "autocast"):
                    loss_of(model, batch).backward()
            if device != "cpu":
                torch.get_device_module(device).synchronize()
            step = (time.perf_counter() - started) / len(data)
            model.zero_grad()
            checks = watched(model, trains, data, True, nullcontext(), device).checks
            counts = [c.to_json()["operations"] or {} for c in checks]
            row = {
                "study": "cost", "model": name, "trains": trains, "tokens": rows * length, "step": step,
                "judged": counts[-1].get("now"), "of": counts[-1].get("of"),
                "operations": [c.get("seconds") for c in counts],
                "rest": [c.seconds - n.get("seconds", 0.0) for c, n in zip(checks, counts, strict=True)],
                "verdicts": [c.verdict for c in checks],
            }  # fmt: skip
            print(json.dumps(row)[:300], flush=True)
            yield row


def page(rows: list[Row], made: Mapping[str, str]) -> str:
    """Write the page."""
    argument = "" if made["device"] == "cpu" else f" --device {made['device']}"
    by = {kind: [row for row in rows if row["study"] == kind] for kind in ("fault", "clean", "cost")}
    checks = sum(row["checks"] for row in by["clean"])
    lines = [
        "# Single operations: planted faults, clean runs, cost",
        "",
        f"Generated by `python -m lockstep.scripts.studies.operations{argument}`: Hugging Face's GPT-2 "
        f"({LAYERS} layers, width {WIDTH}, {ROWS * LENGTH} tokens,",
        "GELU by erf, random weights, `loss_type` set), one step, `watch(..., operations=True)`. "
        f"{made['machine']}, torch {made['torch']},",
        f"JAX {made['jax']}, transformers {made['transformers']}.",
        "",
        "## Planted faults",
        "",
        "A kernel is replaced for the whole process (`torch.library`), so truth and twin of a check of the whole "
        "module run it too.",
        "*Alone* is that check, without `operations=`. The other kernel is correct: it computes in FP64 and "
        "rounds once.",
        "",
        "| fault | trains in | named first | measure | bound | also named | alone | other kernel |",
        "|---|---|---|--:|--:|--:|---|---|",
    ]
    for row in by["fault"]:
        named = f"`{row.get('operation')}` at `{row.get('module')}` ({row.get('phase')}), {_line(row.get('note', ''))}"
        measure = f"{row.get('measure')} {row.get('value', 0):.4g}"
        alone = row["without operations"].partition(" in ")[0]
        lines.append(
            f"| {row['fault']} | {row['trains']} | {named} | {measure} | {row.get('bound') or 0:.3g} | "
            f"{len(row['named']) - 1} | {alone} | {row.get('another right kernel', '')} |"
        )
    lines += [
        "",
        "Under autocast, GELU by tanh differs from GELU by less than a rounding to bf16: excess is below 1. The "
        "bits show it, because GELU rounds each",
        "number once. *Alone* agrees, because its truth also runs the wrong kernel or the replaced forward.",
        "",
        "## DebugMode beside it",
        "",
        "torch's `DebugMode` with hashes of tensors (norm and XOR), forward and backward, against the log of a clean "
        "run. A user has no clean",
        "run of a wrong kernel. Cells: the number of hashes (two per result) that differ, and the operation of "
        "the first one.",
        "",
        "| fault | trains in | clean run again | wrong | another right kernel |",
        "|---|---|---|---|---|",
    ]
    for row in by["fault"]:
        found = row["DebugMode"]
        cells = [_cell(found.get(key, "")) for key in ("clean", "wrong", "another right kernel")]
        lines.append(f"| {row['fault']} | {row['trains']} | {' | '.join(cells)} |")
    lines += [
        "",
        "With a clean run, it names the operation of a wrong kernel, but also that of a correct one. It cannot "
        "compare runs whose operations differ.",
        "",
        "## Clean runs",
        "",
        f"{checks} checks, {CHECKS} a row, with training between them.",
        "",
        "| model | trains in | agreed | operations judged | of a step | by JAX | accused |",
        "|---|---|--:|--:|--:|--:|---|",
    ]
    for row in by["clean"]:
        ways = row["ways"] or {}
        share = ways.get("by JAX", 0) / max(sum(ways.values()), 1)
        lines.append(
            f"| {row['model']} | {row['trains']} | {row['agreed']} of {row['checks']} | {row['judged']} | {row['of']} "
            f"| {share:.0%} | {', '.join(f'`{x}`' for x in row['accused']) or 'none'} |"
        )
    if made["device"] == "cpu":
        lines += [
            "",
            "`aten.native_layer_norm_backward` with bf16 weights is a bug of torch's, not a false alarm: on the CPU it "
            "sums the gradients of weight",
            "and bias in bf16.",
        ]
    lines += [
        "",
        "## Cost",
        "",
        "Seconds, on a machine with other work. *Rest* is the time of a check without `operations=`. The first "
        "check lists the operations,",
        "and compiles the formulas that the rows above did not need: in a new process that took "
        f"{by['fault'][0]['operations']['seconds']:.0f} s for the first row of this page.",
        "",
        "| model | trains in | tokens | step | judged of | first check | last check | rest | agreed |",
        "|---|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for row in by["cost"]:
        first, last = row["operations"][0], row["operations"][-1]
        lines.append(
            f"| {row['model']} | {row['trains']} | {row['tokens']} | {row['step']:.2f} | {row['judged']} of {row['of']}"
            f" | {first:.1f} | {last:.1f} | {row['rest'][-1]:.1f} "
            f"| {row['verdicts'].count('agreed')} of {len(row['verdicts'])} |"
        )
    return "\n".join(lines) + "\n"


def _line(note: str) -> str:
    """Return the `modeling_gpt2.py:63` of a finding's note."""
    return note.partition(";")[0].rpartition("/")[2]


def _cell(text: str) -> str:
    return text.replace("|", "/")[:90]


@dataclass
class Operations:
    """Run all rows, or write the page from the finished lines."""

    page: bool = False
    """only write the page from the finished lines"""
    device: Literal["cpu", "cuda"] = "cpu"
    """device of the models"""


def main() -> None:
    """Write a line after every row, then the page."""
    import jax
    import transformers

    options = tyro.cli(Operations)
    device, at = options.device, PAGES[options.device]
    lines = at.with_suffix(".jsonl")
    if not options.page:
        cpu = f"{platform.machine()} CPU, {os.cpu_count()} cores, {torch.get_num_threads()} threads"
        made = {
            "device": device, "machine": cpu if device == "cpu" else f"{torch.cuda.get_device_name()}, {cpu}",
            "torch": torch.__version__, "jax": jax.__version__, "transformers": transformers.__version__,
        }  # fmt: skip
        with lines.open("w") as file:
            for row in itertools.chain(clean(device), faults(device), cost(device)):
                file.write(json.dumps(row | made) + "\n")
                file.flush()
    rows = [json.loads(line) for line in lines.read_text().splitlines()]
    at.write_text(page(rows, {"device": device} | rows[0]))


if __name__ == "__main__":
    main()
