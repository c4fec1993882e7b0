"""A server of Weights & Biases as far as `wandb sync` talks to one: it keeps the history of each run by line."""

from __future__ import annotations

import contextlib
import gzip
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

HISTORY, SUMMARY = "wandb-history.jsonl", "wandb-summary.json"


class Server(ThreadingHTTPServer):
    def __init__(self):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.histories = {}
        """Of each run, by its id, the lines by their numbers."""
        self.summaries = {}

    def stream(self, run, files):
        for name, chunk in files.items():
            if name == HISTORY:
                lines = {chunk["offset"] + number: json.loads(each) for number, each in enumerate(chunk["content"])}
                self.histories[run] |= lines
            elif name == SUMMARY:
                self.summaries[run] = chunk["content"][-1]
        return {"exitcode": None}

    def answer(self, query, variables):
        project = {"id": "p", "name": variables.get("project"), "entity": {"id": "e", "name": "me"}}
        if "UpsertBucket" in query:
            name = variables["name"]
            is_new = name not in self.histories
            lines = len(self.histories.setdefault(name, {}))
            bucket = {"id": name, "name": name, "displayName": name, "project": project, "historyLineCount": lines}
            return {"upsertBucket": {"bucket": bucket, "inserted": is_new}}
        if "RunResumeStatus" in query:
            return {"model": {**project, "bucket": self._resumed(variables["name"])}}
        if "query Viewer" in query:
            return {"viewer": {"id": "u", "entity": "me", "username": "me", "flags": "{}", "teams": {"edges": []}}}
        if "CreateRunFiles" in query:
            files = [{"name": each, "uploadUrl": f"{self.url}/upload"} for each in variables["files"]]
            return {"createRunFiles": {"runID": "r", "uploadHeaders": [], "files": files}}
        return {}

    def _resumed(self, name):
        if name not in self.histories:
            return None
        lines = [self.histories[name][number] for number in sorted(self.histories[name])]
        return {
            "id": name,
            "name": name,
            "displayName": name,
            "config": "{}",
            "tags": [],
            "wandbConfig": '{"t": 1}',
            "historyLineCount": len(lines),
            "eventsLineCount": 0,
            "logLineCount": 0,
            "eventsTail": "[]",
            "historyTail": json.dumps([json.dumps(each) for each in lines[-1:]]),
            "summaryMetrics": self.summaries.get(name, "{}"),
        }


class _Handler(BaseHTTPRequestHandler):
    server: Server

    def log_message(self, format, *arguments): ...

    def do_GET(self):
        self._reply({})

    def do_PUT(self):
        self._body()
        self._reply({})

    def do_POST(self):
        asked = json.loads(self._body() or "{}")
        if found := re.search(r"/([^/]+)/file_stream$", self.path):
            self._reply(self.server.stream(found[1], asked.get("files") or {}))
        else:
            self._reply({"data": self.server.answer(asked.get("query", ""), asked.get("variables") or {})})

    def _body(self):
        data = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        return gzip.decompress(data) if self.headers.get("Content-Encoding") == "gzip" else data

    def _reply(self, answer):
        data = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@contextlib.contextmanager
def serving():
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
