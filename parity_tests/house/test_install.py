"""`pip install` installs all that is needed, and works in a project with its own `core` and `scripts`."""

from __future__ import annotations

import json
import sys
import tomllib
from pathlib import Path

import pytest

from lockstep.parity_tests.house.imported import file_of, imports_of
from lockstep.parity_tests.house.installed import (
    OWN,
    PROJECT,
    Environment,
    build_sdist,
    build_wheel,
    commit_all,
    contents,
    copy_sources,
    run,
    shipped,
    write_project,
)
from lockstep.parity_tests.repository import REPO
from lockstep.scripts.shared import startup_banner

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node")


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copy_sources(tmp_path_factory.mktemp("sources"))


@pytest.fixture(scope="module")
def wheel(sources: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(sources, tmp_path_factory.mktemp("built"))


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_project(tmp_path_factory.mktemp("project"))


@pytest.fixture(scope="module")
def environment(wheel: Path, project: Path) -> Environment:
    """Install the wheel into the project's own environment, which git does not track."""
    made = Environment.make(project / ".venv")
    made.install(wheel)
    return made


@pytest.fixture(scope="module")
def data(environment: Environment, project: Path) -> Path:
    """Prepare the data of the project's run file by `python -m lockstep`; return the file."""
    run(environment.python, "-m", "lockstep", "data", "prepare", "mine.toml", "--workers", "1", cwd=project)
    return project / "mine.toml"


def test_the_wheel_holds_what_users_need_and_nothing_else(wheel: Path) -> None:
    """No studies, no test but the planted faults, every data file, and `lockstep` alone at the top."""
    inside, due = contents(wheel), shipped(REPO)
    assert (sorted(inside.keys() - due.keys()), sorted(due.keys() - inside.keys())) == ([], [])
    assert [name for name in due if inside[name] != due[name]] == []


def test_what_is_shipped_is_what_is_meant() -> None:
    """The list that the wheel is held to has one file of each kind, and none of those that stay."""
    due = set(shipped(REPO))
    assert {
        "lockstep/py.typed",
        "lockstep/configs/demo.toml",
        "lockstep/configs/rollout/h100x8.toml",
        "lockstep/core/parity/diagnose/repro_templates/attn.txt",
        "lockstep/core/parity/measures/calibrated_bounds.json",
        "lockstep/core/report/page.css",
        "lockstep/parity_tests/faults/catalog.py",
        "lockstep/parity_tests/faults/forward.py",
        "lockstep/scripts/shared/demo_run.py",
    } <= due
    assert {name.split("/")[0] for name in due} == {"lockstep"}
    assert [name for name in due if "studies" in name or "/test_" in name or name.endswith(".sh")] == []


def test_the_sdist_builds_the_same_wheel(sources: Path, wheel: Path, tmp_path: Path) -> None:
    sdist = build_sdist(sources, tmp_path)
    (tmp_path / "again").mkdir()
    assert contents(build_wheel(sdist, tmp_path / "again")) == contents(wheel)


def missing_imports(tree: Path) -> dict[str, str]:
    """Modules of Lockstep's that a shipped file imports, at once or in a function, and that are not shipped."""
    files = shipped(tree)
    found = {}
    for name in files:
        if name.endswith(".py"):
            for module, _ in imports_of(tree / name):
                file = file_of(tree, module) if module.partition(".")[0] == "lockstep" else None
                # parity_tests is shipped without its __init__.py.
                if file and file.relative_to(tree).as_posix() not in {*files, "lockstep/parity_tests/__init__.py"}:
                    found[module] = name
    return found


def test_nothing_shipped_imports_what_stays() -> None:
    assert missing_imports(REPO) == {}


def test_an_import_of_what_stays_is_seen(tmp_path: Path) -> None:
    tree = copy_sources(tmp_path)
    (tree / "core/planted.py").write_text("def f():\n    from lockstep.scripts.studies import chaos\n")
    (tree / "parity_tests/faults/planted.py").write_text("from lockstep.parity_tests.tiny import tiny_config\n")
    assert missing_imports(tree) == {
        "lockstep.scripts.studies": "lockstep/core/planted.py",
        "lockstep.scripts.studies.chaos": "lockstep/core/planted.py",
        "lockstep.parity_tests.tiny": "lockstep/parity_tests/faults/planted.py",
    }


def test_the_command_checks_a_candidate_of_the_project(environment: Environment, data: Path) -> None:
    """As a module, the candidate's folder comes last on the path: nothing that is installed may hide its `core`."""
    command = environment.folder / "bin/lockstep"
    words = ("--steps", "1", "--candidate", "my_candidate:Mine", "--reference", "torch", "--json", "verdict.json")
    run(command, "parity", data, *words, cwd=data.parent)
    assert json.loads((data.parent / "verdict.json").read_text())["verdict"] == "agreed"
    assert (data.parent / "opened-alone.txt").read_text().startswith("the user")


@pytest.mark.parametrize("ranks", [1, 2])
def test_torchrun_trains_with_a_backend_of_the_project(ranks: int, environment: Environment, data: Path) -> None:
    folder, name = data.parent, f"of-{ranks}"
    opened = [folder / f"opened-{rank}.txt" for rank in range(ranks)]
    for file in opened:
        file.unlink(missing_ok=True)
    run(environment.python, *TORCHRUN, ranks, "-m", "lockstep", "train", data, "--train.ranks", ranks, "--name", name,
        "--backend", "my_candidate.py:Mine", cwd=folder)  # fmt: skip
    assert [file.read_text()[:8] for file in opened] == ["the user"] * ranks
    assert len((folder / "runs" / name / "records.jsonl").read_text().splitlines()) == 2
    about = json.loads((folder / "runs" / name / "run.json").read_text())
    assert about["versions"]["lockstep"] == tomllib.loads((REPO / "pyproject.toml").read_text())["project"]["version"]
    # The commit is the project's, whose repository the environment lies in.
    assert about["git_commit"] is None


def test_the_commit_is_that_of_lockstep_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "startup_banner.py"
    file.write_text("")
    monkeypatch.setattr(startup_banner, "__file__", str(file))
    assert startup_banner.git_commit() is None
    commit_all(tmp_path)
    commit = run("git", "rev-parse", "HEAD", cwd=tmp_path).strip()
    assert startup_banner.git_commit() == commit
    file.write_text("changed")
    assert startup_banner.git_commit() == f"{commit}+"


def test_a_loop_of_the_project_is_watched(environment: Environment, project: Path) -> None:
    assert run(environment.python, "loop.py", cwd=project).splitlines()[-1] == "agreed 2"


def test_planted_faults_and_run_files_are_found(environment: Environment, project: Path) -> None:
    """The collection is imported, and the run file opened, before the missing data is named."""
    said = run(environment.folder / "bin/lockstep", "faults", "RopeInBf16", cwd=project, code=2)
    file = environment.packages / "lockstep/configs/quickstart.toml"
    assert said.endswith(f"data/stdlib holds no prepared data; make it with: lockstep data prepare {file}\n")


def test_what_no_dependency_brings_is_not_there(environment: Environment, project: Path) -> None:
    """Else a command that imports a package of the tests' would pass here and fail for a user."""
    assert "No module named 'hypothesis'" in run(environment.python, "-c", "import hypothesis", cwd=project, code=1)


def test_the_demo_finds_its_fault_with_the_dependencies_alone(environment: Environment, tmp_path: Path) -> None:
    """From an empty folder, in a terminal of 80 columns, where there is neither a compiler nor git."""
    command = environment.folder / "bin/lockstep"
    folder = str(command.parent)
    # Two minutes of one core; other tests share the cores.
    printed = run(command, "demo", "--no-open", cwd=tmp_path, seconds=3600, PATH=folder, COLUMNS="80").splitlines()
    assert {"  honest: 3 of 3 checks agreed", "  with-a-fault: 0 of 3 checks agreed"} <= set(printed)
    (report,) = [line.removeprefix("report: ") for line in printed if line.startswith("report: ")]
    assert "q_rope" in Path(report).read_text(encoding="utf-8")
    assert [line for line in printed if len(line) > 80 and not line.startswith(("  lockstep ", "report: "))] == []


WHERE = """
import core, lockstep.core.errors, scripts, sys
print(*(module.__file__ for module in (core, lockstep, lockstep.core.errors, scripts)), sep="\\n")
"""


@pytest.mark.parametrize("kind", ["wheel", "editable"])
def test_lockstep_and_the_projects_own_packages_are_found(
    kind: str, environment: Environment, sources: Path, project: Path, tmp_path: Path
) -> None:
    """By Python and by mypy, which reads .pth files and follows no import hook."""
    base = environment.packages
    if kind == "editable":
        environment = Environment.make(tmp_path / "venv")
        environment.install("-e", sources)
        base = sources / "src"
        assert [path.name for path in base.iterdir() if path.suffix != ".egg-info"] == ["lockstep"]
    found = run(environment.python, "-c", WHERE, cwd=project).splitlines()
    assert found == [
        str(place)
        for place in (
            project / "core/__init__.py",
            base / "lockstep/__init__.py",
            base / "lockstep/core/errors.py",
            project / "scripts/__init__.py",
        )
    ]
    mypy = (sys.executable, "-m", "mypy", "--python-executable", environment.python, "--follow-imports", "skip")
    typed = "import core, lockstep.core.errors, lockstep.parity_tests.faults.catalog, scripts"
    run(*mypy, "--cache-dir", tmp_path, "-c", typed, cwd=project)


def test_the_project_has_packages_of_the_repositorys_names() -> None:
    """Else these tests could not fail."""
    names = {name.partition("/")[0] for name in PROJECT if "/" in name}
    assert names == {"core", "scripts", "parity_tests", "torch_backend"}
    assert all((REPO / name).is_dir() for name in names) and set(OWN) <= {p.name for p in (REPO / "lockstep").iterdir()}
