"""Run `lockstep demo`: make its folder, its data and its two runs. demo_story.py prints the results."""

from __future__ import annotations

import contextlib
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lockstep.core
from lockstep.core.errors import UserError
from lockstep.core.parity.measures.verdict import Finding, Measure
from lockstep.scripts.shared.installation import shipped_config
from lockstep.scripts.shared.planting import chosen

# The two runs, and the planted fault of the second.
HONEST, FAULTY = "honest", "with-a-fault"
FAULT = "RopeInBf16"
CONFIG, DATA, RUNS = "demo.toml", "data", "runs"
MARK = "# Written by `lockstep demo`, which replaces what lies beside this file.\n"
_OWN = {CONFIG, DATA, RUNS, f"{HONEST}.log", f"{FAULTY}.log"}


@dataclass(frozen=True)
class Trained:
    """The results of a run: (step, loss) of each step, and each check with its origin, None if it agreed."""

    losses: Sequence[tuple[int, float]]
    checks: Sequence[tuple[int, str, Finding | None]]

    @property
    def disagreed(self) -> bool:
        """Return whether any check disagreed."""
        return any(verdict == "disagreed" for _, verdict, _ in self.checks)


def claimed(folder: Path) -> Path:
    """Make the folder of a demo, with its run file, and return it.

    Raises UserError if it holds anything but an earlier demo, or cannot be made.
    """
    import tomli_w

    config = folder / CONFIG
    try:
        if folder.exists():
            names = {path.name for path in folder.iterdir()} if folder.is_dir() else {folder.name}
            is_demo = config.is_file() and config.read_text(encoding="utf-8").startswith(MARK)
            if names and not (is_demo and names <= _OWN):
                raise UserError(f"{folder} holds something other than a demo; name another folder with --out")
        tree = tomllib.loads(shipped_config("demo").read_text(encoding="utf-8"))
        tree["data"]["path"] = str(folder.resolve() / DATA)
        text = MARK + tomli_w.dumps(tree)
        folder.mkdir(parents=True, exist_ok=True)
        config.write_text(text, encoding="utf-8")
    except (OSError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or "its name is not valid text"
        raise UserError(f"cannot make {folder}: {why}") from error
    return folder


def prepared(folder: Path) -> int:
    """Make tokens of Lockstep's own sources with the run file's settings; return the number of training tokens.

    Raises UserError as `prepare` does.
    """
    from lockstep.core.config.file import load_config
    from lockstep.core.data.prepare import PrepareSettings, prepare

    config = load_config(folder / CONFIG, {})
    sources = Path(lockstep.core.__file__).resolve().parent
    made = prepare(
        PrepareSettings(
            out=config.data.path,
            source=str(sources / "**" / "*.py"),
            vocab_size=config.model.vocab_size,
            val_fraction=config.data.val_fraction,
            # An earlier demo may have tokens of another version's sources.
            force=True,
        )
    )
    return made.index.train.tokens


def trained(folder: Path, name: str) -> Trained:
    """Train one of the two runs as `lockstep train` does; its output goes into NAME.log.

    Raises UserError if it cannot train or check, and KeyboardInterrupt after Ctrl-C.
    """
    from lockstep.core.run.directory import RunDir
    from lockstep.scripts.commands.train import main as train

    words = [str(folder / CONFIG), "--name", name, "--out", str(folder / RUNS), "--overwrite"]
    words += ["--backend", faulty_backend()] if name == FAULTY else []
    with (
        (folder / f"{name}.log").open("w", encoding="utf-8", errors="backslashreplace") as log,
        contextlib.redirect_stdout(log),
        contextlib.redirect_stderr(log),
    ):
        code = train(words)
    if code == 130:
        raise KeyboardInterrupt
    run = RunDir.open(folder / RUNS / name)
    checks = [(line["step"], line["verdict"], origin_of(line)) for line in run.checks()]
    return Trained([(line["step"], line["loss"]) for line in run.records()], checks)


def faulty_backend() -> str:
    """Name the faulty backend for `--candidate` and `--backend`, valid in any folder: `module:NAME`."""
    (fault,) = chosen([FAULT])
    kind = type(fault.make())
    return f"{kind.__module__}:{kind.__qualname__}"


def origin_of(line: dict[str, Any]) -> Finding | None:
    """Return the origin of a line of parity.jsonl and its measures; None if the check agreed or was skipped."""
    origin = line.get("origin")
    if not origin:
        return None
    found = next(
        one
        for one in line["stages"]
        if one["role"] == "origin" and all(one[key] == origin[key] for key in ("stage", "tap", "phase", "layer"))
    )
    measures = tuple(
        Measure(m["name"], float(m["value"]), _number(m["low"]), _number(m["high"]), m["basis"])
        for m in found["measures"]
    )
    return Finding(
        stage=found["stage"],
        tap=found["tap"],
        phase=found["phase"],
        layer=found["layer"],
        scope=found["scope"],
        measures=measures,
        size=found["size"],
        unequal=found["unequal"],
        note=found["note"],
    )


def _number(value: float | str | None) -> float | None:
    return None if value is None else float(value)
