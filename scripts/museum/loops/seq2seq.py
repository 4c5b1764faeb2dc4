"""Encoder-decoder models, and one that captions images, under transformers' Trainer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import Trainer

from lockstep import watch_trainer
from lockstep.scripts.museum import small
from lockstep.scripts.museum.seen import Seen

STEPS, ROWS = 24, 2


def t5() -> Any:
    """Build a T5 of 60,000 parameters, without dropout."""
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=small.VOCAB, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, dropout_rate=0.0,
        pad_token_id=0, decoder_start_token_id=0,
    )  # fmt: skip
    return T5ForConditionalGeneration(config)


def moonshine() -> Any:
    """Build a Moonshine, from waveforms to text."""
    from transformers import MoonshineConfig, MoonshineForConditionalGeneration

    config = MoonshineConfig(
        vocab_size=small.VOCAB, hidden_size=32, intermediate_size=64, encoder_num_hidden_layers=1,
        decoder_num_hidden_layers=2, encoder_num_attention_heads=4, decoder_num_attention_heads=4,
        decoder_start_token_id=1, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    return MoonshineForConditionalGeneration(config)


def git() -> Any:
    """Build a GIT, from an image to its caption."""
    from transformers import GitConfig, GitForCausalLM

    vision = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4,
              "image_size": 16, "patch_size": 8}  # fmt: skip
    config = GitConfig(
        vision_config=vision, vocab_size=small.VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, max_position_embeddings=64, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        bos_token_id=1, eos_token_id=2, pad_token_id=0, use_cache=False,
    )  # fmt: skip
    return GitForCausalLM(config)


def aligned(model: Any, inputs: Any) -> Tensor:
    """Compute the mean loss per label of a decoder whose inputs are the labels shifted by one."""
    given = {key: value for key, value in inputs.items() if key != "labels"}
    moved = model.prepare_decoder_input_ids_from_labels if hasattr(model, "_shift_right") else shifted
    logits = model(**given, decoder_input_ids=moved(labels=inputs["labels"])).logits
    return F.cross_entropy(logits.flatten(0, 1), inputs["labels"].flatten())


def shifted(labels: Tensor) -> Tensor:
    """Return the decoder's inputs: the start token, then the labels shifted right by one."""
    return torch.cat([torch.ones_like(labels[:, :1]), labels[:, :-1]], 1)


def caption(model: Any, inputs: Any) -> Tensor:
    """Compute the mean next-token loss over the text after the image."""
    logits = model(input_ids=inputs["input_ids"], pixel_values=inputs["pixel_values"]).logits
    return small.next_token_loss(logits[:, -inputs["input_ids"].shape[1] :], inputs["labels"])


def data(kind: str, count: int) -> list[dict[str, Tensor]]:
    """Return rows of text, with a random image or waveform where the model takes one."""
    drawn = torch.Generator().manual_seed(0)
    found = []
    for ids in small.text()[:count]:
        row = {"labels": ids, "input_ids": ids.flip(0)}
        if kind == "git":
            row = {"labels": ids, "input_ids": ids, "pixel_values": torch.randn(3, 16, 16, generator=drawn)}
        if kind == "moonshine":
            row = {"labels": ids, "input_values": torch.randn(2000, generator=drawn)}
        found.append(row)
    return found


MODELS: dict[str, tuple[Callable[[], Any], Callable[[Any, Any], Tensor]]] = {
    "t5": (t5, aligned),
    "moonshine": (moonshine, aligned),
    "git": (git, caption),
}


def loop(model: str, accumulation: int = 1, mended: bool = False) -> Seen:
    """Train for 24 steps. mended: set by hand that the model's loss takes no number of targets."""
    torch.manual_seed(0)
    build, loss = MODELS[model]
    trained = build()
    if mended:
        trained.accepts_loss_kwargs = False
    rows = data(model, STEPS * ROWS * accumulation + 16)
    args = small.arguments("out", per_device_train_batch_size=ROWS, gradient_accumulation_steps=accumulation)
    trainer = Trainer(model=trained, args=args, train_dataset=rows[:-16])
    watcher = watch_trainer(trainer, every=1, loss=loss)
    trainer.train()
    trained.eval()
    with torch.no_grad():
        last = {key: torch.stack([row[key] for row in rows[-16:]]) for key in rows[0]}
        return Seen(watcher, small.logged(trainer), float(loss(trained, last)))
