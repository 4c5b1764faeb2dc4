"""An exhibit as data: a file of `exhibits/` with the package and version of a bug, and the expected finding."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from lockstep.core.errors import UserError

Side = Literal["shipped", "fixed"]
SIDES: tuple[Side, ...] = ("shipped", "fixed")


@dataclass(frozen=True)
class Exhibit:
    """A bug, as its file states it.

    title: the bug in a sentence. link: its issue or pull request, or empty where there is none.
    packages, fixed: requirements with exact versions, with the bug and without it. If the bug is not fixed, `fixed`
    repeats `packages`, and `mended` describes the work-around in the second run.
    loop: a module of `loops/`. settings: keyword arguments of its function.
    acts_at: the first step in which the bug acts; 0 for a single function, which has no steps.
    stage: the stage that the verdict must name. words: a regular expression that must match the verdict.
    caught: whether a check finds it. missed: why not, if not.
    gone: the part of the package with the bug was removed.
    what: the bug's effect on training, for the page.
    """

    name: str
    title: str
    link: str
    packages: tuple[str, ...]
    loop: str
    acts_at: int
    what: str
    fixed: tuple[str, ...] = ()
    mended: str = ""
    settings: Mapping[str, Any] | None = None
    stage: str = ""
    words: str = ""
    caught: bool = True
    missed: str = ""
    gone: bool = False

    @property
    def is_mended(self) -> bool:
        """Return whether the run without the bug has the same packages and a work-around."""
        return self.packages == self.fixed

    @property
    def unfixed(self) -> bool:
        """Return whether the newest version that was tried has the bug."""
        return self.is_mended and not self.gone

    def requirements(self, side: Side) -> tuple[str, ...]:
        """Return the packages of one side, each as `name==version`."""
        return self.packages if side == "shipped" else self.fixed

    def version(self, side: Side) -> str:
        """Return the first package of a side, in words: `transformers 4.45.2`."""
        return self.requirements(side)[0].replace("==", " ")


def read_exhibit(name: str, text: str) -> Exhibit:
    """Read the file of an exhibit. Raises UserError, with its name, for any mistake in it."""
    try:
        given: dict[str, Any] = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"exhibit {name}: {error}") from None
    known = {field.name: field for field in fields(Exhibit)}
    due = {key for key, field in known.items() if field.default is MISSING} - {"name"}
    if wrong := sorted(given.keys() - known.keys()) or sorted(due - given.keys()):
        raise UserError(f"exhibit {name}: {wrong[0]} is {'missing' if wrong[0] in due else 'not a key of an exhibit'}")
    for key in ("packages", "fixed"):
        given[key] = tuple(given.get(key, given["packages"]))
        if loose := [one for one in given[key] if one.count("==") != 1]:
            raise UserError(f"exhibit {name}: {loose[0]}: write a package as name==version")
    made = Exhibit(name, **given)
    if made.is_mended and not made.mended:
        raise UserError(f"exhibit {name}: without `fixed`, `mended` must describe the work-around in its second run")
    if made.caught == bool(made.missed):
        raise UserError(f"exhibit {name}: `missed` gives the reason if `caught` is false, and only then")
    if made.caught and not (made.stage and made.words):
        raise UserError(f"exhibit {name}: a caught bug needs `stage` and `words`")
    return made


@cache
def exhibits() -> dict[str, Exhibit]:
    """Return all exhibits by name, in order."""
    folder = resources.files("lockstep.scripts.museum").joinpath("exhibits")
    found = sorted((one for one in folder.iterdir() if one.name.endswith(".toml")), key=lambda one: one.name)
    return {Path(one.name).stem: read_exhibit(Path(one.name).stem, one.read_text(encoding="utf-8")) for one in found}


def chosen(names: Sequence[str]) -> list[Exhibit]:
    """Return exhibits by their names. Raises UserError for a name without an exhibit."""
    known = exhibits()
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            raise UserError(
                f"no exhibit is named {name!r}"
                + (f"; did you mean {near[0]}?" if near else "; lockstep museum lists them")
            )
    return [known[name] for name in dict.fromkeys(names)]
