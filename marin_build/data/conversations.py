"""Conversations out of JSON lines: messages with a role and a text each, or the reason why a record has none."""

from __future__ import annotations

from dataclasses import dataclass
from reprlib import repr as _short

import orjson
import xxhash

from marin_build.data.documents import Rejection, checked_text, json_record, missing_key, without_mark
from marin_build.recipe.sources import Chat

ROLE, CONTENT = "role", "content"
_ANOTHER_FORMAT = "needs a list of objects with role and content"


@dataclass(frozen=True)
class Message:
    role: str
    content: str


@dataclass(frozen=True)
class Conversation:
    messages: tuple[Message, ...]
    byte: int
    """Where its record begins in the (decompressed) file."""

    @property
    def digest(self) -> bytes:
        """The same for equal messages, wherever they stand."""
        return xxhash.xxh3_128_digest(orjson.dumps([(message.role, message.content) for message in self.messages]))

    @property
    def text_bytes(self) -> int:
        return sum(len(message.content.encode()) for message in self.messages)


def read_conversation(unit: bytes, at: int, format: Chat) -> Conversation | Rejection | None:
    """The conversation of a line that begins at byte `at`, a rejection, or None for a blank line."""
    unit, at = without_mark(unit, at)
    if not unit.strip():
        return None
    record = json_record(unit, at)
    if isinstance(record, Rejection):
        return record
    if format.messages_key not in record:
        return missing_key(record, at, format.messages_key)
    if record.get("tools"):
        return Rejection(at, "unsupported_key", "the record has 'tools', which are not supported")
    return _messages(record[format.messages_key], at, format)


def _messages(value: object, at: int, format: Chat) -> Conversation | Rejection:
    name = repr(format.messages_key)
    if value is None:
        return Rejection(at, "null", f"{name} is null")
    if not isinstance(value, list):
        return Rejection(at, "not_messages", f"{name} is a {type(value).__name__}: {_ANOTHER_FORMAT}")
    if not value:
        return Rejection(at, "empty", f"{name} has no message")
    messages: list[Message] = []
    for number, entry in enumerate(value):
        message = _message(entry, at, f"{format.messages_key}[{number}]", format)
        if isinstance(message, Rejection):
            return message
        messages.append(message)
    return Conversation(tuple(messages), at)


def _message(entry: object, at: int, place: str, format: Chat) -> Message | Rejection:
    if not isinstance(entry, dict):
        return Rejection(at, "not_messages", f"{place} is a {type(entry).__name__}: {_ANOTHER_FORMAT}")
    for key in (ROLE, CONTENT):
        if key not in entry:
            missing = missing_key(entry, at, key)
            return Rejection(at, missing.reason, f"{place} has {missing.detail}")
    others = [key for key, value in entry.items() if value is not None and key not in format.known_keys]
    if others:
        return Rejection(
            at,
            "unsupported_key",
            f"{place} has {_short(others[0])}, which is not supported; named in format.ignored_keys it is left out",
        )
    if entry[ROLE] not in format.roles:
        return Rejection(
            at, "unknown_role", f"{place} is of {_short(entry[ROLE])}; format.roles: {', '.join(format.roles)}"
        )
    content = checked_text(entry[CONTENT], at, f"{place}.{CONTENT}")
    if isinstance(content, Rejection):
        if content.reason != "empty":  # a message may be empty, a text that is null is none
            return Rejection(at, "not_text" if content.reason == "null" else content.reason, content.detail)
        content = ""
    return Message(entry[ROLE], content)
