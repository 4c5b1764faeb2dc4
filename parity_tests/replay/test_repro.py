"""repro.py: without Lockstep it finds a faulty stage's output off, and an honest one's within rounding."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from lockstep.core.config.schema import AttentionConfig
from lockstep.core.parity.diagnose.repro import repro
from lockstep.core.parity.evidence.gather import gather
from lockstep.core.parity.judge.judge import judge
from lockstep.core.parity.reference.self_check import sound_reference
from lockstep.core.train.loss_scale import SKIPPED
from lockstep.jax_backend.backend import JaxBackend
from lockstep.parity_tests.replay.made import (
    CONFIG,
    VERSIONS,
    Accused,
    Gelu,
    SumsInBf16,
    backend,
    checked,
    run_here,
)
from lockstep.parity_tests.tiny import text_batch, tiny_config
from lockstep.torch_backend.backend import TorchBackend
from lockstep.torch_backend.session import TorchSession

UNTIED = tiny_config("fp32", train={"sequence_length": 32}, tied=False, qkv_bias=True, layers=1)
PACKED = CONFIG.model_copy(update={"attention": AttentionConfig(document_mask=True, reset_positions=True)})
MATH = CONFIG.model_copy(update={"attention": AttentionConfig(kernel="math", document_mask=True)})
CONFIGS = {"bf16": CONFIG, "fp32": UNTIED, "packed": PACKED, "math": MATH}


@pytest.mark.parametrize("policy", CONFIGS)
def test_what_is_honest_is_within_rounding_at_every_link(policy, tmp_path, capsys):
    config = CONFIGS[policy]
    evidence, check = checked(TorchBackend(), config)
    assert check.verdict == "agreed"
    codes = {}
    for finding in check.findings:
        # One finding alone is what `repro` then takes for the origin.
        kept = tuple(f for f in check.findings if f.scope == "local" and f is not finding)
        alone = Accused(check.step, kept, (), accused=finding)
        key = (finding.stage, finding.phase, finding.scope)
        if key not in codes:
            codes[key] = run_here(tmp_path / policy, repro(evidence, alone, config, VERSIONS)), capsys.readouterr().out
    wrong = {key: out for key, (code, out) in codes.items() if code == 1}
    assert not wrong, wrong
    untold = {stage for (stage, phase, scope), (code, _) in codes.items() if code == 2 and scope == "local"}
    # These have no tensors of their own: a count of steps, a list of names, a number that is only reported.
    assert untold <= {"step_count", "weights", "record"}
    assert {stage for stage, _, _ in codes} >= {"embed", "attn", "nll", "logits", "act", "update", "moments", "loss"}


def test_the_update_of_a_run_that_left_steps_out_is_one_of_fewer_updates(tmp_path):
    config = tiny_config("fp16")
    session = TorchSession(config)
    session.step(text_batch(config))
    state = session.state()
    session.load(replace(state, step=4, scalars={**state.scalars, SKIPPED: 3.0}))
    evidence = gather(session, config, text_batch(config, 1))
    check = judge(evidence, sound_reference(JaxBackend(), config))
    assert check.verdict == "agreed" and evidence.before.updates == 1
    updated = next(one for one in check.findings if one.stage == "update")
    made = repro(evidence, Accused(5, check.findings, (), accused=updated), config, VERSIONS)
    assert run_here(tmp_path / "repro", made) == 0


class _HeadWithoutRounding(torch.autograd.Function):
    """Attention forward right, backward without the 1/√E (a wrong dq that the forward does not show)."""

    @staticmethod
    def forward(ctx, q, k, v):
        with torch.enable_grad():
            inputs = [x.detach().requires_grad_() for x in (q, k, v)]
            out = F.scaled_dot_product_attention(*inputs, is_causal=True)
        ctx.inputs, ctx.out = inputs, out
        return out.detach()

    @staticmethod
    def backward(ctx, *grads):
        q, k, v = torch.autograd.grad(ctx.out, ctx.inputs, grads)
        return q * q.shape[-1] ** 0.5, k, v


class DqWrong(TorchSession):
    def build_model(self):
        model = super().build_model()
        attention = model.blocks[1].attn

        def attend(q, k, v, policy):
            q, k, v = (x.to(policy.operand).transpose(1, 2) for x in (q, attention.expand(k), attention.expand(v)))
            return _HeadWithoutRounding.apply(q, k, v).transpose(1, 2).to(policy.stream)

        attention.attend = attend
        return model


class Decayed(TorchSession):
    """Decays its norm gains."""

    def build_optimizer(self):
        optimizer = super().build_optimizer()
        for group in optimizer.param_groups:
            group["weight_decay"] = 0.1
        return optimizer


class Scaled(TorchSession):
    """One gradient is a hundredth too long after the program made it."""

    def accumulate(self, batch):
        result = super().accumulate(batch)
        self.parameters["blocks.1.mlp.up_proj.weight"].grad.mul_(1.01)
        return result


class NormTwice(TorchSession):
    def step(self, batch, *, norms=False):
        record = super().step(batch, norms=norms)
        return replace(record, grad_norm=record.grad_norm * 1.001)


FAULTS = {
    "activation": (Gelu, "act", "forward"),
    "attention backward": (DqWrong, "attn", "backward"),
    "accumulation": (SumsInBf16, "accumulation", "backward"),
    "update": (Decayed, "update", "update"),
    "gradient": (Scaled, "gradients", "backward"),
    "norm": (NormTwice, "grad_norm", "update"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_what_is_faulty_is_off_without_lockstep(name, tmp_path):
    session, stage, phase = FAULTS[name]
    evidence, check = checked(backend(session))
    assert check.origin is not None and (check.origin.stage, check.origin.phase) == (stage, phase)
    made = repro(evidence, check, CONFIG, VERSIONS)
    np.savez(tmp_path / "stage.npz", **made.tensors)
    # Lockstep may be installed here: its packages are made impossible to import, and an attempt is reported.
    banned = ["core", "torch_backend", "jax_backend", "jax", "scripts"]
    guard = f"import sys\nsys.modules.update(dict.fromkeys({banned!r}))\n"
    head, future, rest = made.script.partition("from __future__ import annotations\n")
    (tmp_path / "repro.py").write_text(head + future + guard + rest)
    done = subprocess.run(
        [sys.executable, "-I", str(tmp_path / "repro.py")], capture_output=True, text=True, cwd=tmp_path
    )
    assert (done.returncode, done.stderr) == (1, ""), done.stdout + done.stderr
    assert stage in done.stdout and "off:" in done.stdout


def test_the_framework_itself_may_be_the_culprit(tmp_path, monkeypatch, capsys):
    """A candidate that did what the framework does is off all the same, if the framework is wrong."""
    right = F.silu
    monkeypatch.setattr(F, "silu", lambda x: right(x) * 1.01)
    evidence, check = checked(TorchBackend())
    assert check.origin is not None and check.origin.stage == "act"
    assert run_here(tmp_path / "culprit", repro(evidence, check, CONFIG, VERSIONS)) == 1
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if "stored:" in line or "call," in line]
    assert lines[0][-4:] == lines[1][-4:]  # the call, run here, is as wrong as what was stored


def test_names_from_elsewhere_do_not_end_the_script_early(tmp_path):
    evidence, check = checked(backend(Gelu))
    odd = replace(check.findings[0], stage="act", tap="'''\n\"\"\" {evil}", measures=check.findings[0].measures)
    made = repro(evidence, Accused(1, (), (), accused=odd), CONFIG, VERSIONS)
    assert run_here(tmp_path / "odd", made) in (0, 1, 2)
