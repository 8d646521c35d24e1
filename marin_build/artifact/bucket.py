"""A bucket: objects by key, below one prefix of an object store. The few operations that the protocol needs of one.

An object appears whole, by one put. Where a store offers preconditions (GCS by generation, S3 by ETag), `put` and
`delete` of a version are one step; elsewhere they compare and then write, which a writer in between can slip through.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

Version = str
"""What changes with every write of an object; only good for comparing."""

THREADS = 16
"""How many requests are under way at once."""

A = TypeVar("A")
B = TypeVar("B")

ABSENT: Version = ""
"""The version of an object that is not there."""


class Bucket(ABC):
    """Every operation may raise a MarinError, after some tries, when the store cannot be reached or refuses."""

    shown: str
    """URL of the prefix, for messages."""

    @abstractmethod
    def get(self, key: str) -> tuple[bytes | None, Version]:
        """The bytes of a small object with their version; None where there is none."""

    @abstractmethod
    def put(self, key: str, data: bytes, version: Version | None = None) -> bool:
        """Write a small object, and return True; with `version`, only over that one. False does not mean that nothing
        was written: an answer may have been lost on the way."""

    @abstractmethod
    def delete(self, key: str, version: Version | None = None) -> bool:
        """Remove an object, as `put` writes one. What is not there is removed already."""

    @abstractmethod
    def size(self, key: str) -> int | None:
        """Bytes of an object; None where there is none."""

    @abstractmethod
    def read(self, key: str, start: int, length: int) -> bytes:
        """A part of an object; less than `length` only at its end.

        Raises:
            FileNotFoundError: there is none.
        """

    @abstractmethod
    def upload(self, path: Path, key: str) -> None:
        """Write an object with the bytes of a local file, in chunks."""

    @abstractmethod
    def copy(self, source: str, key: str) -> None:
        """Write an object with the bytes of another, inside the store.

        Raises:
            FileNotFoundError: there is no other.
        """

    @abstractmethod
    def listing(self, front: str) -> dict[str, int]:
        """Bytes of every object whose key begins with the folder `front`, by the rest of its key; may be stale."""

    @abstractmethod
    def folders(self, front: str) -> list[str]:
        """Names of the folders in the folder `front`; may be stale."""


def at_once(do: Callable[[A], B], items: Iterable[A]) -> list[B]:
    """The results of `do` for each item, in their order; several requests are under way at a time."""
    listed = list(items)
    if min(THREADS, len(listed)) < 2:
        return [do(item) for item in listed]
    with ThreadPoolExecutor(min(THREADS, len(listed))) as pool:
        return list(pool.map(do, listed))
