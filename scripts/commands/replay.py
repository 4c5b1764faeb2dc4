"""`lockstep replay`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from lockstep.core.errors import UserError
from lockstep.core.run.ranks import ONE
from lockstep.core.sinks.lines import complain
from lockstep.scripts.shared.arguments import check_file, parse
from lockstep.scripts.shared.backends import Maker, on_its_device, open_candidate
from lockstep.scripts.shared.failures import in_one_line
from lockstep.scripts.shared.open_data import open_data
from lockstep.scripts.shared.peers import needs_start, on_every_rank, ranks_of_launch, reference_of, start_ranks

if TYPE_CHECKING:
    from rich.console import Console

    from lockstep.core.backend import Backend, Batch
    from lockstep.core.config.schema import RunConfig
    from lockstep.core.parity.modes.replay import Replayed
    from lockstep.core.run.data import RunData
    from lockstep.core.run.directory import RunDir
    from lockstep.core.run.ranks import Ranks

EXIT = {"agreed": 0, "disagreed": 1, "could_not": 2}


@dataclass
class Replay:
    """Judge steps later and elsewhere: `lockstep replay PATH`, PATH a run directory, a capsule or a loss spike.

    A capsule's evidence is judged again without the candidate. If it has none, or with --run-again, --candidate or
    --device, its step is run again and judged in full. In a run, steps with recorded sketches and a stored state are
    judged end to end from these; steps with only a state are run again. A spike's batch is run again by the candidate
    alone, and its loss must equal the recorded one bit for bit. Ends 0 if all agreed, 1 if any disagreed, 2 if it could
    not (docs/guide/replay.md).
    """

    path: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="PATH")]
    """run directory, capsule (runs/NAME/capsules/step_000040) or spike (runs/NAME/spikes/step_000123)"""
    step: Annotated[int | None, tyro.conf.arg(metavar="N", help_behavior_hint="(default: all there are)")] = None
    """judge only this step; without a stored state, the candidate runs the steps before it"""
    json: Annotated[Path | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="(default: not written)")] = None
    """file for the verdict as JSON"""
    run_again: bool = False
    """let the candidate run a capsule's step again even if the capsule holds the evidence"""
    candidate: Annotated[
        str | None, tyro.conf.arg(metavar="BACKEND", help_behavior_hint="(default: the backend that made it)")
    ] = None
    """backend that runs steps again: torch, jax, FILE.py:NAME or module:NAME; required if neither torch nor jax made
    it"""
    reference: Annotated[str, tyro.conf.arg(metavar="BACKEND")] = "jax"
    """reference to check against: torch, jax, FILE.py:NAME or module:NAME"""
    branch: Annotated[int | None, tyro.conf.arg(metavar="N", help_behavior_hint="(default: the run as it is)")] = None
    """the run as it was before its Nth resume or rollback (branches/00N)"""
    device: Annotated[
        Literal["auto", "cpu", "cuda"] | None,
        tyro.conf.arg(metavar="auto|cpu|cuda", help_behavior_hint="(default: as recorded)"),
    ] = None
    """device of the candidate"""
    reference_devices: Annotated[
        int | None, tyro.conf.arg(metavar="INT", help_behavior_hint="(default: as recorded)")
    ] = None
    """number of devices of the reference (docs/guide/reference_sharding.md)"""
    reference_device: Annotated[
        Literal["cpu", "cuda"] | None,
        tyro.conf.arg(metavar="cpu|cuda", help_behavior_hint="(default: as recorded)"),
    ] = None
    """device of the reference"""
    verbose: bool = False
    """also print the whole table, a row for each stage, phase and scope"""


@on_every_rank
def main(argv: list[str]) -> int:
    """Replay, print, write the JSON; the exit code is the verdict."""
    from lockstep.core.parity.evidence.capsule import is_capsule
    from lockstep.core.run.layout import LISTED
    from lockstep.core.sinks.terminal import open_unwrapped
    from lockstep.core.train.spikes import is_spike

    options, _ = parse(Replay, "replay", argv, with_settings=False)
    check_file("json", options.json)
    if not options.path.is_dir():
        raise UserError(f"no such run, capsule or spike: {options.path}; {LISTED}")
    console, words = open_unwrapped(), ["replay", *argv]
    if is_spike(options.path):
        return _spike(console, options, words)
    if is_capsule(options.path):
        return _capsule(console, options, words)
    return _run(console, options, words)


def _capsule(console: Console, options: Replay, words: Sequence[str]) -> int:
    from lockstep.core.parity.evidence.capsule import other_versions, read_capsule
    from lockstep.core.parity.measures import calibrated_bounds
    from lockstep.core.parity.modes.replay import judge_capsule, replay_capsule
    from lockstep.scripts.shared.startup_banner import versions

    capsule = read_capsule(options.path)
    if options.step not in (None, capsule.step):
        raise UserError(f"{options.path} holds step {capsule.step}, not step {options.step}")
    kept = capsule.evidence is not None and not (options.run_again or options.candidate or options.device)
    maker = Maker.of_capsule(capsule)
    name = str(maker) if kept else maker.named("--candidate", options.candidate, words)
    calibrated_bounds.require(capsule.config)
    config = on_reference_devices(capsule.config, options.reference_devices, options.reference_device)
    if not kept:
        candidate = open_candidate(name)
        config = attempt(lambda: on_device(config, options.device, candidate))
        if needs_start(config, candidate):
            return start_ranks(config.train.ranks, words)
    packed = capsule.verdict
    console.print(f"step {capsule.step}, packed verdict: {_said(packed)}", markup=False, soft_wrap=True)
    for line in other_versions(capsule, versions()):
        console.print(f"other versions: {line}", style="yellow", markup=False, soft_wrap=True)
    with nullcontext(ONE) if kept else ranks_of_launch(config) as ranks:
        reference = reference_of(options.reference, ranks)
        if kept:
            found = attempt(lambda: judge_capsule(capsule, reference, config))
        else:
            found = attempt(lambda: replay_capsule(capsule, candidate, reference, config))
    context = {"candidate": name, "reference": options.reference, "packed": packed.get("origin")}
    file = options.json if ranks.rank == 0 else None
    code = _report(console, [found], calibrated_bounds.recipe_of(config), file, context, verbose=options.verbose)
    same = found.check is not None and _said(found.check.to_json()) == _said(packed)
    said = "the verdict is the one that was packed" if same else f"differs from the packed verdict: {_said(packed)}"
    console.print(said, markup=False, soft_wrap=True)
    return code


def _spike(console: Console, options: Replay, words: Sequence[str]) -> int:
    from lockstep.core.parity.modes.replay import in_words
    from lockstep.core.parity.modes.replay_spike import replay_spike
    from lockstep.core.train.spikes import read_spike

    about, kept = read_spike(options.path)
    step, loss = about["step"], about["loss"]
    if options.step not in (None, step):
        raise UserError(f"{options.path} holds step {step}, not step {options.step}")
    run, data = open_run(*_run_of_spike(options.path, options.branch))
    try:
        kept.require_tokens_below(run.config.model.vocab_size)
    except ValueError as error:
        raise UserError(f"{options.path}: its batch is not of this run: {error}") from error
    candidate = Maker.of_run(run).open("--candidate", options.candidate, words)
    config = attempt(lambda: on_device(run.asked, options.device, candidate))
    if needs_start(config, candidate):
        return start_ranks(config.train.ranks, words)
    with ranks_of_launch(config) as ranks:
        found = attempt(lambda: replay_spike(run, about, kept, batches_of(run, data), candidate, config))
    same = not found.differ
    way = f"after steps {found.loaded + 1} to {step - 1}" if found.loaded + 1 < step else "at once"
    said = f"step {step}, from the state of step {found.loaded}, {way}: loss {found.record.loss!r}"
    said += ", bit for bit as recorded" if same else f"; not as recorded: {in_words(found.differ)}"
    console.print(said, style="green" if same else "bold red", markup=False, soft_wrap=True)
    if found.on_the_way is not None:
        console.print(f"  step {found.on_the_way} differs from its record", markup=False, soft_wrap=True)
    if not found.in_order:
        console.print("  the data order gives another batch at this step", markup=False, soft_wrap=True)
    if options.json and ranks.rank == 0:
        verdict = "agreed" if same else "disagreed"
        write_json(options.json, {"verdict": verdict, "step": step, "loss": found.record.loss, "recorded": loss})
    return EXIT["agreed" if same else "disagreed"]


def _run_of_spike(path: Path, branch: int | None) -> tuple[Path, int | None]:
    """Return the run of a spike, and the branch whose folder it lies in: RUN/branches/002/spikes/step_000123."""
    folder = path.resolve().parent.parent
    if folder.parent.name != "branches" or not folder.name.isdecimal():
        return folder, branch
    return folder.parent.parent, int(folder.name) if branch is None else branch


def _run(console: Console, options: Replay, words: Sequence[str]) -> int:
    run, data = open_run(options.path, options.branch, options.reference_devices, options.reference_device)
    require_bands(run)
    named = open_candidate(options.candidate) if options.candidate and run.config.train.ranks > 1 else None
    if needs_start(run.config, named):
        return start_ranks(run.config.train.ranks, words)
    with ranks_of_launch(run.config) as ranks:
        return _judge_run(console, options, words, run, data, ranks)


def _judge_run(
    console: Console, options: Replay, words: Sequence[str], run: RunDir, data: RunData, ranks: Ranks
) -> int:
    from lockstep.core.parity.measures import calibrated_bounds
    from lockstep.core.parity.modes.replay import replay_run

    maker = Maker.of_run(run)
    reference = reference_of(options.reference, ranks)
    found: list[Replayed] = []

    def candidate() -> Backend:
        # Opened only to run a step again: a judgement from sketches needs no foreign code.
        return maker.open("--candidate", options.candidate, words)

    def judge_all() -> None:
        elsewhere = on_device(run.asked, options.device, candidate()) if options.device else None
        steps = replay_run(run, batches_of(run, data), candidate, reference, options.step, elsewhere)
        for one in steps:
            found.append(one)
            _line(console, one)

    stopped: UserError | None = None
    try:
        attempt(judge_all)
    except UserError as error:
        stopped = error
    if stopped and not any(one.check and one.check.verdict == "disagreed" for one in found):
        raise stopped
    context = {"candidate": options.candidate or str(maker), "reference": options.reference}
    file = options.json if ranks.rank == 0 else None
    recipe = calibrated_bounds.recipe_of(run.config)
    code = _report(console, found, recipe, file, context, verbose=options.verbose, told=True)
    if stopped:
        complain(str(stopped))
    return code


def _report(
    console: Console,
    found: Sequence[Replayed],
    recipe: str,
    json: Path | None,
    context: dict[str, Any],
    *,
    verbose: bool,
    told: bool = False,
) -> int:
    from lockstep.core.parity.measures.verdict import overall, verdict_json
    from lockstep.scripts.shared.parity_table import print_verdict

    if not told:
        for one in found:
            _line(console, one)
    checks = [one.check for one in found if one.check is not None]
    if json:
        steps = [{"step": one.step, "how": one.how, "notes": list(one.notes)} for one in found]
        write_json(json, verdict_json(checks, recipe=recipe, **context) | {"replayed": steps})
    if not checks:
        reasons = "; ".join(dict.fromkeys(note for one in found for note in one.notes))
        raise UserError(f"no step could be judged: {reasons}")
    print_verdict(console, checks, recipe, verbose)
    return EXIT[overall(checks)]


def _line(console: Console, one: Replayed) -> None:
    from lockstep.core.sinks.lines import say
    from lockstep.core.sinks.phrases import check_line

    how = {
        "evidence": "as packed, from its evidence",
        "sketches": "as the run made it, from its sketches (end to end)",
        "run again": "run again by the candidate",
        "not covered": "not covered",
    }[one.how]
    said = check_line(one.check) if one.check else f"step {one.step}"
    style = {"agreed": "green", "disagreed": "bold red"}.get(one.check.verdict if one.check else "", "yellow")
    say(console, f"{said} [{how}]", style)
    for note in one.notes:
        say(console, f"  {note}")


def _said(verdict: Any) -> str:
    origin = verdict.get("origin")
    if not origin:
        return str(verdict.get("verdict"))
    layer = "" if origin["layer"] is None else f", layer {origin['layer']}"
    return f"{verdict['verdict']}, origin {origin['stage']} ({origin['phase']}{layer}) at {origin['tap']}"


def on_reference_devices(config: RunConfig, count: int | None, device: str | None) -> RunConfig:
    """Return the configuration with this number and kind of devices for the reference, where they are given.

    Raises UserError for less than one, and for a GPU if the run does not limit the memory that a check may take.
    """
    if count is not None and count < 1:
        raise UserError(f"reference_devices = {count}: must be at least 1")
    if device == "cuda" and not config.parity.device_gb:
        raise UserError("reference_device = cuda: the run has no parity.device_gb, which bounds the reference there")
    given = {"reference_devices": count, "reference_device": device}
    changed = {name: value for name, value in given.items() if value is not None}
    return config.model_copy(update={"parity": config.parity.model_copy(update=changed)})


def open_run(
    path: Path, branch: int | None = None, reference_devices: int | None = None, reference_device: str | None = None
) -> tuple[RunDir, RunData]:
    """Open a run directory, or a branch of it, for reading, with its data. Raises UserError if either is missing."""
    from lockstep.core.run.branches import RunBranch
    from lockstep.core.run.directory import RunDir
    from lockstep.core.run.layout import CONFIG, LISTED

    if not path.is_dir():
        raise UserError(f"no such run: {path}; {LISTED}")
    run = RunDir.open(path)
    run = RunBranch(run, branch) if branch is not None else run
    run.read_through(lambda config: on_reference_devices(config, reference_devices, reference_device))
    data = open_data(run.config, path / CONFIG, {})
    made_with = run.info.get("data", {}).get("fingerprint")
    if made_with != data.dataset.fingerprint:
        raise UserError(
            f"{path} was made with another data set: {str(made_with)[:16]}, "
            f"but {run.config.data.title} holds {data.dataset.fingerprint[:16]}"
        )
    return run, data


def require_bands(run: RunDir) -> None:
    """Raise UserError unless there are bounds for every step of a run."""
    from lockstep.core.parity.measures import calibrated_bounds
    from lockstep.core.run.history import branches_begun

    for step in (1, *(begun["step"] + 1 for begun in branches_begun(run.info))):
        calibrated_bounds.require(run.config_at(step))


def batches_of(run: RunDir, data: RunData) -> Callable[[int], Batch]:
    """Return the batch of each step, cut by the settings in force there."""
    return lambda step: replace(data, config=run.config_at(step)).batch(step)


def attempt(work: Any) -> Any:
    """Call `work`; an error of foreign code becomes one line."""
    try:
        return work()
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        raise UserError(f"the replay could not run: {in_one_line(error)}") from error


def write_json(path: Path, tree: dict[str, Any]) -> None:
    """Write a verdict. Raises UserError if it cannot be written."""
    import json

    try:
        path.write_text(json.dumps(tree, indent=1, allow_nan=False, default=str) + "\n", encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from error


def on_device(config: RunConfig, device: str | None, candidate: Backend) -> RunConfig:
    """Return the configuration, with its device replaced by the named one as the candidate resolves it."""
    return on_its_device(config.model_copy(update={"device": device}), candidate) if device else config
