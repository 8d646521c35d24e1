"""`marin-build peek`: a few rows of an artifact for people, and as JSON.

Text of others goes through `foreign`: nothing in it acts on a terminal, and credentials are hidden. What stands for
something else than text is set in marks, which text cannot fake: in text they are spelled out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from marin_build.data import peek_text
from marin_build.data.peek import Piece, Row, documents, training_rows
from marin_build.errors import RequestError
from marin_build.foreign import hide, printable, shortened, visible
from marin_build.looks import console
from marin_build.recipe.schema import CheckpointRecipe
from marin_build.recipe.target import Target

if TYPE_CHECKING:
    import argparse

    from marin_build.workplace import Workplace

SPECIAL, TRAINED, BETWEEN = ("⟦", "⟧"), ("⟪", "⟫"), "│"
_MARKS = str.maketrans({mark: mark.encode("unicode_escape").decode() for mark in (*SPECIAL, *TRAINED, BETWEEN)})
MAX_FIELD = 1500
"""Characters of a field of raw text that are shown."""


def peek(options: argparse.Namespace, place: Workplace, target: Target) -> dict[str, Any] | None:
    """Show rows of a target; with `options.json` return them instead.

    Raises:
        RequestError: what cannot be looked into, or an option that does not fit its kind.
    """
    _check_options(options, target)
    if target.kind == "raw":
        found, facts = peek_text.excerpts(
            place.store, target, file=options.file, first=options.first or 0, rows=options.rows
        )
        if options.json:
            return _body(target, facts, [_excerpt(one) for one in found])
        return _show_excerpts(target, facts, found, options.full)
    rows, facts = _rows(options, place, target)
    if options.json:
        return _body(target, facts, [_row(row, options) for row in rows])
    return _show_rows(target, facts, rows, options)


FOR = {"file": ("raw",), "shard": ("tokenized",), "step": ("checkpoints",)}
FOR |= dict.fromkeys(("ids", "tokens"), ("tokenized", "checkpoints"))
KINDS = ("raw", "tokenized", "checkpoints")


def _check_options(options: argparse.Namespace, target: Target) -> None:
    if target.kind not in KINDS:
        raise RequestError(f"{target} is of kind {target.kind}; peek looks into {', '.join(KINDS)}")
    for name, kinds in FOR.items():
        if getattr(options, name) not in (None, False) and target.kind not in kinds:
            raise RequestError(f"--{name} is for {' and '.join(kinds)}; {target} is of kind {target.kind}")


def _rows(options: argparse.Namespace, place: Workplace, target: Target) -> tuple[list[Row], Mapping[str, Any]]:
    if target.kind == "tokenized":
        return documents(
            place.store, target, first=options.first, shard=options.shard, rows=options.rows, full=options.full
        )
    recipe = place.book.load(target)
    assert isinstance(recipe, CheckpointRecipe)
    return training_rows(
        place.store,
        target,
        recipe,
        step=options.step or 0,
        first=options.first or 0,
        rows=options.rows,
        full=options.full,
    )


# ---- as JSON ---------------------------------------------------------------------------------------------------------


def _body(target: Target, facts: Mapping[str, Any], rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {"target": str(target), "facts": dict(facts), "rows": rows}


def _excerpt(excerpt: peek_text.Excerpt) -> dict[str, Any]:
    fields = {hide(name): hide(text) for name, text in excerpt.fields.items()}
    return {"file": excerpt.file, "row": excerpt.number, "fields": fields}


def _row(row: Row, options: argparse.Namespace) -> dict[str, Any]:
    masked = {} if row.trained is None else {"trained": row.trained}
    return {**row.facts, "tokens": row.tokens, **masked, "pieces": [_piece(piece, options) for piece in row.pieces]}


def _piece(piece: Piece, options: argparse.Namespace) -> dict[str, Any]:
    if piece.omitted:
        return {"omitted_tokens": piece.omitted}
    if piece.document is not None:
        return {"document": piece.document}
    body: dict[str, Any] = {"special" if piece.special else "text": hide(piece.text)}
    if piece.trained is not None:
        body["trained"] = piece.trained
    if options.ids:
        body["ids"] = list(piece.ids)
    if options.tokens and not piece.special and hide(piece.text) == piece.text:
        body["tokens"] = piece.tokens
    return body


# ---- for people ------------------------------------------------------------------------------------------------------


def _show_rows(target: Target, facts: Mapping[str, Any], rows: list[Row], options: argparse.Namespace) -> None:
    out = console()
    _title(out, target, facts)
    masked = any(piece.trained is not None for row in rows for piece in row.pieces)
    legend = f"{SPECIAL[0]}special id{SPECIAL[1]}" + (f"  {TRAINED[0]}trained on{TRAINED[1]}" if masked else "")
    out.print(Text(f"{legend}  {BETWEEN} between tokens" if options.tokens else legend, style="dim"))
    for row in rows:
        out.print()
        where = ", ".join(f"{_words(name)} {_number(value)}" for name, value in row.facts.items())
        trained = "" if row.trained is None else f", {row.trained:,} trained on"
        out.print(Text(f"{where}: {row.tokens:,} tokens{trained}", style="bold"))
        out.print(_text_of(row, options.tokens))
        if options.ids:
            out.print(Text(" ".join(_ids(row)), style="dim"))


def _text_of(row: Row, tokens: bool) -> Text:
    text, trained = Text(), False
    for piece in row.pieces:
        if bool(piece.trained) != trained:
            text.append(TRAINED[not piece.trained], style="green")
            trained = bool(piece.trained)
        style = "green" if trained else ""
        if piece.omitted:
            text.append(f"\n… {piece.omitted:,} tokens more; --full shows them …\n", style="dim")
        elif piece.document is not None:
            text.append(f"{chr(10) if text else ''}document {piece.document:,}: ", style="dim")
        elif piece.special:
            text.append(f"{SPECIAL[0]}{_clean(piece.text)}{SPECIAL[1]}", style="reverse")
        else:
            text.append(_run(piece, tokens), style=style)
    if trained:
        text.append(TRAINED[1], style="green")
    return text


def _run(piece: Piece, tokens: bool) -> str:
    """The text of a piece; where a part of it is hidden, without the edges of its tokens, which would show it."""
    if not tokens or hide(piece.text) != piece.text:
        return _clean(piece.text)
    return BETWEEN.join(map(_clean, piece.tokens))


def _clean(text: str) -> str:
    return visible(hide(text)).translate(_MARKS)


def _ids(row: Row) -> Iterator[str]:
    for piece in row.pieces:
        yield from map(str, piece.ids) if not piece.omitted else ("…",)


def _show_excerpts(target: Target, facts: Mapping[str, Any], found: list[peek_text.Excerpt], full: bool) -> None:
    out = console()
    _title(out, target, facts)
    for excerpt in found:
        out.print()
        out.print(Text(printable(f"{excerpt.file}, row {excerpt.number:,}"), style="bold"))
        for name, text in excerpt.fields.items():
            shown = visible(hide(text if full else shortened(text, MAX_FIELD)))
            line = Text(f"{visible(hide(shortened(name, 200)))}: " if name else "", style="dim")
            out.print(line.append(shown, style="not dim"))


def _title(out: Console, target: Target, facts: Mapping[str, Any]) -> None:
    said = ", ".join(f"{_words(name)} {_number(value)}" for name, value in facts.items())
    out.print(Text(f"{target}: {said}"))


def _words(name: str) -> str:
    return name.replace("_", " ")


def _number(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) else printable(value)
