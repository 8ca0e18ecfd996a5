"""Answers `wandb sync` like W&B's server, as far as it asks, and keeps the history of runs."""

from __future__ import annotations

import contextlib
import gzip
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tests.http_files import in_a_thread


@dataclass
class WandbServer:
    """Stands for W&B's server, which W&B's programs find by WANDB_BASE_URL.

    It has the interface that W&B 0.31 uses, not W&B's rules: each line is kept at the offset that
    the client gave, whatever its `_step` is.

    Attributes:
        lines: the lines of history by run id and offset.
        sent: offset and number of lines of each piece of history, in order of arrival.
    """

    lines: dict[str, dict[int, dict[str, Any]]] = field(default_factory=dict)
    sent: list[tuple[int, int]] = field(default_factory=list)
    address: str = ""

    @contextlib.contextmanager
    def serving(self) -> Iterator[WandbServer]:
        """Runs the server, in threads of this process."""
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: object) -> None:
                pass

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                if self.headers.get("Content-Encoding") == "gzip":
                    body = gzip.decompress(body)
                answer: dict[str, Any] = {}
                if self.path == "/graphql":
                    answer = {"data": outer._asked(json.loads(body))}
                elif found := re.fullmatch(r"/files/.+/([^/]+)/file_stream", self.path):
                    outer._streamed(found[1], json.loads(body).get("files") or {})
                reply = json.dumps(answer).encode()
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(reply)))
                self.end_headers()
                self.wfile.write(reply)

            do_GET = do_PUT = do_POST

        with in_a_thread(ThreadingHTTPServer(("127.0.0.1", 0), Handler)) as self.address:
            yield self

    def _streamed(self, id: str, files: dict[str, Any]) -> None:
        if (piece := files.get("wandb-history.jsonl")) is not None:
            self.sent.append((piece["offset"], len(piece["content"])))
            for place, line in enumerate(piece["content"], piece["offset"]):
                self.lines[id][place] = json.loads(line)

    def _asked(self, request: dict[str, Any]) -> dict[str, Any]:
        """Answers a request of GraphQL; the answer is empty if it is of an unknown kind."""
        query, given = request["query"], request.get("variables") or {}
        if "upsertBucket" in query:
            id, is_new = given["name"], given["name"] not in self.lines
            project = {"id": "p", "name": "p", "entity": {"id": "e", "name": "e"}}
            bucket = {"id": id, "name": id, "displayName": id, "config": "{}", "project": project}
            bucket["historyLineCount"] = len(self.lines.setdefault(id, {}))
            return {"upsertBucket": {"bucket": bucket, "inserted": is_new}}
        if "createRunFiles" in query:
            files = [{"name": n, "uploadUrl": f"{self.address}/file"} for n in given["files"]]
            return {"createRunFiles": {"runID": "r", "uploadHeaders": [], "files": files}}
        return {}
