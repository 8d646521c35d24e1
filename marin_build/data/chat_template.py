"""The chat template of a tokenizer: a conversation in, its text out, with what the template wrote itself told apart.

A special token that the template writes becomes that token; text of a message that spells one stays text. So that this
does not hang on what anybody writes, a template never sees the characters of special tokens in a message: each has a
stand-in, a character of no meaning that occurs nowhere else. What of the result has the characters themselves was
written by the template. A second rendering, of the messages as they are, shows that the stand-ins changed nothing; a
conversation where they did (a template that looks for a word of such characters in a message) is not used.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import jinja2

from marin_build.artifact.digest import hash_bytes
from marin_build.artifact.strict_json import parse_object
from marin_build.data.conversations import CONTENT, ROLE, Conversation
from marin_build.data.documents import Rejection
from marin_build.data.durable import json_bytes
from marin_build.data.sandbox import Refused, Sandbox, rendered
from marin_build.data.vocabulary import (
    CHAT_TEMPLATE,
    CONFIG,
    part_types,
    read_small,
    read_specification,
    special_ids,
    spelling,
)
from marin_build.errors import DamageError, RequestError
from marin_build.foreign import shortened

VERSION = 1
"""Raised when the same template would give another text."""
MAX_TEMPLATE_CHARACTERS = 1 << 18
VARIABLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""Of tokenizer_config.json, which templates name."""
PRIVATE = range(0xF0000, 0xFFFFE)
"""Characters that mean nothing by Unicode's word, from which the stand-ins are."""
FAILURES = (jinja2.TemplateError, ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
"""What a template can come to that is its own fault."""
_UNFOLLOWED = (
    "the chat template reads or changes characters of special tokens in a message, so what it writes itself cannot be "
    "told from the message"
)
_GENERATION = re.compile(r"\{%-?\+?\s*generation\s*-?\+?%\}")


@dataclass(frozen=True)
class Rendered:
    """A conversation as a template writes it."""

    text: str
    specials: tuple[tuple[int, int], ...]
    """Where in the text the special tokens are that the template wrote, in their order: [start, end)."""
    trained: tuple[tuple[int, int], ...]
    """Where in the text the assistant's words are, in their order: [start, end)."""
    text_bytes: int
    """Of the messages."""
    messages_digest: bytes
    """Of roles and contents, so that equal conversations can be told."""


@dataclass(frozen=True)
class ChatTemplate:
    """A template with what it is rendered with."""

    source: str
    variables: Mapping[str, str]
    special_tokens: tuple[str, ...]
    """Their spellings."""

    def compile(self) -> None:
        """See whether it is a template.

        Raises:
            jinja2.TemplateError: it is none.
        """
        _ = self._compiled

    @cached_property
    def _compiled(self) -> jinja2.Template:
        return Sandbox().from_string(self.source)

    @cached_property
    def _spelled(self) -> re.Pattern[str]:
        longest_first = sorted(self.special_tokens, key=len, reverse=True)
        return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")

    @cached_property
    def _characters(self) -> str:
        """All characters that special tokens are spelled with, but for white space, which templates trim."""
        return "".join(sorted({c for token in self.special_tokens for c in token if not c.isspace()}))

    def render(self, conversation: Conversation) -> Rendered | Rejection:
        """The text of a conversation, or why there is none."""
        messages = [{ROLE: message.role, CONTENT: message.content} for message in conversation.messages]
        at = conversation.byte
        try:
            plain = self._render(messages, ("", ""))
            plain.encode()  # half a character, which only a template can write, is a ValueError
            before, after, *stand_ins = self._unused([plain, *(message.content for message in conversation.messages)])
            hide = str.maketrans(self._characters, "".join(stand_ins))
            hidden = [{**message, CONTENT: message[CONTENT].translate(hide)} for message in messages]
            text, trained = _without_marks(self._render(hidden, (before, after)), before, after)
        except Refused as error:
            return Rejection(at, "template_refused", f"the chat template says: {shortened(str(error), 200)}")
        except FAILURES as error:
            return Rejection(at, "template_failed", f"the chat template fails: {shortened(str(error), 200)}")
        if text.translate(str.maketrans("".join(stand_ins), self._characters)) != plain:
            return Rejection(at, "unfollowed_text", _UNFOLLOWED)
        if not any(start < end for start, end in trained):
            return Rejection(at, "nothing_trained", "no word of it is in a generation block of the chat template")
        specials = tuple(found.span() for found in self._spelled.finditer(text))
        return Rendered(plain, specials, trained, conversation.text_bytes, conversation.digest)

    def _render(self, messages: Sequence[Mapping[str, str]], marks: tuple[str, str]) -> str:
        given: dict[str, Any] = {"messages": messages, "tools": None, "documents": None, "add_generation_prompt": False}
        return rendered(self._compiled, {**self.variables, **given}, marks)

    def _unused(self, texts: Sequence[str]) -> list[str]:
        """Characters that occur neither in the texts nor in the template: two marks, and stand-ins for the hidden ones.

        Raises:
            ValueError: there are not enough.
        """
        used = {c for text in (*texts, self.source, *self.variables.values()) if not text.isascii() for c in text}
        found = [*islice((chr(number) for number in PRIVATE if chr(number) not in used), 2 + len(self._characters))]
        if len(found) < 2 + len(self._characters):
            raise ValueError("the conversation uses all characters that could stand for others")
        return found


def _without_marks(marked: str, before: str, after: str) -> tuple[str, tuple[tuple[int, int], ...]]:
    """The text without the marks, and the spans [start, end) between them.

    Raises:
        ValueError: a mark is missing: the template cut the text of a block.
    """
    pieces, spans, at, start = [], [], 0, None
    for piece in re.split(f"([{before}{after}])", marked):
        if piece not in (before, after):
            pieces.append(piece)
            at += len(piece)
        elif (piece == before) != (start is None):
            raise ValueError("generation blocks within each other, or cut")
        elif start is None:
            start = at
        else:
            spans.append((start, at))
            start = None
    if start is not None:
        raise ValueError("a generation block was cut")
    return "".join(pieces), tuple(spans)


# ---- from the folder of a tokenizer ----------------------------------------------------------------------------------


def load_chat_template(folder: Path, where: str) -> ChatTemplate:
    """The template of a tokenizer's folder; `where` names the tokenizer in errors.

    Raises:
        RequestError: it has none, or one or a tokenizer that chat data cannot be made with.
        DamageError: the folder is not what the builder of tokenizers leaves there.
    """
    path = folder / CHAT_TEMPLATE
    try:
        specification, config = read_specification(folder), parse_object(read_small(folder / CONFIG))
        file = read_small(path) if path.exists() else None
    except OSError as error:
        raise DamageError(f"{error.filename} cannot be read: {error.strerror}; build the tokenizer again") from None
    except ValueError as error:
        raise DamageError(f"the tokenizer in {folder} cannot be loaded: {error}; build it again") from None
    return make_chat_template(specification, config, file, where)


def make_chat_template(
    specification: dict[str, Any], config: Mapping[str, Any], file: bytes | None, where: str
) -> ChatTemplate:
    """The template of a tokenizer.json and tokenizer_config.json as read; a template in a file of its own goes first.

    Raises:
        RequestError: there is none, or one or a tokenizer that chat data cannot be made with.
    """
    try:
        source = file.decode() if file is not None else _default(config.get("chat_template"))
    except UnicodeDecodeError as error:
        raise RequestError(f"{where}: its {CHAT_TEMPLATE} is not UTF-8: {error.reason}") from None
    _check_source(source, where)
    check_followable(specification, where)
    named = {key: token for key in VARIABLES if (token := spelling(config.get(key))) is not None}
    template = ChatTemplate(source or "", named, tuple(token for token in special_ids(specification) if token))
    try:
        template.compile()
    except (jinja2.TemplateError, RecursionError) as error:
        raise RequestError(f"{where}: its chat template cannot be used: {shortened(str(error), 300)}") from None
    return template


def template_files(folder: Path) -> dict[str, str]:
    """xxh3_128 of the files of a tokenizer's folder that decide how a conversation is rendered.

    Raises:
        DamageError: one cannot be read.
    """
    try:
        names = [name for name in (CONFIG, CHAT_TEMPLATE) if (folder / name).exists()]
        return {name: hash_bytes(read_small(folder / name)) for name in names}
    except (OSError, ValueError) as error:
        raise DamageError(f"the chat template in {folder} cannot be read: {error}; build the tokenizer again") from None


def template_digest(files: Mapping[str, str]) -> str:
    """Digest of all that decides how a conversation is rendered, from xxh3_128 of the tokenizer's files by name."""
    return hash_bytes(json_bytes([VERSION, files.get(CONFIG), files.get(CHAT_TEMPLATE)]))


def _default(templates: object) -> str | None:
    """The template of a configuration: a text, or the one named `default` of a list."""
    if isinstance(templates, list):
        named = {entry.get("name"): entry.get("template") for entry in templates if isinstance(entry, dict)}
        templates = named.get("default")
    return templates if isinstance(templates, str) else None


def _check_source(source: str | None, where: str) -> None:
    if not source:
        raise RequestError(
            f"{where} has no chat template, which format.type chat needs\n"
            f"  it is read from {CHAT_TEMPLATE} or chat_template in {CONFIG}: adopt a tokenizer that has one"
        )
    if len(source) > MAX_TEMPLATE_CHARACTERS:
        raise RequestError(
            f"{where}: its chat template has {len(source):,} characters, at most {MAX_TEMPLATE_CHARACTERS:,}"
        )
    if not _GENERATION.search(source):
        raise RequestError(
            f"{where}: its chat template does not say what is trained on: it has no {{% generation %}} block\n"
            "  put {% generation %} and {% endgeneration %} around what the assistant writes, with the token that ends "
            f"its turn, in a copy of {CHAT_TEMPLATE}, and adopt the tokenizer with it"
        )


def check_followable(specification: dict[str, Any], where: str) -> None:
    """Refuse a tokenizer whose tokens do not say their text, or that gives a text beside a special token other ids."""
    problem = None
    parts = part_types(specification)
    flags = ("lstrip", "rstrip", "single_word")
    special = [token for token in specification["added_tokens"] if token["special"]]
    if "ByteLevel" not in parts:
        problem = f"it is not byte-level: {', '.join(sorted(parts)) or 'no parts'}"
    elif specification["normalizer"] is not None:
        problem = f"it normalizes text: {specification['normalizer'].get('type')}"
    elif _says(specification["pre_tokenizer"], "add_prefix_space"):
        problem = "it puts a space before a text: add_prefix_space"
    elif odd := next((t for t in special if any(t.get(flag) for flag in flags) or not t["content"].strip()), None):
        problem = f"its special token {odd['content']!r} takes the white space beside it, or is white space"
    if problem:
        raise RequestError(f"{where} cannot be used for format.type chat: {problem}")


def _says(part: Any, key: str) -> bool:
    """Whether a part of a tokenizer, or one inside it, has this switched on."""
    inner = part.values() if isinstance(part, dict) else part if isinstance(part, list) else ()
    return (isinstance(part, dict) and part.get(key) is True) or any(_says(value, key) for value in inner)
