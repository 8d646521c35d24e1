"""A builder that takes over what other artifacts have already, for tests on every kind of store."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from artifact_world import RAW, World, write_whole

from marin_build.artifact.context import BuildContext, BuildResult
from marin_build.artifact.digest import hash_bytes

DONOR = "raw/donor/2026.06.28"
TAKER = "raw/taker/2026.06.28"
THIRD = "raw/third/2026.06.28"
"""Nothing is made from these."""


def texts(count: int, salt: str = "") -> dict[str, bytes]:
    """Bytes of files that come out the same whoever makes them."""
    return {f"shard-{number}": f"{number} {salt}\n".encode() * 1000 for number in range(count)}


def with_takers(world: World) -> World:
    text = (world.folder / "config" / f"{RAW}.yaml").read_text()
    for target in (DONOR, TAKER, THIRD):
        world.write(target, text)
    return world


@dataclass
class Shards:
    """Takes over the files that another artifact has with the same bytes, and makes and keeps the others."""

    files: dict[str, bytes]
    takes: bool = True
    shared: bool = True
    made: list[str] = field(default_factory=list)
    taken: set[str] = field(default_factory=set)
    before_making: Callable[[BuildContext, str], Any] = lambda context, name: None

    def __call__(self, context: BuildContext) -> BuildResult:
        if self.takes:
            for record in context.others(context.target.kind):
                equal = {(e["path"], e["xxh3_128"]) for e in record.files}
                wanted = [n for n, data in self.files.items() if (n, hash_bytes(data)) in equal and n not in self.taken]
                self.taken |= context.take(record, wanted)
        for name in (name for name in self.files if name not in self.taken):
            self.before_making(context, name)
            path = context.folder / name
            if not path.exists() or path.read_bytes() != self.files[name]:
                context.check_lease()
                write_whole(path, self.files[name])
                context.keep([name], shared=self.shared)
                self.made.append(name)
        return BuildResult(metrics={"files": len(self.files)}, made=tuple(self.files))
