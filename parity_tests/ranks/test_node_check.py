"""Nodes that run other sources of Lockstep are found."""

import shutil

from lockstep.parity_tests.repository import REPO
from lockstep.torch_backend.ranks import node_check
from lockstep.torch_backend.ranks.node_check import PACKAGES, _fingerprint


def test_the_fingerprint_is_that_of_the_sources(tmp_path, monkeypatch):
    for package in PACKAGES:
        shutil.copytree(REPO / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    copy = tmp_path / "torch_backend/ranks/node_check.py"
    here = _fingerprint("torch 2")
    monkeypatch.setattr(node_check, "__file__", str(copy))
    assert _fingerprint("torch 2") == here != _fingerprint("torch 3")
    changed = tmp_path / "core/backend.py"
    changed.write_text(changed.read_text() + "\n# changed\n")
    assert _fingerprint("torch 2") != here
