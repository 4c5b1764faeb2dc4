"""Files from elsewhere are data: none of the formats that are read, and no cache, makes a program of its contents."""

from __future__ import annotations

import ast
import json
import os
import pickle
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from lockstep.core.checkpoint import format as checkpoint
from lockstep.core.checkpoint.random_state import NUMPY, random_state, restore_random_state
from lockstep.core.config.file import load_config
from lockstep.core.data.documents import read_documents
from lockstep.core.data.sources import list_source
from lockstep.core.data.tokenizer import load_tokenizer, train_tokenizer
from lockstep.core.errors import UserError
from lockstep.core.files.jsonl import read_lines, sealed_line
from lockstep.core.files.npz import read_npz
from lockstep.core.parity.diagnose.repro import repro
from lockstep.core.parity.evidence import observations
from lockstep.core.parity.evidence.capsule import read_capsule
from lockstep.core.parity.judge.bias import Bias
from lockstep.core.parity.measures.verdict import Check, Finding, Measure
from lockstep.core.parity.modes.rerun import initial_state
from lockstep.core.train.spikes import read_spike
from lockstep.parity_tests.guards.planted import (
    CONFIG,
    PROGRAM,
    RAN,
    Runs,
    batch_arrays,
    planted_capsule,
    ran,
    seal_checkpoint,
)
from lockstep.parity_tests.repository import REPO, parsed
from lockstep.parity_tests.tiny import text_batch


@pytest.fixture
def pickled(tmp_path: Path) -> Runs:
    """Pickle an object that leaves a file when it is unpickled."""
    return Runs(tmp_path / RAN)


def test_the_plant_is_alive(pickled: Runs, tmp_path: Path) -> None:
    pickle.loads(pickle.dumps(pickled))
    assert ran(tmp_path)


def npz(path: Path, pickled: Runs, **more: Any) -> Path:
    np.savez(path, **more, planted=np.asarray([pickled], dtype=object))
    return path


READERS: dict[str, Callable[[Path], Any]] = {
    "any npz": read_npz,
    "observations": observations.load,
    "bias sums": lambda path: Bias.from_arrays(read_npz(path)),
}


@pytest.mark.parametrize("reader", READERS)
def test_an_array_of_objects_is_not_unpickled(reader: str, tmp_path: Path, pickled: Runs) -> None:
    with pytest.raises(UserError, match="is damaged"):
        READERS[reader](npz(tmp_path / "a.npz", pickled))
    assert not ran(tmp_path)


def test_nor_in_the_batch_of_a_capsule_or_a_spike(tmp_path: Path, pickled: Runs) -> None:
    raw = npz(tmp_path / "a.npz", pickled, **batch_arrays(text_batch(CONFIG))).read_bytes()
    with pytest.raises(UserError, match=r"batch\.npz is damaged"):
        read_capsule(planted_capsule(tmp_path / "capsule", batch=raw))
    spike = tmp_path / "spikes" / "step_000001"
    spike.mkdir(parents=True)
    (spike / "about.json").write_text(json.dumps({"schema": 1, "step": 1, "record": {}}))
    (spike / "batch.npz").write_bytes(raw)
    with pytest.raises(UserError, match=r"batch\.npz is damaged"):
        read_spike(spike)
    assert not ran(tmp_path)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """Save a checkpoint."""
    return checkpoint.save_checkpoint(tmp_path / "checkpoints", initial_state(CONFIG), {})


PICKLES = (".metadata", "__0_0.distcp", "params.pt", "params.pkl", "model.bin", "extra.pkl", "random.pkl")


def test_pickles_beside_the_tensors_of_a_checkpoint_are_not_read(saved: Path, tmp_path: Path, pickled: Runs) -> None:
    """torch.distributed.checkpoint's own reader would unpickle `.metadata`: it is not the one that reads here."""
    for name in PICKLES:
        (saved / name).write_bytes(pickle.dumps(pickled))
    seal_checkpoint(saved)
    state, _ = checkpoint.load_checkpoint(saved)
    assert state.params.keys() == initial_state(CONFIG).params.keys() and checkpoint.read_random(saved) == {}
    assert not ran(tmp_path)


def test_a_pickle_in_the_place_of_tensors_is_refused(saved: Path, tmp_path: Path, pickled: Runs) -> None:
    for name in ("params.safetensors", checkpoint.RANDOM):
        (saved / name).write_bytes(pickle.dumps(pickled))
    seal_checkpoint(saved)
    with pytest.raises(checkpoint.CorruptCheckpoint):
        checkpoint.load_checkpoint(saved)
    assert not ran(tmp_path)


def test_orbax_unpickles_nothing(tmp_path: Path, pickled: Runs) -> None:
    """Its metadata is JSON, which names types and no modules; what lies beside it is not read."""
    from lockstep.jax_backend.checkpoint import read_state, writing

    state = initial_state(CONFIG)
    pending = checkpoint.begin_checkpoint(tmp_path / "step_000000", 0, lambda folder: writing(state, folder), {})
    folder = pending.commit()
    metadata = [path for path in (folder / "orbax").rglob("*") if path.is_file() and path.suffix != ".zarr"]
    assert any(path.name == "_METADATA" for path in metadata)
    for name in (*PICKLES, "_METADATA.pkl", "_sharding.pkl"):
        (folder / "orbax" / name).write_bytes(pickle.dumps(pickled))
    with unpickled() as found:
        again = read_state(folder, CONFIG)
    assert all(np.array_equal(again.params[name], array) for name, array in state.params.items())
    assert not ran(tmp_path) and found == []
    # The type names of its metadata are looked up in a list, and not imported.
    file = folder / "orbax" / "_METADATA"
    text = file.read_text().replace("jax.Array", "antigravity.fly").replace("np.ndarray", "antigravity.fly")
    assert "antigravity" in text
    file.write_text(text)
    assert read_state(folder, CONFIG).params.keys() == state.params.keys()
    assert "antigravity" not in sys.modules


_listening: list[list[str]] = []


def _hear(event: str, arguments: Any) -> None:
    if event == "pickle.find_class":
        for heard in _listening:
            heard.append(".".join(arguments))


sys.addaudithook(_hear)


class unpickled:
    """A context: what pickles looked up in it, by the interpreter's own account."""

    def __enter__(self) -> list[str]:
        heard: list[str] = []
        _listening.append(heard)
        return heard

    def __exit__(self, *_: object) -> None:
        _listening.pop()


def test_the_ear_hears_pickles(tmp_path: Path, pickled: Runs) -> None:
    with unpickled() as found:
        pickle.loads(pickle.dumps(pickled))
    assert found and ran(tmp_path)


def test_metadata_of_safetensors_is_text(saved: Path) -> None:
    """Offsets are numbers in a JSON text; anything else is an error, and no code."""
    tensors = {f"params/{name}": array for name, array in initial_state(CONFIG).params.items()}
    for evil in ("__import__('os').system('false')", "[[1]]", json.dumps({"params/embed.weight": "x"})):
        save_file(tensors, saved / "params.safetensors", metadata={"DCP_SHARDING_INFO": evil})
        seal_checkpoint(saved)
        with pytest.raises(checkpoint.CorruptCheckpoint):
            checkpoint.load_checkpoint(saved)


def test_a_parquet_file_brings_no_extension_type(tmp_path: Path, pickled: Runs) -> None:
    """Before 14.0.1, pyarrow unpickled a type from a file's metadata (CVE-2023-47248)."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    key = {b"ARROW:extension:name": b"arrow.py_extension_type", b"ARROW:extension:metadata": pickle.dumps(pickled)}
    fields = [pa.field("text", pa.string(), metadata=key), pa.field("other", pa.int64(), metadata=key)]
    table = pa.table([["one", "two"], [1, 2]], schema=pa.schema(fields, metadata={b"pandas": pickle.dumps(pickled)}))
    pq.write_table(table, tmp_path / "a.parquet")
    (file,) = list_source(str(tmp_path / "a.parquet")).files
    with unpickled() as found:
        assert [document.text for document in read_documents(file, "text")] == ["one", "two"]
    assert not ran(tmp_path) and found == []
    requirements = (REPO / "pyproject.toml").read_text()
    assert '"pyarrow>=15"' in requirements


def test_lines_of_json_run_files_and_tokenizers_are_parsed_and_not_evaluated(tmp_path: Path) -> None:
    evil = f"__import__('pathlib').Path({str(tmp_path / RAN)!r}).touch()"
    (tmp_path / "records.jsonl").write_bytes(sealed_line({"step": evil, evil: evil}))
    assert read_lines(tmp_path / "records.jsonl") == [{"step": evil, evil: evil}]
    for text in (f'name = "{evil}"', f"[train]\nsteps = {evil}", f'[optim]\nname = "{evil}"', f'[model]\n"{evil}" = 1'):
        (tmp_path / "run.toml").write_text(text)
        with pytest.raises(UserError):
            load_config(tmp_path / "run.toml")
    content = json.loads(train_tokenizer(["some text"] * 50, 260).content)
    content["pre_tokenizer"] = {"type": "Custom", "module": evil, "auto_map": {"AutoTokenizer": evil}}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match="is not a tokenizer"):
        load_tokenizer(tmp_path / "tokenizer.json")
    assert not ran(tmp_path)


class Draws:
    """A session that draws nothing."""


@pytest.mark.parametrize("position", [625, 10**6, 2**32 - 1])
def test_a_random_state_does_not_read_beyond_itself(position: int) -> None:
    """Numpy takes any position for its next word, and would read the process's memory there, or die of it."""
    before = random_state(Draws())  # type: ignore[arg-type]
    key = before[NUMPY].copy()
    key[-1] = position
    with pytest.raises(UserError, match="not the state of a Mersenne Twister"):
        restore_random_state(Draws(), {**before, NUMPY: key})  # type: ignore[arg-type]
    with pytest.raises(UserError, match="not the state of a Mersenne Twister"):
        restore_random_state(Draws(), {**before, NUMPY: key[:9]})  # type: ignore[arg-type]
    restore_random_state(Draws(), before)  # type: ignore[arg-type]
    assert all(np.array_equal(a, before[name]) for name, a in random_state(Draws()).items())  # type: ignore[arg-type]


@pytest.mark.parametrize("token", [-1, CONFIG.model.vocab_size])
def test_tokens_of_a_capsule_are_within_the_vocabulary(token: int, tmp_path: Path) -> None:
    batch = text_batch(CONFIG)
    for name in ("tokens", "targets"):
        ids = getattr(batch, name).copy()
        ids[1, 2] = token
        arrays = batch_arrays(replace(batch, **{name: ids}))
        np.savez(tmp_path / f"{name}.npz", **arrays)
        with pytest.raises(UserError, match=f"{name} lie in .*outside the vocabulary of 300"):
            raw = (tmp_path / f"{name}.npz").read_bytes()
            read_capsule(planted_capsule(tmp_path / name, batch=raw))


# repro.py


EVIL = "\"\"\"\nimport os\n'''\\\n$facts{x}"


def test_names_do_not_become_code_in_repro_py() -> None:
    """A tensor's name stands in the script's title, in what it is about, in its facts: always as text."""
    measure = Measure("mismatches", 1.0, None, 0.0, EVIL)
    for stage, tap in (("update", f"blocks.0/{EVIL}"), ("moments", EVIL), ("gradients", EVIL)):
        finding = Finding(stage, tap, "update", None, "local", (measure,), 1, note=EVIL)
        made = repro(_Evidence(), Check(1, (finding,), ()), CONFIG, {"torch": EVIL})  # type: ignore[arg-type]
        tree = ast.parse(made.script)
        assert imported(tree) == {
            "__future__", "contextlib", "hashlib", "json", "math", "sys", "pathlib", "numpy", "torch",
            "torch.nn.functional",
        }  # fmt: skip


def test_nor_in_what_an_update_says_it_is_about() -> None:
    from lockstep.core.parity.diagnose import repro as module

    assert '"' not in module._plain(EVIL) and "\\" not in module._plain(EVIL) and "{" not in module._plain(EVIL)
    parts = module._Parts(("scalar",), {}, {}, f"adamw on {EVIL}: a state")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_parts", lambda *_: parts)
        finding = Finding("update", "x", "update", None, "local", (Measure("ulp", 9.0, None, 1.0, ""),), 1)
        made = repro(_Evidence(), Check(1, (finding,), ()), CONFIG, {})  # type: ignore[arg-type]
    assert "os" not in imported(ast.parse(made.script))


class _Evidence:
    """Evidence of nothing."""

    taps: Mapping[str, np.ndarray] = MappingProxyType({})
    probed = stepped = micro = accumulated = reloaded = None


def imported(tree: ast.AST) -> set[str]:
    found = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    return found | {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}


# Where programs are kept, and where processes look for modules.


def test_compiled_programs_of_others_are_not_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor unpickles what it finds in its cache: a folder that is another's is not taken for it."""
    from lockstep.scripts import cli

    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    monkeypatch.setattr(cli, "_INDUCTOR", str(tmp_path / "mine"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    cli.own_inductor_cache()
    assert os.environ.pop("TORCHINDUCTOR_CACHE_DIR") == str(tmp_path / "mine")
    (tmp_path / "mine").chmod(0o777)
    cli.own_inductor_cache()
    other = Path(os.environ.pop("TORCHINDUCTOR_CACHE_DIR"))
    assert other != tmp_path / "mine" and other.parent == tmp_path and other.stat().st_mode & 0o077 == 0
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "said")
    cli.own_inductor_cache()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "said"


# Modules that Python's multiprocessing imports in a new process, and those that Lockstep searches for.
SHADOWED = ("multiprocessing", "pickle", "random", "selectors", "wandb_of_nobody")


def test_processes_import_nothing_from_the_folder_of_the_command(tmp_path: Path) -> None:
    """`lockstep data prepare` with two workers, called in a folder that a stranger has filled with modules."""
    here, command = tmp_path / "here", tmp_path / "bin" / "lockstep"
    here.mkdir()
    command.parent.mkdir()
    for name in SHADOWED:
        (here / f"{name}.py").write_text(PROGRAM + f"raise ImportError({name!r})\n")
    (here / "text").mkdir()
    for number in range(40):
        (here / "text" / f"{number}.txt").write_text(f"some text of document {number}\n" * 30)
    # As pip writes it: Python searches for modules beside it, and not where it is called.
    command.write_text("from lockstep.scripts.cli import main\n\nif __name__ == '__main__':\n    main()\n")
    words = ["data", "prepare", "--data.source", "text", "--data.path", "out", "--workers", "2"]
    done = subprocess.run(
        [sys.executable, str(command), *words, "--model.vocab-size", "300", "--data.val-fraction", "0.2"],
        cwd=here,
        env=os.environ | {"PYTHONPATH": str(REPO)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert not ran(here)


def test_a_built_in_backend_does_not_open_the_folder_of_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A module that is not installed would be looked for there from then on."""
    from lockstep.core.load_backend import load_backend

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    load_backend("lockstep.torch_backend.backend:TorchBackend")
    assert str(tmp_path) not in sys.path
    (tmp_path / "mine_alone.py").write_text("class Mine:\n    open = print\n")
    assert type(load_backend("mine_alone:Mine")).__name__ == "Mine" and str(tmp_path) in sys.path


# The doors that there are

# Calls that can make a program of data, or start one: file → (name → why it may).
DOORS: dict[str, dict[str, str]] = {
    "core/load_backend.py": {
        "importlib.import_module": "a backend that the command line names",
        "importlib.util.find_spec": "the same",
        "importlib.util.spec_from_file_location": "the same",
        "importlib.util.module_from_spec": "the same",
    },
    "core/data/sources.py": {"importlib.util.find_spec": "whether a library is there"},
    "jax_backend/backend.py": {"importlib.util.find_spec": "whether a library is there"},
    "core/parity/evidence/place.py": {"ctypes.CDLL": "of no name: what this process has loaded"},
    "torch_backend/host_memory.py": {"ctypes.CDLL": "the same, for the C library's mallopt"},
    "scripts/shared/needs.py": {"importlib.util.find_spec": "whether a library is there"},
    "scripts/cli.py": {"importlib.import_module": "a command, out of COMMANDS"},
    "torch_backend/ranks/peers.py": {
        "torch.distributed.all_gather_object": "ranks of this run",
        "torch.distributed.broadcast_object_list": "the same",
        "torch.distributed.gather_object": "the same",
    },
    "torch_backend/watch/ranks.py": {
        "torch.distributed.broadcast_object_list": "ranks of the training that is watched",
        "torch.distributed.gather_object": "the same",
    },
    "scripts/shared/peers.py": {"torch.distributed.launcher.api.elastic_launch": "this Python, with Lockstep"},
    "core/bench/suite.py": {"subprocess.Popen": "this Python, with a module of Lockstep's"},
    "core/sweep/trial.py": {"subprocess.Popen": "this Python, with lockstep train"},
    "core/bench/turns.py": {"subprocess.Popen": "this Python, with a module of Lockstep's"},
    "scripts/shared/bench_peer.py": {"importlib.import_module": "a contender or a loader, out of core/bench"},
    "scripts/shared/bench_loader.py": {"importlib.import_module": "a contender, out of core/bench/data.py"},
    "scripts/museum/environments.py": {"subprocess.run": "this Python's pip, with requirements of an exhibit's file"},
    "scripts/museum/run.py": {"subprocess.run": "this Python, with a module of Lockstep's"},
    "scripts/museum/child.py": {"importlib.import_module": "a loop of an exhibit, out of scripts/museum/loops"},
    "scripts/shared/startup_banner.py": {"subprocess.run": "git, in Lockstep's own folder"},
    "torch_backend/tools/bench.py": {"subprocess.run": "nvidia-smi"},
    "core/parity/measures/here.py": {"subprocess.run": "nvidia-smi"},
    "jax_backend/device.py": {"subprocess.run": "nvidia-smi"},
    "torch_backend/attention.py": {"importlib.util.find_spec": "whether a library is there"},
    "torch_backend/kernels/bitsandbytes_adamw.py": {"importlib.util.find_spec": "whether a library is there"},
    "torch_backend/kernels/one_kernel.py": {"importlib.util.find_spec": "whether a library is there"},
    "torch_backend/kernels/cpp.py": {
        "torch._inductor.codecache.CppCodeCache.load": "the C++ file beside it, which is Lockstep's",
    },
    "torch_backend/kernels/library_heads.py": {"importlib.util.find_spec": "whether a library is there"},
    "scripts/commands/bench_peers.py": {"importlib.util.find_spec": "whether a library is there"},
    "scripts/commands/sweep.py": {"importlib.util.find_spec": "whether a library is there"},
    # Studies: no command opens them.
    "scripts/studies/false_alarms.py": {"torch.distributed.launcher.api.elastic_launch": "a function of its own"},
    "scripts/studies/incident.py": {
        "importlib.util.spec_from_file_location": "a constant",
        "importlib.util.module_from_spec": "the same",
    },
    "scripts/studies/cpu_auto.py": {"subprocess.run": "this Python"},
    "scripts/studies/prepare.py": {"subprocess.Popen": "this Python"},
    "scripts/studies/cuda_rehearsal/ahead.py": {"subprocess.run": "this Python, and nvidia-smi"},
    "scripts/studies/cuda_rehearsal/__main__.py": {"subprocess.Popen": "the Python that the command line names"},
    "scripts/studies/cuda_rehearsal/build.py": {"subprocess.run": "gcc and nm, and that Python"},
    "scripts/studies/cuda_rehearsal/worker.py": {"ctypes.CDLL": "the stand-in that is loaded already"},
    "scripts/studies/large_vocabulary.py": {"subprocess.run": "this Python"},
    "scripts/studies/families.py": {"subprocess.run": "this Python"},
    "scripts/studies/parity_matrix.py": {"subprocess.run": "this Python"},
    "scripts/studies/chaos_process.py": {"subprocess.Popen": "this Python"},
    "scripts/studies/peaks.py": {"subprocess.Popen": "this Python"},
    "scripts/studies/browser.py": {"subprocess.Popen": "chromedriver"},
    "scripts/studies/watch_browser.py": {
        "subprocess.Popen": "this Python, with Lockstep",
        "subprocess.run": "chromedriver, for its version",
    },
    "scripts/studies/prepare_ray.py": {"subprocess.Popen": "this Python", "subprocess.run": "this Python"},
    "scripts/studies/sweep.py": {"subprocess.Popen": "this Python", "subprocess.run": "this Python"},
    "scripts/studies/start.py": {"subprocess.Popen": "this Python", "subprocess.run": "git in a clone; this Python"},
}
MODULES = {
    "pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "yaml", "runpy", "code", "importlib", "subprocess",
    "pty", "ctypes", "imp", "zipimport", "pkgutil", "commands", "xml", "jsonpickle",
}  # fmt: skip
BUILT_IN = {"eval", "exec", "compile", "__import__"}
CALLS = {
    "os.system", "os.popen", "os.execv", "os.execve", "os.execvp", "os.posix_spawn", "torch.load", "torch.jit.load",
    "np.load", "numpy.load", "np.fromregex", "torch.hub.load", "jax.export.deserialize",
    "torch.distributed.all_gather_object", "torch.distributed.broadcast_object_list", "torch.distributed.gather_object",
    "torch.distributed.launcher.api.elastic_launch", "torch._inductor.codecache.CppCodeCache.load",
}  # fmt: skip
HARMLESS = {
    "importlib.metadata", "importlib.resources", "pickle.PickleBuffer", "pickle.PicklingError",
    "subprocess.TimeoutExpired", "subprocess.PIPE", "subprocess.STDOUT", "subprocess.DEVNULL",
    "subprocess.SubprocessError", "ctypes.c_void_p", "ctypes.c_char_p", "ctypes.c_int", "ctypes.c_int64",
    "ctypes.c_float",
}  # fmt: skip
PACKAGES = ("core", "torch_backend", "jax_backend", "scripts")
# A door is imported or called by one of these words. A file without any of them has none.
WORDS = re.compile(rf"\b(?:{'|'.join(sorted(MODULES | BUILT_IN | {name.split('.')[-1] for name in CALLS}))})\b")


def doors_in(text: str) -> set[str]:
    """Return the full names of everything in a source file that can turn data into code."""
    if not WORDS.search(text):
        return set()
    tree = parsed(text)
    short: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            short |= {(alias.asname or alias.name).split(".")[0]: alias.name.split(".")[0] for alias in node.names}
            short |= {alias.asname: alias.name for alias in node.names if alias.asname}
        elif isinstance(node, ast.ImportFrom) and node.module:
            short |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}

    def named(node: ast.AST) -> str | None:
        if isinstance(node, ast.Attribute):
            owner = named(node.value)
            return owner and f"{owner}.{node.attr}"
        return short.get(node.id, node.id) if isinstance(node, ast.Name) else None

    found: set[str] = set()
    imported = {full.split(".")[0] for full in short.values()}
    called = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    inner = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for node in ast.walk(tree):
        name = named(node) if id(node) not in inner else None
        if name is None or any(name == one or name.startswith(f"{one}.") for one in HARMLESS):
            continue
        root, *rest = name.split(".")
        of_module = bool(rest) and root in MODULES and root in imported
        if of_module or name in CALLS or (name in BUILT_IN and id(node) in called):
            found.add(name)
    return found - {"np.load", "numpy.load"} | _unsafe_loads(tree)


def _unsafe_loads(tree: ast.AST) -> set[str]:
    """`np.load` without `allow_pickle=False` in so many words."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("np.load", "numpy.load"):
            allowed = {k.arg: ast.unparse(k.value) for k in node.keywords}
            if allowed.get("allow_pickle") != "False":
                found.add("np.load")
    return found


def sources() -> Iterator[Path]:
    for package in PACKAGES:
        yield from sorted((REPO / package).rglob("*.py"))


def test_every_door_is_one_that_is_known() -> None:
    """A new use of these belongs into DOORS, with what it can be given; an old one that is gone leaves it."""
    found = {path.relative_to(REPO).as_posix(): doors_in(path.read_text()) for path in sources()}
    assert {name: names for name, names in found.items() if names} == {name: set(why) for name, why in DOORS.items()}


NEW_DOORS = {
    "import pickle\npickle.load(file)": "pickle.load",
    "from pickle import loads as read\nread(raw)": "pickle.loads",
    "import importlib as i\ni.import_module(info['backend'])": "importlib.import_module",
    "eval(text)": "eval",
    "exec(compile(text, 'x', 'exec'))": "exec",
    "import numpy as np\nnp.load(path)": "np.load",
    "import numpy as np\nnp.load(path, allow_pickle=True)": "np.load",
    "import torch\ntorch.load(path)": "torch.load",
    "import os\nos.system(word)": "os.system",
    "import yaml\nyaml.load(text)": "yaml.load",
    "import torch.distributed as dist\ndist.gather_object(value)": "torch.distributed.gather_object",
}


@pytest.mark.parametrize("text", NEW_DOORS)
def test_a_new_door_is_seen(text: str) -> None:
    assert NEW_DOORS[text] in doors_in(text)
    assert doors_in("import numpy as np, json\nnp.load(path, allow_pickle=False); json.loads(text)") == set()


# The name of a backend in run.json, of a candidate in about.json: who may read it, and for what.
KEYS = {"backend", "candidate"}
MAY_READ = {
    "scripts/shared/backends.py": "to open it, if it is built in",
    "core/report/figures.py": "to show it",
    "core/report/parts.py": "to show it",
    "scripts/shared/startup_banner.py": "to show a backend's description of itself",
}


def reads_a_recorded_name(text: str) -> bool:
    for node in ast.walk(parsed(text)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in ("get", "pop"):
            key: Any = node.args[0] if node.args else None
        elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load):
            key = node.slice
        else:
            continue
        if isinstance(key, ast.Constant) and key.value in KEYS:
            return True
    return False


def test_recorded_names_are_read_at_one_place() -> None:
    found = {path.relative_to(REPO).as_posix() for path in sources() if reads_a_recorded_name(path.read_text())}
    assert found == set(MAY_READ)
    assert reads_a_recorded_name("load_backend(run.info.get('backend', 'torch'))")
    assert reads_a_recorded_name("load_backend(capsule.about['candidate'])")
    loaders = {path.relative_to(REPO).as_posix() for path in sources() if "load_backend(" in path.read_text()}
    assert loaders == {"core/load_backend.py", "core/parity/modes/shadow.py", "scripts/shared/backends.py"}
