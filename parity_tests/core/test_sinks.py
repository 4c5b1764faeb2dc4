"""Sinks: what they print and write, that they survive odd values, and that W&B never decides over a run."""

import io
import json
import math
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console

from lockstep.core.backend import StepRecord
from lockstep.core.config.schema import LogConfig, RunConfig
from lockstep.core.errors import UserError
from lockstep.core.parity.measures.verdict import SCHEMA, Check, Finding, Measure
from lockstep.core.run.directory import RunDir
from lockstep.core.sinks import phrases, tables
from lockstep.core.sinks.console import ConsoleSink
from lockstep.core.sinks.jsonl import JsonlSink
from lockstep.core.sinks.wandb import WandbSink
from lockstep.parity_tests.repository import REPO


def record(step: int, **changes) -> StepRecord:
    values = {
        "loss": 8.0 / step,
        "loss_weight": 2.0,
        "lr": 1e-3,
        "grad_norm": 2.1,
        "clip_coefficient": 0.5,
        "seconds": 2.0,
        "tokens_per_second": 6600.0,
    }
    return StepRecord(**{"step": step, "digest": "d", "tokens": 2, **values, **changes})


def check(step: int, value: float = 1.0, compared: bool = True) -> Check:
    measure = Measure("excess", value, 0.5, 2.0, "a test")
    findings = (Finding("attn", "blocks.1.attn.out", "forward", 1, "local", (measure,), 10),)
    return Check(step, findings if compared else (), ("logits: not exposed",))


def shown(total: int, play, terminal: bool = False, done: int = 0, width: int = 400, verbose: bool = False) -> str:
    text = io.StringIO()
    console = Console(file=text, force_terminal=terminal, width=width, color_system=None)
    sink = ConsoleSink(total, done, console, verbose)
    play(sink)
    sink.close()
    return text.getvalue()


def step_lines(text: str) -> list[str]:
    """Return the lines of steps, without the table at the end."""
    return [line for line in text.splitlines() if line.startswith("step ")]


# Phrases


@pytest.mark.parametrize(
    "value, text",
    [(3.14159, "3.14"), (66, "66.0"), (999, "999"), (6600, "6.60k"), (78_800, "78.8k"), (1.2416e9, "1.24G")],
)
def test_count(value, text):
    assert phrases.count(value) == text


@pytest.mark.parametrize(
    "seconds, text", [(0, "0s"), (59.4, "59s"), (59.6, "1m 00s"), (3599.7, "1h 00m"), (200, "3m 20s"), (7500, "2h 05m")]
)
def test_duration(seconds, text):
    assert phrases.duration(seconds) == text


def test_time_left_is_the_median_pace():
    assert phrases.time_left([2.0, 2.0, 90.0], 30) == "1m 00s left"
    assert phrases.time_left([], 30) == "" and phrases.time_left([2.0], 0) == ""


def test_verdicts():
    assert phrases.verdicts(0, 0, 0) == ""
    assert phrases.verdicts(3, 3, 0) == "parity 3/3 agreed"
    assert phrases.verdicts(2, 3, 1) == "parity 2/3 agreed, 1 skipped"
    assert phrases.verdicts(0, 0, 2) == "parity 2 skipped"


def test_check_lines():
    assert phrases.check_line(check(7)) == (
        "step 7: parity agreed; worst of 1 comparison: "
        "attn (forward, layer 1, at blocks.1.attn.out, from its own input), excess 1 (0.5 … 2)"
    )
    assert (
        "parity disagreed; origin: attn (forward, layer 1, at blocks.1.attn.out, from its own input), excess 44 "
        in phrases.check_line(check(7, 44.0))
    )
    assert "could not: nothing was compared (logits: not exposed" in phrases.check_line(check(7, compared=False))
    assert "excess nan" in phrases.check_line(check(7, math.nan))


def test_an_empty_finding_has_a_line_too():
    empty = Check(1, (Finding("attn", "attn", "forward", 1, "local", (), 0),), ())
    assert phrases.check_line(empty) == (
        "step 1: parity disagreed; origin: attn (forward, layer 1, from its own input), nothing was compared"
    )


# Console


def test_plain_lines_come_first_then_every_tenth_then_last():
    lines = step_lines(shown(200, lambda sink: [sink.record(record(step)) for step in range(1, 201)]))
    assert [int(line.split()[1].split("/")[0]) for line in lines] == [1, *range(20, 201, 20)]
    assert lines[1] == "step 20/200 · loss 0.4000 · lr 1.00e-03 · grad 2.1 · 6.60k tok/s · 6m 00s left"


def test_the_first_step_compiles_and_says_nothing_of_the_pace():
    lines = step_lines(shown(10, lambda sink: [sink.record(record(1, seconds=90.0)), sink.record(record(2))]))
    assert "left" not in lines[0] and lines[1].endswith("16s left")


@pytest.mark.parametrize("total, printed", [(1, 1), (3, 3), (7, 7), (25, 14)])
def test_short_runs_print_few_lines(total, printed):
    lines = step_lines(shown(total, lambda sink: [sink.record(record(step)) for step in range(1, total + 1)]))
    assert len(lines) == printed


def test_a_run_that_was_cut_short_ends_with_its_last_step():
    lines = step_lines(shown(1000, lambda sink: [sink.record(record(step)) for step in range(1, 43)]))
    assert [line.split()[1] for line in lines] == ["1/1000", "42/1000"]


def test_validation_parity_samples_and_notes_have_their_lines():
    def play(sink):
        sink.note("data: 3 shards")
        sink.record(record(1, mfu={"6N": 0.376, "causal": 0.396}))
        sink.record(record(2, metrics={"val/loss": 3.25, "val/top1": 0.5, "fp32/loss": 3.0, "fp32/difference": -2e-4}))
        sink.check(check(2))
        sink.skipped(3, "the queue was full")
        sink.record(record(4, sample="The [bold]meaning[/bold] \n\x1b[31mof"))
        sink.check(check(4, 3.0))

    text = shown(4, play, verbose=True)
    for line in (
        "data: 3 shards",
        "MFU 6N 37.6% causal 39.6%",
        "step 2: validation loss 3.2500, top-1 50.0%",
        "step 2: loss in FP32 3.0000, training precision -2.0e-04",
        "step 2: parity agreed",
        "step 3: parity check skipped: the queue was full",
        "sample: 'The [bold]meaning[/bold] \\n\\x1b[31mof'",
        "step 4: parity disagreed",
        "val 3.2500",
    ):
        assert line in text
    assert text.splitlines()[-1] == "parity 1/2 agreed, 1 skipped"
    assert "\x1b" not in text


@pytest.mark.parametrize("value", [math.nan, math.inf, 0.0])
def test_odd_values_are_shown(value):
    text = shown(1, lambda sink: sink.record(record(1, loss=value, grad_norm=value, tokens_per_second=0.0)))
    assert f"loss {value:.4f}" in text


def test_the_terminal_gets_a_bar_that_ends_as_a_line():
    def play(sink):
        for step in range(1, 6):
            sink.record(record(step, metrics={"val/loss": 3.25} if step == 3 else {}))
        sink.check(check(5))
        sink._progress.refresh()

    text = shown(5, play, terminal=True)
    assert "5/5" in text and "loss 1.6000 · val 3.2500" in text and "parity 1/1 agreed" in text
    assert "step 3: validation loss 3.2500" in text
    assert "step 5/5 · loss 1.6000" in text


def test_closing_twice_and_closing_without_a_record():
    assert shown(5, lambda sink: sink.close()) == ""
    assert shown(5, lambda sink: sink.close(), terminal=True).endswith("\x1b[2K"), "the bar stays on the screen"


def measured(step: int, steps: int) -> StepRecord:
    """Return a record with everything that a line may hold, at the end of a long run."""
    metrics = {"val/loss": 3.25, "fp32/loss": 3.0, "attention_logit/max": 9.0} | LOGITS | SEEN
    return record(steps - 3 + step, mfu={"6N": 0.376, "causal": 0.396}, metrics=metrics, host=HOST)


@pytest.mark.parametrize("verbose", [True, False])
@pytest.mark.parametrize("terminal", [True, False])
@pytest.mark.parametrize("steps", [9, 240, 1_000_000])
@pytest.mark.parametrize("width", [60, 80, 120])
def test_no_line_is_wider_than_the_terminal(width, steps, terminal, verbose):
    def play(sink):
        for step in range(1, 4):
            sink.record(measured(step, steps))
            sink.check(check(steps - 3 + step, 1.0 if step < 3 else 44.0))
            sink.skipped(steps, "the queue was full, as the reference takes longer for a check than steps take")
            if sink._progress:
                sink._progress.refresh()

    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown(steps, play, terminal, width=width, verbose=verbose))
    wide = [line for line in re.split(r"[\r\n]", text) if len(line) > width]
    if terminal:
        assert wide == []
    else:  # a file's lines of events and, if they are asked for, of details stay whole
        assert [line for line in wide if " · " in line and not verbose] == []
    assert f"step {steps}/{steps} · loss " in text


def test_what_matters_less_is_left_out_first():
    line = phrases.measures(measured(1, 240), 3.25, {"6N": 0.376})
    parts = {"step": "step 120/240", **line, "left": "3m 20s left", "verdict": "parity 3/3 agreed"}
    whole = phrases.fitting(parts, 400)
    assert whole == (
        "step 120/240 · loss 0.0336 · val 3.2500 · lr 1.00e-03 · grad 2.1 · 6.60k tok/s · MFU 6N 37.6% · "
        "3m 20s left · parity 3/3 agreed"
    )
    assert phrases.fitting(parts, 91) == (
        "step 120/240 · loss 0.0336 · lr 1.00e-03 · 6.60k tok/s · 3m 20s left · parity 3/3 agreed"
    )
    assert phrases.fitting(parts, 60) == "step 120/240 · loss 0.0336 · lr 1.00e-03 · 6.60k tok/s"
    assert phrases.fitting(parts, 3) == "step 120/240"


def test_the_live_line_has_a_bar_where_there_is_room():
    def play(sink):
        sink.record(record(1))
        sink.record(record(2))
        sink._progress.refresh()

    assert "██████████           step 2/4 · loss 4.0000" in shown(4, play, terminal=True)
    assert "█" not in shown(4, play, terminal=True, width=56)


def test_events_are_broken_between_words_on_a_terminal_and_whole_in_a_file():
    words = "step 4: a note that has more words than a line of a terminal of forty columns has room for"

    def play(sink):
        sink.note(words)

    assert words in shown(4, play, width=40).splitlines()
    on_a_terminal = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown(4, play, terminal=True, width=40))
    assert words not in on_a_terminal and words in " ".join(on_a_terminal.split())


def test_the_run_ends_with_a_table():
    def play(sink):
        sink.record(record(1, host={"seconds/compute": 2.0, "seconds/data": 2.0}, seconds=60.0))
        sink.record(record(2, metrics={"val/loss": 3.25}, grad_norm=7.0))
        sink.record(record(3, metrics={"val/loss": 3.5}, host=HOST, tokens=300))

    cells = [line.strip("│ ").split("│") for line in shown(3, play).splitlines() if line.startswith("│")]
    assert {name.strip(): words.strip() for name, words in cells} == {
        "loss": "2.6667 at step 3, 8.0000 at step 1",
        "validation loss": "3.5000 at step 3, lowest 3.2500 at step 2",
        "pace": "75.5 tokens/s after the first step",
        "time": "8s: compute 62%, data 38%",
        "gradient norm": "2.1, largest 7 at step 2",
        "memory": "resident 0.66 GB, peak 0.71 GB",
    }


# Tables


def printed(table) -> str:
    text = io.StringIO()
    Console(file=text, width=120).print(table)
    return text.getvalue()


def test_parameter_groups():
    rows = [
        tables.GroupRow("matrices", 1_000_000, 1.0, 0.1, "AdamW", "bf16", "mlp"),
        tables.GroupRow("gains", 500, 1.0, 0.0, "AdamW", "fp32", "no"),
    ]
    text = printed(tables.parameter_groups(rows))
    for part in ("Parameters: 1,000,500", "matrices", "1,000,000", "0.1", "bf16"):
        assert part in text


def test_losses_to_know():
    text = printed(tables.losses_to_know(4096, {"unigram": math.log(100), "bigram": math.log(10)}))
    for part in ("uniform guess", "8.3178", "4,096", "unigram", "4.6052", "100.0", "10.0"):
        assert part.replace(",", "") in text.replace(",", "")


def test_a_row_of_another_length_is_refused():
    with pytest.raises(ValueError, match="1 cells under 2 headers"):
        tables.table("t", ("a", "b"), [["only one"]])
    assert "[bold]" in printed(tables.facts("t", {"path": "[bold]x"}))


# JSON lines


def test_jsonl(tmp_path):
    with RunDir.create(tmp_path / "r", RunConfig(), {}) as run:
        sink = JsonlSink(run)
        sink.record(record(1))
        sink.check(check(1))
        sink.skipped(2, "the queue was full")
        sink.note("nothing")
        sink.close()
    reader = RunDir.open(tmp_path / "r")
    assert [line["step"] for line in reader.records()] == [1]
    assert reader.checks() == [
        json.loads(json.dumps(check(1).to_json())),
        {"schema": SCHEMA, "step": 2, "verdict": "skipped", "reason": "the queue was full"},
    ]


# Weights & Biases

OFFLINE = RunConfig(name="r", log=LogConfig(wandb="offline"))


@pytest.fixture
def offline(tmp_path, monkeypatch):
    """Make a run that logs offline, away from the settings of the user who runs the tests."""
    for name in ("WANDB_DIR", "WANDB_MODE", "WANDB_PROJECT", "WANDB_RUN_ID", "WANDB_RESUME", "WANDB_SILENT"):
        monkeypatch.delenv(name, raising=False)
    for name in ("WANDB_CONFIG_DIR", "WANDB_CACHE_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "home"))
    RunDir.create(tmp_path / "r", OFFLINE, {"wandb_id": None}).close()
    return tmp_path / "r"


def test_offline_run_is_written_and_a_resume_keeps_its_id(offline, capfd):
    identities = []
    for steps in ((1, 2), (2, 3)):  # the second goes on from step 1
        with RunDir.open(offline, write=True) as run:
            run.resume_from(steps[0] - 1, lambda text: None)  # there are no records
            sink = WandbSink(run, pytest.fail)
            for step in steps:
                sink.record(record(step, mfu={"6N": 0.4}, metrics={"val/loss": 3.0}, sample="text"))
                sink.check(check(step))
            sink.skipped(3, "full")
            sink.note("nothing")
            sink.close()
            sink.close()
            identities.append(run.info["wandb_id"])
    assert identities[0] and identities[0] == identities[1]
    files = list((offline / "wandb").glob("offline-run-*/*.wandb"))
    assert len(files) == 2 and {path.name for path in files} == {f"run-{identities[0]}.wandb"}
    names = (b"train/loss", b"mfu/6N", b"val/loss", b"parity/agreed", b"parity/worst_strain", b"sample")
    # W&B's own process writes them, and may do so a little after `finish`.
    until = time.monotonic() + 30
    while not all(name in path.read_bytes() for path in files for name in names):
        assert time.monotonic() < until, [path.read_bytes() for path in files]
        time.sleep(0.05)
    assert capfd.readouterr() == ("", "")


class Broken:
    """Stands for a W&B run whose service has died."""

    def log(self, values):
        raise RuntimeError("the service is gone")

    finish = log


def test_a_failure_is_said_once_and_stops_nothing(offline):
    warnings: list[str] = []
    with RunDir.open(offline, write=True) as run:
        sink = WandbSink(run, warnings.append)
        real, sink._run = sink._run, Broken()
        for step in (1, 2, 3):
            sink.record(record(step))
            sink.check(check(step))
        sink.close()
        real.finish()
    assert warnings == ["Weights & Biases failed and is left out from here on: the service is gone"]


def test_missing_wandb_is_said_with_the_command(offline, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with (
        RunDir.open(offline, write=True) as run,
        pytest.raises(UserError, match=r"needs wandb, .*: pip install 'lockstep\[wandb\]'") as error,
    ):
        WandbSink(run, pytest.fail)
    assert "\n" not in str(error.value)


def test_a_failing_start_is_an_error_before_training(offline, monkeypatch):
    import wandb

    def refuse(**_):
        raise RuntimeError("no API key")

    monkeypatch.setattr(wandb, "init", refuse)
    with RunDir.open(offline, write=True) as run, pytest.raises(UserError, match="did not start: no API key"):
        WandbSink(run, pytest.fail)


def test_wandb_is_not_loaded_by_the_sinks():
    names = ", ".join(f"lockstep.core.sinks.{name}" for name in ("console", "wandb", "tables"))
    program = f"import sys; import {names}; print('wandb' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], cwd=Path(REPO), capture_output=True, text=True)
    assert done.stdout.strip() == "False", done.stderr


def test_a_step_that_fp16_left_out_is_said_once():
    skipped = {"loss_scale": 2.0**15, "finite_steps": 0.0, "skipped_steps": 1.0}
    (line,) = phrases.metric_lines(7, skipped, {"skipped_steps": 0.0})
    assert line == "step 7: left out, gradients not finite; 1 so far, the loss scale is now 2^15"
    assert phrases.metric_lines(8, skipped | {"finite_steps": 1.0}, skipped) == []
    grown = {"loss_scale": 2.0**16, "finite_steps": 0.0, "skipped_steps": 1.0}
    assert phrases.metric_lines(9, grown, skipped) == []


SEEN = {
    "update_ratio/matrices": 2e-3,
    "param_norm/matrices": 65.82,
    "grad_norm/matrices": 0.3429,
}
HOST = {"memory/resident": 6.6e8, "memory/peak": 7.1e8, "seconds/compute": 3.0, "seconds/data": 1.0}


def test_norms_memory_and_time_are_shown():
    def play(sink):
        sink.record(record(1, host={"seconds/compute": 2.0, "seconds/data": 2.0}))
        sink.record(record(2, metrics=SEEN, host=HOST))
        sink.record(record(3, metrics={"train/top1": 0.25, "fp32/loss": 3.0, "attention_logit/max": 9.0} | LOGITS))

    brief = shown(30, play)
    assert not any(words in brief for words in ("update/weight", "norms, w", "FP32", "attention logit", "Where the"))
    lines = shown(30, play, verbose=True).splitlines()
    assert "step 2: update/weight: matrices 2.0e-03" in lines
    assert "step 2: norms, weights/gradients: matrices 65.8/0.34" in lines
    assert "step 2: memory: resident 0.66 GB, peak 0.71 GB" in lines
    assert "step 3: loss in FP32 3.0000, top-1 25.0% (a slice of the batch)" in lines
    assert "step 3: largest attention logit 9, in blocks.1" in lines
    title = next(i for i, line in enumerate(lines) if line.startswith("Where the time went"))
    table = [line.split("│") for line in lines[title:]]
    cells = [[cell.strip() for cell in row if cell.strip()] for row in table if len(row) > 2]
    assert cells == [["compute", "5.00", "62.5%"], ["data", "3.00", "37.5%"], ["all", "8.00", "100.0%"]]


LOGITS = {"attention_logit/blocks.0": 8.0, "attention_logit/blocks.1": 9.0}


def test_a_step_that_was_left_out_is_said():
    text = shown(
        9, lambda sink: sink.record(record(1, left_out="first in the loss (nan)", metrics={"skipped_steps": 3}))
    )
    assert "step 1: left out, not finite: first in the loss (nan); 3 so far" in text


def test_a_table_shows_names_as_they_are() -> None:
    """A string with `[red]` is markup for rich, which leaves it out."""
    drawn = io.StringIO()
    Console(file=drawn, width=80).print(tables.table("runs [red]", ("[bold]",), [("[/x]",)]))
    printed = drawn.getvalue()
    assert "runs [red]" in printed and "[bold]" in printed and "[/x]" in printed
