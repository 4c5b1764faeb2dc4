"""`lockstep parity --candidate FILE.py:NAME` with candidates that lack, mistake or raise something."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lockstep.parity_tests.cli.conftest import Lockstep

CANDIDATES = Path(__file__).with_name("candidates.py")
# FP64 has the plainest bounds, and one reference session instead of two.
FP64 = ("--precision.policy", "fp64", "--steps", "1")


def verdict(file: Path) -> dict[str, Any]:
    """Read the verdict, in JSON that has no NaN or Infinity."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    found: dict[str, Any] = json.loads(file.read_text(), parse_constant=refuse)
    return found


def judged(lockstep: Lockstep, run_file: Path, name: str, code: int) -> dict[str, Any]:
    file = Path("verdict.json")
    done = lockstep("parity", run_file, *FP64, "--quick", "--candidate", f"{CANDIDATES}:{name}", "--json", file)
    assert done.code == code, done
    assert "Traceback" not in done.out + done.err
    return verdict(file)


def test_four_methods_are_enough_to_be_judged(lockstep: Lockstep, run_file: Path) -> None:
    found = judged(lockstep, run_file, "FourMethods", 0)
    assert found["verdict"] == "agreed"
    assert "local checks of the forward stages: mine has no taps" in found["not_covered"]
    stages = {finding["stage"] for finding in found["stages"]}
    assert {"tokens", "weights", "nll", "loss", "gradients", "grad_norm", "moments", "update"} <= stages


def test_without_gradients_the_forward_stages_are_judged_and_the_rest_is_named(
    lockstep: Lockstep, run_file: Path
) -> None:
    found = judged(lockstep, run_file, "WithoutGradients", 0)
    assert found["verdict"] == "agreed"
    assert "gradients and per-token NLL: mine gives no gradients" in found["not_covered"]
    stages = {finding["stage"] for finding in found["stages"]}
    assert "logits" in stages and not {"gradients", "update"} & stages


def test_nothing_that_was_computed_is_never_agreed(lockstep: Lockstep, run_file: Path) -> None:
    """Tokens, weights, learning rate and the like agree; nothing that the model computes was seen."""
    found = judged(lockstep, run_file, "Blind", 2)
    assert found["verdict"] == "could_not"
    assert {
        "gradients and per-token NLL: mine gives no gradients",
        "local checks of the forward stages: mine has no taps",
    } <= set(found["not_covered"])
    assert all(finding["ok"] for finding in found["stages"])
    done = lockstep("parity", run_file, *FP64, "--candidate", f"{CANDIDATES}:Blind")
    assert done.code == 2
    assert len(done.lines) == 1 and "nothing that the model computes was compared" in done.err
    assert "not covered: gradients and per-token NLL: mine gives no gradients" in done.out


# A candidate, and the origin that must be named: stage and, where there is but one, tap.
WRONG = {
    "NanGradients": ("gradients", None),
    "NanLoss": ("nll", "nll"),
    "NanTaps": ("embed", "embed"),
    "NanRecord": ("loss", "loss_of_step"),
    "OtherNames": ("gradients", None),
    "Transposed": ("gradients", None),
    "FlatNll": ("nll", "nll"),
    "WithoutMoments": ("weights", "names"),
    "WithoutOneWeight": ("weights", "names"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_no_number_or_has_another_name_or_shape_disagrees(
    lockstep: Lockstep, run_file: Path, name: str
) -> None:
    found = judged(lockstep, run_file, name, 1)
    assert (found["verdict"], found["first_bad_step"]) == ("disagreed", 1)
    stage, tap = WRONG[name]
    assert found["origin"]["stage"] == stage
    assert tap in (found["origin"]["tap"], None)


# A candidate, and the one line that is due.
CANNOT = {
    "Stateless": "the check could not run: NotSupported: mine keeps its state to itself",
    "RaisesWhenItOpens": "the check could not run: RuntimeError: no luck (",
    "RaisesInStep": "the check could not run: RuntimeError: no luck (",
    "RaisesInGradients": "the check could not run: ValueError (",
    "NoneForGradients": "the check could not run: TypeError: gradients() gave NoneType, "
    "not lockstep.core.backend.Gradients (",
    "Exits": "the check could not run: SystemExit: 0 (",
    "Incomplete": "the session has no state, step, gradients, observe, close: docs/guide/candidates.md",
    "Nobody": "has no Nobody; it has ",
    "a_number": "calling a_number() failed: TypeError: 'int' object is not callable",
    "gives_nothing": "gives_nothing() returned NoneType, which has no open(config): not a Backend",
    "raises": "calling raises() failed: OSError: no gpu",
}


@pytest.mark.parametrize("name", CANNOT)
def test_a_candidate_that_cannot_be_judged(refused, run_file: Path, name: str) -> None:
    """No verdict and no file of one."""
    said = refused("parity", run_file, *FP64, "--candidate", f"{CANDIDATES}:{name}", "--json", "verdict.json")
    assert CANNOT[name] in said


def test_a_reference_that_cannot_run(refused, run_file: Path) -> None:
    said = refused("parity", run_file, *FP64, "--reference", f"{CANDIDATES}:RaisesWhenItOpens")
    assert "the check could not run: RuntimeError: no luck (" in said and f"{CANDIDATES}:" in said


def test_a_step_that_disagreed_counts_although_the_next_one_raised(lockstep: Lockstep, run_file: Path) -> None:
    candidate = f"{CANDIDATES}:WrongThenRaises"
    options = ("--precision.policy", "fp64", "--steps", "3", "--json", "verdict.json")
    done = lockstep("parity", run_file, *options, "--candidate", candidate)
    assert done.code == 1
    assert len(done.lines) == 1 and "the check could not run: RuntimeError: no luck" in done.err
    found = verdict(Path("verdict.json"))
    assert (found["verdict"], found["origin"]["stage"], found["steps"]) == ("disagreed", "learning_rate", [1])


# Contents of mine.py, and the message for `--candidate mine.py:Mine`.
FILES = {
    None: "no such file: mine.py",
    "def (:\n": "importing mine.py failed: SyntaxError: ",
    "import nowhere_to_be_found\n": "importing mine.py failed: ModuleNotFoundError: No module named",
    "raise SystemExit(0)\n": "importing mine.py failed: SystemExit: 0",
    "1 / 0\n": "importing mine.py failed: ZeroDivisionError",
    "": "mine.py has no Mine",
}


@pytest.mark.parametrize("text", FILES)
def test_a_candidate_file_that_cannot_be_read(refused, run_file: Path, here: Path, text: str | None) -> None:
    if text is not None:
        (here / "mine.py").write_text(text)
    assert FILES[text] in refused("parity", run_file, *FP64, "--candidate", "mine.py:Mine")


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("mine.py", "'mine.py' names no backend: write FILE.py:NAME or module:NAME"),
        ("mine.py:", "'mine.py:' names no backend"),
        (":Mine", "':Mine' names no backend"),
        ("torhc", "'torhc' names no backend"),
        ("nowhere_to_be_found:Mine", "there is no module nowhere_to_be_found"),
    ],
)
def test_a_candidate_that_is_none(refused, run_file: Path, spec: str, said: str) -> None:
    assert said in refused("parity", run_file, *FP64, "--candidate", spec)


def test_a_candidate_finds_what_lies_beside_it_early_and_late(lockstep: Lockstep, run_file: Path, here: Path) -> None:
    (here / "beside_it.py").write_text("from lockstep.parity_tests.cli.candidates import FourMethods\n")
    (here / "also_beside_it.py").write_text("")
    (here / "mine.py").write_text(
        "import beside_it\n\n\nclass Mine:\n    def open(self, config):\n        import also_beside_it\n\n"
        "        return beside_it.FourMethods().open(config)\n"
    )
    assert lockstep("parity", run_file, *FP64, "--candidate", "mine.py:Mine").code == 0
    (here / "in_a_module.py").write_text("from lockstep.parity_tests.cli.candidates import FourMethods\n")
    assert lockstep("parity", run_file, *FP64, "--candidate", "in_a_module:FourMethods").code == 0
