"""The cause finder: the change under which the origin vanishes is named, and only that."""

from __future__ import annotations

import torch

from lockstep.core.config.schema import CompileConfig, RecomputeConfig
from lockstep.core.errors import UserError
from lockstep.core.parity.diagnose.cause import VARIATIONS, Variation, find_cause
from lockstep.core.parity.judge.judge import judge
from lockstep.jax_backend.backend import JaxBackend
from lockstep.parity_tests.replay.made import (
    CONFIG,
    Gelu,
    HiddenMomentum,
    SumsInBf16,
    backend,
    checked,
    evidence_of,
    reference,
)
from lockstep.parity_tests.tiny import text_batch, tiny_config
from lockstep.torch_backend.backend import TorchBackend
from lockstep.torch_backend.session import TorchSession

COMPILED = CONFIG.model_copy(update={"compile": CompileConfig(enabled=True, backend="aot_eager")})
LEVERS = {v.words: v for v in VARIATIONS}


class OnlyCompiled(Gelu):
    """Wrong under torch.compile alone."""

    def build_model(self):
        model = super().build_model()
        if not self.config.compile.enabled:
            for block in model.blocks:
                block.mlp.__dict__.pop("activate", None)
        return model


def cause_of(session, config, *words):
    evidence, check = checked(backend(session), config)
    assert check.origin is not None
    tried = tuple(LEVERS[w] for w in words) if words else VARIATIONS
    return find_cause(backend(session), JaxBackend(), config, evidence, check, tried)


def test_what_only_the_compiler_does():
    cause = cause_of(OnlyCompiled, COMPILED, "without torch.compile", "in FP32")
    assert cause.tried == [("without torch.compile", "vanishes"), ("in FP32", "stays")]
    assert cause.words == "disappears without torch.compile; present in FP32"


def test_what_only_accumulation_does():
    cause = cause_of(SumsInBf16, CONFIG, "with one micro-batch")
    assert cause.words == "disappears with one micro-batch"


def test_what_a_fresh_start_does_not_show_has_no_variation_for_its_cause():
    made = backend(HiddenMomentum)
    session = made.open_rank(CONFIG)
    session.step(text_batch(CONFIG, 1))
    evidence = evidence_of(session)
    check = judge(evidence, reference())
    assert check.origin is not None and check.origin.stage == "moments"
    cause = find_cause(made, JaxBackend(), CONFIG, evidence, check, (LEVERS["with one micro-batch"],))
    assert cause.words.startswith(
        "a fresh start from the state before the step does not show it: as it ran, the step depended on something "
        "outside the state that the session shows, which loading resets, or on hardware"
    )
    assert "disappears" not in cause.words
    assert cause.tried[-1] == ("with nothing changed", "vanishes")


class ChunksDoubled(TorchSession):
    """Wrong in the chunked head alone."""

    def build_model(self):
        model = super().build_model()
        if right := model.fused_loss:
            model.fused_loss = lambda *inputs: doubled(*right(*inputs))
        return model


def doubled(loss, nll):
    return 2 * loss - loss.detach(), nll


def test_what_only_the_chunked_head_does():
    cause = cause_of(ChunksDoubled, CONFIG, "with the full loss instead of the chunked one", "in FP32")
    assert cause.words.startswith("disappears with the full loss instead of the chunked one; present in FP32")


class RecomputedOtherwise(TorchSession):
    """Recompute SwiGLU with another activation."""

    def build_model(self):
        model = super().build_model()
        for block in model.blocks:
            right = block.mlp.activate

            def activate(gate, up, right=right):
                again = torch._C._current_graph_task_id() != -1
                return 1.5 * right(gate, up) if again else right(gate, up)

            block.mlp.activate = activate
        return model


def test_what_only_recomputation_does():
    recomputing = CONFIG.model_copy(update={"recompute": RecomputeConfig(parts="mlp")})
    cause = cause_of(RecomputedOtherwise, recomputing, "without activation checkpointing", "with one micro-batch")
    assert cause.words.startswith("disappears without activation checkpointing; present with one micro-batch")


def test_what_is_always_there():
    cause = cause_of(Gelu, CONFIG)
    assert cause.words == "present in every variation tried: with one micro-batch, in FP32"
    outcomes = dict(cause.tried)
    assert outcomes["without torch.compile"] == "the program is eager already"
    assert outcomes["with another attention kernel (math)"] == "act is computed as before"
    assert list(outcomes) == [v.words for v in VARIATIONS]


def test_a_variation_that_changes_nothing_is_not_called_a_place_of_the_fault():
    nothing = Variation("with another name", lambda config: config.model_copy(update={"name": "other"}))
    evidence, check = checked(backend(Gelu), CONFIG)
    tried = (nothing, LEVERS["with one micro-batch"])
    cause = find_cause(backend(Gelu), JaxBackend(), CONFIG, evidence, check, tried)
    assert cause.words == (
        "present in every variation tried: with one micro-batch; made no difference to the candidate: with another name"
    )
    cause = find_cause(backend(Gelu), JaxBackend(), CONFIG, evidence, check, (nothing,))
    assert cause.words.startswith("no variation changed the candidate")


class Doubled(TorchSession):
    """Gradients too long by the accumulation steps."""

    def accumulate(self, batch):
        result = super().accumulate(batch)
        for p in self.parameters.values():
            p.grad.mul_(self.config.train.accumulation)
        return result


def test_a_length_that_is_off_is_named():
    # In FP64 twin and truth are one session: the variation's micro-batch is another shape, which is compiled for it.
    cause = cause_of(Doubled, tiny_config("fp64"), "with one micro-batch")
    assert cause.words.startswith("disappears with one micro-batch; length off by the accumulation steps")


def test_a_variation_that_cannot_be_opened_says_nothing():
    class Refuses(TorchBackend):
        def open(self, config):
            raise UserError("no such device")

    evidence, check = checked(backend(Gelu), CONFIG)
    lever = Variation("elsewhere", lambda config: config)
    cause = find_cause(Refuses(), JaxBackend(), CONFIG, evidence, check, (lever,))
    assert cause.tried == [("elsewhere", "could not be tried: no such device")]
    assert cause.words == "no variation could be tried"


def test_an_honest_step_has_no_cause():
    evidence, check = checked(TorchBackend(), CONFIG)
    assert "nothing to explain" in find_cause(TorchBackend(), JaxBackend(), CONFIG, evidence, check).words
