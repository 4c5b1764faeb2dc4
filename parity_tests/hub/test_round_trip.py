"""Out and in again: the same bits, the same settings, and the same text as transformers writes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lockstep.core.arrays import bit_equal
from lockstep.core.checkpoint.format import load_checkpoint
from lockstep.core.config.sections import ModelConfig
from lockstep.core.hub.folder import HubFolder
from lockstep.core.model.families import as_read
from lockstep.core.run.directory import RunDir
from lockstep.parity_tests.hub.conftest import SHORT
from lockstep.parity_tests.loop.conftest import prepare
from lockstep.parity_tests.loop.runs import Folder, one_line
from lockstep.scripts import cli

Imported = Callable[..., int]
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"model.rope_factor": 8.0, "model.rope_original": 16},
    "gpt2": {"model.kv_heads": 4, "model.positions": 70},
    "qwen2": {"model.rope_theta": 1e4},
    "qwen3": {"model.head_width": 24, "model.tied": False},
    "mistral": {"model.window": 9},
    "gemma2": {
        **{"model.window": 9, "model.head_width": 24, "model.attention_scale": 20**-0.5},
        **{"model.attention_cap": 2.0, "model.logits_cap": 3.0},
    },
}
BIASED = {"model.qkv_bias": True, "model.o_bias": True, "model.mlp_bias": True, "model.tied": False}


def params_of(run: Path, step: int) -> dict[str, np.ndarray]:
    state, _ = load_checkpoint(run / "checkpoints" / f"step_{step:06d}")
    return dict(state.params)


def same_tensors(one: Path, other: Path) -> bool:
    """Return whether two folders hold the same tensors, bit for bit, in the same formats."""
    first, second = HubFolder(one), HubFolder(other)
    names = first.tensors.keys()
    return names == second.tensors.keys() and all(bit_equal(first.read(n), second.read(n)) for n in names)


@pytest.mark.parametrize(
    ("settings", "more"),
    [
        ({}, ()),
        ({}, ("--shard-gb", "0.0001")),
        (BIASED, ()),
        ({"precision.policy": "fp64", "model.kv_heads": 1}, ("--dtype", "fp64")),
        *(({"model.family": family, **own}, ()) for family, own in FAMILIES.items()),
    ],
    ids=["tied", "sharded", "untied and biased", "fp64", *FAMILIES],
)
def test_a_run_goes_out_and_in_with_the_same_bits(
    folder: Folder, imported: Imported, settings: dict[str, Any], more: tuple[str, ...], tmp_path: Path
) -> None:
    assert folder.train("one", SHORT | settings) == 0
    out = tmp_path / "deep" / "out"
    assert cli.run(["export", str(tmp_path / "one"), str(out), *more]) == 0
    policy = ("--precision.policy", "fp64") if "precision.policy" in settings else ()
    assert imported(out, tmp_path / "two", *policy) == 0
    due, found = params_of(tmp_path / "one", 2), params_of(tmp_path / "two", 0)
    assert due.keys() == found.keys() and all(bit_equal(due[name], found[name]) for name in due)
    one, two = (as_read(RunDir.open(tmp_path / name).config.model) for name in ("one", "two"))
    assert one == two
    files = sorted(path.name for path in out.glob("*.safetensors"))
    if "--shard-gb" in more:
        count = len(files)
        assert files == [f"model-{n:05d}-of-{count:05d}.safetensors" for n in range(1, count + 1)] and count > 2
        assert all(path.stat().st_size < 110_000 for path in out.glob("*.safetensors"))
    else:
        assert files == ["model.safetensors"]
    # And once more, from the run that was imported, by its checkpoint's folder.
    assert cli.run(["export", str(tmp_path / "two/checkpoints/step_000000"), str(tmp_path / "again"), *more]) == 0
    assert same_tensors(out, tmp_path / "again")
    assert not [path for path in tmp_path.rglob(".*") if path.name != ".lock"]


@pytest.mark.parametrize(
    ("dtype", "shard", "settings"),
    [
        ("float32", "5GB", {}),
        (
            "bfloat16",
            "60KB",
            {"tie_word_embeddings": True, "rope_parameters": {"rope_theta": 1e4, "rope_type": "default"}},
        ),
        ("float32", "5GB", {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 4, "rms_norm_eps": 1e-3}),
        ("float16", "5GB", {"num_key_value_heads": 1, "num_hidden_layers": 3}),
    ],
    ids=["float32", "bfloat16 in shards", "biases", "float16"],
)
def test_a_folder_of_transformers_comes_in_and_goes_out_as_it_was(
    llama: Callable[..., Path], imported: Imported, tmp_path: Path, dtype: str, shard: str, settings: dict[str, Any]
) -> None:
    hub = llama(dtype, shard, **settings)
    assert imported(hub, tmp_path / "run") == 0
    form = "bf16" if dtype == "bfloat16" else "fp32"
    assert cli.run(["export", str(tmp_path / "run"), str(tmp_path / "out"), "--dtype", form]) == 0
    if dtype == "float16":  # which export does not write: the same numbers, wider
        first, second = HubFolder(hub), HubFolder(tmp_path / "out")
        assert all(bit_equal(first.read(n).astype(np.float32), second.read(n)) for n in first.tensors)
        assert first.tensors.keys() == second.tensors.keys()
    else:
        assert same_tensors(hub, tmp_path / "out")
    due, found = (json.loads((at / "config.json").read_text()) for at in (hub, tmp_path / "out"))
    told_by_data = {"max_position_embeddings", "dtype", "transformers_version", "initializer_range", "pretraining_tp"}
    differ = {key for key in due.keys() - told_by_data if due[key] is not None and due[key] != found.get(key)}
    assert not differ


def generated(folder: Path, prompt: str, count: int) -> list[int]:
    """Return the tokens that transformers writes after a prompt, always the likeliest."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    given = tokenizer(prompt, return_tensors="pt")
    found = model.generate(**given, max_new_tokens=count, do_sample=False)
    return found[0, given["input_ids"].shape[1] :].tolist()


def text_of(folder: Path, ids: list[int]) -> str:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder).decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("settings", [{}, {"tie_word_embeddings": True, "num_key_value_heads": 4}], ids=["", "tied"])
def test_both_write_the_same_text(
    llama: Callable[..., Path],
    imported: Imported,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    settings: dict[str, Any],
) -> None:
    """The weights are large: 40 tokens that repeat nothing for long, of which one that differs changes all after it."""
    hub = llama(**settings)
    assert imported(hub, tmp_path / "run", "--train.sequence-length", "64") == 0
    assert cli.run(["export", str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    theirs = generated(tmp_path / "out", "import ", 40)
    assert theirs == generated(hub, "import ", 40) and len(set(theirs)) > 15
    capsys.readouterr()
    words = ["sample", str(tmp_path / "run"), "--prompt", "import ", "--temperature", "0", "--tokens", "40"]
    assert cli.run(words) == 0
    # Bytes that are no text: what both make of them is compared, too.
    assert capsys.readouterr().out == "import " + text_of(tmp_path / "out", theirs) + "\n"


@pytest.mark.parametrize("family", FAMILIES)
def test_both_write_the_same_text_of_every_family(
    family: str, tokens: Path, imported: Imported, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As above, of a model that transformers makes and saves; the text is longer than the windows."""
    sizes = {"vocab_size": 300, "hidden": 64, "layers": 2, "heads": 4, "kv_heads": 2, "ffn_hidden": 96, "tied": False}
    own = {key.removeprefix("model."): value for key, value in FAMILIES[family].items()}
    model = ModelConfig.model_validate({"family": family, **sizes, **own})
    saved_by_transformers(model, tmp_path / "hub")
    shutil.copy(tokens / "tokenizer.json", tmp_path / "hub")
    assert imported(tmp_path / "hub", tmp_path / "run", "--train.sequence-length", "64") == 0
    assert cli.run(["export", str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    assert same_tensors(tmp_path / "hub", tmp_path / "out")
    theirs = generated(tmp_path / "out", "import ", 40)
    # GPT-2 of such weights soon repeats itself.
    assert len(set(theirs)) > (3 if family == "gpt2" else 15)
    capsys.readouterr()
    words = ["sample", str(tmp_path / "run"), "--prompt", "import ", "--temperature", "0", "--tokens", "40"]
    assert cli.run(words) == 0
    assert capsys.readouterr().out == "import " + text_of(tmp_path / "out", theirs) + "\n"


def saved_by_transformers(model: ModelConfig, folder: Path) -> None:
    """Save transformers' own model with large random weights."""
    import torch

    from lockstep.core.hub.families import HUB
    from lockstep.torch_backend.tools.hugging_face import architecture_of, their_arguments

    kind = architecture_of(HUB[model.family])
    torch.manual_seed(0)
    made = kind(kind.config_class(**their_arguments(model, 64), bos_token_id=0, eos_token_id=0))
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            gain = name.endswith("norm.weight") or ".ln_" in name
            spread = 0.3 if parameter.ndim > 1 else 0.2
            parameter.copy_(torch.randn(parameter.shape) * spread + (gain and model.family != "gemma2"))
    made.save_pretrained(folder)


def test_the_tokenizer_is_the_runs(exported: Path, tokens: Path) -> None:
    from transformers import AutoTokenizer

    from lockstep.core.data.tokenizer import load_tokenizer

    theirs, ours = AutoTokenizer.from_pretrained(exported), load_tokenizer(tokens / "tokenizer.json")
    for text in ("def f(x):\n    return x\n", "日本 \u00a0\t", "a" * 100, ""):
        ids = ours.encode_documents([text])[0].tolist()
        assert theirs(text).input_ids == ids and theirs.decode(ids) == text
    assert theirs.eos_token_id == theirs.bos_token_id == ours.eot_id and len(theirs) == ours.vocab_size


def test_rows_without_a_token_are_kept_and_not_drawn(
    folder: Folder, imported: Imported, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert folder.train("one", SHORT | {"model.vocab_size": 320}) == 0
    capsys.readouterr()
    assert cli.run(["export", str(tmp_path / "one"), str(tmp_path / "out")]) == 0
    assert "20 rows of the vocabulary belong to no token: `generate` draws none" in capsys.readouterr().out
    assert json.loads((tmp_path / "out/generation_config.json").read_text())["suppress_tokens"] == [*range(300, 320)]
    assert imported(tmp_path / "out", tmp_path / "two") == 0
    assert RunDir.open(tmp_path / "two").config.model.vocab_size == 320
    assert params_of(tmp_path / "two", 0)["embed.weight"].shape == (320, 64)


def test_what_export_says(folder: Folder, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = {"precision.policy": "bf16", "attention.document_mask": True, "loss.z_loss": 1e-4}
    assert folder.train("one", SHORT | settings) == 0
    capsys.readouterr()
    assert cli.run(["export", str(tmp_path / "one"), str(tmp_path / "out"), "--dtype", "bf16", "--step", "2"]) == 0
    said = capsys.readouterr().out
    for part in (
        "rounded to bf16: a number changed by up to 3.9e-03 of itself",
        "trained under precision.policy = 'bf16'",
        "trained with attention.document_mask: transformers does not separate documents",
        "loss.z_loss: the loss of transformers does not include it",
        "max_position_embeddings: it was trained on sequences of at most 32 tokens",
    ):
        assert part in said
    assert json.loads((tmp_path / "out/config.json").read_text())["dtype"] == "bfloat16"


@pytest.mark.parametrize(
    ("settings", "words", "said"),
    [
        (
            {"model.qkv_bias": True},
            [],
            "model.qkv_bias and model.o_bias differ: LlamaForCausalLM has one attention_bias",
        ),
        ({}, ["--step", "1"], "has no checkpoint of step 1"),
        ({}, ["--shard-gb", "0"], "shard_gb = 0.0: must be above 0"),
        ({}, ["--shard-gb", "nan"], "shard_gb = nan"),
        ({}, ["--tokenizer", "nowhere.json"], "nowhere.json is not there"),
    ],
)
def test_what_cannot_be_exported(
    folder: Folder,
    tmp_path: Path,
    settings: dict[str, Any],
    words: list[str],
    said: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert folder.train("one", SHORT | settings) == 0
    capsys.readouterr()
    assert cli.run(["export", str(tmp_path / "one"), str(tmp_path / "new/out"), *words]) == 2
    assert said in one_line(capsys.readouterr().err)
    assert not (tmp_path / "new").exists()


def test_where_nothing_can_be_written(
    exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = str(exported.parent / "one")

    def refused(*words: object) -> str:
        capsys.readouterr()
        assert cli.run(["export", *map(str, words)]) == 2
        return one_line(capsys.readouterr().err)

    assert "exists already" in refused(run, exported)
    assert "neither a run directory nor a checkpoint" in refused(exported, tmp_path / "out")
    assert "is a checkpoint already" in refused(f"{run}/checkpoints/step_000002", tmp_path / "out", "--step", "2")
    assert "cannot make /proc/nowhere/out: No such file" in refused(run, "/proc/nowhere/out")
    (tmp_path / "dangling").symlink_to("nowhere")
    assert "exists already" in refused(run, tmp_path / "dangling")
    # A bit that is lost on the way, and a disk that is full.
    with monkeypatch.context() as patch:
        patch.setattr(
            "lockstep.core.hub.write.narrowed", lambda a, name: np.nextafter(a, np.float32(1)) if a.ndim < 2 else a
        )
        patch.setattr("lockstep.core.hub.read.bit_equal", lambda a, b: a.ndim > 1)
        assert "does not hold the bits of the checkpoint" in refused(run, tmp_path / "out")
    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", lambda descriptor: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        assert "No space left on device" in refused(run, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["dangling"]


def test_what_a_killed_process_left_is_taken_away(exported: Path, tmp_path: Path) -> None:
    (tmp_path / ".out.99999999.new" / "made").mkdir(parents=True)
    assert cli.run(["export", str(exported.parent / "one"), str(tmp_path / "out")]) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_an_imported_run_trains_is_checked_and_keeps_its_first_weights(
    llama: Callable[..., Path], imported: Imported, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first check would compare the weights with the seed's: here it begins from those that were imported."""
    words = ("--checkpoint.every", "1", "--checkpoint.keep", "1", "--parity.every", "9", "--checkpoint.best", "false")
    assert imported(llama(), tmp_path / "run", *words) == 0
    first = params_of(tmp_path / "run", 0)
    assert cli.run(["train", "--resume", str(tmp_path / "run")]) == 0
    run = RunDir.open(tmp_path / "run")
    assert [line["verdict"] for line in run.checks()] == ["agreed"]
    assert [path.name for path in run.checkpoints()] == ["step_000000", "step_000004"]
    assert len(run.records()) == 4
    # The same steps again, from the imported weights and not from the seed's.
    from lockstep.core.parity.modes.rerun import StoredStates

    states = StoredStates(run)
    assert states.steps == [0, 4]
    assert all(bit_equal(states.load(0).params[name], first[name]) for name in first)
    assert cli.run(["replay", str(tmp_path / "run"), "--step", "2", "--reference", "torch"]) == 0
    import shutil

    shutil.rmtree(tmp_path / "run/checkpoints/step_000000")
    capsys.readouterr()
    assert cli.run(["replay", str(tmp_path / "run"), "--step", "2", "--reference", "torch"]) == 2
    assert "the imported weights, the checkpoint of step 0, are gone" in one_line(capsys.readouterr().err)


@pytest.mark.parametrize("more", [("--backend", "jax"), ("--optim.name", "adamw8bit")], ids=["jax", "adamw8bit"])
def test_any_backend_and_optimizer_goes_on(
    exported: Path, imported: Imported, tmp_path: Path, more: tuple[str, ...]
) -> None:
    assert imported(exported, tmp_path / "run", "--train.steps", "2", *more) == 0
    assert cli.run(["train", "--resume", str(tmp_path / "run")]) == 0
    assert len(RunDir.open(tmp_path / "run").records()) == 2


def test_a_run_file_holds_no_imported_weights(exported: Path, imported: Imported, tmp_path: Path, capsys) -> None:
    assert imported(exported, tmp_path / "run") == 0
    for command in (
        ["train", str(tmp_path / "run/config.toml"), "--out", str(tmp_path)],
        ["parity", str(tmp_path / "run/config.toml")],
    ):
        capsys.readouterr()
        assert cli.run([*command, "--name", "new"]) == 2
        assert "initial = 'imported': a run file holds no weights" in one_line(capsys.readouterr().err)


def test_data_of_another_tokenizer(
    exported: Path, imported: Imported, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prepare(text, tmp_path / "other", "--model.vocab-size", "290")
    capsys.readouterr()
    assert imported(exported, tmp_path / "run", "--data.path", str(tmp_path / "other")) == 2
    assert "was prepared with another tokenizer than" in one_line(capsys.readouterr().err)
    assert imported(exported, tmp_path / "run", "--data.path", str(tmp_path / "nothing")) == 2
    said = one_line(capsys.readouterr().err)
    assert f"make it with: lockstep data prepare --data.path {tmp_path / 'nothing'} --data.tokenizer {exported}" in said
    # The line that it prints, with where the text is.
    prepare(text, tmp_path / "nothing", "--data.tokenizer", str(exported / "tokenizer.json"))
    assert imported(exported, tmp_path / "run", "--data.path", str(tmp_path / "nothing")) == 0
