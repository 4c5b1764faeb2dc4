"""Watch Trainer and Accelerator on two processes. Each process runs this program.

Its arguments are the number of the process, a folder, and cases. It prints the results of this process's checks, by
case.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator  # type: ignore[import-untyped]
from accelerate.state import AcceleratorState, GradientState  # type: ignore[import-untyped]
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments

from lockstep import watch_accelerate, watch_trainer
from lockstep.parity_tests.watch.adapters.causal import llama, rows
from lockstep.parity_tests.watch.own import ROWS as OWN_ROWS
from lockstep.parity_tests.watch.own import Gpt, batches, gpt_loss
from lockstep.torch_backend.watch.adapters.library_watcher import LibraryWatcher

CLIP, STEPS, PARTS, RANKS = 0.5, 2, 2, 2


def through_accelerator(accelerator: Any, loss: Tensor) -> None:
    accelerator.backward(loss)


def past_accelerator(_: Any, loss: Tensor) -> None:
    loss.backward()


def with_accelerate(folder: Path, backward: Callable[[Any, Tensor], None] = through_accelerator) -> LibraryWatcher:
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=PARTS)
    plain = Gpt()
    data = [{key: x[i] for key, x in one.items()} for one in batches(STEPS * PARTS * RANKS) for i in range(OWN_ROWS)]
    loader: Any = DataLoader(data, batch_size=OWN_ROWS)  # type: ignore[arg-type]
    model, optimizer, loader = accelerator.prepare(plain, torch.optim.AdamW(plain.parameters(), lr=1e-2), loader)
    watcher = watch_accelerate(accelerator, model, optimizer, loss=gpt_loss, every=1, clip_norm=CLIP)
    for batch in loader:
        with accelerator.accumulate(model):
            loss = gpt_loss(model, batch)
            backward(accelerator, loss)
            with watcher.step(batch, loss):
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), CLIP)
                optimizer.step()
            optimizer.zero_grad()
    return watcher


def with_trainer(folder: Path, **settings: Any) -> LibraryWatcher:
    torch.manual_seed(0)
    args = TrainingArguments(
        output_dir=str(folder), per_device_train_batch_size=2, num_train_epochs=1, report_to=[], use_cpu=True,
        logging_strategy="no", disable_tqdm=True, dataloader_pin_memory=False, save_strategy="no",
        gradient_accumulation_steps=PARTS, max_grad_norm=CLIP, learning_rate=1e-2, **settings,
    )  # fmt: skip
    trainer = Trainer(model=llama(), args=args, train_dataset=rows(2 * STEPS * PARTS * RANKS))
    watcher = watch_trainer(trainer, every=1)
    trainer.train()
    return watcher


CASES: dict[str, Callable[[Path], LibraryWatcher]] = {
    "accelerate": with_accelerate,
    "accelerate, past it": lambda folder: with_accelerate(folder, past_accelerator),
    "trainer": with_trainer,
    "trainer, bf16": lambda folder: with_trainer(folder, bf16=True),
    "trainer, own tokens": lambda folder: with_trainer(folder, average_tokens_across_devices=False),
}


def told(watcher: LibraryWatcher) -> dict[str, Any]:
    bad = next((check for check in watcher.checks if check.verdict == "disagreed"), None)
    return {
        "headline": watcher.headline,
        "step": bad and bad.step,
        "stages": sorted({f.stage for f in bad.findings if not f.ok}) if bad else [],
        "cause": bad and bad.cause,
        "compared": sorted({f"{f.stage}/{f.tap}" for f in watcher.checks[0].findings}),
    }


if __name__ == "__main__":
    number, folder, *names = sys.argv[1:]
    os.environ |= {
        "LOCAL_RANK": number,
        "RANK": number,
        "WORLD_SIZE": str(RANKS),
        "LOCAL_WORLD_SIZE": str(RANKS),
        "ACCELERATE_USE_CPU": "true",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "0",
    }
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=int(number), world_size=RANKS)
    found = {}
    for name in names or CASES:
        found[name] = told(CASES[name](Path(folder)))
        AcceleratorState._reset_state(False)
        GradientState._reset_state()
    print(json.dumps(found))
    dist.destroy_process_group()
