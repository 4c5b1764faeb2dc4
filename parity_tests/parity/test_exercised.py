"""Levers that did nothing in a check are named; those that are on are looked at where they do something."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from lockstep.core.config.schema import AttentionConfig, RunConfig, TrainConfig
from lockstep.core.parity.evidence import recorded
from lockstep.core.parity.evidence.gather import gather
from lockstep.core.parity.evidence.loss_weights import uneven_weights, weighted_rows
from lockstep.core.parity.evidence.probe import has_end_of_text, is_text_of, micro_to_probe, probe_of
from lockstep.core.parity.judge.exercised import not_exercised
from lockstep.core.parity.judge.judge import Reference, judge
from lockstep.core.parity.measures.verdict import Check, never_exercised
from lockstep.core.sinks.phrases import check_line
from lockstep.jax_backend.backend import JaxBackend
from lockstep.parity_tests.tiny import text_batch, tiny_config
from lockstep.torch_backend.backend import TorchBackend
from lockstep.torch_backend.session import TorchSession

CONFIG = tiny_config("fp32")
MASKED = CONFIG.model_copy(update={"attention": AttentionConfig(document_mask=True)})


class BlindToDocuments(TorchSession):
    """Never masks: every token sees all before it."""

    def documents(self, batch):
        return super().documents(replace(batch, documents=np.zeros_like(batch.documents)))


def with_documents_in(rows, batch):
    """Return the batch with a second document in these sequences alone."""
    documents = np.zeros_like(batch.tokens)
    documents[rows, batch.tokens.shape[1] // 2 :] = 1
    return replace(batch, documents=documents)


def checked(session, config, batch):
    return judge(gather(session, config, uneven_weights(batch, 1)), Reference.open(JaxBackend(), config))


def test_a_mask_that_masked_nothing_is_named_in_the_headline_and_elsewhere_it_is_looked_at():
    """A candidate without the mask agrees where no sequence holds two documents, and nowhere else."""
    batch = text_batch(MASKED)
    apart = checked(BlindToDocuments(MASKED), MASKED, with_documents_in([], batch))
    assert apart.verdict == "agreed" and "document mask" in apart.not_exercised
    assert "agreed; not exercised: document mask" in check_line(apart)
    assert any(item.startswith("document mask, which was not exercised: ") for item in apart.not_covered)
    # One sequence, of the second micro-batch.
    packed = with_documents_in([2], batch)
    wrong = checked(BlindToDocuments(MASKED), MASKED, packed)
    assert wrong.origin is not None and (wrong.origin.stage, wrong.origin.scope) == ("attn", "local")
    honest = checked(TorchBackend().open(MASKED), MASKED, packed)
    assert honest.verdict == "agreed" and "document mask" not in honest.not_exercised


@pytest.mark.parametrize("rows", [[0], [1], [2], [1, 2], [3]])
@pytest.mark.parametrize("turn", range(3))
def test_a_sequence_of_several_documents_is_among_those_looked_at(rows, turn):
    config = MASKED.model_copy(update={"train": TrainConfig(batch_size=4, micro_batch_size=4, sequence_length=32)})
    chosen = weighted_rows(probe_of(with_documents_in(rows, text_batch(config)), config, turn=turn))
    assert len(chosen) == 2 and set(chosen) & set(rows)


def test_the_micro_batch_that_is_looked_at_has_several_documents_in_a_sequence_if_any_does():
    batch = text_batch(MASKED)
    for row, micro in ((0, 0), (3, 1)):
        packed = with_documents_in([row], batch)
        assert micro_to_probe(packed, MASKED).digest() == packed.cut(MASKED.train)[micro].digest()
        assert row % 2 in weighted_rows(recorded.probe_of(packed, MASKED))
    # Without the lever nothing changes: recorded runs are replayed on the sequences that they chose.
    assert micro_to_probe(batch, CONFIG).digest() == batch.cut(CONFIG.train)[0].digest()


# No text of the tests holds it.
END = 0


class TakesEndOfTextForPadding(TorchSession):
    """Leaves its targets out, as `ignore_index` does where the end of text is the padding token too."""

    def to_device(self, batch):
        tokens, targets, weights = super().to_device(batch)
        return tokens, targets, torch.where(targets == END, 0.0, weights)


class HasNoGradientForEndOfText(TorchSession):
    """Its embedding stays as it is, as `padding_idx` has it."""

    def __init__(self, config):
        super().__init__(config)
        embed = self.model.embed
        embed.forward = lambda tokens: F.embedding(tokens, embed.weight, padding_idx=END)


@pytest.mark.parametrize("config", [CONFIG, tiny_config("bf16")], ids=["fp32", "bf16"])
@pytest.mark.parametrize("during_training", [False, True])
@pytest.mark.parametrize(
    "candidate, origin",
    [(TakesEndOfTextForPadding, ("loss", "forward")), (HasNoGradientForEndOfText, ("embed", "backward"))],
)
def test_a_token_that_no_batch_holds_is_put_where_it_is_looked_at(candidate, origin, during_training, config):
    """The same candidate agrees where no setting names the token that ends a document."""

    def check(session, batch):
        looked_at = recorded.probe_of(batch, config) if during_training else None
        evidence = gather(session, config, batch, looked_at)
        return judge(evidence, Reference.open(JaxBackend(), config)), evidence

    unsaid = text_batch(config)
    assert END not in unsaid.tokens
    missed, _ = check(candidate(config), unsaid)
    assert missed.verdict == "agreed"
    batch = replace(unsaid, end_of_text=END)
    found, evidence = check(candidate(config), batch)
    assert found.origin is not None and (found.origin.stage, found.origin.phase) == origin
    if candidate is TakesEndOfTextForPadding:
        assert found.origin.note == "it is without the losses of the targets that end a document"
    assert "end of text" not in not_exercised(evidence, config)
    honest, _ = check(TorchBackend().open(config), batch)
    assert honest.verdict == "agreed"


def test_where_sequences_share_scales_it_is_named_that_none_was_compared():
    config = tiny_config("fp8_tensorwise")
    session = TorchBackend().open(config)
    batch = replace(text_batch(config), end_of_text=END)
    assert "end of text" in not_exercised(gather(session, config, batch), config)
    holds = batch.tokens.copy(), batch.targets.copy()
    holds[0][0, 5] = holds[1][0, 4] = END
    batch = replace(batch, tokens=holds[0], targets=holds[1])
    assert "end of text" not in not_exercised(gather(session, config, batch), config)


def test_an_end_of_text_that_is_there_already_changes_nothing():
    """Nor does it change anything but the last place of one sequence where none is there."""
    batch = replace(text_batch(CONFIG), end_of_text=END)
    micro = micro_to_probe(batch, CONFIG)
    plain, probe = (probe_of(replace(micro, end_of_text=end), CONFIG) for end in (None, END))
    assert is_text_of(probe, micro) and has_end_of_text(probe) and not has_end_of_text(replace(plain, end_of_text=END))
    changed_at = np.argwhere((probe.tokens != plain.tokens) | (probe.targets != plain.targets)).tolist()
    last, length = weighted_rows(plain)[-1], plain.tokens.shape[1]
    assert changed_at == [[last, length - 2], [last, length - 1]]
    assert probe_of(replace(micro, tokens=probe.tokens, targets=probe.targets), CONFIG).digest() == probe.digest()


def levers(config: RunConfig, probe=False, batch=None):
    batch = uneven_weights(text_batch(config) if batch is None else batch, 1)
    looked_at = recorded.probe_of(batch, config) if probe else None
    return not_exercised(gather(TorchBackend().open(config), config, batch, looked_at), config)


def changed(config: RunConfig, section: str, **values) -> RunConfig:
    return config.model_copy(update={section: getattr(config, section).model_copy(update=values)})


@pytest.mark.parametrize(
    "config, probe, named",
    [
        (CONFIG, False, []),
        (CONFIG, True, ["validation"]),
        (changed(CONFIG, "eval", every=0), True, []),
        (changed(CONFIG, "train", micro_batch_size=4), False, ["accumulation"]),
        (changed(CONFIG, "optim", clip_norm=1e6), False, ["clipping"]),
        (changed(CONFIG, "optim", clip_norm=0.0), False, []),
        (changed(CONFIG, "train", on_not_finite="skip"), False, []),
        (changed(CONFIG, "train", on_not_finite="skip"), True, ["leaving a step out", "validation"]),
        (changed(CONFIG, "train", curriculum="32:0.5, 64:0.5"), False, ["sequences of 64 tokens"]),
        (tiny_config("fp16"), False, []),
        (tiny_config("fp16"), True, ["a change of the loss scale", "validation"]),
        (changed(MASKED, "attention", reset_positions=True), False, []),
    ],
)
def test_levers(config, probe, named):
    assert list(levers(config, probe)) == named


def test_a_history_of_amaxes_is_exercised_where_it_is_full():
    """As it is in later steps, which the first check makes, and from the third step on."""
    config = tiny_config("fp8_delayed", train={"steps": 20})
    config = changed(config, "precision", fp8_history=2)
    session = TorchBackend().open(config)
    named = [
        "a full history of amaxes" in not_exercised(gather(session, config, text_batch(config, n)), config)
        for n in range(3)
    ]
    assert named == [False, True, False]


def test_a_step_that_is_left_out_exercises_leaving_out():
    class Overflows(TorchSession):
        def accumulate(self, batch):
            loss, nll = super().accumulate(batch)
            return loss * np.inf, nll

    config = changed(CONFIG, "train", on_not_finite="skip")
    evidence = gather(Overflows(config), config, uneven_weights(text_batch(config), 1))
    assert "leaving a step out" not in not_exercised(evidence, config)


def test_over_several_checks_only_what_none_exercised_is_named():
    def of(*idle: str) -> Check:
        return Check(1, (), (), not_exercised=idle)

    assert never_exercised([]) == ()
    assert never_exercised([of("clipping", "document mask"), of("document mask")]) == ("document mask",)
    assert never_exercised([of("clipping"), of()]) == ()
