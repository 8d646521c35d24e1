"""One shard in the making: units in, an Arrow file and its sidecar out.

Special tokens are added as ids and only by the policy, or for conversations by the chat template; the text of a
document never becomes one.

Shapes: N documents and T ids of a batch, S special ids a document.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from marin_build.artifact.digest import hash_file
from marin_build.data.chat import ChatEncoder
from marin_build.data.chat_template import Rendered, load_chat_template, template_digest, template_files
from marin_build.data.conversations import Conversation, read_conversation
from marin_build.data.documents import OTHER_PART, Rejection, is_on_side, place_of, read_document
from marin_build.data.durable import explained, temporary_of, writing
from marin_build.data.encoder import Encoded, offsets_of
from marin_build.data.ledger import LISTED_REJECTIONS, ContentDigest, Policy, shard_file, stamp
from marin_build.data.shards import id_type, write_stream
from marin_build.data.sources import SourceFile
from marin_build.data.vocabulary import LoadedTokenizer
from marin_build.errors import DamageError, RequestError
from marin_build.recipe.sources import Chat

SHOWN_REJECTIONS = 5

Document = str | Rendered
"""A text, or a conversation as its chat template writes it."""


@dataclass(frozen=True)
class Assignment:
    """What a worker needs to know besides its jobs."""

    target: str
    folder: Path
    """Of the token set."""
    tokenizer: LoadedTokenizer
    policy: Policy
    max_bad_documents: int

    @cached_property
    def chat(self) -> ChatEncoder:
        """What renders and encodes conversations, loaded when the first is there."""
        if template_digest(template_files(self.tokenizer.folder)) != self.policy.template_digest:
            raise DamageError(f"the chat template in {self.tokenizer.folder} changed while it was used")
        return ChatEncoder(self.tokenizer, load_chat_template(self.tokenizer.folder, str(self.tokenizer.folder)))

    def read(self, unit: bytes, at: int) -> Document | Rejection | None:
        """What a unit that begins at byte `at` holds, ready to be encoded."""
        if not isinstance(self.policy.format, Chat):
            return read_document(unit, at, self.policy.format)
        conversation = read_conversation(unit, at, self.policy.format)
        return self.chat.template.render(conversation) if isinstance(conversation, Conversation) else conversation

    def encode(self, documents: Sequence[Document]) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        """ids [T], lengths [N], and for conversations which ids are trained on [T]; special ids are not added yet."""
        if isinstance(self.policy.format, Chat):
            return self.chat.encode([document for document in documents if isinstance(document, Rendered)])
        ids, offsets = self.tokenizer.encode([document for document in documents if isinstance(document, str)])
        return ids, np.diff(offsets), None


class Part:
    """A shard that is made from the units of a source file from byte `start` on."""

    kept = False

    def __init__(self, assignment: Assignment, file: SourceFile, number: int, start: int, bad_before: int = 0) -> None:
        self._assignment, self._file, self._number = assignment, file, number
        self.start = self.end = start
        self.waiting_bytes = 0
        """Bytes of units that are read and not encoded."""
        self.bad_documents = bad_before
        """Of this part and the earlier ones of the file."""
        self._source = xxhash.xxh3_128()
        self._documents: list[Document] = []
        self._ids: list[np.ndarray] = []
        self._lengths: list[np.ndarray] = []
        self._masks: list[np.ndarray] = []
        self._text_bytes, self._max_id = 0, -1
        self._skipped: Counter[str] = Counter()
        self._rejections: list[Rejection] = []

    def add(self, unit: bytes) -> None:
        """Take the next unit of the file.

        Raises:
            RequestError: it holds one unusable document too many.
        """
        document = self._assignment.read(unit, self.end)
        split = self._assignment.policy.split
        if split and isinstance(document, Document) and not is_on_side(identity(document), split):
            self._skipped[OTHER_PART] += 1
        elif isinstance(document, Rejection):
            self._reject(document)
        elif document is not None:
            self._documents.append(document)
        self._source.update(unit)
        self.end += len(unit)
        self.waiting_bytes += len(unit)

    def _reject(self, rejection: Rejection) -> None:
        self._skipped[rejection.reason] += 1
        if not rejection.is_bad:
            return
        self.bad_documents += 1
        if len(self._rejections) < LISTED_REJECTIONS:
            self._rejections.append(rejection)
        if self.bad_documents > self._assignment.max_bad_documents:
            shown = [{"file": self._file.name, **rejection.to_dict()} for rejection in self._rejections]
            raise bad_documents(self._assignment, self.bad_documents, shown)

    def encode(self) -> int:
        """Encode the documents that wait; returns the number of ids."""
        self.waiting_bytes = 0
        if not self._documents:
            return 0
        documents, self._documents = self._documents, []
        ids, lengths, mask = self._assignment.encode(documents)
        self._check_ids(ids)
        self._skipped["empty"] += int((lengths == 0).sum())  # a normalizer may leave nothing of a text
        ids, lengths = with_specials(ids, lengths[lengths > 0], self._assignment.policy)
        self._ids.append(ids)
        self._lengths.append(lengths)
        self._masks += [] if mask is None else [mask]
        self._text_bytes += sum(map(text_bytes, documents))
        return len(ids)

    def _check_ids(self, ids: np.ndarray) -> None:
        largest, size = int(ids.max(initial=0)), self._assignment.policy.vocabulary_size
        if largest >= size:
            raise RequestError(
                f"the tokenizer gave id {largest:,}, but its vocabulary has {size:,} ids, 0 to {size - 1:,}"
            )

    def finish(self, last: bool) -> dict[str, Any]:
        """Write the shard under its temporary name, durably, and return its sidecar."""
        self.encode()
        policy = self._assignment.policy
        ids = np.concatenate([np.empty(0, id_type(policy.vocabulary_size)), *self._ids])
        lengths = np.concatenate([np.empty(0, np.int64), *self._lengths])
        mask = np.concatenate([np.empty(0, np.uint8), *self._masks]) if isinstance(policy.format, Chat) else None
        path = self._assignment.folder / shard_file(self._file.name, self._number)
        with (
            explained(path, ids.nbytes + 4 * len(lengths) + (0 if mask is None else mask.nbytes + 4 * len(lengths))),
            writing(temporary_of(path)) as file,
        ):
            write_stream(file, ids, lengths, mask)
        size, digest = hash_file(temporary_of(path))
        content = ContentDigest()
        content.add(ids, lengths, mask)
        return {
            "stamp": stamp(policy, self._file, self._number),
            "file": path.name,
            "number": self._number,
            "last": last,
            "documents": len(lengths),
            "tokens": len(ids),
            **({} if mask is None else {"trained_tokens": int(mask.sum())}),
            "max_id": int(ids.max()) if len(ids) else -1,
            "text_bytes": self._text_bytes,
            "bytes": size,
            "xxh3_128": digest,
            "content": content.to_dict(),
            "source": self.source(),
            "skipped": {reason: count for reason, count in sorted(self._skipped.items()) if count},
            "rejections": [rejection.to_dict() for rejection in self._rejections],
        }

    def source(self) -> dict[str, Any]:
        """Which bytes of which source file this part was made from."""
        return source_of(self._file, self.start, self.end, self._source.hexdigest())


class KeptPart:
    """A shard of an earlier attempt, while the file is read along to see that the shard came from these bytes."""

    kept = True

    def __init__(self, sidecar: dict[str, Any], file: SourceFile, start: int, bad_before: int) -> None:
        self._sidecar, self._file, self._source = sidecar, file, xxhash.xxh3_128()
        self.start = self.end = start
        self.waiting_bytes = 0
        self.bad_documents = bad_before + bad_count(sidecar)

    def add(self, unit: bytes) -> None:
        self._source.update(unit)
        self.end += len(unit)
        self.waiting_bytes += len(unit)

    def encode(self) -> int:
        self.waiting_bytes = 0
        return 0

    def finish(self, last: bool) -> dict[str, Any] | None:
        """Its sidecar, or None where the shard does not belong to these bytes."""
        source = source_of(self._file, self.start, self.end, self._source.hexdigest())
        agrees = self._sidecar["source"] == source and self._sidecar["last"] == last
        return self._sidecar if agrees else None


def identity(document: Document) -> bytes:
    """What makes a document the same as another: its text, or the messages of a conversation, whatever the template."""
    return document.encode() if isinstance(document, str) else document.messages_digest


def text_bytes(document: Document) -> int:
    if isinstance(document, str):
        return len(document) if document.isascii() else len(document.encode())
    return document.text_bytes


def source_of(file: SourceFile, start: int, end: int, digest: str) -> dict[str, Any]:
    return {"file": file.name, "start": start, "end": end, "xxh3_128": digest}


def with_specials(ids: np.ndarray, lengths: np.ndarray, policy: Policy) -> Encoded:
    """Put BOS before and EOS after each document, as far as the policy has them.

    Takes ids [T] and lengths [N]; returns ids [T + N·S] of the type of the shards, and their lengths [N].
    """
    before, after = int(policy.bos_id is not None), int(policy.eos_id is not None)
    wrapped_lengths = lengths + before + after
    ends = offsets_of(wrapped_lengths)
    wrapped = np.empty(ends[-1], id_type(policy.vocabulary_size))
    is_text = np.ones(len(wrapped), bool)
    if before:
        wrapped[ends[:-1]], is_text[ends[:-1]] = policy.bos_id, False
    if after:
        wrapped[ends[1:] - 1], is_text[ends[1:] - 1] = policy.eos_id, False
    wrapped[is_text] = ids
    return wrapped, wrapped_lengths


# ---- unusable documents ----------------------------------------------------------------------------------------------


def bad_count(sidecar: dict[str, Any]) -> int:
    return sum(count for reason, count in sidecar["skipped"].items() if Rejection(0, reason, "").is_bad)


def bad_documents(assignment: Assignment, count: int, rejections: Sequence[dict[str, Any]]) -> RequestError:
    """The error for more unusable documents than the recipe allows; `rejections` are the first of them."""
    first, *others = [f"{r['file']}, {place_of(r)}: {r['reason']}: {r['detail']}" for r in rejections]
    limit = assignment.max_bad_documents
    lines = [
        f"{assignment.target}: {count:,} unusable documents, max_bad_documents allows {limit:,}; the first: {first}",
        *(f"  {other}" for other in others[: SHOWN_REJECTIONS - 1]),
        "  repair the source, or let a version of the recipe with a higher max_bad_documents skip and list them",
    ]
    return RequestError("\n".join(lines))
