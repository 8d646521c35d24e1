"""Makes some shards of a finished token set again, each from its part of the source, and compares their bytes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from marin_build.artifact.context import BuildContext
from marin_build.artifact.proof import Finding, Made, Sample
from marin_build.data.durable import commit, remove
from marin_build.data.foreign_cache import recorded_ledger
from marin_build.data.ledger import shard_file, sidecar_of, write_sidecar
from marin_build.data.shards import LEDGER, read_ledger
from marin_build.data.sources import SourceFile, source_files
from marin_build.data.tokenize import make_assignment, open_tokenizer
from marin_build.data.workshop import Workshop
from marin_build.errors import RequestError, Stopped
from marin_build.recipe.schema import TokenizedRecipe


@dataclass(frozen=True)
class _Place:
    """Where a shard comes from."""

    source: str
    number: int
    start: int


def remake(context: BuildContext, made: Made, sample: Sample) -> Finding:
    """Make shards and their sidecars again, which say what is in them and of which bytes they are made."""
    recipe = context.recipe
    assert isinstance(recipe, TokenizedRecipe)
    if recorded_ledger(made.record.to_dict()) is not None:
        raise RequestError(
            f"{context.target} cannot be made again and compared: it was adopted as others had made it, and nothing\n"
            f"  says how; whether its bytes are those adopted: marin-build verify --full {context.target}"
        )
    made.check([LEDGER])
    places = _places(read_ledger(made.folder)["shards"], recipe.shard_bytes)
    chosen = sample.choose(places)
    made.check(name for shard in chosen for name in _names(shard))
    workshop = Workshop(make_assignment(context, recipe, open_tokenizer(context.dependencies[recipe.tokenizer])))
    files = {file.name: file for file in source_files(context, recipe.source)}
    for shard in chosen:
        if context.stop_requested():
            raise Stopped(f"{context.target}: stopped")
        difference = _difference(context, made, workshop, shard, places[shard], files.get(places[shard].source))
        if difference:
            return Finding("shards", tuple(chosen), difference)
    return Finding("shards", tuple(chosen))


def _difference(
    context: BuildContext, made: Made, workshop: Workshop, shard: str, place: _Place, file: SourceFile | None
) -> str | None:
    if file is None or shard_file(place.source, place.number) != shard:
        return f"{shard} is said to come from {place.source}, of which the source makes no such shard"
    sidecar = workshop.remake(file, place.number, place.start)
    commit(context.folder / shard)
    write_sidecar(context.folder, sidecar)
    difference = made.difference(context.folder, _names(shard))
    for name in _names(shard):
        remove(context.folder / name)
    return difference


def _names(shard: str) -> list[str]:
    return [shard, sidecar_of(Path(shard)).name]


def _places(listed: list[dict[str, Any]], shard_bytes: int) -> dict[str, _Place]:
    """Where each shard of a ledger comes from."""
    sources = {entry["file"]: entry["source"] for entry in listed}
    return {
        shard: _Place(source["file"], source["start"] // shard_bytes, source["start"])
        for shard, source in sources.items()
    }
