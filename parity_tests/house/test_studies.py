"""A study takes hours and writes over committed results, so none runs on arguments that it does not know."""

from __future__ import annotations

import re

import pytest

from lockstep.parity_tests.repository import REPO

STUDIES = REPO / "scripts/studies"
PARSED = re.compile(r"\btyro\.cli\(|\bArgumentParser\(|\bparse\(")
# Programs that other studies start, with a fixed command line.
STARTED = {"cuda_rehearsal/ahead_worker", "cuda_rehearsal/worker", "killed_at", "on_ray", "start_marks"}
RUN = sorted(
    path.relative_to(STUDIES).with_suffix("").as_posix()
    for path in STUDIES.rglob("*.py")
    if '__name__ == "__main__"' in path.read_text(encoding="utf-8")
)


@pytest.mark.parametrize("study", [name for name in RUN if name not in STARTED])
def test_its_arguments_are_parsed(study: str) -> None:
    assert PARSED.search((STUDIES / f"{study}.py").read_text(encoding="utf-8"))


def test_programs_of_studies_are_started_by_studies() -> None:
    assert set(RUN) >= STARTED
    for name in STARTED:
        others = (path for path in STUDIES.rglob("*.py") if path != STUDIES / f"{name}.py")
        assert any(name.replace("/", ".") in path.read_text(encoding="utf-8") for path in others)
