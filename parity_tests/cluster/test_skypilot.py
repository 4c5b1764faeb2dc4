"""SkyPilot's examples are valid tasks, and their commands are real ones."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from lockstep.parity_tests.cluster.commands import EXAMPLES, in_script, parsed
from lockstep.parity_tests.repository import REPO
from lockstep.scripts import cli

FILES = {path.name: path for path in sorted((EXAMPLES / "skypilot").glob("*.yaml"))}
SCHEMAS = json.loads(Path(__file__).with_name("schemas").joinpath("skypilot.json").read_text())


def task(name: str) -> dict[str, Any]:
    return yaml.safe_load(FILES[name].read_text())


def check(found: dict[str, Any]) -> None:
    """Raise jsonschema.ValidationError unless the task and its resources are valid, as SkyPilot checks both."""
    jsonschema.Draft202012Validator(SCHEMAS["task"]).validate(found)
    jsonschema.Draft202012Validator(SCHEMAS["resources"]).validate(found["resources"])


def test_there_is_one_for_each_stage_and_task() -> None:
    assert set(FILES) == {"h100x1.yaml", "h100x2.yaml", "h100x8.yaml", "prepare.yaml", "sweep.yaml"}


@pytest.mark.parametrize("name", FILES)
def test_it_is_valid(name: str) -> None:
    check(task(name))
    assert task(name)["name"] == name.removesuffix(".yaml")


@pytest.mark.parametrize(
    ("place", "key", "value"),
    [
        ("task", "num_node", 2),
        ("task", "num_nodes", "two"),
        ("task", "run", ["lockstep"]),
        ("task", "envs", {"A NAME": "x"}),
        ("resources", "accelerator", "H100:1"),
        ("resources", "disk_size", {"GB": 100}),
        ("resources", "autostop", {"idle": 30}),
    ],
)
def test_a_planted_mistake_is_found(place: str, key: str, value: Any) -> None:
    found = task("h100x1.yaml")
    (found if place == "task" else found["resources"])[key] = value
    with pytest.raises(jsonschema.ValidationError):
        check(found)


@pytest.mark.parametrize("name", FILES)
def test_its_commands_are_of_lockstep(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = task(name)
    for script in (found["setup"], found["run"]):
        assert subprocess.run(["bash", "-n"], input=script, text=True).returncode == 0
    commands = list(in_script(found["run"]))
    assert commands
    for words in commands:
        if words[0] in {*cli.COMMANDS, *cli.GROUPS}:
            parsed(words, monkeypatch)
        else:
            assert words[0] == "sweep"  # not there yet


@pytest.mark.parametrize("gpus", [1, 2, 8])
def test_a_stage_is_that_of_its_run_file(gpus: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The commands give the ranks and buckets of configs/rollout."""
    found = task(f"h100x{gpus}.yaml")
    assert found["resources"]["accelerators"] == f"H100:{gpus}"
    file = f"configs/rollout/h100x{gpus}.toml"
    _, stage = parsed(["train", file], monkeypatch)
    *_, last = in_script(found["run"])
    if gpus == 1:
        assert last == ["train", file]
    else:
        options, resumed = parsed(last, monkeypatch)
        assert (resumed.train.ranks, resumed.parallel.bucket_mb) == (stage.train.ranks, stage.parallel.bucket_mb)
        assert options.resume == Path("runs") / stage.name and f"--nproc-per-node {gpus} " in found["run"]
    assert stage.train.ranks == gpus


@pytest.mark.parametrize("name", FILES)
def test_what_it_names_is_there(name: str) -> None:
    assert f"docs/examples/cluster/skypilot/{name}" in FILES[name].read_text()
    assert "constraints.txt" in task(name)["setup"] and (REPO / "constraints.txt").is_file()
