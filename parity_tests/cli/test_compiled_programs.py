"""Compiled programs of the reference are kept where nobody else can put one: what is found there is run."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.scripts.cli import owned


def test_a_folder_that_is_not_there_is_made_for_this_user_alone(tmp_path: Path) -> None:
    folder = tmp_path / "programs"
    assert owned(str(folder))
    assert folder.stat().st_mode & 0o777 == 0o700
    assert owned(str(folder))


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o702])
def test_a_folder_that_others_may_write_to_is_not_used(tmp_path: Path, mode: int) -> None:
    folder = tmp_path / "programs"
    folder.mkdir()
    folder.chmod(mode)
    assert not owned(str(folder))


def test_a_link_to_a_folder_is_not_used(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    (tmp_path / "programs").symlink_to(tmp_path / "elsewhere")
    assert not owned(str(tmp_path / "programs"))


def test_a_file_of_that_name_is_not_used(tmp_path: Path) -> None:
    (tmp_path / "programs").write_text("")
    assert not owned(str(tmp_path / "programs"))
