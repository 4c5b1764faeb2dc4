"""transformers' Trainer counts GPT-2's labels before they are shifted. Exit code 1: the bug is there."""

# python first_label_gpt2.py

import sys

import torch
import transformers
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

torch.manual_seed(0)
config = GPT2Config(vocab_size=64, n_positions=8, n_embd=16, n_layer=1, n_head=2, bos_token_id=1, eos_token_id=1,
                    resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)  # fmt: skip
model = GPT2LMHeadModel(config)
rows = [{"input_ids": ids, "labels": ids} for ids in torch.randint(0, 64, (2, 8))]
ids = torch.stack([row["input_ids"] for row in rows])
with torch.no_grad():
    mean = model(input_ids=ids, labels=ids).loss.item()
args = TrainingArguments(output_dir="out", per_device_train_batch_size=2, max_steps=1, report_to=[], use_cpu=True,
                         logging_steps=1, save_strategy="no", disable_tqdm=True)  # fmt: skip
trainer = Trainer(model=model, args=args, train_dataset=rows)
trainer.train()
logged = trainer.state.log_history[0]["loss"]
print(f"transformers {transformers.__version__}: model.loss {mean:.4f}, Trainer's loss of the same rows {logged:.4f}")
print(f"ratio {logged / mean:.4f}; 7 of 8 labels of a row are targets, and 7/8 = {7 / 8}")
sys.exit(abs(logged / mean - 1) > 1e-3)
