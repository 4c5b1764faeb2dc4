"""`lockstep plan` in this process: what it prints and writes, how it ends, what it refuses."""

import json

import pytest

from lockstep.core.config.file import load_config
from lockstep.core.plan import GPUS, fits
from lockstep.core.plan.choices import POLICIES, choices, micro_batches, smallest_change, with_settings
from lockstep.core.plan.estimate import at_length
from lockstep.core.sinks.tables import stacked
from lockstep.parity_tests.repository import REPO
from lockstep.scripts import cli
from lockstep.scripts.studies import plan_check

LLAMA = str(REPO / "configs/llama-1b.toml")


def test_the_published_run(capsys, tmp_path):
    assert cli.run(["plan", LLAMA, "--json", str(tmp_path / "plan.json")]) == 0
    out = capsys.readouterr().out
    for said in ("1,241,581,568", "14.90 GB", "7.449 G", "7.852 G", "8.255 G", "1979 is the sparse"):
        assert said in out
    data = json.loads((tmp_path / "plan.json").read_text())
    assert (data["parameters"], data["fits"], data["policy"]) == (1_241_581_568, True, "none")
    assert {choice["policy"] for choice in data["choices"]} == set(POLICIES)
    assert data["cost"] == pytest.approx(data["days"] * 24 * GPUS["h100"].price)


def test_checks_are_planned_and_what_does_not_fit_is_said(capsys, tmp_path):
    small = ["--train.batch-size", "2", "--train.micro-batch-size", "1", "--train.curriculum", ""]
    budgets = ["--parity.disk-gb", "20", "--parity.memory-gb", "40", "--parity.every", "500"]
    assert cli.run(["plan", LLAMA, *small, *budgets, "--json", str(tmp_path / "plan.json")]) == 0
    printed = capsys.readouterr()
    checks = json.loads((tmp_path / "plan.json").read_text())["checks"]
    during, thorough = checks["during_training"], checks["thorough"]
    for said in ("every 500 steps", f"{during['kept'] / 1e9:,.2f} GB", f"{thorough['disk'] / 1e9:,.2f} GB"):
        assert said in printed.out
    assert "of the 0 that may wait" in printed.out and printed.out.count("s; not measured") == 2
    assert during["kept"] == sum(during["evidence"].values()) and thorough["transient"] == 3 * 4 * 1_241_581_568
    assert "GB on the disk, and parity.disk_gb is 20: " in printed.err and "memory_gb" not in printed.err


def test_steps_of_another_length_take_their_own_time():
    config = load_config(REPO / "configs/llama-1b.toml")
    alone = {n: fits(at_length(config, n), "h100") for n in (2048, 4096)}
    found = fits(config, "h100")
    assert found.days == pytest.approx((18_000 * alone[2048].step_seconds + 2_000 * alone[4096].step_seconds) / 86400)
    assert alone[4096].config.train.micro_batch_size == 8 and alone[4096].step_seconds > alone[2048].step_seconds


def test_a_price(capsys, tmp_path):
    assert cli.run(["plan", LLAMA, "--price", "7.5", "--json", str(tmp_path / "plan.json")]) == 0
    data = json.loads((tmp_path / "plan.json").read_text())
    assert data["cost"] == pytest.approx(data["days"] * 24 * 7.5)


def test_a_run_that_does_not_fit_is_told_with_what_would(capsys):
    assert cli.run(["plan", LLAMA, "--train.micro-batch-size", "64"]) == 0
    told = capsys.readouterr().err
    assert "what would fit: train.micro_batch_size = 16; or recompute.parts = " in told


def test_a_plan_ends_with_what_it_found_and_the_next_command(capsys):
    assert cli.run(["plan", LLAMA, "--optim.peak-lr", "1e-3"]) == 0
    last = capsys.readouterr().out.splitlines()[-2:]
    assert last == [
        "llama-1b fits: 80.2 of 84.9 GB on NVIDIA H100 SXM 80 GB; 3.86 days on 1 GPU, $278",
        f"next: lockstep train {LLAMA} --optim.peak-lr 1e-3",
    ]
    assert cli.run(["plan", LLAMA, "--train.micro-batch-size", "64"]) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[-1].startswith("llama-1b does not fit: ") and "next: " not in out


def test_a_header_and_its_value_stand_in_one_line():
    cells = [str(10**n) for n in range(8)]
    headers = ["policy", *(f"{2**n}" for n in range(8))]
    lines = stacked("GB", headers, [["block", *cells]], 40)
    assert lines[:2] == ["GB", "  block"] and max(map(len, lines)) <= 40
    named = [cell for line in lines[2:] for cell in line.strip().split(" · ")]
    assert named == [f"{header}: {cell}" for header, cell in zip(headers[1:], cells, strict=True)]


def test_what_is_said_to_fit_fits():
    config = load_config(REPO / "configs/llama-1b.toml", {"train.micro_batch_size": "64"})
    gpu = GPUS["h100"]
    assert not fits(config, gpu).fits
    for choice in choices(config, gpu):
        own = with_settings(config, choice.largest, choice.recompute)
        assert fits(own, gpu).fits
        assert not fits(with_settings(config, choice.largest + 1, choice.recompute), gpu).fits
        share = config.train.batch_size // config.train.ranks
        fitting = [n for n in range(1, choice.largest + 1) if share % n == 0]
        assert choice.largest_dividing == max(fitting)
    assert 64 in micro_batches(config) and len(smallest_change(config, choices(config, gpu))) == 2


def test_what_fits_nowhere_ends_with_2(capsys):
    assert cli.run(["plan", LLAMA, "--model.layers", "400"]) == 2
    assert "no micro-batch or checkpointing policy makes it fit" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["plan", LLAMA, "--gpu", "h1000"], "gpu = h1000: not known; did you mean h100? known are h100, h100-pcie,"),
        (["plan", LLAMA, "--price", "-1"], "price = -1: must be a number of at least 0"),
        (["plan", LLAMA, "--price", "nan"], "price = nan"),
        (["plan", LLAMA, "--price", "cheap"], "price = 'cheap'"),
        (["plan", LLAMA, "--gpu", "a100-80", "--precision.policy", "fp8_rowwise"], "NVIDIA A100 SXM 80 GB has no FP8"),
        (["plan"], "nothing to plan; name a run file"),
        (["plan", LLAMA, "--json", "nowhere/plan.json"], "json = nowhere/plan.json: cannot write there"),
        (["plan", LLAMA, "--train.micro-batch-size", "6"], "512 sequences are not a multiple of"),
    ],
)
def test_refused_in_one_line(words, said, capsys):
    assert cli.run(words) == 2
    told = capsys.readouterr().err
    assert said in told and told.count("\n") == 1


def test_a_processor_has_memory_alone(capsys):
    assert cli.run(["plan", str(REPO / "configs/rollout/laptop.toml")]) == 0
    out = capsys.readouterr().out
    assert "steady" in out and "tokens/s  " not in out and "MFU" not in out


def test_the_pages_estimates_are_these():
    """Else: python -m lockstep.scripts.studies.plan_check --estimates."""
    for name, text in plan_check.estimates().items():
        assert f"<!-- {name}: begin -->\n{text}\n<!-- {name}: end -->" in plan_check.PAGES[name].read_text()


def test_thousands_of_layers_are_planned_as_one():
    config = load_config(REPO / "configs/llama-1b.toml", {"model.layers": "1000"})
    assert fits(config).peak > 1e12
