"""SkyPilot's examples are valid tasks, and their commands are real ones."""

from __future__ import annotations

import itertools
import json
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from lockstep.core.errors import UserError
from lockstep.core.sweep.space import read_space
from lockstep.parity_tests.cluster.commands import EXAMPLES, in_script, parsed, torchrun_problems
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


# Set by the machine, and by the scripts themselves.
OF_THE_MACHINE = {"PWD", "PATH"}


def problems(found: dict[str, Any]) -> Iterator[str]:
    """Yield what is wrong with a task beyond its schemas."""
    setup, run = found["setup"], found["run"]
    for script in (setup, run):
        if subprocess.run(["bash", "-n"], input=script, text=True, stderr=subprocess.DEVNULL).returncode:
            yield f"no script: {script.splitlines()[0]}"
    (made,) = re.findall(r"python3 -m venv (\S+)", setup)
    if f'export PATH="$PWD/{made}/bin:$PATH"' not in run or f"{made}/bin/pip install " not in setup:
        yield f"{made} is made, and another environment is used"
    used = set(re.findall(r"\$(\w+)", run))
    yield from (f"a variable that nobody sets: {name}" for name in used - OF_THE_MACHINE - found.get("envs", {}).keys())
    yield from (f"a variable that nothing reads: {name}" for name in found.get("envs", {}).keys() - used)
    for place in found.get("file_mounts", {}):
        if f"cp -r {place} " not in run:
            yield f"mounted, and not read: {place}"
    for words in re.findall(r"^ *torchrun (.*)", re.sub(r"\\\n\s*", " ", run), re.MULTILINE):
        yield from torchrun_problems(shlex.split(words))
    for words in in_script(run):
        if words[0] == "sweep":
            read_space([after for word, after in itertools.pairwise(words) if word == "--vary"])


@pytest.mark.parametrize("name", FILES)
def test_nothing_beyond_the_schemas_is_wrong(name: str) -> None:
    assert list(problems(task(name))) == []


@pytest.mark.parametrize(
    ("name", "before", "after", "said"),
    [
        ("prepare.yaml", ".venv/bin:$PATH", ".env/bin:$PATH", ".venv is made, and another environment is used"),
        ("sweep.yaml", ".venv/bin/pip", ".env/bin/pip", ".venv is made, and another environment is used"),
        ("prepare.yaml", "SOURCE: hf", "SAUCE: hf", "a variable that nobody sets: SOURCE"),
        ("h100x1.yaml", '"$SOURCE"', "x", "a variable that nothing reads: SOURCE"),
        ("h100x2.yaml", "~/stage_before: runs", "~/stage: runs", "mounted, and not read: ~/stage"),
        ("h100x8.yaml", "--nproc-per-node 8", "--nprocs-per-node 8", "no words of torchrun"),
        ("h100x8.yaml", "-m lockstep", "-m locksteps", "no words of torchrun"),
        ("h100x1.yaml", "\n  fi", "", "no script"),
    ],
)
def test_a_mistake_beyond_the_schemas_is_found(name: str, before: str, after: str, said: str) -> None:
    text = FILES[name].read_text()
    assert before in text
    found = list(problems(yaml.safe_load(text.replace(before, after))))
    assert any(problem.startswith(said) for problem in found), found


def test_a_search_space_that_is_none_is_found() -> None:
    found = task("sweep.yaml")
    found["run"] = found["run"].replace("peak-lr", "peek-lr")
    with pytest.raises(UserError, match=r"did you mean optim\.peak_lr"):
        list(problems(found))


@pytest.mark.parametrize("name", FILES)
def test_its_commands_are_of_lockstep(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    commands = list(in_script(task(name)["run"]))
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
