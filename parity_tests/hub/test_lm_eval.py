"""lm-evaluation-harness on an export, offline: the example of docs/guide/hugging_face.md, held to Lockstep's own NLL.

Skipped without `lm_eval`, which the test environment does not have: it needs some forty packages more.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from lockstep.core.backend import Batch
from lockstep.core.checkpoint.format import load_checkpoint
from lockstep.core.data.tokenizer import load_tokenizer
from lockstep.core.run.directory import RunDir
from lockstep.parity_tests.repository import REPO

EXAMPLE = REPO / "docs/examples/lm_eval"
# Short enough to be read at once: 31 tokens and the one before them are the longest sequence of the run.
TEXTS = ("import os\n", "def f(x):\n    return 1\n", "日本 is text")


def test_the_questions_are_made_of_the_standard_library(tmp_path: Path) -> None:
    subprocess.run([sys.executable, EXAMPLE / "make_questions.py"], cwd=tmp_path, check=True)
    questions = [json.loads(line) for line in (tmp_path / "python_words.jsonl").read_text().splitlines()]
    assert len(questions) == 200 and len((tmp_path / "python_text.jsonl").read_text().splitlines()) == 20
    assert all(len(set(one["choices"])) == 4 and 0 <= one["answer"] < 4 for one in questions)
    assert len({one["answer"] for one in questions}) == 4


@pytest.mark.skipif(find_spec("lm_eval") is None, reason="needs lm-eval (pip install 'lm-eval>=0.4,<0.5')")
def test_it_measures_what_lockstep_measures(exported: Path, tmp_path: Path) -> None:
    shutil.copytree(EXAMPLE, tmp_path / "tasks")
    subprocess.run([sys.executable, "make_questions.py"], cwd=tmp_path / "tasks", check=True)
    lines = [json.dumps({"text": text}) for text in TEXTS]
    (tmp_path / "tasks/python_text.jsonl").write_text("\n".join(lines) + "\n")
    words = ["--model", "hf", "--model_args", f"pretrained={exported},dtype=float32", "--include_path", "."]
    words += ["--tasks", "python_words,python_text", "--device", "cpu", "--batch_size", "8", "--limit", "20"]
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(tmp_path / "home")}
    done = subprocess.run(
        [sys.executable, "-m", "lm_eval", *words, "--output_path", "results"],
        cwd=tmp_path / "tasks",
        env=os.environ | offline,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    (file,) = (tmp_path / "tasks/results").rglob("results_*.json")
    results = json.loads(file.read_text())["results"]
    assert 0 <= results["python_words"]["acc,none"] <= 1
    assert results["python_text"]["bits_per_byte,none"] == pytest.approx(bits_per_byte(exported), rel=1e-5)


def bits_per_byte(exported: Path) -> float:
    """Σ −log₂ p(token) / bytes of the texts, each after an end of text, by the session of the run."""
    from lockstep.torch_backend.backend import TorchBackend

    run = RunDir.open(exported.parent / "one")
    session = TorchBackend().open(run.config)
    session.load(load_checkpoint(run.checkpoints()[-1])[0])
    tokenizer = load_tokenizer(Path(run.config.data.path) / "tokenizer.json")
    nats = 0.0
    for text in TEXTS:
        ids = tokenizer.encode_documents([text])[0].astype(np.int32)
        assert len(ids) < run.config.train.sequence_length
        before = np.concatenate(([tokenizer.eot_id], ids[:-1])).astype(np.int32)
        batch = Batch(before[None], ids[None], np.ones((1, len(ids)), np.float32))
        nats += float(session.evaluate(batch)["nll"].sum(dtype=np.float64))
    session.close()
    return nats / math.log(2) / sum(len(text.encode()) for text in TEXTS)
