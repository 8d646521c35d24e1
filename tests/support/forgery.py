"""Small files as somebody else may have written them: any content, with a correct checksum."""

from __future__ import annotations

import json
from typing import Any

from marin_build.artifact.digest import hash_bytes

RAW_BODY: dict[str, Any] = {
    "schema": 1,
    "name": "raw/a",
    "version": "2026.06.28",
    "kind": "raw",
    "fingerprint": "f" * 32,
    "digest": "d" * 32,
    "recipe": {},
    "dependencies": [],
    "files": [{"path": "x", "bytes": 3, "xxh3_128": "0" * 32}],
    "metrics": {"files": 1},
    "provenance": {},
}
ATTEMPT_BODY: dict[str, Any] = {
    "schema": 1,
    "id": "20260628T000000Z-00000000",
    "name": "raw/a",
    "version": "2026.06.28",
    "fingerprint": "f" * 32,
    "recipe": {},
    "dependencies": [],
    "folder": ".",
    "token": 1,
    "started": "2026-06-28T00:00:00Z",
    "host": "elsewhere",
}
OWNER_BODY: dict[str, Any] = {
    "host": "elsewhere",
    "boot_id": "b",
    "namespace": "n",
    "pid": 1,
    "process_start": 1,
    "user": "u",
    "run": None,
}
LEASE_BODY: dict[str, Any] = {
    "owner": OWNER_BODY,
    "token": 1,
    "nonce": "0" * 16,
    "lease_seconds": 90.0,
    "beat": 0,
    "wall_seconds": 0.0,
    "boot_seconds": 0.0,
}


def signed(body: dict[str, Any]) -> bytes:
    """The file of a body, with the checksum that the program itself would write, whatever the body holds."""
    text = json.dumps(body, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return json.dumps({**body, "checksum": hash_bytes(text.encode("utf-8", "surrogatepass"))}).encode()


def entry(path: Any = "x", size: Any = 3, digest: Any = "0" * 32) -> dict[str, Any]:
    return {"path": path, "bytes": size, "xxh3_128": digest}
