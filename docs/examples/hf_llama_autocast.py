"""The same trainer under torch.autocast: each stage of Hugging Face's model is judged by itself.

    lockstep parity configs/quickstart.toml --precision.casts autocast --compile.enabled false \
        --candidate docs/examples/hf_llama_autocast.py:HfLlamaAutocast

Autocast rounds where Lockstep's own trainer does not: `precision.casts` declares it (docs/guide/casts.md).
"""

import torch
from hf_llama import HfLlama


class HfLlamaAutocast(HfLlama):
    def precision(self, config):
        return torch.autocast("cpu", torch.bfloat16)
