"""transformers makes no mask of packed documents under the default use_cache=True. Exit code 1: the bug is there."""

# python packed_use_cache.py

import sys

import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
                     num_key_value_heads=4, max_position_embeddings=64)  # fmt: skip
model = LlamaForCausalLM(config)
first, second = torch.randint(0, 64, (1, 9)), torch.randint(0, 64, (1, 7))
ids, positions = torch.cat([first, second], 1), torch.cat([torch.arange(9), torch.arange(7)])[None]
with torch.no_grad():
    alone = model(input_ids=second).logits
    errors = []
    for settings in ({}, {"use_cache": False}):
        packed = model(input_ids=ids, position_ids=positions, **settings).logits[:, 9:]
        errors.append(float((packed - alone).norm() / alone.norm()))
print(f"transformers {transformers.__version__}: logits of the second document, packed, against those of it alone:")
print(f"relative difference {errors[0]:.2e} by default, {errors[1]:.2e} with use_cache=False")
sys.exit(errors[0] > 1e-4)
