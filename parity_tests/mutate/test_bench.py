"""Mutants end to end: planted, measured, judged; rows that are kept; what the command prints and how it ends."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from lockstep.core.errors import UserError
from lockstep.core.files.jsonl import scan_lines
from lockstep.core.mutate import draw as drawing
from lockstep.core.mutate.mutant import Mutant
from lockstep.core.mutate.rows import Row, Score
from lockstep.jax_backend.backend import JaxBackend
from lockstep.parity_tests.cli.workspace import REPO
from lockstep.parity_tests.mutate.data import Text
from lockstep.parity_tests.tiny import tiny_config
from lockstep.scripts import cli
from lockstep.scripts.commands import mutate
from lockstep.scripts.shared import mutating
from lockstep.scripts.shared.mutating import MutantBench
from lockstep.scripts.studies.tiny_workspace import RUN_FILE, write_workspace
from lockstep.torch_backend.backend import TorchBackend

pytestmark = pytest.mark.usefixtures("in_one_process", "frozen_heap")


@cache
def bench(policy: str = "bf16", compiled: bool = False) -> MutantBench:
    config = tiny_config(policy, compiled)
    return MutantBench(config, Text(config), JaxBackend(), TorchBackend())


def test_the_honest_trainer_agrees() -> None:
    assert bench().honest_check().verdict == "agreed"


NAMED = {
    "forward": ("blocks.1.attn.q:forward*scale(+2^-4)@always", ("q", "forward", 1)),
    "resumed": ("blocks.0.mlp.act.up:input*swap(column)@resumed", ("act", "forward", 0)),
    "parameter": ("blocks.1.mlp.down_proj.weight:backward*zero(row,last)@always", ("down_proj", "backward", 1)),
    "edge": ("blocks.0.attn.out.v:backward*flip@last-row", ("attn", "backward", 0)),
    "micro-batch": ("final_norm:forward*drop@last-micro", ("accumulation", "backward", None)),
    "gradient": ("blocks.1.attn.k_proj.weight:gradient*other@always", ("gradients", "backward", 1)),
    "moment": ("exp_avg/embed.weight:moment*stale@always", ("moments", "update", None)),
    "update": ("blocks.1.mlp_norm.weight:update*drop@from-step-3", ("update", "update", 1)),
    "scalar": ("grad_norm:scalar*twice@always", ("grad_norm", "update", None)),
    "batch": ("targets:batch*shift(position)@always", ("tokens", "data", None)),
    "loader": ("tokens:loader*swap(row)@always", ("tokens", "data", None)),
    "written": ("exp_avg_sq/embed.weight:written*narrow(bf16)@always", ("checkpoint", "state", None)),
    "read": ("params/embed.weight:read*scale(+2^-9)@always", ("checkpoint", "state", None)),
}


@pytest.mark.parametrize("what", NAMED)
def test_a_mutant_is_found_and_named(what: str) -> None:
    text, named = NAMED[what]
    row = bench().row(Mutant.parse(text))
    assert not row.error and row.acts and row.effect > 0
    assert row.found and row.exact and row.named == named


@pytest.mark.parametrize(
    ("condition", "stage"), [("untapped", "compiler"), ("compiled", "act")], ids=["untapped", "compiled"]
)
def test_a_program_that_is_wrong_only_as_it_is_compiled(condition: str, stage: str) -> None:
    row = bench("bf16", compiled=True).row(Mutant.parse(f"blocks.0.mlp.act:backward*drop@{condition}"))
    assert not row.error and row.found and row.exact
    assert row.named is not None and row.named[0] == stage


def test_what_changes_no_bit_is_counted_apart() -> None:
    row = bench().row(Mutant.parse("blocks.0.attn.q:forward*narrow(bf16)@always"))
    assert row.equivalent and not row.found and not row.survives
    score = Score.of([row])
    assert (score.equivalent, score.large.of, score.less.of) == (1, 0, 0)


def test_a_program_that_is_traced_anew_changes_no_bit() -> None:
    """The mutant begins to act in step 3, and rounds bf16 to bf16."""
    row = bench("bf16", compiled=True).measured(Mutant.parse("blocks.1.attn.q:forward*narrow(bf16)@from-step-3"))
    assert row.equivalent and not row.error


def test_a_step_that_is_not_finite_ends_the_trainer() -> None:
    row = bench().row(Mutant.parse("total_weight:scalar*drop@always"))
    assert row.stopped and not row.survives and Score.of([row]).stopped == 1


Command = Callable[..., int]


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Command:
    """Return the command on this text. A judge that sees nothing but `seen` lists them all as not found."""
    (tmp_path / "run.toml").write_text(RUN_FILE.format(data=tmp_path / "data", source=tmp_path / "text"))
    monkeypatch.setattr(mutate, "open_data", lambda config, file, given: Text(config))

    def run(*words: str) -> int:
        return mutate.main([str(tmp_path / "run.toml"), *words])

    return run


def blind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every check agree, whatever it was given."""
    honest = bench().honest_check()
    monkeypatch.setattr(MutantBench, "_check", lambda self, session, step, handed: honest)


SURVIVOR = "blocks.0.attn.q:forward*twice@always"


def test_a_survivor_is_a_line_that_runs_it(
    command: Command, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    blind(monkeypatch)
    assert command("--only", SURVIVOR, "--out", str(tmp_path / "out")) == 1
    printed = capsys.readouterr().out
    line = next(one for one in printed.splitlines() if one.startswith("lockstep mutate"))
    again = shlex.split(line)
    assert again == ["lockstep", "mutate", str(tmp_path / "run.toml"), "--only", SURVIVOR]
    assert line in (tmp_path / "out" / "mutants.md").read_text()
    assert mutate.main(again[2:]) == 1
    assert "NOT FOUND" in capsys.readouterr().out


def test_each_recipe_of_a_page_has_its_own_lines(
    command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    blind(monkeypatch)
    out = ("--only", SURVIVOR, "--out", str(tmp_path / "out"))
    assert command(*out, "--precision.policy", "fp32") == 1
    assert command(*out, "--resume", "--precision.policy", "bf16") == 1
    page = (tmp_path / "out" / "mutants.md").read_text()
    for policy in ("fp32", "bf16"):
        assert f"## {policy}/eager" in page
        assert f"--precision.policy {policy} --only '{SURVIVOR}'" in page


def test_rows_are_kept_and_go_on(command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    blind(monkeypatch)
    out = ("--out", str(tmp_path / "out"))
    command("--sample", "1", *out)
    rows = [line.value for line in scan_lines(tmp_path / "out" / "mutants.jsonl") if line.value and "id" in line.value]
    assert len(rows) == 1 and all(json.loads(json.dumps(Row.from_json(row).to_json())) for row in rows)
    with pytest.raises(UserError, match="exists already"):
        command("--sample", "1", *out)
    tried: list[str] = []
    right = MutantBench.row

    def row(self: MutantBench, mutant: Mutant) -> Row:
        tried.append(str(mutant))
        return right(self, mutant)

    monkeypatch.setattr(MutantBench, "row", row)
    command("--sample", "2", "--resume", *out)
    assert len(tried) == 1 and not {row["id"] for row in rows} & set(tried)
    with pytest.raises(UserError, match="other bounds, settings or another seed"):
        command("--sample", "2", "--resume", "--draw-seed", "7", *out)


ON_RANKS = {
    "blocks.0.mlp.act:forward*scale(+2^-4)@one-rank": ("act", "forward", 0),
    "blocks.1.mlp.up_proj.weight:gradient*drop@one-rank": ("reduction", "backward", 1),
    "blocks.1.mlp.up_proj.weight:part*twice@one-rank": ("reduction", "backward", 1),
    "blocks.1.mlp.up_proj.weight:reduced*own@one-rank": ("reduction", "backward", 1),
    "blocks.1.mlp.up_proj.weight:update*drop@one-rank": ("update", "update", None),
    "clip_coefficient:scalar*twice@one-rank": ("clip_coefficient", "update", None),
    "tokens:loader*swap(row)@one-rank": ("tokens", "data", None),
}


def test_a_rank_that_is_wrong_by_itself_is_named(tmp_path: Path) -> None:
    file = write_workspace(tmp_path)
    assert cli.run(["data", "prepare", str(file)]) == 0
    words = ["mutate", str(file), "--train.ranks", "2", "--out", str(tmp_path / "out"), "--loss.head", "full"]
    done = subprocess.run(
        [sys.executable, "-m", "lockstep", *words, "--only", *ON_RANKS],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    lines = [line.value for line in scan_lines(tmp_path / "out" / "mutants.jsonl")]
    rows = [Row.from_json(line) for line in lines if line and "id" in line]
    assert {row.id: row.named for row in rows} == ON_RANKS
    assert all(row.exact and row.recipe == "bf16/eager, 2 ranks" for row in rows)
    # Rank 0 computes the right thing: the sizes are those on the rank that is wrong.
    assert all(row.effect > 1e-3 for row in rows if "loader" not in row.id)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--parallel.strategy", "fsdp"), "parallel.strategy = fsdp: mutants change whole tensors"),
        (("--jobs", "2"), "jobs = 2: with 2 ranks it must be 1"),
    ],
)
def test_what_ranks_cannot_mutate_is_refused(command: Command, words: tuple[str, ...], told: str) -> None:
    with pytest.raises(UserError, match=re.escape(told)):
        command("--train.ranks", "2", *words)


def test_nothing_to_mutate_fails(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="at least 1"):
        command("--sample", "0")
    with pytest.raises(UserError, match="no mutant changed a bit"):
        command("--only", "blocks.0.attn.q:forward*narrow(bf16)@always", "--precision.policy", "bf16")
    monkeypatch.setattr(drawing, "places", lambda config: [])
    with pytest.raises(UserError, match="nothing to mutate"):
        command("--sample", "5")


def test_processes_share_the_mutants(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers are given configuration and ids alone; here they are threads, with a bench that is there already."""
    from concurrent.futures import ThreadPoolExecutor

    def pool(jobs: int, context: Any, begin: Callable[..., None], arguments: tuple[Any, ...]) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(jobs)

    monkeypatch.setattr(mutating, "ProcessPoolExecutor", pool)
    monkeypatch.setattr(mutating, "_bench", [bench()])
    blind(monkeypatch)
    texts = [SURVIVOR, "nll:validation*flip@always"]
    found = list(mutating.run(bench().config, Text(bench().config), [Mutant.parse(text) for text in texts], 2))
    assert {row.id for row in found} == set(texts)


def test_the_score_sorts_by_what_a_mutant_moves() -> None:
    row = Row("grad_norm:scalar*drop@always", "bf16/eager", (("grad_norm", "update", None),), 1)
    rows = [replace(row, effect=effect) for effect in (0.5, 0.02, float("nan"), 5e-3, 1e-5)]
    rows[0] = replace(rows[0], found=True, exact=True)
    rows[4] = replace(rows[4], update=0.05)
    score = Score.of(rows)
    assert (score.large.count, score.large.of, score.named.of, score.small.of, score.less.of) == (1, 3, 1, 1, 1)
    assert (score.update.count, score.update.of) == (0, 1)
    assert [row.survives for row in rows] == [False, True, True, False, False]
    assert all(len(text) <= 80 for text in score.lines())
