"""The page of a run that is being written: what is new comes, and nobody else gets it."""

from __future__ import annotations

import http.client
import json
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lockstep.core.config.schema import ModelConfig
from lockstep.core.errors import UserError
from lockstep.core.files.jsonl import read_lines, sealed_line, value_of
from lockstep.core.files.lock import FolderLock
from lockstep.core.live import follow, snapshot
from lockstep.core.live.follow import FollowedLines
from lockstep.core.live.server import LiveServer, code
from lockstep.core.live.snapshot import GONE, WAITING, Watched
from lockstep.core.report.build import SCRIPTS, asset, build_report, digest_of
from lockstep.core.run.info import read_info, write_info
from lockstep.parity_tests.report.fake_run import write_run
from lockstep.parity_tests.report.test_report import Tags, embedded
from lockstep.scripts import cli

SMALL = ModelConfig(layers=1)
MARKUP = "</script><img src=x onerror=alert(1)>\"'&\u2028"


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every look be one."""
    monkeypatch.setattr(snapshot, "LEAST", 0.0)
    monkeypatch.setattr(snapshot, "SHARE", 1e9)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run", steps=30, every=15, model=SMALL)


@pytest.fixture
def server(run: Path) -> Iterator[LiveServer]:
    server = LiveServer(run, 0)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def ask(server: LiveServer, path: str, method: str = "GET", **headers: str) -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=20)
    sent = {name.replace("_", "-"): value for name, value in headers.items()}
    connection.request(method, path, headers=sent)
    answer = connection.getresponse()
    return answer.status, dict(answer.getheaders()), answer.read()


def data_of(server: LiveServer, query: str = "") -> dict[str, Any]:
    status, _, body = ask(server, f"/data{query}")
    assert status == 200
    found: dict[str, Any] = json.loads(body)
    return found


def append(run: Path, step: int, **more: Any) -> None:
    with (run / "records.jsonl").open("rb") as file:
        record = {**(value_of(file.readline()[:-1]) or {}), "step": step, **more}
    with (run / "records.jsonl").open("ab") as file:
        file.write(sealed_line(record))


# Lines that grow


def test_new_lines_come_once_and_a_line_in_work_does_not(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    followed = FollowedLines(path)
    assert followed.news() == follow.News(False, ())
    first, second = (sealed_line({"step": step}) for step in (1, 2))
    path.write_bytes(first + second[:9])
    assert followed.news() == follow.News(False, ((1, {"step": 1}),))
    assert followed.news() == follow.News(False, ())
    with path.open("ab") as file:
        file.write(second[9:] + b"broken\n")
    assert followed.news().lines == ((2, {"step": 2}), (3, None))


@pytest.mark.parametrize("how", ["cut", "replaced", "same inode", "gone"])
def test_a_file_that_is_another_is_read_anew(how: str, tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    lines = [sealed_line({"step": step, "text": "x" * 20}) for step in range(1, 5)]
    path.write_bytes(b"".join(lines))
    followed = FollowedLines(path)
    assert len(followed.news().lines) == 4
    other = [sealed_line({"step": step, "text": "y" * 20}) for step in range(1, 6)]
    if how == "cut":
        path.write_bytes(lines[0])
        assert followed.news() == follow.News(True, ((1, {"step": 1, "text": "x" * 20}),))
    elif how == "replaced":
        (tmp_path / "new").write_bytes(b"".join(lines[:2]))
        (tmp_path / "new").rename(path)
        assert [number for number, _ in followed.news().lines] == [1, 2]
    elif how == "same inode":
        path.write_bytes(b"".join(other))
        news = followed.news()
        assert news.anew and len(news.lines) == 5
    else:
        path.unlink()
        assert followed.news() == follow.News(True, ()) and followed.news() == follow.News(False, ())


def test_a_long_file_is_taken_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follow, "MOST", 200)
    path = tmp_path / "records.jsonl"
    path.write_bytes(b"".join(sealed_line({"step": step}) for step in range(1, 51)))
    followed, found = FollowedLines(path), []
    while True:
        news = followed.news()
        found += [value["step"] for _, value in news.lines if value]
        if not news.more:
            break
    assert found == list(range(1, 51))


# The data of the page


def test_it_is_the_report(run: Path) -> None:
    """Parts and data are those of the static report, so that both pages show the same."""
    shown = Watched(run).look()
    page = build_report(run)
    for part in shown.parts.values():
        assert part in page
    assert json.loads(shown.answer("x", ""))["data"] == embedded(page)


def test_a_record_a_check_a_rollback_and_the_end_are_seen(run: Path) -> None:
    watched = Watched(run)
    before = watched.look()
    assert (before.step, before.planned, before.state) == (30, 400, "stopped")
    assert watched.look().number == before.number
    append(run, 31, loss=1.25)
    later = watched.look()
    assert later.number > before.number and later.step == 31 and later.checks == before.checks
    assert later.data["charts"][0]["series"][0]["y"][-1] == 1.25
    checks = read_lines(run / "parity.jsonl")
    with (run / "parity.jsonl").open("ab") as file:
        file.write(sealed_line({**checks[0], "step": 31, "verdict": "disagreed"}))
    assert watched.look().data["checks"][-1][:2] == (31, "disagreed")
    lines = (run / "records.jsonl").read_bytes().splitlines(keepends=True)
    (run / "new").write_bytes(b"".join(lines[:10]))
    (run / "new").rename(run / "records.jsonl")
    assert watched.look().step == 10
    with FolderLock(run):
        assert watched.look().state == "running"
    write_info(run / "run.json", read_info(run / "run.json") | {"finished": True})
    assert watched.look().state == "ended"


def test_it_waits_for_the_first_record_and_for_a_folder_that_comes_back(run: Path, tmp_path: Path) -> None:
    records = run / "records.jsonl"
    records.rename(tmp_path / "later")
    watched = Watched(run)
    assert watched.look().problem == WAITING and not watched.look().parts
    (tmp_path / "later").rename(records)
    assert watched.look().problem == "" and watched.look().step == 30
    run.rename(tmp_path / "away")
    assert watched.look().problem == GONE and watched.look().step == 30
    write_run(run, steps=5, checked=False)
    assert watched.look().problem == "" and watched.look().step == 5


def test_what_is_broken_is_told_and_the_rest_is_shown(run: Path) -> None:
    watched = Watched(run)
    watched.look()
    with (run / "records.jsonl").open("ab") as file:
        file.write(b'{"step": 31}\n' + sealed_line({"iteration": 7}))
    append(run, 33)
    shown = watched.look()
    assert shown.step == 33
    assert "records.jsonl, line 31: damaged" in shown.parts["notes"]
    assert "records.jsonl: no run writes line 32; left out" in shown.parts["notes"]
    (run / "run.json").write_text("{")
    assert "run.json is damaged" in watched.look().parts["notes"]
    write_info(run / "run.json", {"config": {}, "resumes": [3], "branches": 4})
    assert watched.look().problem.startswith("cannot be shown: ")


def test_looking_takes_a_tenth_of_the_time_at_most(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    monkeypatch.setattr(snapshot, "LEAST", 1.0)
    monkeypatch.setattr(snapshot, "SHARE", 0.1)
    watched = Watched(run)
    look = watched._look
    monkeypatch.setattr(watched, "_look", lambda: (look(), now.__setitem__(0, now[0] + 3.0)))
    watched.look()
    append(run, 31)
    now[0] += 29.0
    assert watched.look().step == 30
    now[0] += 2.0
    assert watched.look().step == 31


# The server


def test_a_page_that_knows_the_newest_gets_nothing(server: LiveServer, run: Path) -> None:
    first = data_of(server)
    known = f"?version={first['version']}&checks={first['checks']}"
    assert first["data"]["heat"] and ask(server, f"/data{known}")[0] == 204
    append(run, 31)
    second = data_of(server, known)
    assert second["step"] == 31 and "heat" not in second["data"]
    # Another server on this port counts anew.
    assert data_of(server, "?version=0-1&checks=0-1")["data"]["heat"]


def test_nothing_of_a_run_is_in_the_page_itself(server: LiveServer, run: Path) -> None:
    status, headers, page = ask(server, "/")
    assert status == 200 and b"stdlib-6l" not in page and b"run.json" not in page
    script = page.decode().rsplit("<script>", 1)[1].partition("</script>")[0]
    policy = headers["Content-Security-Policy"]
    assert f"script-src 'sha256-{digest_of(script)}'" in policy
    assert "default-src 'none'" in policy and "connect-src 'self'" in policy and "frame-ancestors 'none'" in policy
    assert "unsafe-inline" not in policy.split("script-src")[1] and "unsafe-eval" not in policy
    assert f'content="{policy.partition("; frame-ancestors")[0]}"' in page.decode()
    tags = Tags()
    tags.feed(page.decode())
    assert tags.scripts == 2 and not {"img", "link", "iframe"} & set(tags.tags)
    assert all(asset(name) in script for name in SCRIPTS) and script.strip() == code().strip()


def test_every_answer_has_the_headers(server: LiveServer) -> None:
    for path, method in (("/", "GET"), ("/data", "GET"), ("/x", "GET"), ("/", "POST"), ("/data", "OPTIONS")):
        _, headers, _ = ask(server, path, method)
        assert headers["Cache-Control"] == "no-store" and headers["X-Content-Type-Options"] == "nosniff"
        assert headers["X-Frame-Options"] == "DENY" and headers["Referrer-Policy"] == "no-referrer"
        assert headers["Cross-Origin-Resource-Policy"] == "same-origin"
        assert "Access-Control-Allow-Origin" not in headers and "Python" not in headers.get("Server", "")


def test_only_the_loopback_by_its_name(server: LiveServer, run: Path) -> None:
    assert server.server_address[0] == "127.0.0.1"
    port = server.server_port
    assert ask(server, "/data", Host=f"localhost:{port}")[0] == 200
    for host in ("evil.example", f"evil.example:{port}", "127.0.0.1", f"127.0.0.1:{port + 1}", f"[::1]:{port}", ""):
        status, _, body = ask(server, "/data", Host=host)
        assert status == 421 and b"stdlib" not in body
    assert ask(server, "/data", Sec_Fetch_Site="cross-site")[0] == 403
    with socket.create_connection(("127.0.0.1", port)) as raw:
        raw.sendall(b"GET /data HTTP/1.0\r\n\r\n")
        assert b"421" in raw.recv(100)


@pytest.mark.parametrize("method", ["HEAD", "POST", "PUT", "DELETE", "OPTIONS", "TRACE"])
def test_only_get(method: str, server: LiveServer) -> None:
    status, headers, _ = ask(server, "/", method)
    assert status == 405 and headers["Allow"] == "GET"


@pytest.mark.parametrize(
    "path",
    ["/run.json", "/data/", "/../run.json", "/%2e%2e/run.json", "/data/../run.json", "/etc/passwd", "/.lock"],
)
def test_no_path_is_a_file(path: str, server: LiveServer) -> None:
    status, _, body = ask(server, path)
    assert status == 404 and body == b"404 Not Found\n"


def test_a_request_that_is_none_gets_nothing_back_and_ends_nothing(server: LiveServer) -> None:
    for raw in (b"\x00\xff\r\n\r\n", b"GET <img> HTTP/9\r\n\r\n", b"GET / HTTP/1.0\r\n" + b"A: b\r\n" * 300 + b"\r\n"):
        with socket.create_connection(("127.0.0.1", server.server_port), timeout=20) as connection:
            connection.sendall(raw)
            assert b"<img>" not in connection.recv(4000)
    assert ask(server, "/")[0] == 200


def test_markup_in_a_run_is_text(server: LiveServer, run: Path) -> None:
    info = read_info(run / "run.json")
    stopped = {"how": "failed", "said": MARKUP, "time": ""}
    write_info(run / "run.json", info | {"name": MARKUP, "git_commit": MARKUP, "stopped": stopped})
    append(run, 31, sample=MARKUP, metrics={f"grad_norm/{MARKUP}": 1.0})
    checks = read_lines(run / "parity.jsonl")
    checks[0]["stages"][0] |= {"stage": MARKUP, "tap": MARKUP, "scope": MARKUP}
    checks[0]["not_covered"] = [MARKUP]
    (run / "parity.jsonl").write_bytes(b"".join(map(sealed_line, checks)))
    status, _, body = ask(server, "/data")
    assert status == 200 and b"<" not in body
    found = json.loads(body)
    assert found["why"] == MARKUP and MARKUP in found["title"]
    tags = Tags()
    for _, html in found["parts"]:
        tags.feed(html)
    assert "img" not in tags.tags and tags.scripts == 0
    assert not [name for name, _ in tags.attributes if name.startswith("on")]


def test_the_page_writes_no_text_as_markup() -> None:
    """`live.js` makes nodes of the server's escaped parts at one place; all other text is text."""
    for name in (*SCRIPTS, "refresh.js", "live.js", "runs.js"):
        text = asset(name)
        assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|\beval\b|new Function|srcdoc", text)
    assert asset("live.js").count("parseFromString") == 1


# The command


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nowhere", "--watch"], "nowhere is not a run directory; lockstep runs lists those below runs/"),
        ([".", "--watch"], ". has no run.json, config.toml or records.jsonl: there is no run to watch"),
        (["run", "run", "--watch"], "--watch serves one run and writes no file: lockstep report --watch RUN"),
        (["run", "--watch", "--out", "x.html"], "--watch serves one run and writes no file"),
        (["run", "--port", "8000"], "--port needs --watch"),
        (["run", "--watch", "--port", "65536"], "a port is a number from 1 to 65535"),
        (["run", "--watch", "--port", "-1"], "a port is a number from 1 to 65535"),
    ],
)
def test_what_is_refused(
    words: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "run", steps=2, checked=False)
    assert cli.run(["report", *words]) == 2
    err = capsys.readouterr().err
    assert said in err and err.count("\n") == 1


def test_a_port_that_cannot_be_had(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=f"port {port} is in use: name another with --port"):
            LiveServer(run, port)

    def refuse(self: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(LiveServer, "server_bind", refuse)
    with pytest.raises(UserError, match="port 80 is not for this user"):
        LiveServer(run, 80)


def test_ctrl_c_ends_it_with_0(run: Path) -> None:
    words = [sys.executable, "-m", "lockstep", "report", "--watch", str(run)]
    # Where this suite runs in the background, Ctrl-C is ignored, and would be by its children.
    process = subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip
    try:
        assert process.stdout is not None and process.stderr is not None
        said = process.stdout.readline()
        assert re.fullmatch(rf"{re.escape(str(run))}: http://127\.0\.0\.1:\d+/ \(Ctrl-C ends it\)\n", said)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0 and process.stderr.read() == ""
    finally:
        process.kill()
        process.wait()
