"""What is written beside the shards: a sidecar for each, and for the set the ledger and the two files of `datasets`.

A shard of an earlier attempt is kept only if the stamp in its sidecar says that it would come out the same, and size
and digest say that it is intact. The stamp covers what decides the bytes of a shard and nothing else: no host, time,
number of processes or library version. Sidecars have a checksum of their own, since nothing else guards them until the
artifact's record is written.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import xxhash
from pydantic import Field, StringConstraints, TypeAdapter
from typing_extensions import NotRequired, TypedDict  # noqa: UP035 (pydantic needs this one before Python 3.12)

from marin_build.artifact.bodies import Count, Hash, check
from marin_build.artifact.digest import hash_bytes, hash_file
from marin_build.artifact.strict_json import parse_object
from marin_build.data.durable import json_bytes, write_whole
from marin_build.data.encoder import offsets_of
from marin_build.data.shards import FORMAT, LEDGER, LOSS_MASK, id_type
from marin_build.data.sources import SourceFile
from marin_build.recipe.schema import ValidationSplit
from marin_build.recipe.sources import DocumentFormat

STATE, DATASET_INFO = "state.json", "dataset_info.json"
LISTED_REJECTIONS = 20
"""The first rejections of a shard that its sidecar lists, and five times as many of all in the ledger."""
_PLAIN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


@dataclass(frozen=True)
class Policy:
    """What decides the ids of a text and the edges of the shards."""

    tokenizer_digest: str
    vocabulary_size: int
    bos_id: int | None
    """Put before every document; none: nothing is."""
    eos_id: int | None
    """Put after every document; none: nothing is."""
    format: DocumentFormat
    shard_bytes: int
    split: ValidationSplit | None = None
    """Take the documents on one side of it; none: all."""
    template_digest: str | None = None
    """Of what renders conversations, where the documents are some."""

    def to_dict(self) -> dict[str, Any]:
        """Plain values, without those that say nothing."""
        told = {**self.__dict__, "format": self.format.model_dump(exclude_defaults=True)}
        told["split"] = self.split.model_dump() if self.split else None
        later = ("split", "template_digest")
        return {key: value for key, value in told.items() if value is not None or key not in later}


def stamp(policy: Policy, file: SourceFile, number: int) -> str:
    """Digest of all that decides the bytes of the shard of this number of a source file."""
    source = {"name": file.name, "bytes": file.bytes, "xxh3_128": file.digest, "number": number}
    return hash_bytes(json_bytes({"format": FORMAT, "policy": policy.to_dict(), "source": source}))


def shard_file(name: str, number: int) -> str:
    """File name of the shard of this number of the source file `name`; a function of these two alone."""
    return f"{shard_stem(name)}-{number:05d}.arrow"


def shard_stem(name: str) -> str:
    """The source file's name, or where that makes no good file name, what is readable of it and a hash."""
    if _PLAIN_NAME.fullmatch(name):
        return name
    readable = re.sub(r"[^A-Za-z0-9.-]", "_", name)[-80:].lstrip("._-")
    return f"{readable}-{hash_bytes(name.encode())[:8]}"


def rejections_of(sidecars: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The first bad documents of these shards, with the file of each."""
    listed = [{"file": s["source"]["file"], **rejection} for s in sidecars for rejection in s["rejections"]]
    return listed[: 5 * LISTED_REJECTIONS]


# ---- sidecars --------------------------------------------------------------------------------------------------------


def sidecar_of(shard: Path) -> Path:
    return shard.with_suffix(".json")


class _Source(TypedDict):
    file: str
    start: Count
    end: Count
    xxh3_128: Hash


class _Rejected(TypedDict):
    byte: NotRequired[Count]
    row: NotRequired[Count]
    reason: str
    detail: str


class _Content(TypedDict):
    documents: Count
    value: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{32}$")]


class _Sidecar(TypedDict):
    stamp: Hash
    file: str
    number: Count
    last: bool
    documents: Count
    tokens: Count
    max_id: Annotated[int, Field(ge=-1, lt=1 << 31)]
    trained_tokens: NotRequired[Count]
    text_bytes: Count
    bytes: Count
    xxh3_128: Hash
    content: _Content
    source: _Source
    skipped: dict[str, Count]
    rejections: list[_Rejected]


_sidecar_form = TypeAdapter(_Sidecar)


def checked_sidecar(value: Any) -> dict[str, Any]:
    """A sidecar as a ledger lists it.

    Raises:
        ValueError: it is none.
    """
    check(_sidecar_form, value)
    if value["file"] != shard_file(value["source"]["file"], value["number"]):
        raise ValueError(f"no shard is named {value['file']!a}")
    sidecar: dict[str, Any] = value
    return sidecar


def names_of(sidecar: dict[str, Any]) -> list[str]:
    """The file names of a shard and of its sidecar."""
    return [sidecar["file"], sidecar_of(Path(sidecar["file"])).name]


def write_sidecar(folder: Path, sidecar: dict[str, Any]) -> None:
    body = {**sidecar, "checksum": hash_bytes(json_bytes(sidecar))}
    write_whole(sidecar_of(folder / sidecar["file"]), json_bytes(body))


def read_sidecar(folder: Path, policy: Policy, file: SourceFile, number: int) -> dict[str, Any] | None:
    """The sidecar of an intact shard of an earlier attempt, as it would come out again; None where there is none."""
    shard = folder / shard_file(file.name, number)
    try:
        sidecar = parse_object(sidecar_of(shard).read_bytes())
        checksum = sidecar.pop("checksum", None)
        check(_sidecar_form, sidecar)
    except (OSError, ValueError):
        return None  # missing or damaged: the shard is made again
    if checksum != hash_bytes(json_bytes(sidecar)) or sidecar["stamp"] != stamp(policy, file, number):
        return None
    if (sidecar["file"], sidecar["number"], sidecar["source"]["file"]) != (shard.name, number, file.name):
        return None
    return sidecar if is_intact(folder, sidecar) else None


def is_intact(folder: Path, sidecar: dict[str, Any]) -> bool:
    path = folder / sidecar["file"]
    if not path.is_file() or path.stat().st_size != sidecar["bytes"]:
        return False
    return hash_file(path) == (sidecar["bytes"], sidecar["xxh3_128"])


# ---- the whole set ---------------------------------------------------------------------------------------------------


class ContentDigest:
    """Digest of ids, document edges and loss masks in their order: the same however they are cut into shards.

    A polynomial over the hashes of the documents, modulo a prime: those of two runs of documents give that of both, so
    a set needs no second look at its shards.
    """

    prime = (1 << 127) - 1
    base = 0x5DEECE66D1CE4E5B9B1F3A2D7C6E9A1D  # any number below the prime that is no small one

    def __init__(self) -> None:
        self._documents = self._value = 0

    def add(self, ids: np.ndarray, lengths: np.ndarray, mask: np.ndarray | None = None) -> None:
        """Take the next N documents: their ids [T], lengths [N], and loss mask [T] where there is one."""
        data, edges, value = memoryview(ids).cast("B"), offsets_of(lengths).tolist(), self._value
        for start, end in pairwise(edges):
            document = data[start * ids.itemsize : end * ids.itemsize]
            content = document if mask is None else b"".join((document, mask[start:end].tobytes()))
            value = (value * self.base + xxhash.xxh3_128_intdigest(content)) % self.prime
        self._documents, self._value = self._documents + len(lengths), value

    def join(self, content: Mapping[str, Any]) -> None:
        """Take the next documents, given what `to_dict` said of them."""
        documents = content["documents"]
        self._value = (self._value * pow(self.base, documents, self.prime) + int(content["value"], 16)) % self.prime
        self._documents += documents

    def to_dict(self) -> dict[str, Any]:
        return {"documents": self._documents, "value": f"{self._value:032x}"}

    def hexdigest(self) -> str:
        return hash_bytes(json_bytes(self.to_dict()))


def write_ledger(
    folder: Path, sidecars: Sequence[dict[str, Any]], content_digest: str, facts: dict[str, Any]
) -> dict[str, Any]:
    """Write the two files of `datasets` and then the ledger, whose presence means that the set is complete."""
    ledger = {
        "format": FORMAT,
        **facts,
        "shards": list(sidecars),
        "totals": {key: sum(s[key] for s in sidecars) for key in _summed(sidecars)},
        "max_id": max((s["max_id"] for s in sidecars), default=-1),
        "skipped": dict(sum((Counter(s["skipped"]) for s in sidecars), Counter())),
        "rejections": rejections_of(sidecars),
        "content_digest": content_digest,
        "digest": hash_bytes(json_bytes([(s["file"], s["bytes"], s["xxh3_128"]) for s in sidecars])),
    }
    size, masked = facts["tokenizer"]["vocabulary_size"], "trained_tokens" in ledger["totals"]
    _write_datasets_files(folder, ledger, size, has_loss_mask=masked)
    write_whole(folder / LEDGER, json_bytes(ledger, indent=1))
    return ledger


def _summed(sidecars: Sequence[dict[str, Any]]) -> list[str]:
    """What is added up over all shards: trained tokens only where the shards have a loss mask."""
    return [
        "documents",
        "tokens",
        *(["trained_tokens"] if any("trained_tokens" in s for s in sidecars) else []),
        "bytes",
        "text_bytes",
    ]


def _write_datasets_files(
    folder: Path, ledger: dict[str, Any], vocabulary_size: int, *, has_loss_mask: bool = False
) -> None:
    """What `datasets.load_from_disk` needs to open the folder as one Dataset."""
    state = {
        "_data_files": [{"filename": shard["file"]} for shard in ledger["shards"]],
        "_fingerprint": ledger["content_digest"][:16],
        "_format_columns": None,
        "_format_kwargs": {},
        "_format_type": None,
        "_output_all_columns": False,
        "_split": None,
    }
    types = {"input_ids": id_type(vocabulary_size).name} | ({LOSS_MASK: "uint8"} if has_loss_mask else {})
    features = {name: {"feature": {"dtype": dtype, "_type": "Value"}, "_type": "List"} for name, dtype in types.items()}
    info = {"features": features, "citation": "", "description": "", "homepage": "", "license": ""}
    write_whole(folder / STATE, json_bytes(state))
    write_whole(folder / DATASET_INFO, json_bytes(info))
