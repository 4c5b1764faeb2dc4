"""The examples of docs/guide/candidates.md run and end as on the page; a session is always closed."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from lockstep.parity_tests.cli.conftest import Lockstep

DOCS = Path(__file__).resolve().parents[2] / "docs"
EXAMPLE = DOCS / "examples" / "hf_llama.py"
FP32 = ("--precision.policy", "fp32", "--compile.enabled", "false")

OTHER_EPSILON = """
from hf_llama import HfLlama


class OtherEpsilon(HfLlama):
    def build(self, config):
        model = config.model.model_copy(update={"norm_eps": 1e-4})
        return super().build(config.model_copy(update={"model": model}))
"""

FAILING = """
from pathlib import Path
from lockstep.torch_backend.backend import TorchBackend
from lockstep.torch_backend.session import TorchSession


class Session(TorchSession):
    def gradients(self, batch):
        raise RuntimeError("out of cheese")

    def close(self):
        Path(MARK).write_text("closed")


class Failing(TorchBackend):
    session_class = Session
"""


def test_the_example_of_hugging_faces_llama_agrees(lockstep: Lockstep, run_file: Path, tmp_path: Path) -> None:
    verdict = tmp_path / "verdict.json"
    candidate = f"{EXAMPLE}:HfLlama"
    said = lockstep("parity", run_file, "--steps", 2, *FP32, "--candidate", candidate, "--json", verdict)
    # Where transformers is imported first, torch may warn of torchao.
    assert said.code == 0 and "lockstep:" not in said.err, said.out
    found = json.loads(verdict.read_text())
    assert not [line for line in found["not_covered"] if line.startswith(("local checks of the", "the checkpoint"))]
    assert {"nll", "loss", "gradients", "grad_norm", "moments", "update"} <= {f["stage"] for f in found["stages"]}
    seen = {(f["stage"], f["phase"]) for f in found["stages"] if f["scope"] == "local"}
    assert {("q_rope", "forward"), ("attn", "backward"), ("act", "backward"), ("logits", "forward")} <= seen


def test_the_candidate_hf_needs_no_file(lockstep: Lockstep, run_file: Path, tmp_path: Path) -> None:
    verdict = tmp_path / "verdict.json"
    said = lockstep("parity", run_file, "--steps", 1, "--quick", *FP32, "--candidate", "hf", "--json", verdict)
    assert (said.code, said.err) == (0, ""), said.out
    found = json.loads(verdict.read_text())
    assert found["candidate"] == "hf" and ("act", "forward") in {(f["stage"], f["phase"]) for f in found["stages"]}


def test_a_setting_that_the_candidate_does_not_put_in_force_is_refused(
    refused: Callable[..., str], run_file: Path
) -> None:
    said = refused("parity", run_file, "--candidate", "hf", "--compile.enabled", "true")
    assert said == "compile.enabled = true: a candidate's module runs eagerly; take --compile.enabled false"


def test_the_examples_are_ten_lines() -> None:
    for name, most in (("hf_llama.py", 10), ("hf_llama_autocast.py", 5)):
        _, _, code = (DOCS / "examples" / name).read_text()[3:].partition('"""')
        assert len([line for line in code.splitlines() if line.strip()]) <= most, name


AUTOCAST = {"precision.casts": "autocast", "attention.grouped": "kernel"}


@pytest.mark.parametrize("declared", [True, False], ids=["declared", "not declared"])
def test_the_example_under_autocast_agrees_with_its_own_casts(
    lockstep: Lockstep, run_file: Path, tmp_path: Path, declared: bool
) -> None:
    verdict, candidate = tmp_path / "verdict.json", f"{DOCS / 'examples' / 'hf_llama_autocast.py'}:HfLlamaAutocast"
    settings = [word for key, value in AUTOCAST.items() for word in (f"--{key}", value)] if declared else []
    said = lockstep(
        *("parity", run_file, "--steps", 1, "--quick", "--compile.enabled", "false", *settings),
        *("--candidate", candidate, "--json", verdict),
    )
    found = json.loads(verdict.read_text())
    assert said.code == (0 if declared else 1), said.out
    if declared:
        seen = {(f["stage"], f["phase"]) for f in found["stages"] if f["scope"] == "local"}
        assert {("act", "forward"), ("q_rope", "backward"), ("attn", "backward"), ("logits", "forward")} <= seen
        assert found["fitting"] is None
    else:
        # Where the processor's kernels of both kinds of grouping give the same bits, the shorter plan is offered.
        settings = found["fitting"]["settings"]
        assert found["fitting"]["agrees"] and settings.items() <= AUTOCAST.items()
        assert settings.keys() >= AUTOCAST.keys() - {"attention.grouped"}


def test_the_example_with_another_epsilon_disagrees(
    lockstep: Lockstep, run_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLE.parent))
    file = tmp_path / "other_epsilon.py"
    file.write_text(OTHER_EPSILON)
    said = lockstep("parity", run_file, "--steps", 1, "--quick", *FP32, "--candidate", f"{file}:OtherEpsilon")
    assert said.code == 1
    assert "first bad step 1; origin: attn_norm (forward, layer 0, " in said.out


def test_the_code_of_the_page_does_what_the_page_says(lockstep: Lockstep, run_file: Path, tmp_path: Path) -> None:
    page = (DOCS / "guide/candidates.md").read_text()
    (code,) = re.findall(r"^```python\n(.*?)^```", page, re.M | re.S)
    file = tmp_path / "bf16_logits.py"
    file.write_text(code)
    shown = re.search(r"^\$ lockstep (parity .*)\n(first bad step 1; origin: logits \(forward)", page, re.M)
    assert shown
    words = shown[1].replace("bf16_logits.py", str(file)).split()
    words[1] = str(run_file)
    said = lockstep(*words, "--quick")
    assert said.code == 1
    assert shown[2] in said.out
    assert "$ echo $?\n1\n" in page[shown.end() :]


def test_a_session_is_closed_also_when_the_check_fails(lockstep: Lockstep, run_file: Path, tmp_path: Path) -> None:
    mark, file = tmp_path / "mark", tmp_path / "failing.py"
    file.write_text(f"MARK = {str(mark)!r}\n{FAILING}")
    said = lockstep("parity", run_file, "--steps", 1, "--candidate", f"{file}:Failing")
    assert said.code == 2
    assert said.err.startswith("lockstep: the check could not run: RuntimeError: out of cheese (")
    assert mark.read_text() == "closed"
