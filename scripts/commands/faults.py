"""`lockstep faults`: plant the known faults one by one, and compare what is named with what is promised."""

from __future__ import annotations

import difflib
import gc
import hashlib
import json
import math
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Protocol

import tyro

from lockstep.core.errors import UserError
from lockstep.core.run.launch import launched
from lockstep.core.run.ranks import ONE, Ranks
from lockstep.scripts.shared.arguments import check_file, parse
from lockstep.scripts.shared.backends import REFERENCE, TRAINER, on_its_device, open_named
from lockstep.scripts.shared.failures import in_one_line
from lockstep.scripts.shared.installation import shipped_config
from lockstep.scripts.shared.open_data import open_data
from lockstep.scripts.shared.peers import on_every_rank, ranks_of_launch, start_ranks

if TYPE_CHECKING:
    from rich.console import Console

    from lockstep.core.backend import Backend, Batch, Session
    from lockstep.core.config.schema import RunConfig
    from lockstep.core.parity.evidence.gather import Evidence
    from lockstep.core.parity.measures.compare import Reference
    from lockstep.core.parity.measures.verdict import Check, Finding
    from lockstep.core.run.data import RunData

QUICKSTART = shipped_config("quickstart")
SCHEMA = 1
HONEST = "the honest trainer"
HONEST_STEPS = 3
TOP = 3
Origin = tuple[str, str, int | None]


@dataclass
class Faults:
    """Plant known faults in the trainer and print the scoreboard: `lockstep faults`, `lockstep faults KvHeadsTiled`.

    Ends 0 if every fault was found in time and named as promised, 1 otherwise, 2 if it could not run.
    """

    names: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="NAME")] = ()
    """faults to plant; none = all that the recipe allows"""
    config: Annotated[Path, tyro.conf.arg(help_behavior_hint="(default: quickstart.toml)")] = QUICKSTART
    """run file (TOML) of the trainer that they are planted in"""
    recipe: tuple[str, ...] = ("bf16/eager",)
    """precision policy / eager or compiled, one or more"""
    json: Annotated[Path | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="(default: not written)")] = None
    """write the scoreboard here as JSON, after every fault"""
    resume: bool = False
    """keep the rows that FILE holds already"""
    causes: Literal["promised", "all", "none"] = "promised"
    """for which faults the step is run again with one thing changed at a time"""


@dataclass(frozen=True)
class Row:
    """What was promised of one fault and what was said. Layers of `expected` are those of the model.

    step: the first check that disagreed. named: its origin. others: all origins in the chain's order.
    rank: place of the expected origin among them, from 1. measure: the origin's worst, with its bound.
    loss_moved: relative change of the loss in the first step in which the fault acts. error: why there is no verdict.
    """

    name: str
    recipe: str
    mechanism: str
    number: int | None
    expected: Origin | None
    first_step: int
    within: int
    loss_moves_less_than: float | None
    promised_cause: str | None
    note: str = ""
    step: int | None = None
    named: Origin | None = None
    others: tuple[Origin, ...] = ()
    rank: int | None = None
    measure: str = ""
    loss_moved: float | None = None
    cause: str = ""
    checks: int = 0
    seconds: float = 0.0
    error: str = ""

    @property
    def in_time(self) -> bool:
        """Found in one of the checks in which it must be, and no honest step before it accused."""
        return self.step is not None and 0 <= self.step - self.first_step < self.within

    @property
    def exact(self) -> bool:
        """Stage, phase and layer of the origin are those of the fault."""
        return self.rank == 1

    @property
    def broken_promises(self) -> list[str]:
        """What is otherwise than promised, in words."""
        if self.error:
            return [f"no verdict: {self.error}"]
        if self.expected is None:
            return ["accused"] if self.step else []
        said = []
        if not self.in_time:
            said.append("missed" if self.step is None else f"found in step {self.step}, acts in {self.first_step}")
        elif not self.exact:
            said.append("misnamed" if self.rank is None else f"its origin is number {self.rank} of those named")
        limit, moved = self.loss_moves_less_than, self.loss_moved
        if limit is not None and moved is not None and not moved < limit:
            said.append(f"the loss moved by {moved:.1e}")
        if self.promised_cause and self.step is not None and self.promised_cause not in self.cause:
            said.append(f"the cause does not say {self.promised_cause!r}")
        return said

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready mapping."""
        return asdict(self) | {"in_time": self.in_time, "exact": self.exact, "broken_promises": self.broken_promises}


def from_json(row: dict[str, Any]) -> Row:
    """The row of a mapping that `to_json` made."""
    kept = {key: row[key] for key in Row.__dataclass_fields__}
    for key in ("expected", "named"):
        kept[key] = tuple(kept[key]) if kept[key] else None
    return Row(**kept | {"others": tuple(tuple(o) for o in kept["others"])})


class Kept:
    """A backend that opens each configuration once: compiled programs of a reference are most of its cost.

    Sessions are shared, so that whoever asks for one gives it its state first, as every check does.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend, self._sessions = backend, dict[str, "Session"]()
        self.name = backend.name

    def open(self, config: RunConfig) -> Session:
        """A session on this configuration, opened before or now."""
        key = config.model_dump_json()
        if key not in self._sessions:
            self._sessions[key] = self._backend.open(config)
        return self._sessions[key]

    def describe(self, config: RunConfig) -> Any:
        """As the backend itself."""
        return self._backend.describe(config)


class Data(Protocol):
    """What hands out a run's batches: core/run/data.py's RunData."""

    def batch(self, step: int) -> Batch:
        """The batch of optimizer step `step`, from 1."""
        ...


@dataclass
class Bench:
    """One recipe: a configuration, its data, the reference that judges, and what the honest trainer's loss is."""

    config: RunConfig
    data: Data
    backend: Backend
    honest: Backend
    causes: str = "promised"
    honest_name: str = HONEST
    _reference: Reference | None = None
    _losses: list[float] = field(default_factory=list)

    @property
    def reference(self) -> Reference:
        """Twin and truth, opened when they are first needed."""
        from lockstep.core.parity.measures.compare import Reference

        if self._reference is None:
            self._reference = Reference.open(self.backend, self.config)
        return self._reference

    def honest_row(self) -> Row:
        """The honest trainer, judged as the faults are: it must not be accused."""
        row = Row(self.honest_name, self._recipe, "", None, None, 1, HONEST_STEPS, None, None)
        return self._judged(row, self.honest, lambda batches: batches, HONEST_STEPS, "none")

    def row(self, fault: Any) -> Row:
        """Plant one fault and judge it; whatever it raises stands in its row."""
        origin = fault.origin(self.config.model.layers)
        row = Row(
            fault.name,
            self._recipe,
            fault.mechanism,
            fault.number,
            origin,
            fault.first_step,
            fault.within,
            fault.loss_moves_less_than,
            fault.cause if self.causes != "none" else None,
            "; ".join([*([fault.note] if fault.note else []), *_settings_in_words(fault.settings)]),
        )
        last = fault.first_step + fault.within - 1
        started = time.perf_counter()
        try:
            row = self._judged(row, fault.make(), fault.loader or (lambda batches: batches), last, self.causes)
        except Exception as error:  # a fault may break more than it says; the others are tried all the same
            row = replace(row, error=in_one_line(error))
        return replace(row, seconds=time.perf_counter() - started)

    @property
    def _recipe(self) -> str:
        from lockstep.core.parity.measures import calibrated_bounds

        return calibrated_bounds.recipe_of(self.config)

    def _judged(
        self, row: Row, backend: Backend, loader: Callable[[Any], Callable[[int], Any]], last: int, causes: str
    ) -> Row:
        import torch

        from lockstep.core.parity.diagnose.recheck_rows import look_closer
        from lockstep.core.parity.evidence.gather import gather, uneven_weights
        from lockstep.core.parity.judge.judge import judge

        torch._dynamo.reset()
        # A session refers to its own programs and they to it: without this, those of many faults stay in memory.
        gc.collect()
        reference = self.reference.over_a_run() if last > HONEST_STEPS else self.reference
        session = backend.open(self.config)
        handed, seed = loader(self.data.batch), self.config.seed - 1
        for step in range(1, last + 1):
            batch = uneven_weights(handed(step), seed + step)
            due = uneven_weights(self.data.batch(step), seed + step).digest()
            evidence = gather(session, self.config, batch, due=due)
            evidence, check = look_closer(session, self.config, evidence, judge(evidence, reference), reference)
            row = replace(row, checks=step)
            if step == row.first_step and row.expected is not None:
                row = replace(row, loss_moved=self._moved(evidence.record.loss, step))
            if check.verdict == "could_not":
                return replace(row, error=f"step {step}: nothing was compared")
            if check.verdict == "disagreed":
                # The check's own number is the candidate's, which may count wrongly.
                row = replace(said_of(check, row), step=step)
                cause = self._cause(backend, session, evidence, check, row, causes)
                return replace(row, cause=cause)
        return row

    def _cause(
        self, backend: Backend, session: Session, evidence: Evidence, check: Check, row: Row, causes: str
    ) -> str:
        """The decoder's words; where more is asked for, whether the step repeats and which change makes it vanish."""
        from lockstep.core.capabilities import ranks_of
        from lockstep.core.parity.diagnose.cause import find_cause
        from lockstep.core.parity.diagnose.disagreement import repeated

        note = check.origin.note if check.origin else ""
        wanted = causes == "all" or (causes == "promised" and row.promised_cause and row.promised_cause not in note)
        if not wanted:
            return note
        try:
            found = repeated(session, evidence, check, self.config)
            repeat = ranks_of(session).of_first(lambda: found)
            words = [repeat.why]
            if repeat.happened is not False:
                words.append(find_cause(backend, self.backend, self.config, evidence, check).words)
        except Exception as error:  # the verdict stands without its cause
            words = [f"the cause could not be sought: {in_one_line(error)}"]
        return "; ".join(words)

    def _moved(self, loss: float, step: int) -> float | None:
        """|loss − honest| / honest in this step, both trained from the initial weights; None if it is not finite."""
        if not self._losses:
            from lockstep.core.parity.evidence.gather import uneven_weights

            session = self.honest.open(self.config)
            for number in range(1, HONEST_STEPS + 1):
                batch = uneven_weights(self.data.batch(number), self.config.seed + number - 1)
                self._losses.append(session.step(batch).loss)
        right = self._losses[step - 1]
        moved = abs(loss - right) / right
        return moved if math.isfinite(moved) else None


def said_of(check: Check, row: Row) -> Row:
    """The row with the origins that a check which disagreed names."""
    from lockstep.core.sinks.phrases import bounds

    origins = tuple(_link(finding) for finding in check.origins)
    found = check.origins[0]
    measure = ""
    if found.measures:
        m = found.worst
        measure = f"{m.name.replace('_', ' ')} {m.value:.3g} ({bounds(m.low, m.high)})"
    rank = origins.index(row.expected) + 1 if row.expected in origins else None
    return replace(row, named=origins[0], others=origins[:8], rank=rank, measure=measure)


def _settings_in_words(settings: Mapping[str, str]) -> list[str]:
    return [f"planted with {', '.join(f'{key} = {text}' for key, text in settings.items())}"] if settings else []


def _link(finding: Finding) -> Origin:
    return finding.stage, finding.phase, finding.layer


def totals(rows: Sequence[Row]) -> dict[str, Any]:
    """Counts over the faults of some rows; the honest trainer's row apart."""
    faults = [row for row in rows if row.expected is not None]
    return {
        "faults": len(faults),
        "found_in_time": sum(row.in_time for row in faults),
        "found_in_the_first_step": sum(row.step == row.first_step for row in faults),
        "named_exactly": sum(row.in_time and row.exact for row in faults),
        "within_top_three": sum(row.in_time and row.rank is not None and row.rank <= TOP for row in faults),
        "accused_before_they_act": sum(row.step is not None and row.step < row.first_step for row in faults),
        "without_a_verdict": sum(bool(row.error) for row in faults),
        "as_promised": sum(not row.broken_promises for row in faults),
        "honest_trainer_accused": any(row.broken_promises for row in rows if row.expected is None),
        "seconds": sum(row.seconds for row in rows),
    }


def in_words(counts: dict[str, Any]) -> str:
    """The totals as a sentence."""
    n = counts["faults"]
    honest = "accused" if counts["honest_trainer_accused"] else "not accused"
    return (
        f"{counts['found_in_time']} of {n} found in time ({counts['found_in_the_first_step']} in the first step in "
        f"which they act), {counts['named_exactly']} named exactly, {counts['within_top_three']} within the top "
        f"three; {counts['accused_before_they_act']} accused before they act, {counts['without_a_verdict']} without a "
        f"verdict; the honest trainer is {honest}"
    )


def place(origin: Origin | None) -> str:
    """`attn backward 3`."""
    return "nothing" if origin is None else " ".join(str(part) for part in origin if part is not None)


def run(
    config_of: Callable[[str], RunConfig],
    data: Callable[[RunConfig], RunData],
    recipes: Sequence[str],
    names: Sequence[str] = (),
    causes: str = "promised",
    kept: Sequence[Row] = (),
    on_ranks: Callable[[str, Sequence[str], int], Sequence[Row]] | None = None,
    ranks: Ranks = ONE,
) -> Iterator[Row]:
    """Rows of every fault under every recipe in turn, the honest trainer first; those in `kept` are not run again.

    Faults that need settings of their own come after the others, each set of settings with its honest trainer.
    on_ranks: gives the rows of a recipe's faults, by name, that need so many ranks. Without it these are ranks, and
    there are rows of such faults alone.
    """
    from lockstep.core.parity.measures.compare import JudgeOfRanks

    faults = chosen(names)
    done = {(row.name, row.recipe): row for row in kept if not row.error}
    for recipe in recipes:
        plain = on_its_device(config_of(recipe), open_named(TRAINER))
        of_settings: dict[str, list[Any]] = {HONEST: []}
        for fault in faults:
            if recipe in fault.recipes:
                of_settings.setdefault(honest_name(fault), []).append(fault)
        for name, alike in of_settings.items():
            config = configured(alike[0], plain) if alike else plain
            if config.train.ranks != ranks.count:
                missing = [fault.name for fault in alike if (fault.name, recipe) not in done]
                found = on_ranks(recipe, missing, config.train.ranks) if on_ranks and missing else ()
                done |= {(row.name, row.recipe): row for row in found}
                if on_ranks:
                    rows = [done.get((row, recipe)) for row in (name, *(fault.name for fault in alike))]
                    yield from (row for row in rows if row is not None)
                continue
            reference = Kept(open_named(REFERENCE)) if ranks.rank == 0 else None
            bench = Bench(
                config,
                data(config),
                reference if reference and ranks.count == 1 else JudgeOfRanks(reference, ranks),
                open_named(TRAINER),
                causes,
                name,
            )
            yield done.get((name, recipe)) or bench.honest_row()
            for fault in alike:
                yield done.get((fault.name, recipe)) or bench.row(fault)


def configured(fault: Any, config: RunConfig) -> RunConfig:
    """The run with the settings that a fault needs. Raises UserError if the run's own do not go with them."""
    from pydantic import ValidationError

    try:
        return fault.configured(config)
    except ValidationError as error:
        why = "; ".join(one["msg"].removeprefix("Value error, ") for one in error.errors())
        said = ", ".join(_settings_in_words(fault.settings))
        raise UserError(f"{fault.name} is {said}, which the run's settings do not allow: {why}") from error


def honest_name(fault: Any) -> str:
    """The row of the honest trainer that this fault stands beside: one for all that need the same settings."""
    said = ", ".join(f"{key} = {text}" for key, text in fault.settings.items())
    return f"{HONEST}: {said}" if said else HONEST


def chosen(names: Sequence[str]) -> list[Any]:
    """The faults of these names, all of them without one. Raises UserError for a name that is not there."""
    # pyproject.toml allows this import of a script: the collection is all of the tests that is installed.
    from lockstep.parity_tests.faults import FAULTS

    collection = list(FAULTS)
    by_name = {fault.name: fault for fault in collection}
    for name in names:
        if name not in by_name:
            near = difflib.get_close_matches(name, by_name, n=1)
            hint = f"did you mean {near[0]}?" if near else "the collection is lockstep.parity_tests.faults"
            raise UserError(f"command line: {name!r} is not a fault of the collection; {hint}")
    return [by_name[name] for name in names] if names else collection


def with_recipe(given: dict[str, str], recipe: str) -> dict[str, str]:
    """Settings under a recipe. Raises UserError for one that is not `policy/eager` or `policy/compiled`."""
    policy, _, program = recipe.partition("/")
    if program not in ("eager", "compiled"):
        raise UserError(f"command line: recipe = {recipe}: write one as bf16/eager or fp32/compiled")
    return given | {"precision.policy": policy, "compile.enabled": str(program == "compiled").lower()}


def stamp(config: RunConfig) -> str:
    """Of everything that a row depends on and that is not code: bounds, configuration, expectations."""
    from importlib import resources

    bounds = resources.files("lockstep.core.parity.measures").joinpath("calibrated_bounds.json").read_bytes()
    promised = [
        (f.name, f.stage, f.phase, f.layer, f.first_step, f.within, f.cause, dict(f.settings)) for f in chosen(())
    ]
    return hashlib.sha256(bounds + repr((config.model_dump(), promised)).encode()).hexdigest()[:16]


def write(file: Path, rows: Sequence[Row], mark: str) -> None:
    """The scoreboard as JSON: rows, and totals by recipe."""
    from lockstep.core.files.atomic import write_atomically

    by_recipe: dict[str, list[Row]] = {}
    for row in rows:
        by_recipe.setdefault(row.recipe, []).append(row)
    tree = {
        "schema": SCHEMA,
        "stamp": mark,
        "totals": {recipe: totals(of_recipe) for recipe, of_recipe in by_recipe.items()},
        "rows": [row.to_json() for row in rows],
    }
    write_atomically(file, [(json.dumps(tree, indent=1, ensure_ascii=False) + "\n").encode()])


def read(file: Path, mark: str) -> list[Row]:
    """Rows of an earlier run on the same bounds, configuration and expectations; none if there are none."""
    try:
        tree = json.loads(file.read_text())
        return [from_json(row) for row in tree["rows"]] if tree["stamp"] == mark else []
    except FileNotFoundError:
        return []
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{file} is not a scoreboard: {in_one_line(error)}") from error


def print_row(console: Console, row: Row) -> None:
    """One line as soon as a fault is judged, and what is otherwise than promised."""
    broken = row.broken_promises
    step = "–" if row.step is None else str(row.step)
    rank = "–" if row.rank is None else str(row.rank)
    moved = "" if row.loss_moved is None else f"{row.loss_moved:.1e}"
    line = f"{row.name:<29} {place(row.expected):<25} step {step:>3}  {place(row.named):<25} top {rank}  {moved:>7}"
    line += f"  {row.seconds:4.0f} s"
    console.print(line, style="red" if broken else "green", markup=False, soft_wrap=True)
    for said in broken:
        console.print(f"    {said}", style="red", markup=False, soft_wrap=True)
    if row.cause:
        console.print(f"    cause: {row.cause}", markup=False, soft_wrap=True)


@on_every_rank
def main(argv: list[str]) -> int:
    """Plant, judge, print; 0 if all is as promised."""
    from lockstep.core.config.file import load_config
    from lockstep.core.sinks.terminal import open_console

    options, given = parse(Faults, "faults", argv, with_settings=True)
    if not options.recipe:
        raise UserError("command line: recipe has no value")
    if options.resume and options.json is None:
        raise UserError("command line: resume: say with json which file to go on with")
    check_file("json", options.json)

    def config_of(recipe: str) -> RunConfig:
        config = load_config(options.config, with_recipe(given, recipe))
        if config.model.layers < 2:
            raise UserError(f"model.layers = {config.model.layers}: faults are planted in the second block as well")
        return config

    configs = [config_of(recipe) for recipe in options.recipe]
    from lockstep.core.parity.measures import calibrated_bounds

    for config in configs:
        recipe = calibrated_bounds.recipe_of(config)
        calibrated_bounds.require(config)
        for fault in chosen(options.names):
            if recipe in fault.recipes:
                calibrated_bounds.require(configured(fault, config))
    mark = stamp(configs[0].model_copy(update={"precision": None, "compile": None}))
    kept = read(options.json, mark) if options.resume and options.json else []
    console = open_console()
    console.print(
        f"{'fault':<29} {'planted in':<25} {'found':<8}  {'named':<25} {'rank':<5} {'loss moved':>9}",
        style="bold",
        soft_wrap=True,
    )
    rows: list[Row] = []

    def data(config: RunConfig) -> RunData:
        return open_data(config, options.config, given)

    def on_ranks(recipe: str, names: Sequence[str], ranks: int) -> Sequence[Row]:
        """Rows of faults that need several ranks: this command, on so many of them."""
        with tempfile.TemporaryDirectory(prefix="lockstep-") as folder:
            file = Path(folder) / "rows.json"
            words = ["faults", *names, "--config", str(options.config), "--recipe", recipe, "--json", str(file)]
            words += ["--causes", options.causes]
            words += [word for key, text in given.items() for word in (f"--{key.replace('_', '-')}", text)]
            start_ranks(ranks, words, quiet=True)
            found = read(file, mark)
        if lost := set(names) - {row.name for row in found}:
            raise UserError(f"no row of {', '.join(sorted(lost))}: the {ranks} ranks that plant them have ended before")
        return found

    with ranks_of_launch(configs[0]) as ranks:
        starts = on_ranks if launched() is None else None
        for row in run(config_of, data, options.recipe, options.names, options.causes, kept, starts, ranks):
            if row.name == HONEST:
                console.print(row.recipe, style="bold")
            rows.append(row)
            print_row(console, row)
            if options.json and ranks.rank == 0:
                write(options.json, rows, mark)
    for recipe in options.recipe:
        console.print(
            f"{recipe}: {in_words(totals([r for r in rows if r.recipe == recipe]))}", style="bold", soft_wrap=True
        )
    return int(any(row.broken_promises for row in rows))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
