"""`lockstep museum`."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from lockstep.core.errors import UserError
from lockstep.core.sinks.lines import wrapped
from lockstep.scripts.shared.arguments import check_file, parse

if TYPE_CHECKING:
    from lockstep.scripts.museum.exhibit import Exhibit
    from lockstep.scripts.museum.run import Told

WIDTH = 80
NAME, VERSION, SAID = 23, 22, 12
# Most lines of a finding.
MOST = 6


@dataclass
class Museum:
    """Run silent bugs of released packages, with the bug and without it.

    Without a name, list the exhibits. Ends 0 if each bug was caught or missed as its exhibit declares, 1 otherwise, 2
    if one could not run.
    """

    names: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="[NAME …]")] = ()
    """exhibits to run"""
    all: bool = False
    """run every exhibit"""
    install: bool = False
    """install missing packages by pip into the folder of environments, and nowhere else"""
    environments: Annotated[
        Path | None,
        tyro.conf.arg(metavar="FOLDER", help_behavior_hint="(default: in the cache folder)"),
    ] = None
    """folder of the released packages"""
    json: Annotated[Path | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="(default: not written)")] = None
    """file for the results, a line per exhibit, written after each; lines of other exhibits are kept"""
    repro: Annotated[Path | None, tyro.conf.arg(metavar="FOLDER", help_behavior_hint="(default: not written)")] = None
    """run nothing; write scripts that show unfixed bugs to the package's maintainers into this folder"""


def main(argv: list[str]) -> int:
    """List, write scripts, or run; return the exit code."""
    from lockstep.scripts.museum.exhibit import chosen, exhibits

    options, _ = parse(Museum, "museum", argv, with_settings=False)
    if options.all and options.names:
        raise UserError("command line: all: --all runs every exhibit; leave the names out")
    wanted = chosen(tuple(exhibits()) if options.all else options.names)
    if options.repro is not None:
        return write_repros(wanted or list(exhibits().values()), options.repro, named=bool(options.names))
    if not wanted:
        return list_them(list(exhibits().values()))
    check_file("json", options.json)
    return run_them(wanted, options.environments or default_folder(), options.install, options.json)


def list_them(them: Sequence[Exhibit]) -> int:
    """Print every exhibit with its version and title."""
    for one in them:
        print(f"{one.name:<{NAME}} {one.version('shipped'):<{VERSION}} {'unfixed' if one.unfixed else ''}".rstrip())
        print(wrapped(one.title, WIDTH, "  "))
    print(f"{len(them)} exhibits; lockstep museum NAME… or --all runs them")
    return 0


def default_folder() -> Path:
    """Return `lockstep/museum` in the user's cache folder."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lockstep" / "museum"


def run_them(them: Sequence[Exhibit], environments: Path, install: bool, file: Path | None) -> int:
    """Install missing packages with --install, run the exhibits, print and record the results; return the exit code."""
    from lockstep.scripts.museum import environments as packages
    from lockstep.scripts.museum.run import missing, run_exhibit

    print(f"{'exhibit':<{NAME}} {'version':<{VERSION}} {'with bug':<{SAID}} {'fixed':<{SAID}} caught")
    unexpected = failed = 0
    for exhibit in them:
        try:
            for requirements, folder in missing(exhibit, environments):
                if not install:
                    raise UserError(
                        f"{exhibit.name}: {' '.join(requirements)} missing in {environments}; --install puts them there"
                    )
                print(f"pip install --no-deps --target {folder} {' '.join(requirements)}")
                packages.install(requirements, folder)
            told = run_exhibit(exhibit, environments)
        except UserError as error:
            failed += 1
            for line in error.lines:
                print(wrapped(f"could not run: {line}", WIDTH, hang=2))
            continue
        unexpected += not told.as_expected
        print_told(told)
        if file is not None:
            record(told, file)
    ran = len(them) - failed
    print(f"{ran} ran, {ran - unexpected} as expected; {failed} could not run")
    return 1 if unexpected else 2 if failed else 0


def print_told(told: Told) -> None:
    """Print one row, and the finding on the bug."""
    e, shipped, fixed = told.exhibit, told.shipped, told.fixed
    row = f"{e.name:<{NAME}} {e.version('shipped'):<{VERSION}} {verdict(shipped):<{SAID}} {verdict(fixed):<{SAID}}"
    print(f"{row} {'yes' if told.caught else 'no'}")
    if not told.as_expected:
        due = f"step {e.acts_at}, {e.stage}, {e.words!r}" if e.caught else "agreed"
        print(wrapped(f"UNEXPECTED: expected {due}, then agreed", WIDTH, "  "))
    words = shipped["headline"] if shipped["step"] in (None, 0) else shipped["words"]
    shown = wrapped(words, WIDTH, "  ").split("\n")
    print("\n".join([*shown[:MOST], *(["  …"] if len(shown) > MOST else [])]))


def verdict(found: Mapping[str, Any]) -> str:
    """Write a verdict in a word or two: `agreed`, `step 6`, or `not honest`."""
    if found["verdict"] != "disagreed":
        return str(found["verdict"]).replace("_", " ")
    return f"step {found['step']}" if found["step"] else "not honest"


def record(told: Told, file: Path) -> None:
    """Write an exhibit's line into the file, in the place of its older one."""
    from lockstep.core.files.atomic import write_atomically

    lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
    kept = [line for line in lines if f'"exhibit": "{told.exhibit.name}"' not in line]
    write_atomically(file, ["\n".join([*kept, json.dumps(told.to_json()), ""]).encode()])


def write_repros(them: Sequence[Exhibit], folder: Path, named: bool) -> int:
    """Copy the scripts of exhibits. Raises UserError for a named one without a script, and for files that are there."""
    from lockstep.scripts.museum.repro import repro_of

    texts = {one.name: repro_of(one.name) for one in them}
    if named and (without := [name for name, text in texts.items() if text is None]):
        raise UserError(f"{without[0]} is fixed, so it has no script for the maintainers")
    files = {folder / f"{name}.py": text for name, text in texts.items() if text is not None}
    if there := [path for path in files if path.exists()]:
        raise UserError(f"{there[0]} exists already")
    folder.mkdir(parents=True, exist_ok=True)
    for path, text in files.items():
        path.write_text(str(text), encoding="utf-8")
        print(path)
    return 0
