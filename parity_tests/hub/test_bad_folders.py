"""Folders from strangers: what is wrong is refused by name, in one line, and nothing is left behind or run."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from lockstep.parity_tests.guards.planted import RAN, Runs, ran
from lockstep.parity_tests.loop.runs import one_line

Damage = Callable[[Path], object]
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
UP = "model.layers.1.mlp.up_proj.weight"


def config(**changes: Any) -> Damage:
    """Change keys of config.json; None of Python's own takes one away, "null" makes it null."""

    def damage(folder: Path) -> None:
        path = folder / "config.json"
        found = json.loads(path.read_text())
        for key, value in changes.items():
            found.pop(key, None)
            if value is not None:
                found[key] = None if value == "null" else value
        path.write_text(json.dumps(found))

    return damage


def text(name: str, content: str | bytes) -> Damage:
    return lambda folder: (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())


def in_config(old: str, new: str) -> Damage:
    def damage(folder: Path) -> None:
        before = (folder / "config.json").read_text()
        assert old in before
        (folder / "config.json").write_text(before.replace(old, new))

    return damage


def tensors(change: Callable[[dict[str, np.ndarray]], object]) -> Damage:
    def damage(folder: Path) -> None:
        found = load_file(folder / WEIGHTS)
        change(found)
        save_file(found, folder / WEIGHTS, metadata={"format": "pt"})

    return damage


def raw(change: Callable[[bytes], bytes]) -> Damage:
    return lambda folder: (folder / WEIGHTS).write_bytes(change((folder / WEIGHTS).read_bytes()))


def header(old: bytes, new: bytes) -> Damage:
    """Change the header of the weights, to as many bytes."""
    assert len(old) == len(new)
    return raw(lambda content: content.replace(old, new, 1))


def sharded(change: Callable[[Path, dict[str, str]], object]) -> Damage:
    """Two files and an index, of which something is wrong."""

    def damage(folder: Path) -> None:
        found = load_file(folder / WEIGHTS)
        (folder / WEIGHTS).unlink()
        names = sorted(found)
        parts = {"model-00001-of-00002.safetensors": names[:9], "model-00002-of-00002.safetensors": names[9:]}
        weight_map: dict[str, str] = {}
        for file, own in parts.items():
            save_file({name: found[name] for name in own}, folder / file, metadata={"format": "pt"})
            weight_map |= dict.fromkeys(own, file)
        index = change(folder, weight_map)
        (folder / INDEX).write_text(json.dumps({"weight_map": weight_map} if index is None else index))

    return damage


def put(found: dict[str, np.ndarray], name: str, array: np.ndarray) -> None:
    found[name] = array


def poisoned(found: dict[str, np.ndarray], value: float) -> None:
    found[UP][3, 5] = value


def moved_out(folder: Path, name: str) -> None:
    (folder / name).rename(folder.parent / "elsewhere")
    (folder / name).symlink_to(folder.parent / "elsewhere")


def only_a_pickle(name: str) -> Damage:
    def damage(folder: Path) -> None:
        (folder / WEIGHTS).unlink()
        (folder / name).write_bytes(pickle.dumps(Runs(folder.parents[1] / RAN)))

    return damage


def instead(name: str, make: Callable[[Path], object]) -> Damage:
    """Something else in the place of a file."""

    def damage(folder: Path) -> None:
        (folder / name).unlink()
        make(folder / name)

    return damage


def index_of_pickles(folder: Path, weight_map: dict[str, str]) -> None:
    for name in weight_map:
        weight_map[name] = "pytorch_model-00001.bin"
    (folder / "pytorch_model-00001.bin").write_bytes(pickle.dumps(Runs(folder.parents[1] / RAN)))


def nested(depth: int) -> str:
    return '{"a":' * depth + "1" + "}" * depth


BAD: dict[str, tuple[Damage, str]] = {
    # config.json
    "no config": (lambda f: (f / "config.json").unlink(), "config.json is missing"),
    "config is a list": (text("config.json", "[1]"), "must hold an object of JSON, not list"),
    "config is cut short": (in_config("}", ""), "config.json is not JSON"),
    "config is no text": (text("config.json", b"\xff\xfe{}"), "config.json is not JSON"),
    "config is a pipe": (instead("config.json", os.mkfifo), "it is not a regular file"),
    "config is large": (text("config.json", '{"a": "' + "x" * 2**20 + '"}'), "is larger than 1,048,576 bytes"),
    "config is deep": (text("config.json", nested(100_000)), "config.json is not JSON"),
    "config lies elsewhere": (lambda f: moved_out(f, "config.json"), "config.json is a link to outside"),
    "NaN": (in_config('"rms_norm_eps": 1e-05', '"rms_norm_eps": NaN'), "NaN is not a JSON number"),
    "infinity": (in_config("500000.0,", "Infinity,"), "Infinity is not a JSON number"),
    "infinity by digits": (config(rope_theta=None, rope_parameters={"rope_theta": 1e400}), "is not a JSON number"),
    "infinity in digits": (in_config('"rms_norm_eps": 1e-05', '"rms_norm_eps": 1e999'), "rms_norm_eps = inf"),
    "a key twice": (in_config('"vocab_size"', '"hidden_size": 9, "vocab_size"'), "hidden_size occurs twice"),
    "a number of digits": (in_config('"vocab_size": 300', '"vocab_size": ' + "9" * 5000), "config.json is not JSON"),
    "no architecture": (config(architectures=None), "architectures = None"),
    "another architecture": (config(architectures=["MambaForCausalLM"]), "architectures = ['MambaForCausalLM']"),
    "two architectures": (config(architectures=["LlamaForCausalLM", "X"]), "are LlamaForCausalLM"),
    "an architecture of numbers": (config(architectures=[[3]]), "architectures = [[3]]"),
    "another type": (config(model_type="mistral"), "model_type = 'mistral': LlamaForCausalLM is a 'llama'"),
    "another activation": (config(hidden_act="gelu"), "hidden_act = 'gelu': LlamaForCausalLM is known at 'silu'"),
    "another rotation": (config(rope_scaling={"rope_type": "yarn", "factor": 4.0}, rope_parameters=None), "'yarn'"),
    "another rotation by its old name": (
        config(rope_scaling={"type": "linear", "factor": 2.0}, rope_parameters=None),
        "rope_type = 'linear'",
    ),
    "two rotations": (config(rope_scaling={"type": "default"}), "rope_scaling and rope_parameters differ"),
    "half a rotation": (config(partial_rotary_factor=0.5), "partial_rotary_factor = 0.5"),
    "a rotation with more": (config(rope_parameters={"rope_type": "default", "factor": 2}), "rope_parameters.factor"),
    "a rotation of text": (config(rope_parameters="default"), "rope_parameters = 'default': must be an object"),
    "a rotation that is a list": (config(rope_parameters={"rope_type": ["default"]}), "rope_type = ['default']"),
    "a base of text": (config(rope_theta="x", rope_parameters=None), "rope_theta = 'x'"),
    "quantized": (config(quantization_config={"bits": 4}), "quantization_config = {'bits': 4}"),
    "code of its own": (config(auto_map={"AutoModel": "evil.Model"}), "auto_map = {'AutoModel': 'evil.Model'}"),
    "no width": (config(hidden_size=None), "hidden_size is missing"),
    "a null width": (config(hidden_size="null"), "hidden_size is missing"),
    "a width of text": (config(hidden_size="64"), "hidden_size = '64'"),
    "a width with a point": (config(hidden_size=64.0), "hidden_size = 64.0"),
    "a width of true": (config(hidden_size=True), "hidden_size = True"),
    "a negative width": (config(hidden_size=-64), "hidden_size = -64"),
    "a width of zero": (config(hidden_size=0), "hidden_size = 0"),
    "an absurd width": (config(hidden_size=2**62), "head_dim = 16: of these sizes it can only be 1152921504606846976"),
    "an absurd vocabulary": (config(vocab_size=10**18), "has shape [300, 64]; by config.json it is"),
    "absurd blocks": (config(num_hidden_layers=10**9), "num_hidden_layers = 1000000000"),
    "many blocks": (config(num_hidden_layers=9999), "9,999 blocks, and the files hold 20 tensors"),
    "more blocks": (config(num_hidden_layers=3), "model.layers.2.input_layernorm.weight"),
    "fewer blocks": (config(num_hidden_layers=1), "no tensor of this LlamaForCausalLM"),
    "heads that do not divide": (config(num_attention_heads=3), "3 heads do not divide"),
    "KV heads that do not divide": (config(num_key_value_heads=3), "num_attention_heads: 3 KV heads do not divide"),
    "no KV heads": (config(num_key_value_heads=None), "has shape [32, 64]; by config.json it is [64, 64]"),
    "other heads": (config(head_dim=32), "head_dim = 32: of these sizes it can only be 16"),
    "a flag of text": (config(tie_word_embeddings="yes"), "tie_word_embeddings = 'yes'"),
    "a flag of 1": (config(attention_bias=1), "attention_bias = 1"),
    # tensors
    "a tensor is missing": (tensors(lambda t: t.pop(UP)), f"{UP}: missing"),
    "all are missing": (tensors(lambda t: t.clear()), "2 blocks, and the files hold 0 tensors"),
    "a tensor too many": (tensors(lambda t: put(t, "model.x", np.zeros(3, "f4"))), "model.x: no tensor of this"),
    "a bias too many": (
        tensors(lambda t: put(t, UP.replace("weight", "bias"), np.zeros(128, "f4"))),
        "mlp.up_proj.bias: no tensor of this",
    ),
    "transposed": (
        tensors(lambda t: put(t, UP, t[UP].T.copy())),
        "has shape [64, 128]; by config.json it is [128, 64]",
    ),
    "one axis more": (tensors(lambda t: put(t, UP, t[UP][None])), "has shape [1, 128, 64]"),
    "integers": (tensors(lambda t: put(t, UP, t[UP].astype("i4"))), f"{UP} is of I32"),
    "eight bits": (
        tensors(lambda t: put(t, UP, t[UP].astype(ml_dtypes.float8_e4m3fn))),
        f"{UP} is of F8_E4M3",
    ),
    "truth": (tensors(lambda t: put(t, UP, t[UP] > 0)), f"{UP} is of BOOL"),
    "NaN in a tensor": (tensors(lambda t: poisoned(t, np.nan)), f"{UP} holds numbers that are not finite"),
    "infinity in a tensor": (tensors(lambda t: poisoned(t, -np.inf)), f"{UP} holds numbers that are not finite"),
    "too fine": (
        tensors(lambda t: put(t, UP, t[UP].astype("f8") + 1e-12)),
        "not of float32; take precision.policy = 'fp64'",
    ),
    "too large": (tensors(lambda t: put(t, UP, t[UP].astype("f8") * 1e300)), "not finite or not of float32"),
    "a head that is not tied": (
        tensors(lambda t: put(t, "lm_head.weight", t["model.embed_tokens.weight"] + 1)),
        "lm_head.weight is not model.embed_tokens.weight, to which config.json ties it",
    ),
    "a tied head of another shape": (
        tensors(lambda t: put(t, "lm_head.weight", t["model.embed_tokens.weight"][:-1])),
        "lm_head.weight has shape [299, 64]",
    ),
    "a head that is not there": (config(tie_word_embeddings=False), "lm_head.weight: missing"),
    # files of weights
    "no weights": (lambda f: (f / WEIGHTS).unlink(), "has neither model.safetensors nor"),
    "weights are a folder": (instead(WEIGHTS, Path.mkdir), "it is not a regular file"),
    "weights lie elsewhere": (lambda f: moved_out(f, WEIGHTS), "is a link to outside the folder"),
    "a link to nothing": (instead(WEIGHTS, lambda path: path.symlink_to("nowhere")), "model.safetensors is missing"),
    "cut short": (raw(lambda content: content[:-100]), "is damaged, or is not a safetensors file"),
    "longer": (raw(lambda content: content + b"x"), "is damaged, or is not a safetensors file"),
    "empty": (raw(lambda content: b""), "is damaged, or is not a safetensors file"),
    "eight bytes": (raw(lambda content: content[:8]), "is damaged, or is not a safetensors file"),
    "a long header": (raw(lambda content: b"\xff" * 8 + content[8:]), "is damaged, or is not a safetensors file"),
    "a header of text": (raw(lambda content: content[:8] + b"x" * 50 + content[58:]), "is damaged"),
    "a header that overlaps": (header(b'"data_offsets":[0,', b'"data_offsets":[8,'), "is damaged"),
    "a name twice": (
        header(b"layers.1.mlp.up_proj", b"layers.0.mlp.up_proj"),
        "is damaged|layers.1.mlp.up_proj.weight: missing",
    ),
    "a pickle in their place": (
        lambda f: (f / WEIGHTS).write_bytes(pickle.dumps(Runs(f.parents[1] / RAN))),
        "is damaged, or is not a safetensors file",
    ),
    "a pickle alone": (only_a_pickle("pytorch_model.bin"), "as a pickle (pytorch_model.bin), which is a program"),
    "a checkpoint of torch's": (only_a_pickle("consolidated.00.pth"), "as a pickle (consolidated.00.pth)"),
    # index
    "both": (lambda f: (f / INDEX).write_text('{"weight_map": {}}'), "holds both model.safetensors and"),
    "an index of pickles": (sharded(index_of_pickles), "names pytorch_model-00001.bin: a pickle is a program"),
    "an index of nothing": (sharded(lambda f, m: {"weight_map": {}}), "weight_map must name a file"),
    "an index without a map": (sharded(lambda f, m: {"metadata": {}}), "weight_map must name a file"),
    "a map that is a list": (sharded(lambda f, m: {"weight_map": list(m)}), "weight_map must name a file"),
    "a map of numbers": (sharded(lambda f, m: {"weight_map": {UP: 3}}), "weight_map must name a file"),
    "an index that is a list": (sharded(lambda f, m: [m]), "must hold an object of JSON"),
    "out of the folder": (
        sharded(lambda f, m: m.update({UP: "../model-00002-of-00002.safetensors"})),
        "names '../model-00002-of-00002.safetensors', which is not a file of this folder",
    ),
    "out by way of in": (sharded(lambda f, m: m.update({UP: "a/../../x.safetensors"})), "which is not a file of this"),
    "an absolute path": (sharded(lambda f, m: m.update({UP: "/etc/x.safetensors"})), "which is not a file of this"),
    "a path of Windows": (sharded(lambda f, m: m.update({UP: "..\\x.safetensors"})), "which is not a file of this"),
    "a null character": (sharded(lambda f, m: m.update({UP: "a\0.safetensors"})), "which is not a file of this"),
    "another ending": (sharded(lambda f, m: m.update({UP: "config.json"})), "which is not a safetensors file"),
    "a file that is not there": (sharded(lambda f, m: m.update({UP: "x.safetensors"})), "x.safetensors is missing"),
    "in the wrong file": (
        sharded(lambda f, m: m.update({UP: "model-00001-of-00002.safetensors"})),
        f"{UP} is not in model-00001-of-00002.safetensors",
    ),
    "not in the index": (sharded(lambda f, m: m.pop(UP) and None), f"{UP}: not in model.safetensors.index.json"),
    "in the index alone": (
        sharded(lambda f, m: m.update({"x": "model-00001-of-00002.safetensors"})),
        "x is not in model-00001-of-00002.safetensors",
    ),
    "a part lies elsewhere": (
        sharded(lambda f, m: moved_out(f, "model-00002-of-00002.safetensors")),
        "is a link to outside the folder",
    ),
    # tokenizer
    "no tokenizer": (lambda f: (f / "tokenizer.json").unlink(), "tokenizer.json is missing"),
    "a tokenizer elsewhere": (lambda f: moved_out(f, "tokenizer.json"), "tokenizer.json is a link to outside"),
    "a tokenizer of text": (text("tokenizer.json", "{}"), "tokenizer.json is not a tokenizer.json"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_folder_is_refused_by_name(
    name: str, copied: Path, imported: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damage, said = BAD[name]
    damage(copied)
    capsys.readouterr()
    assert imported(copied, tmp_path / "new" / "run") == 2
    line = one_line(capsys.readouterr().err)
    assert any(part in line for part in said.split("|")), line
    assert str(tmp_path) in line
    assert [path.name for path in tmp_path.iterdir()] == ["given"] and not ran(tmp_path)


def test_sound_folders_of_the_same_making_are_taken(copied: Path, imported: Callable[..., int], tmp_path: Path) -> None:
    """A folder with the damages' ingredients alone is sound, and pickles beside the weights are left alone."""
    config(head_dim=None, rope_theta=5e5, rope_parameters=None, rope_scaling="null", hidden_act="swish")(copied)
    tensors(lambda t: put(t, "lm_head.weight", t["model.embed_tokens.weight"]))(copied)
    tensors(lambda t: put(t, "model.layers.0.self_attn.rotary_emb.inv_freq", np.ones(8, "f4")))(copied)
    tensors(lambda t: put(t, UP, t[UP].astype("f8")))(copied)
    sharded(lambda f, m: None)(copied)
    for name in ("pytorch_model.bin", "training_args.bin"):
        (copied / name).write_bytes(pickle.dumps(Runs(tmp_path / RAN)))
    assert imported(copied, tmp_path / "run") == 0
    assert not ran(tmp_path)


def test_flags_that_contradict_the_folder(
    exported: Path, imported: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(*words: str) -> str:
        capsys.readouterr()
        assert imported(exported, tmp_path / "run", *words) == 2
        return one_line(capsys.readouterr().err)

    assert "model.hidden = 128: " in refused("--model.hidden", "128")
    assert "model.tied = false: " in refused("--model.tied", "false")
    assert "model.hidden = x: " in refused("--model.hidden", "x")
    assert "initial = seed: " in refused("--initial", "seed")
    assert "optim.peek_lr is not a setting" in refused("--optim.peek-lr", "1")
    assert not (tmp_path / "run").exists()
    same = ("--model.hidden", "64", "--model.rope-theta", "5e5", "--model.tied", "true")
    assert imported(exported, tmp_path / "run", *same) == 0
    assert "exists already" in refused(*same)


def test_a_bit_that_is_lost_is_seen(
    exported: Path,
    imported: Callable[..., int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """One number of one tensor, in its last bit, on its way into the run."""
    from lockstep.core.run.directory import RunDir

    save = RunDir.save_checkpoint

    def loses(self: RunDir, state: Any, extra: Any) -> Path:
        state.params["blocks.1.mlp.up_proj.weight"].reshape(-1).view("u4")[7] ^= 1
        return save(self, state, extra)

    monkeypatch.setattr(RunDir, "save_checkpoint", loses)
    assert imported(exported, tmp_path / "new" / "run") == 2
    assert f"does not hold the bits of {exported}: {UP}" in one_line(capsys.readouterr().err)
    assert not (tmp_path / "new").exists()
