"""`lockstep train`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from lockstep.core.errors import UserError
from lockstep.core.files.jsonl import in_ranges
from lockstep.core.files.paths import quoted
from lockstep.core.run.launch import launched, require_ranks
from lockstep.core.sinks.lines import print_if_read, tell
from lockstep.scripts.shared.arguments import parse
from lockstep.scripts.shared.backends import (
    REFERENCE,
    Maker,
    command_line,
    is_built_in,
    on_its_device,
    open_candidate,
    open_named,
    trainer_of,
)
from lockstep.scripts.shared.failures import in_short
from lockstep.scripts.shared.initial_weights import require_seed
from lockstep.scripts.shared.interrupts import interrupts, terminated_as_interrupted
from lockstep.scripts.shared.open_data import open_data
from lockstep.scripts.shared.peers import needs_start, opens_ranks, ranks_of_launch, start_ranks
from lockstep.scripts.shared.restart import is_of_this_launch, note_launch, run_of_this_launch, with_ranks_that_are_left

if TYPE_CHECKING:
    from rich.console import Console

    from lockstep.core.backend import Session
    from lockstep.core.config.schema import RunConfig
    from lockstep.core.parity.evidence.evidence import Evidence
    from lockstep.core.parity.measures.verdict import Check, Finding
    from lockstep.core.parity.modes.shadow import Shadow
    from lockstep.core.run.data import RunData
    from lockstep.core.run.directory import RunDir
    from lockstep.core.run.ranks import Ranks
    from lockstep.core.run.resume import Changes

RUNS = Path("runs")


@dataclass
class Train:
    """Train a run file: `lockstep train CONFIG`. Ctrl-C writes a checkpoint after the step; --resume RUN goes on.

    Ends 0 when finished, 1 if a parity check disagreed, 2 if it could not start or continue, or if fewer than half of
    the due checks were made, 130 after Ctrl-C.
    """

    config: Annotated[
        Path | None, tyro.conf.Positional, tyro.conf.arg(metavar="[CONFIG]", help_behavior_hint="(this or --resume)")
    ] = None
    """run file (TOML)"""
    resume: Annotated[Path | None, tyro.conf.arg(metavar="RUN", help_behavior_hint="(default: a new run)")] = None
    """run directory to continue from its last checkpoint, with its own settings. Flags may change ranks, micro-batch,
    device, checkpoint, eval, log and parity. Flags of optim, precision, loss, compile, recompute, train.steps and
    train.curriculum begin a branch (docs/guide/checkpoints.md)"""
    from_step: Annotated[int | None, tyro.conf.arg(metavar="N", help_behavior_hint="(default: the last)")] = None
    """with --resume: continue from the checkpoint of this step; later steps are kept in branches/"""
    out: Annotated[Path | None, tyro.conf.arg(metavar="DIR", help_behavior_hint="(default: runs)")] = None
    """folder of run directories"""
    overwrite: bool = False
    """replace an earlier run of the same name"""
    verbose: bool = False
    """also print the metrics of longer intervals, which are always recorded: norms, memory, the loss in FP32"""
    backend: Annotated[str | None, tyro.conf.arg(metavar="BACKEND", help_behavior_hint="(default: torch)")] = None
    """trainer: torch, jax (the reference itself), hf, litgpt, FILE.py:NAME or module:NAME (docs/guide/candidates.md).
    --resume keeps the run's trainer; name FILE.py:NAME or module:NAME again, because foreign code runs only if the
    command line names it"""


def main(argv: list[str]) -> int:
    """Open everything that can fail, then make the run directory, then train."""
    from lockstep.core.backend import NotSupported
    from lockstep.core.capabilities import SpansNodes, ask
    from lockstep.core.config.auto import settled
    from lockstep.core.config.file import load_config
    from lockstep.core.parity.measures import calibrated_bounds
    from lockstep.core.run.create import check_free
    from lockstep.core.run.directory import RunDir
    from lockstep.core.run.layout import CONFIG
    from lockstep.core.train.determinism import place, require_same_place
    from lockstep.scripts.shared.startup_banner import versions

    if (rank := launched()) is not None and rank[0] > 0:
        # Rank 0 checks the command line and sends the result to the others.
        return _peer()
    options, given = parse(Train, "train", argv, with_settings=True)
    if options.resume and options.overwrite:
        raise UserError("--overwrite and --resume exclude each other")
    if options.resume and options.out and options.out.resolve() != (lies := options.resume.resolve().parent):
        raise UserError(f"--out {options.out}: --resume continues a run in its own folder, which is in {lies}")
    if options.config is None and options.resume is None:
        raise UserError("name a run file to train, or --resume RUN to continue a run")
    if options.from_step is not None and options.resume is None:
        raise UserError("--from-step needs --resume RUN")
    resumed = RunDir.open(options.resume) if options.resume else None
    again = None if resumed else _of_this_launch(options, given)
    if again and again.latest_checkpoint() is not None:
        resumed = again
    known = again or resumed
    if known and is_of_this_launch(known):
        given = with_ranks_that_are_left(given, known)
        # The launch's first command line. A restarted launch continues from its own last checkpoint instead.
        options.from_step = None
    # A restarted launch names its backend as it did when it made the run.
    named = options.backend if options.resume else options.backend or "torch"
    name = trainer_of(resumed, named, ["train", *argv]) if resumed else named or "torch"
    going_on = _going_on(resumed, options, given, name) if resumed else None
    config = going_on.config if going_on else load_config(options.config, given)
    if not going_on:
        require_seed(config)
    if launched() is not None:
        require_ranks(config.train.ranks)
    path = resumed.path if resumed else (options.out or RUNS) / config.name
    if not resumed:
        options.overwrite |= again is not None
        check_free(path, options.overwrite)
    data = open_data(config, options.config or path / CONFIG, given)
    backend = open_candidate(name)
    if config.train.ranks > 1 and not opens_ranks(backend):
        raise UserError(f"train.ranks = {config.train.ranks}: {name} trains in one process; set train.ranks = 1")
    if needs_start(config):
        return start_ranks(config.train.ranks, ["train", *argv])
    asked = on_its_device(config, backend)
    config = resumed.settled(asked) if resumed else settled(asked, asked.device)
    about = backend.describe(config)
    if resumed and config.deterministic:
        require_same_place(resumed, place(config, about, versions()))
    if config.parity.every:
        calibrated_bounds.require(config)
    with ExitStack() as stack:
        ranks = stack.enter_context(ranks_of_launch(config))
        stack.enter_context(terminated_as_interrupted())
        ranks.of_first(lambda: (name, data.config.model_dump(), config.model_dump()))
        if going_on:
            run = stack.enter_context(_reopen(path, data, going_on))
        session = backend.open(config)
        stack.callback(session.close)
        if not resumed:
            run = stack.enter_context(_create(path, options, asked, name, about, data))
            stack.push(_Unbegun(run))
            note_launch(run, again, 0)
        with suppress(NotSupported):
            ask(session, SpansNodes).require_shared(run.path)
        return _train(stack, run, data, session, about, going_on, ranks, options.verbose)


def _peer() -> int:
    """Train on a rank other than 0: the same run on the same data, without its directory, console and checks."""
    from lockstep.core.capabilities import HasRandomState, SpansNodes, ask
    from lockstep.core.checkpoint.taken_over import restore_state
    from lockstep.core.config.schema import RunConfig
    from lockstep.core.parity.diagnose.disagreement import named, sound
    from lockstep.core.parity.evidence.recorder import Recorder
    from lockstep.core.parity.modes.shadow import ShadowPart
    from lockstep.core.run.data import RunData
    from lockstep.core.train.determinism import prove
    from lockstep.core.train.loop import train

    with ExitStack() as stack:
        ranks = stack.enter_context(ranks_of_launch(None))
        stack.enter_context(terminated_as_interrupted())
        told: Any = ranks.of_first(tuple)
        name, of_data, of_session = told
        data = RunData.open(RunConfig(**of_data))
        session_config = RunConfig(**of_session)
        session = open_named(name).open(session_config)
        stack.callback(session.close)
        ask(session, SpansNodes).require_shared(Path())
        if (told := ranks.of_first(tuple)) is not None:
            folder, step, scalars = told
            restore_state(session, session_config, Path(folder), step, scalars)
            ask(session, HasRandomState).set_random_state(ranks.of_first(dict))
        told = ranks.of_first(tuple)
        done, settings = told
        config = RunConfig(**settings)
        data = replace(data, config=config)
        if done >= config.train.steps:
            return 0
        if config.deterministic:
            prove(config, session, data.batch(done + 1), done + 1, ranks)
        part = stack.enter_context(ShadowPart(config, ranks, done + 1)) if config.parity.every else None
        watch = stack.enter_context(Recorder(config, None, part)) if config.parity.records else part

        def alarm(check: Check) -> tuple[Check, None]:
            if (evidence := ranks.of_first(lambda: None)) is not None:
                # Rank 0 judges the step, names the rank at fault, and packs the step.
                evidence, check = named(session, evidence, check, config, lambda seen: (seen, []))
                sound(session, evidence, check, config, Path(), candidate="", reference="", versions={})
            return check, None

        with interrupts(told=False) as interrupted:
            ranks.of_first(bool, "begin")
            train(session, data, None, [], interrupted, done + 1, "", watch, alarm, ranks)
        return 0


def _train(
    stack: ExitStack,
    run: RunDir,
    data: RunData,
    session: Session,
    about: Mapping[str, Any],
    going_on: _GoingOn | None,
    ranks: Ranks,
    verbose: bool,
) -> int:
    from lockstep.core.parity.evidence.recorder import Recorder
    from lockstep.core.parity.modes.shadow import Shadow
    from lockstep.core.run.layout import EVIDENCE, OBSERVATIONS
    from lockstep.core.sinks.console import ConsoleSink
    from lockstep.core.sinks.jsonl import JsonlSink
    from lockstep.core.sinks.terminal import open_console
    from lockstep.core.sinks.wandb import WandbSink
    from lockstep.core.train.determinism import prove_run
    from lockstep.core.train.loop import train
    from lockstep.scripts.shared.startup_banner import print_start, versions

    config = run.config
    console = open_console()
    done = _load(run, data, session, console, going_on, ranks) if going_on else ranks.of_first(lambda: None) or 0
    ranks.of_first(lambda: (done, config.model_dump()))
    if done >= config.train.steps:
        run.finish()
        tell(console, "all steps are done")
        return _exit_code(run, done, console)
    if config.deterministic:
        about = prove_run(run, session, data.batch(done + 1), done + 1, about, versions(), ranks)
    print_if_read(console, lambda: print_start(console, run, data, about))
    sinks: list[Any] = [JsonlSink(run)]
    if config.log.wandb != "disabled":
        sinks.append(WandbSink(run, lambda text: tell(console, text, "yellow")))
    kept = run.path / OBSERVATIONS
    folder = run.path / EVIDENCE
    shadow = None
    if config.parity.every:
        shadow = stack.enter_context(Shadow(config, REFERENCE, kept, ranks, folder, done + 1))
    watch = stack.enter_context(Recorder(config, kept, shadow)) if config.parity.records else shadow
    sinks.append(ConsoleSink(config.train.steps, done, console, verbose))
    for sink in sinks:
        stack.callback(sink.close)
    alarm = _alarm(run, session, shadow, about, ranks)
    with interrupts() as interrupted, _told_how_to_go_on(run), _stop_noted(run):
        ranks.of_first(bool, "begin")
        ending = train(session, data, run, sinks, interrupted, done + 1, str(about["device"]), watch, alarm, ranks)
    if ending != "finished":
        run.note_stop(ending, {"alarmed": "a check disagreed"}.get(ending, ""))
    stack.close()
    if ending == "interrupted":
        tell(console, f"stopped; continue with: lockstep train --resume {quoted(run.path)}")
        return 130
    if ending == "alarmed":
        _tell_of_disagreement(run, console)
        return 1
    tell(console, f"its report: lockstep report {quoted(run.path)}")
    return _exit_code(run, done, console)


def _alarm(
    run: RunDir, session: Session, shadow: Shadow | None, about: Mapping[str, Any], ranks: Ranks
) -> Callable[[Check], tuple[Check, str | None]]:
    """Follow up a check that disagreed: look for its stage, run the step again, and pack it for `lockstep replay`."""
    from lockstep.core.parity.diagnose.disagreement import named, sound
    from lockstep.core.parity.diagnose.recheck_rows import broken_stages
    from lockstep.core.run.layout import CAPSULES
    from lockstep.scripts.shared.startup_banner import versions

    def judged(seen: Evidence) -> tuple[Evidence, list[Finding]]:
        assert shadow is not None
        seen, check = shadow.judge_apart(seen)
        return seen, broken_stages(check.findings if check else ())

    def alarm(check: Check) -> tuple[Check, str | None]:
        lost = ""

        def found() -> Evidence | None:
            nonlocal lost
            try:
                return shadow.evidence_of(check.step) if shadow else None
            except UserError as error:  # reported in the alarm: training goes on
                lost = f"step {check.step}: no capsule: {error}"
                return None

        evidence = ranks.of_first(found)
        if evidence is None:
            return check, lost or None
        evidence, check = named(session, evidence, check, run.config, judged)
        made = sound(
            session,
            evidence,
            check,
            run.config,
            run.path / CAPSULES,
            candidate=str(Maker.of_run(run)),
            reference="jax",
            versions={**about.get("versions", {}), **versions()},
            machine={"device": about.get("device")},
        )
        return replace(check, cause="; ".join(made.cause) or None), made.summary

    return alarm


def _load(run: RunDir, data: RunData, session: Session, console: Console, going_on: _GoingOn, ranks: Ranks) -> int:
    """Reset session and run directory to the checkpoint; return its step."""
    from lockstep.core.backend import NotSupported
    from lockstep.core.capabilities import Restores, ask
    from lockstep.core.checkpoint.format import (
        checkpoint_step,
        load_checkpoint,
        read_random,
        reader_of,
        restore_checkpoint,
    )
    from lockstep.core.checkpoint.random_state import restore_random_state, session_states
    from lockstep.core.checkpoint.taken_over import require_taken_over, restore_state
    from lockstep.core.run.history import BRANCH, in_words
    from lockstep.core.train.skipped_steps import as_its_own

    def warn(text: str) -> None:
        tell(console, text, "yellow")

    def warn_of(unseen: str | None) -> None:
        if unseen:
            warn(unseen)

    path = run.checkpoint(warn, going_on.from_step)
    going_on.require(run, checkpoint_step(path) or 0)
    try:
        try:
            ask(session, Restores)

            def restore(folder: Path, step: int, scalars: Mapping[str, float]) -> None:
                ranks.of_first(lambda: (str(folder.resolve()), step, dict(scalars)))
                warn_of(restore_state(session, run.config, folder, step, scalars))

            step, extra = restore_checkpoint(path, restore)
        except NotSupported:
            state, extra = load_checkpoint(path, reader_of(session))
            step = state.step
            session.load(as_its_own(run.config, state))
            warn_of(require_taken_over(session, run.config, state, f"the checkpoint {path}"))
    except UserError:
        raise
    except ValueError as error:
        raise UserError(f"{run.path}: its checkpoint does not fit its settings: {error}") from error
    if extra.get("data_fingerprint") != data.dataset.fingerprint:
        raise UserError(
            f"{run.path}: its checkpoint was made with another data set than {data.config.data.title} holds now"
        )
    random = read_random(path)
    ranks.of_first(lambda: session_states(random))
    restore_random_state(session, random)
    run.resume_from(step, warn)
    if (made_by := str(Maker.of_run(run))) != going_on.backend:
        run.update_info(backend=going_on.backend)
        warn(f"{run.path}: trained by {made_by} so far, by {going_on.backend} from here on")
    started = note_launch(run, None, step)
    why = f" after restart {started} of this launch" if started else ""
    lines = [f"{run.path}: going on from step {step}{why}"]
    if BRANCH in (last := run.info["resumes"][-1]):
        lines.append(in_words(last))
    print_if_read(console, lambda: tell(console, "\n".join(lines)))
    return step


def _of_this_launch(options: Train, given: Mapping[str, str]) -> RunDir | None:
    from lockstep.core.config.file import load_config

    return run_of_this_launch((options.out or RUNS) / load_config(options.config, given).name, options.overwrite)


def _exit_code(run: RunDir, done: int, console: Console) -> int:
    """Return the exit code of a finished run: 1 if any check disagreed, before or after the resume at `done`.

    Raises UserError if none disagreed and fewer than half of those that were due were made, by the same record.
    """
    from lockstep.core.parity.modes.coverage import coverage
    from lockstep.core.run.layout import CHECKS

    lines = run.checks()
    bad = [line["step"] for line in lines if line.get("verdict") == "disagreed"]
    if before := [step for step in bad if step <= done]:
        said = f"checks that disagreed before this resume: {in_ranges(before)}; so this ends with exit code 1"
        tell(console, said, "bold red")
    checked = coverage(run.checks_due(run.config.train.steps), lines, f"{run.path / CHECKS} has no line for it")
    if not checked.is_enough:
        if not bad:
            raise UserError(checked.words)
        tell(console, checked.words, "bold red")
    _tell_of_disagreement(run, console)
    return int(bool(bad))


def _tell_of_disagreement(run: RunDir, console: Console) -> None:
    """Print the first step whose check disagreed and the command that finds the cause, if there is such a step."""
    bad = [line["step"] for line in run.checks() if line.get("verdict") == "disagreed"]
    if not bad:
        return
    maker = Maker.of_run(run)
    candidate = [] if is_built_in(maker.name) else ["--candidate", str(maker)]
    command = command_line(["bisect", str(run.path), *candidate])
    tell(console, f"the first check that disagreed: step {min(bad)}; continue with: {command}", "bold red")


@dataclass(frozen=True)
class _GoingOn:
    """The resume of a run: where, how and by whom. done: steps in the checkpoint, by its name; 0 if there is none."""

    done: int
    backend: str
    from_step: int | None
    config: RunConfig
    changes: Changes

    def require(self, run: RunDir, done: int) -> None:
        """Raise UserError if it is another checkpoint and settings change."""
        from lockstep.core.run.history import settings_at

        same = settings_at(run.info, done) == settings_at(run.info, self.done)
        if done != self.done and (self.changes.branch or not same):
            raise UserError(
                f"{run.path}: the checkpoint of step {self.done} is damaged, and the settings change there; "
                f"continue from the checkpoint before it with --from-step {done}"
            )


def _going_on(run: RunDir, options: Train, given: Mapping[str, str], backend: str) -> _GoingOn:
    """Return the state to resume from. Raises UserError for settings that a run keeps, or without such a checkpoint.

    Settings come from the command line, or from a run file that differs from the run's only in them.
    """
    from lockstep.core.checkpoint.format import checkpoint_step
    from lockstep.core.config.file import load_config
    from lockstep.core.run.history import settings_at
    from lockstep.core.run.layout import CONFIG
    from lockstep.core.run.resume import changes

    last = run.latest_checkpoint() if options.from_step is None else run.checkpoint_after(options.from_step)
    done = (checkpoint_step(last) or 0) if last else 0
    file, settings = run.path / CONFIG, settings_at(run.info, done)
    own = load_config(file, settings)
    asked = load_config(options.config, given) if options.config else load_config(file, {**settings, **given})
    found = changes(str(run.path), own, asked, given, done)
    return _GoingOn(done, backend, options.from_step, load_config(file, {**settings, **found.settings}), found)


def _reopen(path: Path, data: RunData, going_on: _GoingOn) -> RunDir:
    from lockstep.core.run.directory import RunDir
    from lockstep.core.run.resume import other_data
    from lockstep.scripts.shared.startup_banner import data_facts

    run = RunDir.open(path, write=True, changes=going_on.changes, done=going_on.done)
    made_with, now = run.info.get("data", {}), data_facts(data)
    if made_with.get("fingerprint") != now["fingerprint"]:
        run.close()
        raise UserError(
            f"{path} was made with another data set than {run.config.data.title} holds: "
            + ("; ".join(other_data(made_with, now)) or "run.json does not record which")
        )
    return run


def _create(path: Path, options: Train, config: Any, backend: str, about: Mapping[str, Any], data: RunData) -> RunDir:
    from lockstep.core.run.directory import RunDir
    from lockstep.scripts.shared.startup_banner import run_info

    return RunDir.create(path, config, run_info(config, backend, about, data), options.overwrite)


class _Unbegun(contextlib.AbstractContextManager[None]):
    """A guard that removes a new run's directory if the run fails before its first step."""

    def __init__(self, run: RunDir) -> None:
        self._run = run

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        with contextlib.suppress(UserError):  # moved away: its records, if any, are there
            if kind is not None and not self._run.records():
                self._run.discard()


@contextmanager
def _told_how_to_go_on(run: RunDir) -> Iterator[None]:
    """Add the command that continues the run to an error that ends a run with a checkpoint."""
    try:
        yield
    except UserError as error:
        if run.latest_checkpoint() is None:
            raise
        raise UserError(f"{error}; continue with: lockstep train --resume {quoted(run.path)}") from error


@contextmanager
def _stop_noted(run: RunDir) -> Iterator[None]:
    """Record in the run what ended it, for `lockstep runs`."""
    try:
        yield
    except KeyboardInterrupt:
        run.note_stop("interrupted", "")
        raise
    except Exception as error:
        run.note_stop("failed", in_short(error))
        raise
