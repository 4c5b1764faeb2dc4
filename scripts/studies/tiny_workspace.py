"""A tiny run file and its text, for studies and for tests of the command line."""

from __future__ import annotations

import sysconfig
from pathlib import Path

RUN_FILE = """
name = "tiny"
[model]
vocab_size = 300
hidden = 64
layers = 2
heads = 4
kv_heads = 2
ffn_hidden = 128
[data]
path = "{data}"
source = "{source}"
val_fraction = 0.2
[train]
steps = 12
batch_size = 4
micro_batch_size = 2
sequence_length = 32
[optim]
warmup_steps = 3
clip_norm = 0.25
[compile]
enabled = false
backend = "aot_eager"
[eval]
every = 0
[log]
norms_every = 0
fp32_loss_every = 0
"""


def write_workspace(folder: Path) -> Path:
    """Write text (the heads of some modules of the standard library) and a run file; return the run file."""
    text = folder / "text"
    text.mkdir(parents=True)
    for module in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:30]:
        (text / f"{module.stem}.txt").write_bytes(module.read_bytes()[:4000].decode(errors="ignore").encode())
    file = folder / "tiny.toml"
    file.write_text(RUN_FILE.format(data=folder / "data", source=text))
    return file
