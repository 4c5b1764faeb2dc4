"""Sources at addresses: the same bytes as from a disk, changes noticed, refusals in one line, no credential kept."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lockstep.core.data import documents, remote
from lockstep.core.data.catalog import expected_documents
from lockstep.core.data.documents import read_documents
from lockstep.core.data.plan import read_plan
from lockstep.core.data.prepare import prepare
from lockstep.core.data.sources import list_source
from lockstep.core.errors import UserError
from lockstep.parity_tests.data.conftest import settings_for, write_texts
from lockstep.parity_tests.data.test_prepare import contents
from lockstep.scripts import cli

KEY, SECRET = "AKIALOCKSTEPTESTS", "a-secret-that-nobody-writes-down"


@pytest.fixture
def endpoint(monkeypatch):
    """Set where s3:// is, for this process and its workers."""

    def point(url: str) -> None:
        monkeypatch.setenv("AWS_ENDPOINT_URL", url)
        remote._connected.cache_clear()

    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    yield point
    remote._connected.cache_clear()


@pytest.fixture(scope="module")
def server():
    """Start a local S3 server, and yield its address."""
    from moto.server import ThreadedMotoServer

    running = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    running.start()
    host, port = running.get_host_and_port()
    yield f"http://{host}:{port}"
    running.stop()


@pytest.fixture
def bucket(server, endpoint):
    """Make an empty bucket, `texts`, and yield its file system."""
    endpoint(server)
    system = fsspec.filesystem("s3", skip_instance_cache=True, use_listings_cache=False)
    system.mkdir("texts")
    yield system
    system.rm("texts", recursive=True)


@pytest.fixture
def memory():
    """Yield fsspec's file system in memory, empty."""
    system = fsspec.filesystem("memory")
    yield system
    system.store.clear()
    system.pseudo_dirs[:] = [""]


@pytest.fixture(scope="module")
def mixed(tmp_path_factory) -> Path:
    """Text, JSON lines (packed and not) and parquet, in folders."""
    folder = write_texts(tmp_path_factory.mktemp("mixed") / "texts", 9)
    texts = [path.read_text() for path in sorted(write_texts(folder.parent / "more", 24, seed=2).iterdir())]
    lines = [json.dumps({"text": text}) + "\n" for text in texts]
    (folder / "below").mkdir()
    (folder / "below" / "a.jsonl").write_text("".join(lines[:8]))
    (folder / "below" / "b.jsonl.gz").write_bytes(gzip.compress("".join(lines[8:16]).encode(), mtime=0))
    pq.write_table(pa.table({"text": texts[16:]}), folder / "c.parquet", row_group_size=3)
    (folder / ".hidden").write_text("hidden words")
    return folder


def upload(system, folder: Path, root: str) -> None:
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            system.pipe(f"{root}/{path.relative_to(folder).as_posix()}", path.read_bytes())


def said_by(source, **changes) -> str:
    with pytest.raises(UserError) as error:
        list_source(source, **changes)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_every_place_gives_the_same_bytes(mixed, bucket, memory, tmp_path, capfd):
    expected = prepare(settings_for(tmp_path / "disk", mixed)).folder
    upload(bucket, mixed, "texts/some")
    bucket.pipe("texts/some/below/", b"")  # stands for a folder
    upload(memory, mixed, "/some")
    for name, source, workers in (("s3", "s3://texts/some", 2), ("memory", "memory://some", 2)):
        found = prepare(settings_for(tmp_path / name, source, workers=workers))
        for path in [expected / "tokenizer.json", *expected.glob("*.bin")]:
            assert (found.folder / path.name).read_bytes() == path.read_bytes(), (name, path.name)
    assert prepare(settings_for(expected, f"file://{mixed}")).up_to_date
    # From the bucket, after its worker's half, as from the disk.
    (tmp_path / "s3" / "index.json").unlink()
    (tmp_path / "s3" / "train_00001.bin").unlink()
    assert prepare(settings_for(tmp_path / "s3", "s3://texts/some")).shards_written == 1
    said = capfd.readouterr()
    kept = b"".join(path.read_bytes() for path in (tmp_path / "s3").iterdir()) + (said.out + said.err).encode()
    assert SECRET.encode() not in kept and KEY.encode() not in kept


def test_files_at_an_address_are_those_of_a_folder(mixed, memory):
    upload(memory, mixed, "/some")
    memory.pipe("/some/.git/config", b"hidden")
    names = [file.name for file in list_source(str(mixed)).files]
    assert [file.name for file in list_source("memory://some").files] == names
    assert [file.name for file in list_source("Memory://some/").files] == names
    assert [file.name for file in list_source("memory://some/**/*.jsonl*").files] == ["a.jsonl", "b.jsonl.gz"]
    assert [file.name for file in list_source("memory://some/c.parquet").files] == ["c.parquet"]
    assert [file.name for file in list_source("memory://some/.hidden").files] == [".hidden"]
    assert list_source(f"file://{mixed}") == list_source(str(mixed))
    one = list_source("memory://some/doc_003.txt").files[0]
    assert (one.path, one.size) == ("memory:///some/doc_003.txt", (mixed / "doc_003.txt").stat().st_size)


@pytest.mark.parametrize("place", ["s3", "memory"])
def test_a_file_that_changes_after_it_was_listed_is_noticed(place, request, tmp_path):
    system = request.getfixturevalue({"s3": "bucket", "memory": "memory"}[place])
    source = {"s3": "s3://texts/some", "memory": "memory://some"}[place]
    upload(system, write_texts(tmp_path / "texts", 5), {"s3": "texts/some", "memory": "/some"}[place])
    name = list_source(source).files[3].path

    def change(progress):
        if progress.stage == "encode":
            system.pipe(name, system.cat(name)[::-1])

    with pytest.raises(UserError, match=r"doc_003\.txt was changed"):
        prepare(settings_for(tmp_path / "out", source), change)
    with pytest.raises(UserError, match="the source has changed since: 1 files differ"):
        prepare(settings_for(tmp_path / "out", source))


def test_a_file_that_changes_while_it_is_read_is_noticed(bucket, monkeypatch):
    # So that the file takes several requests.
    monkeypatch.setattr(remote, "_REQUEST_BYTES", 1 << 12)
    monkeypatch.setattr(documents, "_CHUNK_BYTES", 1 << 12)
    lines = b'{"text": "words"}\n' * 2000
    bucket.pipe("texts/a.jsonl", lines)
    (file,) = list_source("s3://texts/a.jsonl").files
    with pytest.raises(UserError, match=r"s3://texts/a\.jsonl was changed"):
        for number, _ in enumerate(read_documents(file, "text")):
            if number == 0:
                bucket.pipe("texts/a.jsonl", lines[:-2] + b" \n")


@pytest.mark.parametrize("place", ["memory", "disk"])
def test_a_file_that_changes_behind_its_reader_is_noticed(place, memory, tmp_path):
    system, name = (
        (memory, "memory:///a.jsonl") if place == "memory" else (fsspec.filesystem("file"), tmp_path / "a.jsonl")
    )
    line = b'{"text": "words"}\n'
    system.pipe(str(name), line * 2)
    (file,) = list_source(str(name)).files
    found = expected_documents(file, "text", [(0, file.size)])
    next(found)
    system.pipe(str(name), line * 3)
    with pytest.raises(UserError, match=r"a\.jsonl was changed"):
        list(found)


def test_of_parquet_only_the_column_is_fetched(memory, monkeypatch):
    noise = np.random.default_rng(0).bytes(6_000_000)
    table = {"other": [noise[n : n + 6000] for n in range(0, len(noise), 6000)], "text": ["words"] * 1000}
    with memory.open("/a.parquet", "wb") as out:
        pq.write_table(pa.table(table), out, row_group_size=250)
    fetched = []
    true = remote.open_file

    def counted(path, *, ranges=False):
        assert ranges
        stream = true(path, ranges=ranges)
        read = stream.read

        class Counted:
            closed = False

            def __getattr__(self, name):
                return getattr(stream, name)

            def read(self, size=-1):
                fetched.append(len(found := read(size)))
                return found

        return Counted()

    monkeypatch.setattr(remote, "open_file", counted)
    (file,) = list_source("memory://a.parquet").files
    assert [document.text for document in read_documents(file, "text")] == ["words"] * 1000
    assert 0 < sum(fetched) < 200_000 < file.size


class _Refusing(BaseHTTPRequestHandler):
    code, status = "AccessDenied", 403

    def do_GET(self):
        body = f"<Error><Code>{self.code}</Code><Message>{SECRET}</Message></Error>".encode()
        self.send_response(self.status)
        self.send_header("Content-Type", "application/xml")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    do_HEAD = do_GET

    def log_message(self, *_):
        pass


@pytest.mark.parametrize("code", ["ExpiredToken", "InvalidAccessKeyId", "SignatureDoesNotMatch", "AccessDenied"])
def test_credentials_that_are_refused(code, endpoint, tmp_path, capsys):
    handler = type("Handler", (_Refusing,), {"code": code})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        endpoint(f"http://127.0.0.1:{server.server_port}")
        for source in ("s3://texts/some", "s3://texts/some/*.txt"):
            given = ["data", "prepare", "--data.source", source, "--data.path", str(tmp_path / "a" / "out")]
            assert cli.run(given) == 2
            (line,) = capsys.readouterr().err.strip().splitlines()
            assert f"access to {source} was refused" in line and "AWS_PROFILE" in line and SECRET not in line
            assert "*" not in source or code in line
        assert not (tmp_path / "a").exists()
    finally:
        server.shutdown()
        server.server_close()


REFUSED = {
    "ftp://host/texts": "ftp:// is not read as a source; give s3://",
    "reference://x": "reference:// is not read as a source",
    "zip://a.txt::s3://texts/a.zip": "zip:// is not read as a source",
    "s3://": "s3:// names nothing",
    "gs://bucket/texts": "gs://bucket/texts needs gcsfs: pip install gcsfs",
    "memory://nothing/here": "there is nothing at memory://nothing/here",
    "memory://nothing/*.txt": "no files in the source memory://nothing/*.txt",
}


@pytest.mark.parametrize("source", REFUSED)
def test_addresses_that_cannot_be(source, monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    remote._connected.cache_clear()
    assert cli.run(["data", "prepare", "--data.source", source, "--data.path", str(tmp_path / "out")]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert REFUSED[source] in line and not (tmp_path / "out").exists()


def test_credentials_in_an_address_are_refused_and_not_repeated():
    said = said_by(f"s3://{KEY}:{SECRET}@texts/some")
    assert "leave credentials out of the s3:// address" in said and SECRET not in said and KEY not in said


def test_a_bucket_that_is_not_there_and_one_without_a_server(server, endpoint, monkeypatch):
    endpoint(server)
    assert "there is nothing at s3://no-such-bucket" in said_by("s3://no-such-bucket")
    assert "there is nothing at s3://no-such-bucket/a.txt" in said_by("s3://no-such-bucket/a.txt")
    endpoint("http://127.0.0.1:9")
    said = said_by("s3://texts/some")
    assert "s3://texts/some cannot be reached" in said and "AWS_ENDPOINT_URL" in said
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", os.devnull)
    remote._connected.cache_clear()
    assert "access to s3://texts/some was refused" in said_by("s3://texts/some")


def test_parquet_at_an_address_that_is_cut_short_or_has_another_column(bucket, tmp_path):
    pq.write_table(pa.table({"body": ["words"] * 99}), tmp_path / "a.parquet")
    raw = (tmp_path / "a.parquet").read_bytes()
    for name, content, says in (
        ("cut", raw[: len(raw) // 2], "not a readable parquet file"),
        ("other", raw, "no column 'text'; there are body"),
    ):
        bucket.pipe(f"texts/{name}.parquet", content)
        with pytest.raises(UserError, match=says) as error:
            prepare(settings_for(tmp_path / "out", f"s3://texts/{name}.parquet"))
        assert f"s3://texts/{name}.parquet" in str(error.value) and "\n" not in str(error.value)
        assert not (tmp_path / "out").exists()


def test_a_version_is_kept_in_the_plan_and_paths_of_this_machine_have_none(mixed, memory, bucket, tmp_path):
    bucket.pipe("texts/a.txt", b"one\ntwo\n")
    folder = prepare(settings_for(tmp_path / "s3", "s3://texts")).folder
    (file,) = read_plan(folder).listing.files
    assert (len(file.version), file.mtime_ns) == (32, 0)
    local = shutil.copytree(mixed, tmp_path / "texts")
    prepare(settings_for(tmp_path / "disk", local))
    assert {len(row) for row in json.loads((tmp_path / "disk" / "plan.json").read_text())["files"]} == {5}
    assert contents(tmp_path / "disk")
