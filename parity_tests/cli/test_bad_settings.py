"""Settings that are wrong, in a file or on the command line: one clear line each, exit code 2, nothing written."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.core.errors import UserError
from lockstep.core.parity.measures import calibrated_bounds
from lockstep.parity_tests.cli.conftest import Lockstep
from lockstep.parity_tests.tiny import tiny_config
from lockstep.scripts.studies.clean_runs import draw_config

# Arguments after `train FILE`, and the message that is due.
WRONG = [
    ("--optim.peek-lr 3", "command line: optim.peek_lr is not a setting; did you mean optim.peak_lr?"),
    ("--optim.peek-lr=3", "command line: optim.peek_lr is not a setting; did you mean optim.peak_lr?"),
    ("--modle.hidden 3", "command line: modle.hidden is not a setting; did you mean model.hidden?"),
    ("-train.steps 3", "command line: -train.steps is not an option; did you mean --train.steps?"),
    ("---optim.peak-lr=3", "command line: ---optim.peak-lr is not an option; did you mean --optim.peak-lr?"),
    ("--overwrit", "command line: overwrit is not a setting; did you mean overwrite?"),
    ("--optim.peak-lr abc", "command line: optim.peak_lr = 'abc': must be a number"),
    ("--optim.peak-lr nan", "command line: optim.peak_lr = 'nan': must be a finite number"),
    ("--optim.peak-lr -1", "command line: optim.peak_lr = '-1': must be greater than 0"),
    ("--optim.peak-lr", "command line: optim.peak-lr has no value"),
    ("--train.steps abc", "command line: train.steps = 'abc': must be an integer"),
    ("--train.steps 0", "command line: train.steps = '0': must be greater than 0"),
    ("--model.tied maybe", "command line: model.tied = 'maybe': must be true or false"),
    ("--log.wandb on", "command line: log.wandb = 'on': must be 'disabled', 'offline' or 'online'"),
    ("--backend tf", "'tf' names no backend: write FILE.py:NAME or module:NAME"),
    ("--name ../x", "command line: name = '../x'"),
    ("--resume", "command line: resume has no value"),
    ("another.toml", "command line: not understood: another.toml"),
    ("--model.heads 16 --model.kv-heads 3", "command line: model.heads: 3 KV heads do not divide 16 query heads"),
    ("--model.hidden 66", "command line: model.hidden: 4 heads do not divide hidden = 66"),
    ("--model.hidden 68", "a head dimension of 17 is odd"),
    (
        "--train.batch-size 3",
        "command line: train.batch_size: 3 sequences are not a multiple of ranks × micro_batch_size",
    ),
    ("--optim.warmup-steps 12", "12 warm-up steps do not fit in 12 steps"),
    ("--train.sequence-length 10000000", "fewer than one sequence of 10000000 and its target"),
    ("--model.vocab-size 299", "model.vocab_size = 299 does not cover the tokenizer of"),
    ("--model.vocab-size 1000000000000", "model.vocab_size = 1000000000000: 64,000,000,074,"),
]


@pytest.mark.parametrize(("arguments", "said"), WRONG, ids=[a for a, _ in WRONG])
def test_one_wrong_setting(refused, run_file: Path, arguments: str, said: str) -> None:
    assert said in refused("train", run_file, *arguments.split())


@pytest.mark.parametrize("command", ["train", "parity", "data prepare"])
def test_every_command_that_takes_settings_refuses_an_unknown_one(refused, run_file: Path, command: str) -> None:
    said = refused(*command.split(), run_file, "--optim.peek-lr", "3")
    assert said == "command line: optim.peek_lr is not a setting; did you mean optim.peak_lr?"


def test_an_unknown_option_beside_a_run_that_goes_on(refused) -> None:
    said = refused("train", "--resume", "x", "--from", "20")
    assert said == "command line: from is not a setting; did you mean from_step?"


def test_a_missing_positional(refused) -> None:
    assert refused("parity").startswith("command line: CONFIG is missing: lockstep parity CONFIG")
    told = "lockstep convert FROM TO … (see --help)"
    assert refused("convert") == f"command line: FROM and TO are missing: {told}"
    assert refused("convert", "runs/tiny") == f"command line: TO is missing: {told}"
    assert refused("report").startswith("command line: RUN is missing: lockstep report RUN")
    assert refused("train") == "name a run file to train, or --resume RUN to continue a run"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            "--steps abc",
            "command line: steps = 'abc': must be an integer",
        ),
        ("--steps 0", "command line: steps = 0: must be at least 1"),
        ("--step 1", "command line: step is not a setting; did you mean steps?"),
        (
            "--json /nowhere/v.json",
            "command line: json = /nowhere/v.json: cannot write there; name a file in an existing folder",
        ),
        ("--json .", "command line: json = .: cannot write there; name a file in an existing folder"),
    ],
)
def test_wrong_options_of_parity(refused, run_file: Path, arguments: str, said: str) -> None:
    assert refused("parity", run_file, *arguments.split()) == said


@pytest.mark.parametrize("command", [["bench", "best"], ["replay"], ["sample"]])
def test_a_setting_that_a_command_does_not_take(refused, run_file: Path, command: list[str]) -> None:
    said = (
        "command line: train.ranks is a setting of run files, not an option of this command (--help lists the options)"
    )
    assert refused(*command, run_file, "--train.ranks", "2") == said


def test_wrong_options_of_prepare(refused, run_file: Path) -> None:
    assert "workers = -1" in refused("data", "prepare", run_file, "--workers", "-1")
    assert "workers = 'x': must be an integer" in refused("data", "prepare", run_file, "--workers", "x")


def test_every_error_at_once_each_with_its_place(lockstep: Lockstep, here: Path) -> None:
    file = here / "bad.toml"
    file.write_text('[optim]\npeek_lr = 3\n[model]\nhidden = 65\nlayers = "two"\n')
    done = lockstep("train", file, "--trian.steps", "3", "--data.seed", "-1")
    assert done.code == 2
    assert sorted(done.lines) == sorted(
        [
            "lockstep: command line: trian.steps is not a setting; did you mean train.steps?",
            "lockstep: command line: data.seed = '-1': must be greater than or equal to 0",
            f"lockstep: {file}: optim.peek_lr is not a setting; did you mean optim.peak_lr?",
            f"lockstep: {file}: model.layers = 'two': must be an integer",
            f"lockstep: {file}: model.hidden: 8 heads do not divide hidden = 65",
        ]
    )
    assert list(here.iterdir()) == [file]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("name =\n", "not TOML"),
        ('base = "nowhere.toml"\n', "no such run file"),
        ('base = "bad.toml"\n', "is its own base"),
        ("\x00", "not TOML"),
        ("model = 3\n", "model is a section, not a value"),
    ],
)
def test_a_run_file_that_is_none(refused, here: Path, text: str, said: str) -> None:
    (here / "bad.toml").write_text(text)
    assert said in refused("train", "bad.toml")


def test_no_run_file(refused) -> None:
    assert refused("train", "nowhere.toml") == "no such run file: nowhere.toml"
    assert refused("data", "prepare", "nowhere.toml") == "no such run file: nowhere.toml"
    assert "cannot read" in refused("parity", "/")


@pytest.mark.parametrize("command", ["train", "parity"])
@pytest.mark.parametrize("lost", ["all", "forward/attn"])
def test_checks_without_calibrated_bounds_do_not_start(
    refused, run_file: Path, monkeypatch: pytest.MonkeyPatch, command: str, lost: str
) -> None:
    table = {recipe: dict(kinds) for recipe, kinds in calibrated_bounds.table().items()}
    kinds = table["bf16/eager"]
    for kind in list(kinds) if lost == "all" else [lost]:
        del kinds[kind]
    monkeypatch.setattr(calibrated_bounds, "table", lambda: table)
    every = ["--parity.every", "5"] if command == "train" else []
    said = refused(command, run_file, *every)
    assert said.startswith(f"no clean runs of bf16/eager{'' if lost == 'all' else ' (forward/attn)'} were measured")
    assert "python -m lockstep.scripts.studies.calibrate bf16/eager" in said


def test_who_asks_for_checks_of_tf32_is_told_how_its_bounds_are_measured() -> None:
    on_gpu = tiny_config("tf32").model_copy(update={"device": "cuda"})
    with pytest.raises(UserError, match=r"calibrate tf32/eager --device cuda in a checkout"):
        calibrated_bounds.require(on_gpu)
    assert draw_config(0, "tf32/eager").precision.chosen.on_tensor_cores


@pytest.mark.parametrize("recipe", ["fp64/eager", "fp32/eager", "fp32/compiled", "bf16/eager", "bf16/compiled"])
def test_every_recipe_that_can_be_asked_for_has_bounds(recipe: str) -> None:
    policy, program = recipe.split("/")
    calibrated_bounds.require(tiny_config(policy, compiled=program == "compiled"))


@pytest.mark.parametrize("command", ["train", "parity"])
def test_a_launch_that_does_not_fit_is_refused(
    refused, run_file: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "train.ranks = 1, but torchrun launched 2 processes" in refused(command, run_file)
