"""Cases: run files, flags, commands and environments, drawn by hypothesis from the schema of the settings.

A new setting is covered as soon as it is there: its values come from its type and its bounds.
"""

from __future__ import annotations

import dataclasses
import importlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin
from unittest import mock

import hypothesis
import tomli_w
from hypothesis import strategies as st
from hypothesis.internal.conjecture.engine import ConjectureRunner
from pydantic.fields import FieldInfo

from lockstep.core.config.file import settings
from lockstep.core.config.rules import RULES
from lockstep.scripts.cli import COMMANDS

KINDS = ("run file", "flags", "together", "command", "environment", "own process")
RUN_FILE = "case.toml"
SETTINGS = settings()
OUT = ("--out", "out")
# Settings that make a valid run end soon; the settings that a case draws come after it, and win.
SHORT = ("--train.steps", "2", "--optim.warmup-steps", "0")
TRAIN = ("train", "tiny.toml", *OUT, *SHORT)


@dataclass(frozen=True)
class Case:
    """One call of `lockstep` in the sandbox's folder.

    files: what is written before. environment: variables that are set, or taken away (None). streams: what stdout is,
    and whether the call has a process of its own. through: whether a valid call runs to its end, or is cut short where
    the work begins.
    """

    kind: str
    argv: tuple[str, ...]
    files: tuple[tuple[str, bytes], ...] = ()
    environment: tuple[tuple[str, str | None], ...] = ()
    stdout: Literal["captured", "closed", "full", "broken"] = "captured"
    own_process: bool = False
    through: bool = False


# Values of settings, as text

_INTEGERS = [0, 1, -1, 2, 3, 7, 255, 2**31 - 1, 2**31, 2**32, 2**40, 2**63 - 1, 2**63, 2**64, 10**30, -(2**63)]
_ABSURD = [
    *("", " ", "-", "--", "-x", "nan", "inf", "-inf", "NaN", "1e400", "-1e-400", "5e-324", "1e308", "-0.0", "0x10"),
    *("1_000", " 1", "1 ", "+1", "１", "1.0", "1,5", "1e3", ".5", "True", "None", "null", "[1]", "{}", "=", "==1", "é"),
    *("'", '"', "\\", "\t", "a\nb", "\x1b[31m", "\u202e", "\ufeff", "日本", "🜚", "\udcff", "%s", "{0}", "$HOME", "`x`"),
    *("9" * 400, "9" * 5000, "x" * 300, "x" * 5000, "a b " * 500, "[bold]", "[/]", "--help", "-h", "-1"),
]
# Settings, and options of commands that run to their end, that ask for long work when they are large: that they get it
# is no fault.
_ASKS_FOR_WORK = {"log.sample_tokens", "train.steps", "optim.ns_steps", "steps", "trials"}
# A reference in a process of its own: seconds a case.
_STARTS_A_WORKER = {"parity.every"}
# Large enough to train for minutes and small enough to fit into memory: neither a test of refusal nor a quick run.
_TINY = {
    "model.vocab_size": 300,
    "model.hidden": 64,
    "model.layers": 2,
    "model.heads": 4,
    "model.kv_heads": 2,
    "model.ffn_hidden": 128,
    "train.batch_size": 4,
    "train.micro_batch_size": 2,
    "train.sequence_length": 64,
}
# Names of what the sandbox holds, and what does not exist, cannot be, or is not to be written. Nothing outside the
# sandbox that could be written by root.
PATHS = [
    *("tiny.toml", "data", "text", "runs/tiny", "runs", "folder", "full", "file", "binary", "empty.toml", "loop"),
    *("dangling", "unreadable", "unreadable.toml", "unwritable", "unwritable/x", "file/x", "nowhere", "nowhere/x", "."),
    *("broken/no_config", "broken/bad_config", "broken/bad_info", "broken/no_checkpoint", "broken/bad_records"),
    *("broken/bad_data", "broken/capsule", "cand.py", "pipe", "", " ", "a b", "é", "日本/語", "x" * 300, "y/" * 2500),
    *("/dev/null/x", "/proc/nowhere/x", "/proc/self/mem", "/proc/self/fd"),
    *(
        "runs/tiny/",
        "runs/../runs/tiny",
        "./runs/tiny",
        "-",
        "--",
        "-x",
        "\udcff",
        "a\nb",
        "\x1b[31m",
        "~nobody-such/x",
    ),
    "a\x7fb",
]
# To be read only: a file that is put together aside and renamed would take the device's place.
DEVICES = ["/dev/null", "/dev/full", "/dev/zero"]
BACKENDS = [
    *("torch", "jax", "hf", "", ":", ":x", "x:", "torch:", "os:getcwd", "os:nothing", "json:JSONDecoder", "nowhere:X"),
    *("nowhere.deep:X", ".:X", "..:X", ".a:X", "a..b:X", "file:X", "cand.py:Good", "cand.py:Nothing", "cand.py:raises"),
    *("cand.py:exits", "cand.py:number", "bad.py:X", "exits.py:X", "nowhere.py:X", "folder.py:X", "torch.nn:Module"),
    *("builtins:exit", "numpy:ndarray", "\udcff:X", "a\nb:X", "x" * 300 + ":X", "é:é", "cand.py", "tiny.toml:X"),
]
JUNK = [
    *("x", "", "--", "-", "-x", "-xyz", "--x", "---", "--=", "--=1", "=", "---x", "--train", "--model.", "--.hidden"),
    *("--model.hidden.x", "--model", "--help", "-h", "--hel", "-help", "-H", "--version", "--HELP", "another.toml"),
    *("--tyro-print-completion", "--tyro-write-completion", "--no-overwrite", "--resum", "--train.step", "-1", "@x"),
    *("--optim", "--optim.lr", "--no-model.tied", "--model.tied", "--base", "--config", "é", "--é", "\udcff", "a\nb"),
]


def _bounds(field: FieldInfo) -> tuple[float, float]:
    """Least and largest value as its metadata say; strict bounds count as reached."""
    low, high = -math.inf, math.inf
    for part in field.metadata:
        low = max(low, *(b for name in ("ge", "gt") if (b := getattr(part, name, None)) is not None), low)
        high = min(high, *(b for name in ("le", "lt") if (b := getattr(part, name, None)) is not None), high)
    return low, high


def harmless(text: str) -> str:
    """Text that leads nowhere out of the sandbox if it is taken for a path."""
    return text.replace("..", ".").replace("\x00", "").lstrip("/~")


_texts = st.text(st.characters(exclude_characters="\x00"), max_size=12).map(harmless)


def _valid_value(key: str, kind: Any, field: FieldInfo) -> st.SearchStrategy[Any]:
    """Values within the bounds, small enough to train with."""
    low, high = _bounds(field)
    if get_origin(kind) is Literal:
        return st.sampled_from(get_args(kind))
    if kind is bool:
        return st.booleans()
    if kind is int:
        if key in _STARTS_A_WORKER:
            return st.just(0)
        least = 0 if low == -math.inf else int(low)
        near = _TINY.get(key, least + 1)
        return st.sampled_from([near, near, near * 2, least + 1, least + 2, least + 4, min(max(near, 8), high)]).map(
            int
        )
    if kind is float:
        low, high = max(low, -1e3), min(high, 1e3)
        return st.floats(low, high, exclude_min=True, exclude_max=True, allow_subnormal=False)
    if kind is str:
        return st.one_of(_texts, st.just(field.default))
    if options := [option for option in get_args(kind) if option is not type(None)]:
        return st.one_of([_valid_value(key, option, field) for option in options])
    raise TypeError(f"{key}: no strategy for {kind}; give it one")


def _edge_value(key: str, field: FieldInfo) -> st.SearchStrategy[Any]:
    """On the bounds, beside them, and far out."""
    found: list[Any] = []
    for bound in _bounds(field):
        if math.isfinite(bound):
            found += [bound, int(bound), int(bound) - 1, int(bound) + 1]
            found += [math.nextafter(bound, -math.inf), math.nextafter(bound, math.inf)]
    far = [n for n in _INTEGERS if key not in _ASKS_FOR_WORK | _STARTS_A_WORKER or n <= 3]
    if key in _TINY:
        far = [n for n in far if n < 8 or n >= 2**31 - 1]
    if key in _STARTS_A_WORKER:
        found, far = [0, -1], [0, -1]
    return st.sampled_from(found + far + [1e308, -1e308, 1e-320, 1e30])


def _text_of(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _in_the_sandbox(key: str) -> bool:
    return key in ("data.path", "data.source", "data.tokenizer")


def flag_value(key: str) -> st.SearchStrategy[str]:
    """Draw the text of one setting: valid, borderline or absurd."""
    field = SETTINGS[key]
    if _in_the_sandbox(key):
        return st.sampled_from(PATHS)
    valid = _valid_value(key, field.annotation, field).map(_text_of)
    return st.one_of(valid, valid, _edge_value(key, field).map(_text_of), st.sampled_from(_ABSURD), _texts)


def file_value(key: str) -> st.SearchStrategy[Any]:
    """One setting as a run file has it: right, borderline, or of any type that TOML knows."""
    field = SETTINGS[key]
    if _in_the_sandbox(key):
        return st.one_of(st.sampled_from([p for p in PATHS if "\udcff" not in p]), st.just("a\x00b"), st.just(3))
    valid = _valid_value(key, field.annotation, field)
    return st.one_of(valid, valid, _edge_value(key, field), _toml_values)


_toml_values = st.one_of(
    st.none().map(lambda _: []),
    st.booleans(),
    st.sampled_from(_INTEGERS),
    st.floats(),
    st.sampled_from([text for text in _ABSURD if "\udcff" not in text]),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=8),
    st.datetimes(),
    st.dates(),
    st.times(),
    st.lists(st.integers(0, 3), max_size=3),
    st.dictionaries(st.sampled_from(["a", "hidden", "", "a.b", "é"]), st.integers(0, 3), max_size=2),
)
_keys = st.sampled_from(sorted(SETTINGS))


def _misspelt(draw: st.DrawFn, key: str) -> str:
    at = draw(st.integers(0, len(key) - 1))
    how = draw(st.sampled_from(["drop", "double", "swap", "cut", "case", "section", "empty"]))
    return {
        "drop": key[:at] + key[at + 1 :],
        "double": key[:at] + key[at] + key[at:],
        "swap": key[:at] + key[at : at + 2][::-1] + key[at + 2 :],
        "cut": key[: at + 1],
        "case": key.upper(),
        "section": key.partition(".")[0],
        "empty": key.partition(".")[0] + ".",
    }[how]


# Run files


@st.composite
def tree(draw: st.DrawFn) -> dict[str, Any]:
    """Draw a run file's content: some settings, right and wrong, on top of the tiny run's."""
    flat: dict[str, Any] = {}
    for key in draw(st.lists(_keys, max_size=4, unique=True)):
        flat[key if draw(st.integers(0, 7)) else _misspelt(draw, key)] = draw(file_value(key))
    nested: dict[str, Any] = {}
    for key, value in flat.items():
        *sections, last = key.split(".")
        node = nested
        for section in sections:
            node = node.setdefault(section, {})
            if not isinstance(node, dict):
                break
        else:
            node[last] = value
    return nested


_BROKEN = [
    b"",
    b"\n\n# nothing\n",
    b"\xef\xbb\xbf",
    b"\xff\xfe\x00",
    bytes(range(256)),
    b"seed = 1\nseed = 2\n",
    b"[model]\nhidden = 64\n[model]\nlayers = 1\n",
    b"model.hidden = 64\n[model]\nlayers = 1\n",
    b"[[model]]\nhidden = 64\n",
    b"model = [1]\n",
    b"model = 3\n",
    b"seed = " + b"9" * 5000 + b"\n",
    b"seed = 0x" + b"f" * 5000 + b"\n",
    b"seed = 1e999999\n",
    b"seed = " + b"[" * 3000 + b"]" * 3000 + b"\n",
    b".".join([b"a"] * 3000) + b" = 1\n",
    b"[" + b".".join([b"a"] * 3000) + b"]\n",
    b'name = "' + b"x" * 100_000 + b'"\n',
    b'"' + b"k" * 5000 + b'" = 1\n',
    b'"a\\nb" = 1\n"\\u001b[31m" = 2\n"" = 3\n',
    b'["model"."hidden"]\nx = 1\n',
    b"seed = 1979-05-27T07:32:00Z\n",
    b"name = '''a\nb'''\n",
    b'[data]\npath = "a\\u0000b"\n',
    b'[data]\nsource = "a\\u0000b"\n',
    b'[data]\ntokenizer = "a\\u0000b"\n',
    b'base = "' + b"x" * 5000 + b'"\n',
    b'base = "a\\u0000b"\n',
    b"base = 3\n",
    b'base = ""\n',
    b'base = "."\n',
    b'base = "case.toml"\n',
    b'base = "./case.toml"\n',
    b'base = "nowhere.toml"\n',
    b'base = "folder"\n',
    b'base = "loop"\n',
    b'base = "binary"\n',
    b'base = "other.toml"\n',
    b'base = "~/x.toml"\n',
    b'base = ["tiny.toml"]\n',
    b"x" * 3_000_000,
]


@st.composite
def run_file(draw: st.DrawFn) -> bytes:
    """Draw the bytes of a run file: settings on the tiny run, written in some way, right or wrong."""
    if not draw(st.integers(0, 4)):
        return draw(st.one_of(st.sampled_from(_BROKEN), st.binary(max_size=40)))
    text = tomli_w.dumps({"base": draw(st.sampled_from(["tiny.toml"] * 9 + ["other.toml"])), **draw(tree())})
    raw = text.encode()
    how = draw(st.sampled_from(["plain"] * 8 + ["bom", "crlf", "cr", "utf-16", "cut", "insert", "flip", "twice"]))
    at = draw(st.integers(0, max(0, len(raw) - 1)))
    return {
        "plain": raw,
        "bom": b"\xef\xbb\xbf" + raw,
        "crlf": raw.replace(b"\n", b"\r\n"),
        "cr": raw.replace(b"\n", b"\r"),
        "utf-16": text.encode("utf-16"),
        "cut": raw[:at],
        "insert": raw[:at] + draw(st.sampled_from([b"\x00", b'"', b"[", b"=", b"\xff", b"\n", b".", b"#"])) + raw[at:],
        "flip": raw[:at] + bytes([raw[at] ^ 1 << draw(st.integers(0, 7))]) + raw[at + 1 :],
        "twice": raw + raw,
    }[how]


@st.composite
def run_file_case(draw: st.DrawFn) -> Case:
    """Draw a run file, given to a command that reads one."""
    command = draw(st.sampled_from(["train"] * 6 + ["parity"] * 2 + ["data prepare", "faults", "bench step"]))
    files = [
        (RUN_FILE, draw(run_file())),
        ("other.toml", draw(st.sampled_from([b'base = "case.toml"\n', b"seed = 4\n"]))),
    ]
    where = {"faults": ("--config", RUN_FILE)}.get(command, (RUN_FILE,))
    more = {"train": OUT + SHORT, "parity": (*SHORT, "--steps", "1"), "data prepare": ("--workers", "1")}.get(
        command, ()
    )
    return Case("run file", (*command.split(), *where, *more), tuple(files), through=draw(_through(command)))


def _through(command: str) -> st.SearchStrategy[bool]:
    """Return whether a valid call runs to its end: some quick commands, few that start the reference."""
    often = {"train": 4, "parity": 60, "replay": 60, "bisect": 60, "data prepare": 4, "report": 1, "runs": 1}
    odds = often.get(command)
    return st.just(False) if odds is None else st.integers(1, odds).map(lambda n: n == 1)


# Flags

_COMMAND_OPTIONS = {
    "demo": "lockstep.scripts.commands.demo:Demo",
    "train": "lockstep.scripts.commands.train:Train",
    "sweep": "lockstep.scripts.commands.sweep:SweepOptions",
    "parity": "lockstep.scripts.commands.parity:Parity",
    "report": "lockstep.scripts.commands.report:Report",
    "runs": "lockstep.scripts.commands.runs:Runs",
    "sample": "lockstep.scripts.commands.sample:Sample",
    "convert": "lockstep.scripts.commands.convert:Convert",
    "export": "lockstep.scripts.commands.export:Export",
    "import": "lockstep.scripts.commands.import_model:Import",
    "replay": "lockstep.scripts.commands.replay:Replay",
    "bisect": "lockstep.scripts.commands.bisect:Bisect",
    "data prepare": "lockstep.scripts.commands.data_prepare:Prepare",
    "faults": "lockstep.scripts.commands.faults:Faults",
    "mutate": "lockstep.scripts.commands.mutate:Mutate",
    "museum": "lockstep.scripts.commands.museum:Museum",
    "calibrate": "lockstep.scripts.commands.calibrate:Calibrate",
    "profile": "lockstep.scripts.commands.profile:Profile",
    "plan": "lockstep.scripts.commands.plan:Plan",
    "bench step": "lockstep.scripts.commands.bench_step:Bench",
    "bench best": "lockstep.scripts.commands.bench_best:BenchBest",
    "bench peers": "lockstep.scripts.commands.bench_peers:BenchPeers",
    "bench data": "lockstep.scripts.commands.bench_data:BenchData",
    "bench ladder": "lockstep.scripts.commands.bench_ladder:BenchLadder",
    "bench parity": "lockstep.scripts.commands.bench_parity:BenchParity",
}
assert set(_COMMAND_OPTIONS) == set(COMMANDS), "every command is fuzzed"
TAKES_A_RUN_FILE = (
    "train",
    "sweep",
    "parity",
    "data prepare",
    "mutate",
    "calibrate",
    "profile",
    "plan",
    "bench step",
    "bench best",
    "bench peers",
    "bench ladder",
)
TAKES_SETTINGS = (*TAKES_A_RUN_FILE, "faults", "import")
TAKES_A_RUN = ("report", "replay", "bisect", "sample")


def options_of(command: str) -> dict[str, str]:
    """Return a command's own options with their types as written, positionals included."""
    module, _, name = _COMMAND_OPTIONS[command].partition(":")
    shape = getattr(importlib.import_module(module), name)
    return {field.name: str(field.type) for field in dataclasses.fields(shape)}


def _is_large(text: str) -> bool:
    try:
        return int(text) > 3
    except ValueError:  # no number, or one of more digits than Python reads
        return False


def _option_value(name: str, kind: str) -> st.SearchStrategy[str]:
    if name in ("candidate", "reference", "backend"):
        return st.sampled_from(BACKENDS)
    if "Path" in kind:
        return st.sampled_from(PATHS)
    if "int" in kind or "float" in kind:
        far, absurd = [str(n) for n in _INTEGERS], _ABSURD
        if name in _ASKS_FOR_WORK:
            far, absurd = ([text for text in some if not _is_large(text)] for some in (far, absurd))
        return st.one_of(st.sampled_from(["1", "1", "2"]), st.sampled_from(far), st.sampled_from(absurd))
    words = ["auto", "cpu", "cuda", "bf16/eager", "fp32/eager", "bf16/compiled", "bf16", "/", "promised", "none"]
    return st.one_of(st.sampled_from(words), st.sampled_from(_ABSURD), _texts)


def _spelt(draw: st.DrawFn, name: str, value: str) -> list[str]:
    """One flag with its value, in some spelling."""
    how = draw(
        st.sampled_from(["dashes"] * 5 + ["underscores", "equals", "equals", "bare", "one dash", "cut", "wrong"])
    )
    dashed = "--" + name.replace("_", "-")
    if how == "wrong":
        return ["--" + _misspelt(draw, name), value]
    return {
        "dashes": [dashed, value],
        "underscores": ["--" + name, value],
        "equals": [f"{dashed}={value}"],
        "bare": [dashed],
        "one dash": [dashed[1:], value],
        "cut": [dashed[: draw(st.integers(3, len(dashed)))], value],
    }[how]


@st.composite
def flag_words(draw: st.DrawFn, command: str) -> list[str]:
    """Draw some flags of a command, or of another one, and some junk."""
    words: list[str] = []
    for _ in range(draw(st.integers(0, 4))):
        which = draw(st.sampled_from(["setting"] * 6 + ["option"] * 3 + ["other", "junk"]))
        if which == "setting":
            key = draw(_keys)
            words += _spelt(draw, key, draw(flag_value(key)))
        elif which == "junk":
            words.append(draw(st.one_of(st.sampled_from(JUNK), _texts)))
        else:
            of = command if which == "option" else draw(st.sampled_from(sorted(COMMANDS)))
            name, kind = draw(st.sampled_from(sorted(options_of(of).items())))
            if "bool" in kind and draw(st.booleans()):
                words.append("--" + name.replace("_", "-"))
            else:
                words += _spelt(draw, name, draw(_option_value(name, kind)))
    if words and not draw(st.integers(0, 9)):
        words += words[: draw(st.integers(1, len(words)))]
    return words


@st.composite
def flags_case(draw: st.DrawFn) -> Case:
    """Draw a command on the tiny run with some flags."""
    command = draw(st.sampled_from(["train"] * 6 + ["parity"] * 2 + ["data prepare", "faults", "bench step"]))
    before = {"train": OUT + SHORT, "parity": (*SHORT, "--steps", "1"), "data prepare": ("--workers", "1")}.get(
        command, ()
    )
    where = ("--config", "tiny.toml") if command == "faults" else ("tiny.toml",)
    argv = [*where, *before, *draw(flag_words(command))]
    if not draw(st.integers(0, 19)):
        argv = list(draw(st.permutations(argv)))
    return Case("flags", (*command.split(), *argv), through=draw(_through(command)))


@st.composite
def together_case(draw: st.DrawFn) -> Case:
    """Draw settings that a rule ties together, each right by itself: the run is one, or the rule reports why not."""
    words: list[str] = []
    for rule in draw(st.lists(st.sampled_from(RULES), min_size=1, max_size=2)):
        for key in rule.keys:
            if draw(st.integers(0, 3)):
                value = draw(_valid_value(key, SETTINGS[key].annotation, SETTINGS[key]))
                words += ["--" + key.replace("_", "-"), _text_of(value)]
    return Case("together", (*TRAIN, *words), through=draw(_through("train")))


# Commands


@st.composite
def command_case(draw: st.DrawFn) -> Case:
    """Any command, or none, on any path, with some of its options."""
    if not draw(st.integers(0, 11)):
        words = st.one_of(
            st.sampled_from([*" ".join(COMMANDS).split(), "help", "--help", "-h"]), _texts, st.sampled_from(JUNK)
        )
        argv = draw(st.lists(words, max_size=2))
        return Case("command", tuple(argv))
    command = draw(st.sampled_from(sorted(COMMANDS)))
    argv = []
    if command in TAKES_A_RUN and draw(st.integers(0, 9)):
        argv.append(draw(st.one_of(st.sampled_from(PATHS + DEVICES), st.just("runs/tiny"), st.just("runs/tiny"))))
    elif command in ("convert", "export"):
        places = st.one_of(st.sampled_from(PATHS), st.sampled_from(["runs/tiny", "runs/tiny/checkpoints/step_000002"]))
        argv += [draw(places), draw(st.one_of(st.sampled_from(PATHS), st.just("converted")))]
    elif command == "import":
        argv += [draw(st.one_of(st.sampled_from(PATHS), st.just("hub"))), draw(st.sampled_from([*PATHS, "imported"]))]
        argv += ["--config", draw(st.sampled_from(["tiny.toml", "tiny.toml", *PATHS]))]
    elif command in TAKES_A_RUN_FILE and draw(st.integers(0, 9)):
        argv.append(draw(st.one_of(st.sampled_from(PATHS + DEVICES), st.just("tiny.toml"), st.just("tiny.toml"))))
    elif command == "faults":
        argv += ["--config", draw(st.sampled_from(["tiny.toml", *PATHS, *DEVICES]))]
        argv += draw(st.lists(st.sampled_from(["KvHeadsTiled", "KvHeadTiled", "", "é", "x" * 300]), max_size=1))
    elif command == "bench parity":
        argv += ["--config", draw(st.sampled_from(["tiny.toml", *PATHS, *DEVICES]))]
    elif command == "runs":
        argv.append(draw(st.sampled_from(["runs", "broken", "broken", *PATHS, *DEVICES])))
    for _ in range(draw(st.integers(0, 3))):
        # Exhibits run for minutes, and pip reaches out of the sandbox.
        options = {n: k for n, k in options_of(command).items() if command != "museum" or n in ("json", "repro")}
        name, kind = draw(st.sampled_from(sorted(options.items())))
        if "bool" in kind:
            argv.append("--" + name.replace("_", "-"))
        else:
            argv += _spelt(draw, name, draw(_option_value(name, kind)))
    if command == "train":
        argv += [*(() if "--out" in argv else OUT), *(() if "--resume" in argv else SHORT)]
    return Case("command", (*command.split(), *argv), through=draw(_through(command)))


# Environments

_VARIABLES: dict[str, list[str | None]] = {
    "HOME": [None, "", "/nowhere", "relative"],
    "COLUMNS": ["0", "1", "2", "9", "-3", "x", "", "99999999"],
    "LINES": ["0", "x"],
    "TERM": ["dumb", "", "nonsense", None],
    "NO_COLOR": ["1", ""],
    "FORCE_COLOR": ["1"],
    "WORLD_SIZE": ["x", "", "0", "-1", "2", "1e3", "9" * 30, "1"],
    "RANK": ["x", "", "-1", "9", "0"],
    "LOCAL_RANK": ["x", "0"],
    "TMPDIR": ["/nowhere", "file", ""],
    "OMP_NUM_THREADS": ["1"],
    "SOURCE_DATE_EPOCH": ["x"],
}
_LOCALES: dict[str, list[str | None]] = {
    "LC_ALL": ["C", "POSIX", "nonsense", "de_DE.ISO-8859-1"],
    "LANG": ["C", None, "tr_TR.UTF-8"],
    "PYTHONUTF8": ["0"],
    "PYTHONIOENCODING": ["ascii", "latin-1", "utf-16", "ascii:strict"],
    "PYTHONCOERCECLOCALE": ["0"],
    "PATH": ["", "/nowhere", None],
}
_SIMPLE = st.sampled_from(
    [
        TRAIN,
        (*TRAIN, "--name", "é"),
        ("train", "tiny.toml", *OUT, "--optim.peek-lr", "3"),
        (*TRAIN, "--log.sample-every", "1", "--log.sample-prompt", "日本"),
        ("train", "--resume", "runs/tiny"),
        ("parity", "tiny.toml", "--steps", "0"),
        ("data", "prepare", "tiny.toml", "--workers", "1"),
        ("data", "prepare", "tiny.toml", "--workers", "2", "--data.path", "new"),
        ("report", "runs/tiny"),
        ("report", "folder"),
        ("replay", "folder"),
        ("bisect", "nowhere"),
        ("bench", "step", "tiny.toml", "--repeat", "0"),
        ("train", "--help"),
        ("--help",),
        (),
        ("train", "\udcff.toml"),
        ("trian",),
    ]
)


@st.composite
def environment_case(draw: st.DrawFn) -> Case:
    """Draw a simple call under an odd environment, in this process."""
    chosen = draw(st.lists(st.sampled_from(sorted(_VARIABLES)), min_size=1, max_size=3, unique=True))
    values = tuple((name, draw(st.sampled_from(_VARIABLES[name]))) for name in chosen)
    return Case("environment", draw(_SIMPLE), environment=values, through=True)


@st.composite
def own_process_case(draw: st.DrawFn) -> Case:
    """Draw a simple call in a process of its own: locale and stdout are settled when Python starts."""
    known = _VARIABLES | _LOCALES
    chosen = draw(st.lists(st.sampled_from(sorted(known)), max_size=3, unique=True))
    values = tuple((name, draw(st.sampled_from(known[name]))) for name in chosen)
    stdout = draw(st.sampled_from(["captured", "captured", "closed", "full", "broken"]))
    return Case("own process", draw(_SIMPLE), environment=values, stdout=stdout, own_process=True, through=True)  # type: ignore[arg-type]


def cases(own_processes: bool = True) -> st.SearchStrategy[Case]:
    """All kinds, as often as they are cheap."""
    kinds = [
        *((34, flags_case()), (28, run_file_case()), (15, together_case())),
        *((18, command_case()), (4, environment_case())),
    ]
    if own_processes:
        kinds.append((1, own_process_case()))
    table = [strategy for weight, strategy in kinds for _ in range(weight)]
    return st.integers(0, len(table) - 1).flatmap(lambda n: table[n])


def draw_cases(seed: int, count: int, take: Callable[[Case], None]) -> None:
    """Give `count` cases to `take`, the same ones for the same seed and version of hypothesis."""

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=count,
        database=None,
        deadline=None,
        phases=[hypothesis.Phase.generate],
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(cases())
    def drawn(case: Case) -> None:
        take(case)

    # Every case is drawn anew: hypothesis would make some of them by changing a little in the one before.
    with mock.patch.object(ConjectureRunner, "generate_mutations_from", lambda runner, data: None):
        drawn()
