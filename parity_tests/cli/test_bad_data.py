"""Data that is missing, damaged or does not fit: one clear line, exit code 2, no run directory."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from lockstep.core.config.file import load_config
from lockstep.parity_tests.cli.conftest import Lockstep


@pytest.fixture
def data(run_file: Path, here: Path) -> Path:
    """Copy the prepared data, to be damaged."""
    return Path(shutil.copytree(load_config(run_file).data.path, here / "data"))


def flip(path: Path, position: int) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)


# Damage to the data, and the words that the message must have.
DAMAGE = {
    "a byte of a shard": (lambda d: flip(d / "train_00000.bin", 5000), "train_00000.bin is damaged: its checksum"),
    "a byte of the last shard": (lambda d: flip(d / "val_00000.bin", -1), "val_00000.bin is damaged: its checksum"),
    "a byte of a header": (lambda d: flip(d / "train_00000.bin", 2), "train_00000.bin is not a Lockstep token shard"),
    "a shard cut short": (lambda d: (d / "train_00000.bin").write_bytes(b"LKSTPTOK" + bytes(992)), "train_00000.bin"),
    "a shard gone": (lambda d: (d / "val_00000.bin").unlink(), "cannot read the shard"),
    "the tokenizer": (lambda d: (d / "tokenizer.json").write_text("{}"), "tokenizer.json is not the tokenizer that"),
    "the index": (lambda d: flip(d / "index.json", 40), "index.json is damaged or was edited"),
    "the index gone": (lambda d: (d / "index.json").unlink(), "make it with: lockstep data prepare"),
}


@pytest.mark.parametrize("command", ["train", "parity"])
@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_data(refused, run_file: Path, data: Path, command: str, damage: str) -> None:
    inflict, said = DAMAGE[damage]
    inflict(data)
    assert said in refused(command, run_file, "--data.path", data)


@pytest.mark.parametrize("command", ["train", "parity"])
def test_data_that_was_never_prepared_names_the_command_that_prepares_it(
    refused, lockstep: Lockstep, run_file: Path, here: Path, command: str
) -> None:
    said = refused(command, run_file, "--data.path", "own tokens", "--model.vocab-size", "310", "--model.layers", "1")
    told = f"lockstep data prepare {run_file} --model.vocab-size 310 --data.path 'own tokens'"
    assert said == f"own tokens holds no prepared data; make it with: {told}"
    # It is the right one.
    arguments = ["data", "prepare", run_file, "--model.vocab-size", "310", "--data.path", "own tokens"]
    assert lockstep(*arguments, "--workers", "1").code == 0
    assert (here / "own tokens" / "index.json").is_file()


def test_a_resumed_run_names_its_own_settings(lockstep: Lockstep, refused, run_file: Path, data: Path) -> None:
    assert lockstep("train", run_file, "--data.path", data, "--train.steps", "4").code == 0
    shutil.rmtree(data)
    assert refused("train", "--resume", "runs/tiny").endswith("lockstep data prepare runs/tiny/config.toml")


# Arguments of `data prepare`, what lies in the file `source.txt`, and the message that is due.
UNPREPARABLE = [
    ("--data.source nowhere", "", "the source nowhere does not exist"),
    ("--data.source source.txt", "", "no text in"),
    ("--data.source source.txt", "  \n\t\n", "no text in"),
    ("--data.source source.txt", "\ud800", "1 of 1 file: not UTF-8 text (source.txt)"),
    ("--data.source empty", "x", "no files in the source"),
    ("--data.source source.jsonl", '{"body": "a"}\n', "no column 'text'; there are body"),
    ("--data.source source.jsonl", '{"text": "a"}\n{"text"', "not a line of JSON"),
    ("--data.source source.parquet", "PAR1junk", "is not a readable parquet file"),
    ("--data.source source.jsonl", "", "source.jsonl: it has no records"),
    ("--data.source source.jsonl", '{"text": ' + 100_000 * "[" + "\n", "at byte 0: not a line of JSON"),
    ("--data.source source.jsonl", '{"text": "a", "n": ' + 5_000 * "9" + "}\n", "at byte 0: not a line of JSON"),
    ("--data.source source.jsonl", '{"text": "a", "text": 3}\n', "must hold text, not a number"),
    ("--data.source source.txt --data.tokenizer source.txt", "x", "source.txt is not a tokenizer.json"),
    ("--data.source source.txt --data.tokenizer nowhere.json", "x", "cannot read the tokenizer nowhere.json"),
    ("--data.source source.txt --model.vocab-size 10", "text", "vocab_size 10 is too small; 257 is the least"),
    ("--data.source source.txt --data.path /proc/nowhere", "text", "cannot make the folder /proc/nowhere"),
    ("--data.source source.txt --data.path source.txt", "text", "source.txt is the source and the folder to prepare"),
    ("--data.source source.txt --data.val-fraction 1", "text", "data.val_fraction = '1'"),
    ("--data.source=", "text", "data.source = '': no path; leave it out for Python's standard library"),
    ("--data.source source.txt --workers 100000000", "text", "workers = 100000000: 1 to 4,096 processes"),
    (
        "--data.source source.txt --model.vocab-size 99999999999",
        "text",
        "vocab_size 99,999,999,999 is too large to train; 4,194,304 is the most",
    ),
    ("--data.mixture a:0,b:0", "text", "data.mixture = 'a:0,b:0': the weights add up to zero"),
    ("--data.mixture a:-1,b:2", "text", "a has the weight -1; a weight is zero or more"),
    ("--data.mixture a:nan,b:2", "text", "a has the weight 'nan'; a weight is a number such as 0.7, 3 or 1/3"),
    ("--data.mixture a:1,a:2", "text", "a occurs twice: give each data set one weight"),
]


@pytest.mark.parametrize(("arguments", "text", "said"), UNPREPARABLE)
def test_what_cannot_be_prepared_leaves_nothing(
    refused, run_file: Path, here: Path, arguments: str, text: str, said: str
) -> None:
    (here / "empty").mkdir()
    content = text.encode(errors="surrogatepass")
    for name in ("source.txt", "source.jsonl", "source.parquet"):
        (here / name).write_bytes(content)
    assert said in refused("data", "prepare", run_file, "--data.path", "own", *arguments.split())


def test_other_settings_do_not_replace_what_is_there(refused, lockstep: Lockstep, run_file: Path, data: Path) -> None:
    before = {p.name: p.read_bytes() for p in data.iterdir() if p.name != ".lock"}
    said = refused("data", "prepare", run_file, "--data.path", data, "--model.vocab-size", "280")
    assert "was prepared with other settings or data: vocab_size is 300 there, 280 was asked for" in said
    assert {p.name: p.read_bytes() for p in data.iterdir() if p.name != ".lock"} == before
    again = lockstep("data", "prepare", run_file, "--data.path", data)
    assert (again.code, again.err) == (0, "")
    assert "was ready" in again.out


def test_preparing_says_what_there_is_now(lockstep: Lockstep, run_file: Path) -> None:
    done = lockstep("data", "prepare", run_file)
    assert (done.code, done.err) == (0, "")
    for what in ("documents", "tokens", "300 tokens", "held-out unigram entropy", "held-out bigram entropy"):
        assert what in done.out
    assert "left out" not in done.out


def test_preparing_says_what_is_left_out(lockstep: Lockstep, run_file: Path, here: Path) -> None:
    texts = here / "texts"
    texts.mkdir()
    (texts / "a.txt").write_text("".join(f"line {n} of a text\n" for n in range(50)))
    (texts / "b.txt").write_bytes(b"caf\xe9\n" * 50)
    (texts / "c.jsonl").write_text('{"text": ""}\n{"text": "one line"}\n{"text": null}\n')
    prepare = ("data", "prepare", run_file, "--data.source", texts, "--data.path", "own", "--workers", 1)
    for state in ("2 shards written, 0 kept", "was ready"):
        done = lockstep(*prepare)
        assert done.code == 0 and state in done.out
        # The cells of the table, each in one line.
        said = " ".join(done.out.replace("│", " ").split())
        assert "left out" in said and "1 of 3 files: not UTF-8 text (b.txt)" in said
        assert "1 document: empty (c.jsonl, at byte 0)" in said
        assert "1 document: no text (null) (c.jsonl, at byte 34)" in said
