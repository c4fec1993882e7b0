"""A real S3 server on loopback, one for all tests of a process, and a proxy before it that fails as it is told."""

from __future__ import annotations

import contextlib
import http.client
import itertools
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Literal

import pytest

Failure = Literal["503", "500", "hang", "reset", "cut", "403"]
"""Answers of the proxy. hang: none, until the client has gone; reset: none, the connection ends; cut: half of one."""
CREDENTIALS = {"AWS_ACCESS_KEY_ID": "testing", "AWS_SECRET_ACCESS_KEY": "testing", "AWS_DEFAULT_REGION": "us-east-1"}
START_SECONDS = 60.0
_buckets = itertools.count(1)


@cache
def server_port():
    """The port of the server, which ends with this process."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    # In a process of its own: warnings that are errors here are none of its business. It ends when its input does.
    script = (
        "import os, sys, threading\n"
        "threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()\n"
        "from moto.server import main\n"
        f"main(['-H', '127.0.0.1', '-p', '{port}'])\n"
    )
    quiet = subprocess.DEVNULL
    env = {**os.environ, **CREDENTIALS}
    child = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=quiet, stderr=quiet, env=env)
    deadline = time.monotonic() + START_SECONDS
    while True:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            _children.append(child)
            return port
        assert child.poll() is None, "the server ended"
        assert time.monotonic() < deadline, "the server does not listen"
        time.sleep(0.05)


_children = []


@dataclass
class Request:
    """What came: `number` counts from 1."""

    number: int
    method: str
    path: str

    @property
    def lists(self):
        return self.method == "GET" and "list-type=2" in self.path

    @property
    def puts_part(self):
        return self.method == "PUT" and "partNumber=" in self.path


@dataclass
class Proxy:
    """Hands on what comes, unless `fail` names a failure for it. `seen`: all that came."""

    url: str
    fail: Callable[[Request], Failure | None] = lambda request: None
    seen: list[Request] = field(default_factory=list)
    ending: threading.Event = field(default_factory=threading.Event)

    def first(self, count, failure, which=lambda request: True):
        """The first so many requests of a kind fail."""
        left = itertools.count(1)
        self.fail = lambda request: failure if which(request) and next(left) <= count else None

    def always(self, failure, which=lambda request: True):
        self.fail = lambda request: failure if which(request) else None


@contextlib.contextmanager
def proxy_before(port):
    """A proxy before the server, as long as the block lasts."""
    numbers = itertools.count(1)
    proxy = Proxy("")

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def handle_one_request(self):
            with contextlib.suppress(ConnectionError):
                super().handle_one_request()

        def answer(self):
            body = self._body()
            request = Request(next(numbers), self.command, self.path)
            proxy.seen.append(request)
            failure = proxy.fail(request)
            if failure == "hang":
                proxy.ending.wait(30)
            if failure in ("hang", "reset"):
                self.close_connection = True
                return
            if failure is not None and failure != "cut":
                code = {"503": "SlowDown", "500": "InternalError", "403": "AccessDenied"}[failure]
                text = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>injected</Message></Error>".encode()
                self._reply(int(failure), {"Content-Type": "application/xml"}, text, len(text))
                return
            upstream = http.client.HTTPConnection("127.0.0.1", port, timeout=240)
            headers = {k: v for k, v in self.headers.items() if k.lower() not in ("transfer-encoding", "connection")}
            headers["Content-Length"] = str(len(body))
            upstream.request(self.command, self.path, body, headers)
            answer = upstream.getresponse()
            content = answer.read()
            size = int(answer.headers.get("Content-Length") or len(content))
            keep = {k: v for k, v in answer.headers.items() if k.lower() not in ("content-length", "connection")}
            keep.pop("Transfer-Encoding", None)
            upstream.close()
            self._reply(answer.status, keep, content[: len(content) // 2] if failure == "cut" else content, size)
            if failure == "cut":
                self.close_connection = True

        do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = answer

        def _body(self):
            if "chunked" not in self.headers.get("Transfer-Encoding", ""):
                return self.rfile.read(int(self.headers.get("Content-Length", 0)))
            pieces = []
            while size := int(self.rfile.readline().split(b";")[0], 16):
                pieces.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(pieces)

        def _reply(self, status, headers, content, size):
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(size))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

        def log_message(self, format, *args):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        server.block_on_close = False
        proxy.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield proxy
        finally:
            proxy.ending.set()
            server.shutdown()
            thread.join()


@pytest.fixture(name="proxy")
def proxy_fixture(monkeypatch):
    """A proxy before the S3 server, and an environment in which S3 is there."""
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    with proxy_before(server_port()) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        yield proxy


@pytest.fixture(name="bucket")
def bucket_fixture(proxy):
    """A bucket of its own."""
    name = f"bucket-{os.getpid()}-{next(_buckets)}"
    connection = http.client.HTTPConnection("127.0.0.1", server_port(), timeout=240)
    connection.request(
        "PUT", f"/{name}", headers={"Authorization": "AWS4-HMAC-SHA256 Credential=testing/x/us-east-1/s3"}
    )
    assert connection.getresponse().status == 200
    connection.close()
    return name
