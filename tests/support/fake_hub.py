"""A Hugging Face hub on loopback: repositories of models and data sets at one commit, one that is gated, and no other.

Clients must be told its address before they are imported: run them in a process of their own, with `environment_for`.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import builders

COMMIT = "0123456789" * 4
LARGE = (".parquet", ".zst", ".gz")
"""Files that the hub keeps in its large storage, and names by their SHA-256."""


class FakeHub:
    """Holds repositories by id; those of data sets begin with `datasets/`."""

    def __init__(self, repositories: dict[str, dict[str, bytes]]) -> None:
        hub, self.asked = self, []
        self.spoiled: set[str] = set()
        """Files that come with other bytes than the hub says."""

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                hub.answer(self, b"")

            def do_POST(self) -> None:
                hub.answer(self, self.rfile.read(int(self.headers.get("Content-Length") or 0)))

            do_HEAD = do_GET

            def log_message(self, *_: object) -> None:
                pass

        self.files = repositories
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def answer(self, request: BaseHTTPRequestHandler, body: bytes) -> None:
        path = unquote(request.path.partition("?")[0])
        self.asked.append(path)
        front = path.removeprefix("/api/models").removeprefix("/api").lstrip("/")
        repository = next((name for name in self.files if front == name or front.startswith(f"{name}/")), None)
        if "/someone/gated" in path:
            send(request, 403, {"error": "gated"}, {"X-Error-Code": "GatedRepo", "X-Error-Message": "gated"})
        elif repository is None:
            send(request, 404, {"error": "no"}, {"X-Error-Code": "RepoNotFound", "X-Error-Message": "no"})
        else:
            self._repository(request, repository, front.removeprefix(repository).strip("/"), body)

    def _repository(self, request: BaseHTTPRequestHandler, repository: str, rest: str, body: bytes) -> None:
        files, (what, revision, name) = self.files[repository], (*rest.split("/", 2), "", "", "")[:3]
        if revision and revision not in (COMMIT, COMMIT[:7], "main"):
            send(request, 404, {"error": "no"}, {"X-Error-Code": "RevisionNotFound", "X-Error-Message": "no"})
        elif what in ("", "revision"):
            siblings = [{"rfilename": name} for name in files]
            where = repository.removeprefix("datasets/")
            send(request, 200, {"id": where, "sha": COMMIT, "siblings": siblings, "tags": [], "private": False})
        elif what == "tree":
            send(request, 200, tree(files, name, "recursive=true" in request.path.lower()))
        elif what == "paths-info":
            asked = re.findall(r"paths=([^&]*)", body.decode()) or json.loads(body or b"{}").get("paths", [])
            found = [entry(path, files[path]) for path in map(unquote, asked) if path in files]
            send(request, 200, found + [folder(path) for path in map(unquote, asked) if is_folder(path, files)])
        elif what == "resolve" and name in files:
            data = files[name]
            headers = {"ETag": f'"{digest(name, data)}"', "X-Repo-Commit": COMMIT}
            send(request, 200, data[::-1] if name in self.spoiled else data, headers)
        else:
            send(request, 404, {"error": "no"}, {"X-Error-Code": "EntryNotFound", "X-Error-Message": "no"})


def tree(files: dict[str, bytes], below: str, recursive: bool) -> list[dict[str, Any]]:
    front = f"{below}/" if below else ""
    inside = [path for path in files if path.startswith(front)]
    if recursive:
        return [entry(path, files[path]) for path in inside]
    heads = dict.fromkeys(front + path.removeprefix(front).partition("/")[0] for path in inside)
    return [entry(head, files[head]) if head in files else folder(head) for head in heads]


def folder(path: str) -> dict[str, Any]:
    return {"type": "directory", "path": path, "oid": git_digest(path.encode())}


def is_folder(path: str, files: dict[str, bytes]) -> bool:
    return any(name.startswith(f"{path}/") for name in files)


def entry(path: str, data: bytes) -> dict[str, Any]:
    found = {"type": "file", "path": path, "size": len(data), "oid": git_digest(data)}
    if path.endswith(LARGE):
        found["lfs"] = {"oid": digest(path, data), "size": len(data), "pointerSize": 130}
    return found


def git_digest(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def digest(path: str, data: bytes) -> str:
    return hashlib.sha256(data).hexdigest() if path.endswith(LARGE) else git_digest(data)


def send(request: BaseHTTPRequestHandler, code: int, body: object, headers: dict[str, str] | None = None) -> None:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    request.send_response(code)
    for key, value in {"Content-Length": str(len(data)), **(headers or {})}.items():
        request.send_header(key, value)
    request.end_headers()
    if request.command != "HEAD":
        request.wfile.write(data)


def environment_for(hub: FakeHub, home: Path) -> dict[str, str]:
    """The environment of a process whose hub is this one, with a cache of its own."""
    kept = {key: value for key, value in os.environ.items() if not key.lower().endswith("_proxy")}
    return {
        **kept,
        "PYTHONPATH": os.pathsep.join([os.path.dirname(builders.__file__), kept.get("PYTHONPATH", "")]),
        "HF_ENDPOINT": hub.address,
        "HF_HOME": str(home),
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "HF_HUB_DISABLE_XET": "1",
    }
