"""Find `lockstep` commands in a script or an argument list, and parse them as the command line does."""

from __future__ import annotations

import contextlib
import io
import re
import shlex
from collections.abc import Iterator, Sequence
from importlib import import_module
from typing import Any

import pytest
from torch.distributed.run import get_args_parser

from lockstep.core.config.file import load_config
from lockstep.core.config.schema import RunConfig
from lockstep.parity_tests.repository import REPO
from lockstep.scripts import cli

EXAMPLES = REPO / "docs/examples/cluster"
# Values of variables that the examples take from the machine they run on.
VALUES = {
    "ranks": "16",
    "SOURCE": "hf://datasets/a/b",
    "GPUS_PER_TRIAL:-1": "1",
}
IN_THE_CONTAINER = "/opt/lockstep/"


class Parsed(Exception):
    """Raised in place of running a command, once it has been parsed."""


def in_script(text: str, words: Sequence[str] = ()) -> Iterator[list[str]]:
    """Yield the arguments of each `lockstep` command of a shell script; `"$@"` becomes `words`."""
    text = re.sub(r"\\\n\s*", " ", text)
    for line in text.splitlines():
        line = line.strip()
        if line.startswith("#") or not re.search(r"(^|\s)lockstep\s", line):
            continue
        for name, value in VALUES.items():
            line = line.replace("${" + name + "}", value).replace("$" + name, value)
        line = line.replace('"$@"', shlex.join(words))
        found = in_words(shlex.split(line, comments=True))
        if found:
            yield found


def in_words(words: Sequence[str]) -> list[str]:
    """Return the arguments that follow `lockstep` in `words`; an empty list if it does not occur."""
    at = [number for number, word in enumerate(words) if word == "lockstep"]
    return list(words[at[0] + 1 :]) if at else []


def torchrun_problems(words: Sequence[str]) -> Iterator[str]:
    """Yield the errors that torchrun's own parser finds in its arguments."""
    complaints = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaints):
            found = get_args_parser().parse_args(list(words))
    except SystemExit:
        yield f"no words of torchrun: {complaints.getvalue().splitlines()[-1]}"
        return
    # After a misspelled option, torchrun takes the next word for the program, which then is not lockstep.
    if not found.module or found.training_script != "lockstep":
        yield f"no words of torchrun: it would run {found.training_script}"


def parsed(words: Sequence[str], monkeypatch: pytest.MonkeyPatch) -> tuple[Any, RunConfig]:
    """Return the options and the configuration of a command. Raises UserError or KeyError, as the command line does.

    Paths of run files inside a container are replaced by those of the checkout.
    """
    words = [word.replace(IN_THE_CONTAINER, f"{REPO}/") for word in words]
    name = " ".join(words[:2]) if words[0] in cli.GROUPS else words[0]
    module = import_module(cli.COMMANDS[name][0])
    found: list[Any] = []
    parse = module.parse

    def note(*arguments: Any, **keywords: Any) -> Any:
        found.append(parse(*arguments, **keywords))
        raise Parsed

    with monkeypatch.context() as patch, pytest.raises(Parsed):
        patch.setattr(module, "parse", note)
        patch.chdir(REPO)
        module.main(words[len(name.split()) :])
    options, given = found[0]
    file = getattr(options, "config", None)
    if resumed := getattr(options, "resume", None):
        # No run directory exists here: the file of the same name in configs/ replaces its run file.
        file = f"configs/{resumed.name}.toml"
    return options, load_config(None if file is None else REPO / file, given)
