"""Where the reference computes: JAX's settings before it searches for devices. No test here has a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from lockstep.core.errors import UserError
from lockstep.core.plan.checks import GB, cost_of_check, over_budget, reference_share, taps_budget
from lockstep.jax_backend import device
from lockstep.parity_tests.repository import REPO
from lockstep.parity_tests.tiny import tiny_config

CONFIG = tiny_config("bf16", compiled=True)
MIB = 1 << 20


def on_gpu(gigabytes: float, **others: object):
    changed = {"reference_device": "cuda", "device_gb": gigabytes, **others}
    return CONFIG.model_copy(update={"parity": CONFIG.parity.model_copy(update=changed)})


@pytest.fixture
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Make a machine whose GPUs have so many MiB by nvidia-smi; keep the words that it was called with."""

    def says(*sizes: int) -> Path:
        file, words = tmp_path / "nvidia-smi", tmp_path / "words"
        lines = "".join(f"echo {size}\n" for size in sizes)
        file.write_text(f'#!/bin/sh\necho "$@" > {words}\n{lines}')
        file.chmod(0o755)
        return words

    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv(device.SHARE, raising=False)
    monkeypatch.delenv(device.OLDER, raising=False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv(device.FLAGS, "")
    return says


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    """Record changes of JAX's settings instead of making them."""
    found: dict[str, object] = {}
    monkeypatch.setattr(jax.config, "update", found.__setitem__)
    monkeypatch.setattr(jax, "devices", lambda kind: found.setdefault("asked", kind))
    return found


def test_jax_chooses_unless_a_gpu_is_asked_for(told) -> None:
    device.use_device(CONFIG)
    assert not told


def test_jax_is_told_of_the_gpu_and_of_its_share(smi, told, monkeypatch: pytest.MonkeyPatch) -> None:
    words = smi(80 * 1024, 80 * 1024)
    device.use_device(on_gpu(4))
    assert told == {"jax_cuda_visible_devices": "0", "jax_platforms": "cuda,cpu", "asked": "cuda"}
    share = float(os.environ.pop(device.SHARE)) * 80 * 1024 * MIB
    assert share == pytest.approx(reference_share(on_gpu(4)), rel=1e-3)
    assert share + cost_of_check(on_gpu(4), thorough=False).device == pytest.approx(4 * GB, rel=1e-3)
    assert "--id" not in words.read_text()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5,6")
    device.use_device(on_gpu(4, reference_devices=2))
    assert told["jax_cuda_visible_devices"] == "0,1" and "--id=3,5" in words.read_text()
    assert float(os.environ.pop(device.SHARE)) * 80 * 1024 * MIB == pytest.approx(share / 2, rel=1e-3)


def test_a_share_that_the_user_has_set_stays(smi, told, monkeypatch: pytest.MonkeyPatch) -> None:
    smi(80 * 1024)
    for name in (device.SHARE, device.OLDER):
        monkeypatch.setenv(name, "0.25")
        device.use_device(on_gpu(4))
        assert {device.SHARE, device.OLDER} & os.environ.keys() == {name} and os.environ[name] == "0.25"
        monkeypatch.delenv(name)


def test_kernels_are_not_chosen_by_timing_them_unless_the_user_says_so(smi, told, monkeypatch: pytest.MonkeyPatch):
    smi(80 * 1024)
    for given, due in (("", "{}"), ("--xla_dump_to=x", "--xla_dump_to=x {}"), ("--xla_gpu_autotune_level=4", None)):
        monkeypatch.setenv(device.FLAGS, given)
        device.use_device(on_gpu(4))
        monkeypatch.delenv(device.SHARE)
        assert os.environ[device.FLAGS] == (given if due is None else due.format(device.NO_TRIALS))


def test_no_gpu(smi, told, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "ASK", ["no-such-program"])
    with pytest.raises(UserError, match=r"nvidia-smi does not report the GPU's memory \(FileNotFoundError\)$"):
        device.use_device(on_gpu(4))
    monkeypatch.setattr(device, "ASK", ["nvidia-smi"])
    smi()
    with pytest.raises(UserError, match=r"needs 1 GPUs, and nvidia-smi lists 0$"):
        device.use_device(on_gpu(4))
    smi(80 * 1024)
    with pytest.raises(UserError, match=r"needs 2 GPUs, and nvidia-smi lists 1$"):
        device.use_device(on_gpu(4, reference_devices=2))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(UserError, match=r"lists 0$"):
        device.use_device(on_gpu(4))
    assert not told


def test_a_jax_without_cuda_says_so(smi) -> None:
    """In a process of its own: JAX itself is set up, and finds no GPU."""
    smi(80 * 1024)
    program = """
from lockstep.parity_tests.jax_backend.test_device import on_gpu
from lockstep.jax_backend.backend import JaxBackend
try:
    JaxBackend().open(on_gpu(4))
except Exception as error:
    print(type(error).__name__, error)
"""
    environment = {name: value for name, value in os.environ.items() if name != "JAX_PLATFORMS"}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=environment | {"PYTHONPATH": str(REPO)}
    )
    said = "UserError parity.reference_device = 'cuda', and JAX has no GPU in this process: "
    assert done.stdout.startswith(said), done


def test_taps_and_reference_share_the_budget() -> None:
    """Enough memory is accepted, and just too little is not."""
    config = on_gpu(1e-4)
    (line,) = over_budget(config, thorough=False)
    enough = float(line.split(": ")[1].removesuffix(" would do"))
    assert over_budget(on_gpu(enough), thorough=False) == []
    for budget in (1e-3, 2e-3, 1e-2, 1.0):
        cost, both = cost_of_check(on_gpu(budget), thorough=False), on_gpu(budget)
        fits = cost.reference <= reference_share(both)
        assert (over_budget(both, thorough=False) == []) == fits
        assert taps_budget(both) == budget * GB / 2
    on_cpu = cost_of_check(CONFIG, thorough=False)
    assert on_cpu.reference == 0 < cost.reference and cost.judging < on_cpu.judging
