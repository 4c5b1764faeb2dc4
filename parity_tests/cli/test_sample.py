"""`lockstep sample`: text on stdout, all else on stderr, and one line where there is none to be had."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from lockstep.parity_tests.cli.conftest import Lockstep
from lockstep.scripts.cli import run

RUNS: dict[str, list[str]] = {
    "tiny": [],
    "documents": ["--attention.document-mask", "true", "--attention.reset-positions", "true"],
    "reference": ["--backend", "jax"],
    "wide": ["--model.vocab-size", "320"],
}


class Runs:
    """Runs of four steps, with checkpoints of the second and the fourth: `runs / name` makes one the first time.

    In FP64: the cache's roundings move no draw.
    """

    def __init__(self, run_file: Path, folder: Path) -> None:
        self._run_file, self._folder = run_file, folder

    def __truediv__(self, name: str) -> Path:
        made = self._folder / name
        if not made.exists():
            words = ["train", self._run_file, "--out", self._folder, "--name", name, "--train.steps", 4]
            words += ["--checkpoint.every", 2, "--precision.policy", "fp64", *RUNS[name]]
            assert run([str(word) for word in words]) == 0
        return made


@pytest.fixture(scope="session")
def runs(run_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(run_file, tmp_path_factory.mktemp("sampled"))


@pytest.mark.parametrize("name", RUNS)
def test_a_seed_is_a_text_with_the_cache_and_without(lockstep: Lockstep, runs: Runs, name: str) -> None:
    ask = ("sample", runs / name, "--prompt", "import ", "--tokens", 80, "--seed", 7, "--top-k", 100, "--top-p", 0.95)
    done, again, plain, other = (lockstep(*ask, *more) for more in ((), (), ("--no-cache",), ("--seed", 8)))
    assert done.code == 0 and done.out.startswith("import ") and len(done.out) > 40
    assert done.out == again.out == plain.out != other.out
    assert len(done.lines) == 1 and "80 tokens" in done.err and "fp64 on cpu, KV cache" in done.err
    assert "beyond 32 tokens each is computed from the last 32" in done.err and "no cache" in plain.err


@pytest.mark.parametrize("name", ["reference", "documents"])
def test_without_a_prompt_a_text_begins(lockstep: Lockstep, runs: Runs, name: str) -> None:
    done, plain = (lockstep("sample", runs / name, "--tokens", 5, *more) for more in ((), ("--no-cache",)))
    assert done.code == 0 and done.out.strip() and done.out == plain.out


def test_samples_are_apart_and_the_first_is_the_one_that_is_alone(lockstep: Lockstep, runs: Runs) -> None:
    ask = ("sample", runs / "tiny", "--prompt", "日本 ", "--tokens", 12, "--seed", 3)
    alone, three = lockstep(*ask), lockstep(*ask, "--count", 3)
    texts = [part.partition("\n")[2].rstrip("\n") for part in three.out.split("--- ")[1:]]
    assert len(set(texts)) == 3 and all(text.startswith("日本 ") for text in texts)
    assert texts[0] == alone.out.rstrip("\n") and len(three.lines) == 3


def test_which_checkpoint(lockstep: Lockstep, runs: Runs) -> None:
    # To an untrained model all tokens are equally likely, and the draws alone would decide.
    ask = ("sample", runs / "tiny", "--prompt", "def ", "--tokens", 40, "--temperature", 0)
    assert lockstep(*ask).out == lockstep(*ask, "--step", 4).out != lockstep(*ask, "--step", 2).out


def test_the_end_of_text_ends_it(lockstep: Lockstep, runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lockstep.core.sampling.draw.write_tokens", lambda *a: iter([300 - 1, 0, 5]))
    done = lockstep("sample", runs / "tiny", "--prompt", "x")
    assert "1 tokens" in done.err and "the model ended the text" in done.err and "endoftext" not in done.out


def test_what_cannot_be(refused, runs: Runs, here: Path) -> None:
    tiny = runs / "tiny"
    assert "nowhere is not a run directory" in refused("sample", "nowhere")
    assert refused("sample", tiny, "--step", 3).endswith("no checkpoint of step 3; it has those of step 2, 4")
    assert refused("sample", tiny, "--tokens", 0) == "tokens = 0: must be at least 1"
    assert refused("sample", tiny, "--count", -1) == "count = -1: must be at least 1"
    assert "temperature = -1.0" in refused("sample", tiny, "--temperature", -1)
    assert "top_p = 2.0" in refused("sample", tiny, "--top-p", 2)
    assert "top_k = -2" in refused("sample", tiny, "--top-k", -2)
    assert "seed = -1" in refused("sample", tiny, "--seed", -1)
    assert "not UTF-8" in refused("sample", tiny, "--prompt", "\udcff")
    assert "torch finds no CUDA device" in refused("sample", tiny, "--device", "cuda")


def test_runs_that_lack_something(refused, runs: Runs, here: Path) -> None:
    run_dir = here / "run"
    shutil.copytree(runs / "tiny", run_dir)
    tokenizer = here / "tokenizer.json"
    tokenizer.write_text(json.dumps({"model": {}, "added_tokens": [{"content": "</s>", "id": 1}]}))
    assert "is not a tokenizer.json" in refused("sample", run_dir, "--tokenizer", tokenizer)
    assert "--tokenizer FILE" in refused("sample", run_dir, "--tokenizer", here / "none.json")
    found = next((run_dir / "checkpoints" / "step_000004").glob("*.safetensors"))
    found.write_bytes(found.read_bytes()[:-1] + b"x")
    assert "was damaged after it was written" in refused("sample", run_dir, "--step", 4)
    shutil.rmtree(run_dir / "checkpoints")
    assert "has no checkpoint" in refused("sample", run_dir)
