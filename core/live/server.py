"""Serve the page of a run that is being written to browsers on this machine, and to nothing else.

Two routes: `/`, the page, which is the same for every run, and `/data`, what it shows, as JSON. No path of a request
becomes a path of a file. Only GET is answered. The socket is bound to 127.0.0.1, and the Host header must say so: a
name that somebody else lets point to 127.0.0.1 (DNS rebinding) gets nothing.
"""

from __future__ import annotations

import errno
import secrets
import socketserver
import threading
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from lockstep.core.errors import UserError
from lockstep.core.live.snapshot import Watched
from lockstep.core.report.build import SCRIPTS, asset, digest_of, page_of

LOOPBACK = "127.0.0.1"
STYLES = ("page.css", "runs.css", "live.css")
# As the report's policy, but for /data of the same server.
POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{}'; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'"
)
# Seconds that a request may take to be sent.
_PATIENCE = 10
_BODY = (
    '<p id="live" class="live" role="status"><span id="live-state" class="state"></span> <span id="live-said">'
    "connecting</span></p>\n"
    '<noscript><p class="notes">The script in this page fetches the run and draws it.</p></noscript>\n'
    '<div id="parts"></div>'
)


def code() -> str:
    """Return the page's script: the report's in a function that can be called again, and what calls it."""
    report = "".join(map(asset, (*SCRIPTS, "refresh.js")))
    return f"'use strict';\nfunction start() {{\n{report}\nreturn {{ refresh, life }};\n}}\n{asset('live.js')}"


class LiveServer(ThreadingHTTPServer):
    """A server of one run on a port of the loopback. Raises UserError if the port cannot be had; 0 is a free one."""

    daemon_threads = True

    def __init__(self, run: Path, port: int) -> None:
        self.watched = Watched(run)
        self.looking = threading.Lock()
        # Numbers of an earlier server on this port count for nothing.
        self.boot = secrets.token_hex(4)
        script = code()
        self.page = page_of("Lockstep", _BODY, {}, script, STYLES, POLICY).encode()
        self.policy = f"{POLICY.format(digest_of(chr(10) + script))}; frame-ancestors 'none'"
        try:
            super().__init__((LOOPBACK, port), _Handler)
        except OSError as error:
            raise UserError(_refused(port, error)) from error

    def server_bind(self) -> None:
        """Bind the socket, without asking a name server who this is."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = LOOPBACK, int(self.server_address[1])

    @property
    def address(self) -> str:
        """The page's address."""
        return f"http://{LOOPBACK}:{self.server_port}/"

    def answer(self, version: str, checks: str) -> bytes | None:
        """Return what /data answers a page that shows `version`; None if that is the newest."""
        with self.looking:
            snapshot = self.watched.look()
        return None if version == f"{self.boot}-{snapshot.number}" else snapshot.answer(self.boot, checks)

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore it: a browser that disconnects in the middle of a response is not an error."""


class _Handler(BaseHTTPRequestHandler):
    server: LiveServer
    timeout = _PATIENCE

    def do_GET(self) -> None:
        if self.headers.get("Host") not in self._names():
            return self.send_error(HTTPStatus.MISDIRECTED_REQUEST)
        asked = urlsplit(self.path)
        if asked.path == "/":
            return self._send(HTTPStatus.OK, "text/html; charset=utf-8", self.server.page)
        if asked.path != "/data":
            return self.send_error(HTTPStatus.NOT_FOUND)
        if self.headers.get("Sec-Fetch-Site", "same-origin") not in ("same-origin", "none"):
            return self.send_error(HTTPStatus.FORBIDDEN)
        query = {key: values[-1] for key, values in parse_qs(asked.query[:200]).items()}
        found = self.server.answer(query.get("version", ""), query.get("checks", ""))
        if found is None:
            return self._send(HTTPStatus.NO_CONTENT, None, b"")
        return self._send(HTTPStatus.OK, "application/json", found)

    def _names(self) -> tuple[str, str]:
        return f"{LOOPBACK}:{self.server.server_port}", f"localhost:{self.server.server_port}"

    def _refuse(self) -> None:
        self.send_error(HTTPStatus.METHOD_NOT_ALLOWED)

    do_HEAD = do_POST = do_PUT = do_DELETE = do_PATCH = do_OPTIONS = do_TRACE = do_CONNECT = _refuse

    def _send(self, status: HTTPStatus, kind: str | None, body: bytes) -> None:
        self.send_response_only(status)
        if kind:
            self.send_header("Content-Type", kind)
        if status is not HTTPStatus.NO_CONTENT:
            self.send_header("Content-Length", str(len(body)))
        if status is HTTPStatus.METHOD_NOT_ALLOWED:
            self.send_header("Allow", "GET")
        self.send_header("Cache-Control", "no-store")
        self.send_header("Content-Security-Policy", self.server.policy)
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("X-Frame-Options", "DENY")
        self.send_header("Referrer-Policy", "no-referrer")
        self.send_header("Cross-Origin-Resource-Policy", "same-origin")
        self.send_header("Cross-Origin-Opener-Policy", "same-origin")
        self.end_headers()
        self.wfile.write(body)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Send the status alone: nothing of the request comes back."""
        status = HTTPStatus(code)
        self._send(status, "text/plain; charset=utf-8", f"{status.value} {status.phrase}\n".encode())

    def log_message(self, format: str, *args: object) -> None:
        """Write nothing: the text of a request is not for the terminal."""


def _refused(port: int, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"port {port} is in use: name another with --port, or none for one that is free"
    if error.errno in (errno.EACCES, errno.EPERM):
        return f"port {port} is not for this user: name one from 1024 on with --port, or none for one that is free"
    return f"cannot serve on {LOOPBACK}:{port}: {error.strerror or error}"


def serve(run: Path, port: int, say: Callable[[str], None]) -> None:
    """Serve the page of `run` until KeyboardInterrupt; `say` is given the address. Raises UserError as `LiveServer`."""
    server = LiveServer(run, port)
    thread = threading.Thread(target=server.serve_forever, name="lockstep-live", daemon=True)
    thread.start()
    try:
        say(server.address)
        threading.Event().wait()
    finally:
        server.shutdown()
        server.server_close()
