"""Serves a folder over HTTP on the loopback, with chosen headers about its files."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import fsspec
from fsspec.spec import AbstractFileSystem

ETAG, MODIFIED, WEAK = "ETag", "Last-Modified", "weak ETag"


@contextlib.contextmanager
def in_a_thread(server: ThreadingHTTPServer) -> Iterator[str]:
    """Runs a server in a thread of this process; yields its address."""
    with server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


@dataclass
class Server:
    """Headers that the server sends about the files in `folder`: ETAG, MODIFIED and WEAK.

    Attributes:
        conditions: whether If-Match is obeyed.
        before: called with the method, the name of the file and the bytes asked for, before each
            answer.
        asked: methods, names and bytes asked for.
    """

    folder: Path
    tells: tuple[str, ...]
    conditions: bool = True
    before: Callable[[str, str, str], None] = lambda *_: None
    asked: list[tuple[str, str, str]] = field(default_factory=list)
    address: str = ""

    @contextlib.contextmanager
    def serving(self) -> Iterator[Server]:
        """Runs the server, in threads of this process."""
        with in_a_thread(self.listening()):
            yield self

    def listening(self) -> ThreadingHTTPServer:
        """Returns the server, before it serves its first request."""
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_HEAD(self) -> None:
                outer.answer(self, "HEAD")

            def do_GET(self) -> None:
                outer.answer(self, "GET")

            def log_message(self, *_: Any) -> None:
                pass

        class Quiet(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, *_: Any) -> None:
                """Ignores connections that a test breaks off."""

        server = Quiet(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{server.server_port}"
        return server

    def answer(self, request: BaseHTTPRequestHandler, method: str) -> None:
        name, piece = request.path.lstrip("/"), request.headers.get("Range", "")
        self.asked.append((method, name, piece))
        self.before(method, name, piece)
        try:
            content = (self.folder / name).read_bytes()
            modified = (self.folder / name).stat().st_mtime
        except OSError:
            request.send_error(404)
            return
        etag = f'"{hashlib.blake2b(content, digest_size=8).hexdigest()}"'
        wanted = request.headers.get("If-Match")
        code, headers = 200, {}
        if ETAG in self.tells:
            headers["ETag"] = etag
        if WEAK in self.tells:
            headers["ETag"] = 'W/"the same"'
        if MODIFIED in self.tells:
            headers["Last-Modified"] = formatdate(modified, usegmt=True)
        if wanted is not None and self.conditions and wanted != etag:
            code, content = 412, b""
        elif piece:
            first, _, last = piece.removeprefix("bytes=").partition("-")
            begin, end = int(first), min(int(last), len(content) - 1) + 1
            headers["Content-Range"] = f"bytes {begin}-{end - 1}/{len(content)}"
            code, content = 206, content[begin:end]
        request.send_response(code)
        for key, value in (headers | {"Content-Length": str(len(content))}).items():
            request.send_header(key, value)
        request.end_headers()
        if method == "GET":
            request.wfile.write(content)


class PlainHTTP(AbstractFileSystem):
    """Implements the parts of fsspec's HTTP file system, if aiohttp is not installed."""

    protocol = ("http", "https")
    cachable = False

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return path

    @property
    def kwargs(self) -> dict[str, Any]:
        return {}

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        with self._open_url(path, {}, "HEAD") as answer:
            told = {key: answer.headers[key] for key in (ETAG, MODIFIED) if answer.headers[key]}
            size = int(answer.headers["Content-Length"])
        return {"name": path, "size": size, "type": "file", **told}

    def cat_file(
        self,
        path: str,
        start: int | None = None,
        end: int | None = None,
        headers: dict[str, str] | None = None,
    ) -> bytes:
        asked = {"Range": f"bytes={start}-{end - 1}"} if start is not None and end else {}
        with self._open_url(path, asked | (headers or {}), "GET") as answer:
            return answer.read()

    def _open_url(self, path: str, headers: dict[str, str], method: str) -> Any:
        try:
            asked = urllib.request.Request(path, headers=headers, method=method)
            return urllib.request.build_opener(urllib.request.ProxyHandler({})).open(asked)
        except urllib.error.HTTPError as error:
            error.close()
            if error.code == 404:
                raise FileNotFoundError(path) from None
            raise


def use_some_http() -> None:
    """Makes fsspec read http:// addresses even without aiohttp."""
    if importlib.util.find_spec("aiohttp") is None:
        fsspec.register_implementation("http", PlainHTTP, clobber=True)
