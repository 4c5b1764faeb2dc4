"""repro.py of an update that Muon or 8-bit AdamW made: an honest one is within rounding, a faulty one is off."""

from __future__ import annotations

import runpy
from dataclasses import dataclass, replace
from importlib.util import find_spec

import numpy as np
import pytest

from lockstep.core.parity.diagnose.repro import repro
from lockstep.core.parity.evidence.gather import gather
from lockstep.core.parity.evidence.loss_weights import uneven_weights
from lockstep.core.parity.judge.update import update
from lockstep.core.parity.measures.compare import Reference
from lockstep.core.parity.measures.verdict import Finding, Measure
from lockstep.jax_backend.backend import JaxBackend
from lockstep.parity_tests.faults.optimizer import BlockScaleStale, MuonWithoutItsLength
from lockstep.parity_tests.replay.made import VERSIONS
from lockstep.parity_tests.tiny import text_batch, tiny_config
from lockstep.torch_backend.backend import TorchBackend

BASE = tiny_config("fp32", train={"sequence_length": 32, "micro_batch_size": 4})
MATRIX = "blocks.1.attn.q_proj.weight"


@dataclass
class Accusing:
    """A check with an origin of the test's choice."""

    step: int
    findings: tuple[Finding, ...]
    origin: Finding
    not_covered: tuple[str, ...] = ()


def bound(recipe, kind, d, size):
    """Bounds that do not wait for a calibration."""
    return (
        Measure("excess", d.excess, None, 1.5, "the test's own"),
        Measure("twin_distance", d.twin_distance, None, 1.5, "the test's own"),
    )


def judged(name: str, backend: TorchBackend):
    """Config, evidence and findings of an optimizer's step; `adamw8bit_bnb` is that of bitsandbytes."""
    library = "bitsandbytes" if name.endswith("_bnb") else "torchao"
    changed = {"name": name.removesuffix("_bnb"), "eight_bit": library, "gains_lr_scale": 2.0}
    config = BASE.model_copy(update={"optim": BASE.optim.model_copy(update=changed)})
    reference = replace(Reference.open(JaxBackend(), config), bound=bound)
    session = backend.open(config)
    session.step(text_batch(config, 1))
    evidence = gather(session, config, uneven_weights(text_batch(config), 0))
    return config, evidence, tuple(update(evidence, reference))


def run_script(folder, config, evidence, findings, tap):
    origin = next(f for f in findings if f.tap == tap)
    made = repro(evidence, Accusing(2, findings, origin), config, VERSIONS)
    folder.mkdir(exist_ok=True)
    np.savez(folder / "stage.npz", **made.tensors)
    (folder / "repro.py").write_text(made.script)
    with pytest.raises(SystemExit) as stop:
        runpy.run_path(str(folder / "repro.py"), run_name="__main__")
    return stop.value.code


NEEDS_LIBRARY = pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed")


@pytest.mark.parametrize("name", ["adamw", "adamw8bit", pytest.param("adamw8bit_bnb", marks=NEEDS_LIBRARY), "muon"])
def test_an_honest_update_is_within_rounding(name, tmp_path):
    config, evidence, findings = judged(name, TorchBackend())
    assert all(f.ok for f in findings), [f for f in findings if not f.ok]
    for tap in (MATRIX, "blocks.1.attn_norm.weight", "embed.weight"):
        assert run_script(tmp_path / "honest", config, evidence, findings, tap) == 0, tap


@pytest.mark.parametrize(
    "name, backend, tap",
    [("muon", MuonWithoutItsLength(), MATRIX), ("adamw8bit", BlockScaleStale(), f"exp_avg/{MATRIX}")],
    ids=["muon", "adamw8bit"],
)
def test_a_faulty_update_is_off(name, backend, tap, tmp_path, capsys):
    config, evidence, findings = judged(name, backend)
    assert not next(f for f in findings if f.tap == tap).ok
    assert run_script(tmp_path / "faulty", config, evidence, findings, tap) == 1
    assert "off:" in capsys.readouterr().out
