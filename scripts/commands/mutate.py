"""`lockstep mutate`: change the training step place by place, and count the changes that a check finds."""

from __future__ import annotations

import hashlib
import platform
import shlex
import sys
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from lockstep.core.errors import UserError
from lockstep.core.files.atomic import write_atomically
from lockstep.core.files.jsonl import JsonLines, scan_lines
from lockstep.core.mutate.draw import draw, place_of
from lockstep.core.mutate.mutant import Mutant
from lockstep.core.mutate.page import page, place
from lockstep.core.mutate.picture import picture
from lockstep.core.mutate.rows import Row, Score
from lockstep.core.sinks.lines import tell
from lockstep.scripts.shared.arguments import parse
from lockstep.scripts.shared.mutating import recipe_of, run
from lockstep.scripts.shared.open_data import open_data
from lockstep.scripts.shared.peers import needs_start, on_every_rank, ranks_of_launch, start_ranks

if TYPE_CHECKING:
    from rich.console import Console

    from lockstep.core.config.schema import RunConfig
    from lockstep.core.run.data import RunData
    from lockstep.core.run.ranks import Ranks

SCHEMA = 1
HEAD = f"{'moves by':>8}  {'verdict':<10} mutant"
ROWS, PAGE, PICTURE = "mutants.jsonl", "mutants.md", "mutants.svg"


@dataclass
class Mutate:
    """Change the trainer in many places, one at a time, and count the changes that a check finds.

    A mutant is a place in the step, an operator and a condition: blocks.1.mlp.act:backward*scale(+2^-6)@always.
    Ends 0 if a check found every mutant that moves the step by more than 1 %, 1 otherwise, 2 if it could not run.
    """

    config: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="CONFIG")]
    """run file (TOML) of the trainer; configs/mutate.toml is small"""
    sample: int = 200
    """number of mutants to draw; a larger draw begins with the same mutants"""
    draw_seed: int = 20261124
    """seed of the draw"""
    only: Annotated[tuple[str, ...], tyro.conf.arg(metavar="ID…")] = ()
    """ids of the mutants to run instead"""
    out: Annotated[Path | None, tyro.conf.arg(metavar="FOLDER", help_behavior_hint="(default: not written)")] = None
    """folder for a line per mutant, and for a page and a picture of all recipes"""
    resume: bool = False
    """keep the rows that the folder already has"""
    jobs: int = 1
    """processes that share the mutants; 1 with several ranks"""


def stamp(config: RunConfig) -> str:
    """Return a digest of a row's inputs other than code: bounds and configuration."""
    from importlib import resources

    bounds = resources.files("lockstep.core.parity.measures").joinpath("calibrated_bounds.json").read_bytes()
    return hashlib.sha256(bounds + config.model_dump_json(exclude={"name", "log"}).encode()).hexdigest()[:16]


@on_every_rank
def main(argv: list[str]) -> int:
    """Run mutants, print and write their results; return 1 if one survives."""
    from lockstep.core.config.file import load_config
    from lockstep.core.parity.measures import calibrated_bounds
    from lockstep.scripts.shared.backends import TRAINER, on_its_device, open_named

    options, given = parse(Mutate, "mutate", argv, with_settings=True)
    _check(options)
    config = on_its_device(load_config(options.config, given), open_named(TRAINER))
    if config.train.ranks > 1:
        _check_ranks(config, options)
    calibrated_bounds.require(config)
    chosen = [Mutant.parse(text) for text in options.only]
    for one in chosen:
        place_of(config, one)
    chosen = chosen or draw(config, options.sample, options.draw_seed)
    if not chosen:
        raise UserError("nothing to mutate: no mutant was drawn")
    data = open_data(config, options.config, given)
    if needs_start(config):
        return start_ranks(config.train.ranks, ["mutate", *argv])
    with ranks_of_launch(config) as ranks:
        return _run(options, config, data, chosen, given, ranks)


def _run(
    options: Mutate,
    config: RunConfig,
    data: RunData,
    chosen: Sequence[Mutant],
    given: Mapping[str, str],
    ranks: Ranks,
) -> int:
    from lockstep.core.sinks.terminal import open_console

    recipe = recipe_of(config)
    console = open_console()
    made = {"schema": SCHEMA, "of": recipe, "stamp": stamp(config), "seed": options.draw_seed}
    # Rank 0 alone has the folder.
    folder = options.out if ranks.rank == 0 else None
    with closing(Book.open(folder, made, given, options.resume)) as book:
        if not options.only:
            tell(console, HEAD, "bold")
        kept = ranks.of_first(lambda: {row.id: row for row in book.rows if row.recipe == recipe})
        for row in run(config, data, [one for one in chosen if str(one) not in kept], options.jobs, ranks):
            kept[row.id] = row
            book.add(row)
            print_row(console, row, bool(options.only))
        rows = [kept[str(one)] for one in chosen]
        if not any(row.acts or row.error for row in rows):
            raise UserError("no mutant changed a bit of the step: nothing was tested")
        _print_score(console, rows, options.config, given)
        book.write_page(about(options), options.config)
    return int(any(row.survives or row.error for row in rows))


def _check_ranks(config: RunConfig, options: Mutate) -> None:
    if config.parallel.strategy != "ddp":
        raise UserError(
            f"parallel.strategy = {config.parallel.strategy}: mutants change whole tensors, which only ddp has"
        )
    if options.jobs > 1:
        raise UserError(f"command line: jobs = {options.jobs}: with {config.train.ranks} ranks it must be 1")


def _check(options: Mutate) -> None:
    for name, least in (("sample", 1), ("jobs", 1)):
        if getattr(options, name) < least:
            raise UserError(f"command line: {name} = {getattr(options, name)}: at least {least}")
    if options.resume and options.out is None:
        raise UserError("command line: resume: name the folder to continue with --out")
    if options.out is not None and options.out.exists() and not options.out.is_dir():
        raise UserError(f"command line: out = {options.out}: not a folder")


@dataclass
class Book:
    """The rows kept in a folder; without a folder, none are kept.

    A line before each recipe's first row holds the recipe and the settings that made its rows.
    A mutant without a verdict is tried again. settings: of each recipe.
    """

    folder: Path | None
    rows: list[Row] = field(default_factory=list)
    settings: dict[str, Mapping[str, str]] = field(default_factory=dict)
    _lines: JsonLines | None = None

    @classmethod
    def open(cls, folder: Path | None, made: Mapping[str, Any], given: Mapping[str, str], resume: bool) -> Book:
        """Open the rows of a folder, new or to be continued.

        made: the recipe (`of`) and the digest of its rows' inputs. given: its settings. Raises UserError for rows of
        this recipe from other inputs.
        """
        book = cls(folder)
        if folder is None:
            return book
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"cannot make {folder}: {error.strerror or error}") from error
        path = folder / ROWS
        if path.exists() and not resume:
            raise UserError(f"{path} exists already; --resume continues it")
        for line in scan_lines(path) if path.exists() else ():
            if line.value is None:
                continue
            if "of" in line.value:
                if line.value["of"] == made["of"] and {key: line.value.get(key) for key in made} != made:
                    raise UserError(
                        f"{path}: its rows of {made['of']} were made with other bounds, settings or another seed"
                    )
                book.settings[line.value["of"]] = line.value["settings"]
            elif not line.value["error"]:
                book.rows.append(Row.from_json(line.value))
        book._lines = JsonLines(path)
        if made["of"] not in book.settings:
            book._lines.append({**made, "settings": dict(given)})
            book.settings[made["of"]] = given
        return book

    def add(self, row: Row) -> None:
        """Keep a row."""
        self.rows.append(row)
        if self._lines is not None:
            self._lines.append(row.to_json())

    def close(self) -> None:
        """Close the file of rows."""
        if self._lines is not None:
            self._lines.close()

    def write_page(self, about: Sequence[str], config: Path) -> None:
        """Write the page over all rows of the folder, and its picture."""
        if self.folder is None:
            return
        text = page(self.rows, about, lambda row: command(row, config, self.settings[row.recipe]))
        write_atomically(self.folder / PAGE, [text.encode()])
        write_atomically(self.folder / PICTURE, [picture(self.rows).encode()])


def print_row(console: Console, row: Row, in_full: bool) -> None:
    """Print the lines of a row; a line that is wider than the terminal is continued."""
    for line in said(row, in_full):
        tell(console, line)


def said(row: Row, in_full: bool) -> list[str]:
    """Return a row in one line, or, in full, its verdict in several."""
    verdict = (
        f"no verdict: {row.error}"
        if row.error
        else "changes no bit"
        if row.equivalent
        else f"{'found' if row.exact else 'found as ' + place(row.named)}"
        if row.found
        else "the trainer ends by itself"
        if row.stopped
        else "NOT FOUND"
    )
    if not in_full:
        return [f"{row.effect:8.1e}  {verdict:<10} {row.id}"]
    lines = [row.id, f"  {verdict}", f"  should be named {place(row.expected[0])}, in the check of step {row.step}"]
    if row.found:
        lines += [f"  was named {place(row.named)} ({row.scope}), by {row.measure}"]
    moved = f"gradients {row.gradients:.2e} (worst {row.worst:.2e}), loss {row.loss:.2e}, update {row.update:.2e}"
    return [*lines, f"  moves {moved}"]


def command(row: Row, config: Path, given: Mapping[str, str]) -> str:
    """Return the command that runs a row's mutant."""
    settings = [word for key, text in given.items() for word in (f"--{key.replace('_', '-')}", text)]
    return shlex.join(["lockstep", "mutate", str(config), *settings, "--only", row.id])


def about(options: Mutate) -> list[str]:
    """Return the page's text before its tables."""
    from importlib.metadata import version

    versions = f"torch {version('torch').split('+')[0]}, jax {version('jax')}"
    return [
        f"Made by `lockstep mutate {options.config}` with the draw's seed {options.draw_seed} on {platform.machine()} "
        f"({platform.system()}), {versions}. Each mutant is judged by one check, of the first step in which it can "
        "act; what it moves is measured on the run's own step, whose loss weights are all 1. docs/guide/mutate.md "
        "explains the columns.",
        f"![What came of mutants, by place, operator and condition]({PICTURE})",
    ]


def _print_score(console: Console, rows: Sequence[Row], config: Path, given: Mapping[str, str]) -> None:
    for text in Score.of(rows).lines():
        console.print(text, soft_wrap=True, markup=False, highlight=False)
    for row in rows:
        if row.survives:
            console.print(command(row, config, given), soft_wrap=True, markup=False, highlight=False)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
