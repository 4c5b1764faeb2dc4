"""transformers' Trainer does not divide T5's loss by the number of micro-batches. Exit code 1: the bug is there."""

# python t5_accumulation.py

import sys

import torch
import transformers
from transformers import T5Config, T5ForConditionalGeneration, Trainer, TrainingArguments

config = T5Config(vocab_size=64, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2, dropout_rate=0.0,
                  pad_token_id=0, decoder_start_token_id=0)  # fmt: skip
ids = torch.randint(1, 64, (8, 8), generator=torch.Generator().manual_seed(0))
rows = [{"input_ids": one, "labels": one} for one in ids]


def norm_and_loss(rows_at_once: int) -> tuple[float, float]:
    """Return gradient norm and loss, as Trainer logs them, of one step over 8 rows."""
    torch.manual_seed(0)
    args = TrainingArguments(output_dir="out", per_device_train_batch_size=rows_at_once, max_steps=1, report_to=[],
                             gradient_accumulation_steps=8 // rows_at_once, use_cpu=True, logging_steps=1,
                             save_strategy="no", disable_tqdm=True)  # fmt: skip
    trainer = Trainer(model=T5ForConditionalGeneration(config), args=args, train_dataset=rows)
    trainer.train()
    line = trainer.state.log_history[0]
    return line["grad_norm"], line["loss"]


(whole, loss), (parts, loss_of_parts) = norm_and_loss(8), norm_and_loss(2)
print(f"transformers {transformers.__version__}: 8 rows at once: gradient norm {whole:.4f}, loss {loss:.4f}")
print(f"the same 8 rows in 4 micro-batches: gradient norm {parts:.4f}, loss {loss_of_parts:.4f}: {parts / whole:.3f}x")
sys.exit(abs(parts / whole - 1) > 1e-2)
