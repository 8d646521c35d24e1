"""Foreign text: what others wrote, made harmless before it reaches a terminal, a log, a page or a record.

A file name, an error of a library, a line of an old log or a field of a record may hold terminal escapes, characters
that turn the direction of writing, half characters, and credentials. `printable` is used at every place where such
text is shown or kept; the messages themselves are written without a thought of it.
"""

from __future__ import annotations

import os
import re

HIDDEN = "[hidden]"
MAX_LINE = 20_000
"""Characters of a line that are shown: a message quotes, it does not reprint a file."""

_KEY = r"(?:api|access|private|account)[_\-]?key"
_SECRET = rf"(?:token|secret|passw(?:or)?d|credential|signature|{_KEY})"
_URL_USER = re.compile(
    r"(\b(?:(?:https?|ftps?):/{1,2}(?=[^/@\s]{1,1000}@)|[A-Za-z][\w+.\-]{0,20}:/{1,2}(?=[^/@\s:]{0,200}:[^/@\s]{1,1000}@)))"
    r"[^/@\s]{1,1200}@"
)
"""Whoever stands before the @ of a web address, and elsewhere a name with a password: `abfs://container@account` is a
place, `git@host` a custom."""
_URL_QUERY = re.compile(rf"([?&](?:[\w.\-]{{0,40}}{_SECRET}(?:[_\-]?id)?|sig|key|auth)=)[^&#\s'\"]+", re.IGNORECASE)
_KNOWN_TOKEN = re.compile(
    r"\b(?:hf_|sk-|gh[pousr]_|github_pat_|glpat-|xox[abprs]-|AKIA|ASIA|AIza|ya29\.|eyJ[\w\-]+\.)[\w.\-]{8,}"
)
_PRIVATE_KEY = re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.DOTALL)
_HEADER = re.compile(r"(\bauthorization\W{1,4}(?:\w+\s+)?|\bbearer\s+)[\w.~+/=\-]{8,}", re.IGNORECASE)
_ASSIGNED = re.compile(
    rf"((?<![\w.\-])(?:[\w.\-]{{0,40}}(?:secret|passw(?:or)?d|{_KEY})"
    r"[\w.\-]{0,40}|(?!(?:bos|eos|pad|unk|special)_)(?:[\w.\-]{0,40}[_\-])?token)[\"']?\s{0,3}[=:]\s{0,3}[\"']?)[^\s,;&}\"']{4,}",
    re.IGNORECASE,
)
_SECRET_VARIABLE = re.compile(rf"(?:token|secret|passw(?:or)?d|{_KEY}|connection_string)\Z", re.IGNORECASE)
MIN_SECRET = 8
"""Characters of a variable's value from which on it can be a secret: shorter ones are words of the language."""


def printable(text: object) -> str:
    """Text for a terminal, a log or a page: nothing in it acts, no credentials are left, and no line is endless."""
    text = str(text)
    if len(text) > MAX_LINE:
        text = "\n".join(shortened(line, MAX_LINE) for line in text.split("\n"))
    return visible(hide(text))


def visible(text: str) -> str:
    """Text whose every character shows: line breaks and tabs stay, what a terminal would obey is spelled out."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)


def one_line(text: object) -> str:
    """`printable`, with line breaks spelled out: for text that stands inside a line of ours."""
    return printable(text).replace("\n", "\\n").replace("\t", "\\t")


def shortened(text: str, length: int) -> str:
    return text if len(text) <= length else f"{text[:length]}… ({len(text):,} characters)"


def hide(text: str) -> str:
    """Text without credentials: those in URLs and headers, after names that mean one, of a known form, and the values
    of this process's own secret variables, such as HF_TOKEN.
    """
    for value in _secret_values():
        text = text.replace(value, HIDDEN)
    text = _PRIVATE_KEY.sub(HIDDEN, text)
    text = _URL_USER.sub(rf"\1{HIDDEN}@", text)
    text = _URL_QUERY.sub(rf"\1{HIDDEN}", text)
    text = _HEADER.sub(rf"\1{HIDDEN}", text)
    text = _ASSIGNED.sub(rf"\1{HIDDEN}", text)
    return _KNOWN_TOKEN.sub(HIDDEN, text)


def holds_credentials(text: str) -> bool:
    """True where a text that is to be kept, such as a URL in a recipe, holds credentials beyond doubt."""
    in_query = "://" in text and _URL_QUERY.search(text)
    found = _KNOWN_TOKEN.search(text) or _PRIVATE_KEY.search(text) or _URL_USER.search(text)
    return bool(found or in_query)


def _secret_values() -> list[str]:
    """Values of the environment that are secrets by their variable's name."""
    found = (value for name, value in os.environ.items() if _SECRET_VARIABLE.search(name))
    return [value for value in found if len(value) >= MIN_SECRET]
