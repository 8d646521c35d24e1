"""Buckets through fsspec: any of its file systems, and with preconditions GCS (gcsfs) and S3 (s3fs).

What may pass is tried again a few times, with growing pauses; what is refused is not.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import random
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from marin_build.artifact.bucket import ABSENT, Bucket, Version
from marin_build.artifact.digest import hash_bytes
from marin_build.errors import MarinError, RequestError

TRIES = 7
FIRST_PAUSE_SECONDS = 0.2
LONGEST_PAUSE_SECONDS = 20.0

EXTRAS = {"gs": ("gcsfs", "gcs"), "gcs": ("gcsfs", "gcs"), "s3": ("s3fs", "s3"), "s3a": ("s3fs", "s3")}
"""The package that understands a protocol, and the extra of ours that installs it."""

_TRANSIENT_ERRNO = frozenset(
    {errno.EIO, errno.EBUSY, errno.EAGAIN, errno.EREMOTEIO, errno.ETIMEDOUT, errno.ECONNRESET, errno.ECONNREFUSED}
)
_NETWORK_PACKAGES = ("aiohttp", "requests", "urllib3", "botocore", "aiobotocore", "httpx")

T = TypeVar("T")


def open_bucket(url: str) -> FsspecBucket:
    """The bucket of a prefix, for example gs://bucket/artifacts.

    Raises:
        RequestError: no installed package understands it, or it holds what belongs into no prefix.
    """
    protocol, _, path = url.partition("://")
    place, _, _ = path.partition("/")
    if ":" in place.partition("@")[0] and "@" in place:
        raise RequestError("a prefix may hold no password: give credentials as the store's own tools expect them")
    if "?" in path or "#" in path:
        raise RequestError(f"prefix {protocol}://{path.partition('?')[0].partition('#')[0]}: may hold no '?' or '#'")
    if not path.strip("/"):
        raise RequestError(f"prefix {url!r} names no bucket; write {protocol}://BUCKET/FOLDER")
    kinds = {"gs": GcsBucket, "gcs": GcsBucket, "s3": S3Bucket, "s3a": S3Bucket, "http": WebPlace, "https": WebPlace}
    kind = kinds.get(protocol, FsspecBucket)
    return kind(_file_system(protocol), protocol, path.strip("/"))


def _file_system(protocol: str) -> Any:
    package, extra = EXTRAS.get(protocol, ("", ""))
    if package == "gcsfs":  # what its experimental part asks first takes a minute to fail where it is not served
        os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
    logging.getLogger(package or protocol).setLevel(logging.CRITICAL)  # they log with a traceback what they also raise
    try:
        import fsspec

        return fsspec.filesystem(protocol, use_listings_cache=False)
    except ImportError:
        help_line = f"pip install 'marin_build[{extra}]'" if extra else f"pip install what fsspec needs for {protocol}"
        raise RequestError(f"prefixes {protocol}://… need a package that is not installed\n  {help_line}") from None
    except ValueError as error:
        raise RequestError(f"prefix {protocol}://…: {error}") from None


class FsspecBucket(Bucket):
    """Without preconditions: a version is a hash of the bytes, and is compared before the write."""

    tries = TRIES

    def __init__(self, fs: Any, protocol: str, root: str) -> None:
        self._fs, self._root = fs, root
        self.shown = f"{protocol}://{root}"
        self.first_pause_seconds = FIRST_PAUSE_SECONDS

    def _path(self, key: str) -> str:
        return f"{self._root}/{key}"

    def _place(self, front: str) -> str:
        """The folder `front`, which may be that of the bucket itself."""
        return self._path(front) if front else self._root

    def _try(self, key: str, do: Callable[[], T]) -> T:
        """Do it, again and again where the trouble may pass.

        Raises:
            FileNotFoundError, FileExistsError: as they come, for those who know what they mean.
            RequestError: access is refused.
            MarinError: it did not pass.
        """
        for number in range(1, self.tries + 1):
            try:
                return do()
            except (FileNotFoundError, FileExistsError):
                raise
            except Exception as error:
                if not is_transient(error):
                    raise self._refused(key, error) from error
                if number == self.tries:
                    raise MarinError(
                        f"{self.shown}/{key}: the store failed {self.tries} times, at last with {_line(error)}\n"
                        "  run the same command again: what was done is kept"
                    ) from error
                pause = min(self.first_pause_seconds * 2 ** (number - 1), LONGEST_PAUSE_SECONDS)
                time.sleep(pause * random.uniform(0.5, 1.5))
        raise AssertionError("unreachable")

    def _refused(self, key: str, error: Exception) -> MarinError:
        is_denied = isinstance(error, PermissionError) or "Forbidden" in str(error) or getattr(error, "code", 0) == 401
        is_access = is_denied or _is_about_credentials(error)
        kind = RequestError if is_access else MarinError
        return kind(f"{self.shown}/{key}: {'no access' if is_access else 'refused'}: {_line(error)}")

    def get(self, key: str) -> tuple[bytes | None, Version]:
        try:
            return self._try(key, lambda: self._get(key))
        except FileNotFoundError:
            return None, ABSENT

    def put(self, key: str, data: bytes, version: Version | None = None) -> bool:
        try:
            return self._try(key, lambda: self._put(key, data, version))
        except (FileNotFoundError, FileExistsError):
            return False

    def delete(self, key: str, version: Version | None = None) -> bool:
        try:
            return self._try(key, lambda: self._delete(key, version))
        except FileNotFoundError:
            return True
        except FileExistsError:
            return False

    def _get(self, key: str) -> tuple[bytes | None, Version]:
        data, size = self._fs.cat_file(self._path(key)), self._fs.info(self._path(key))["size"]
        if len(data) != size:  # cut short, or written just now: another try tells
            raise OSError(errno.EIO, f"{len(data):,} of {size:,} bytes were read")
        return data, hash_bytes(data)

    def _put(self, key: str, data: bytes, version: Version | None) -> bool:
        if version is not None and self.get(key)[1] != version:
            return False
        self._fs.pipe_file(self._path(key), data)
        return True

    def _delete(self, key: str, version: Version | None) -> bool:
        if version is not None and self.get(key)[1] != version:
            return False
        self._fs.rm_file(self._path(key))
        return True

    def size(self, key: str) -> int | None:
        try:
            info = self._try(key, lambda: self._fs.info(self._path(key)))
        except FileNotFoundError:
            return None
        return int(info["size"]) if info["type"] == "file" else None

    def read(self, key: str, start: int, length: int) -> bytes:
        return bytes(self._try(key, lambda: self._fs.cat_file(self._path(key), start=start, end=start + length)))

    def upload(self, path: Path, key: str) -> None:
        self._try(key, lambda: self._fs.put_file(str(path), self._path(key)))

    def copy(self, source: str, key: str) -> None:
        self._try(source, lambda: self._fs.cp_file(self._path(source), self._path(key)))

    def listing(self, front: str) -> dict[str, int]:
        place = self._place(front)
        try:
            found = self._try(front, lambda: self._fs.find(place, detail=True))
        except FileNotFoundError:
            return {}
        start = f"{place}/".lstrip("/")
        names = {name.lstrip("/"): info for name, info in found.items()}
        return {name.removeprefix(start): int(info["size"]) for name, info in names.items() if name.startswith(start)}

    def folders(self, front: str) -> list[str]:
        place = self._place(front)
        try:
            found = self._try(front, lambda: self._fs.ls(place, detail=True))
        except FileNotFoundError:
            return []
        return sorted(info["name"].rstrip("/").rpartition("/")[2] for info in found if info["type"] == "directory")


class WebPlace(FsspecBucket):
    """Files of a web server, which can be read and not listed."""

    def _path(self, key: str) -> str:
        return f"{self.shown}/{key}"

    def size(self, key: str) -> int | None:
        try:
            size = self._try(key, lambda: self._fs.info(self._path(key)))["size"]
        except FileNotFoundError:
            return None
        if size is None:
            raise RequestError(f"{self._path(key)}: the server does not say how many bytes it has; download it first")
        return int(size)

    def read(self, key: str, start: int, length: int) -> bytes:
        data = super().read(key, start, length)
        if len(data) > length:
            raise RequestError(f"{self._path(key)}: the server gives no parts of a file; download it first")
        return data

    def listing(self, front: str) -> dict[str, int]:
        raise RequestError(f"{self.shown}: a web server has no list of its files; name each of them without globs")


class ConditionalBucket(FsspecBucket):
    """With preconditions for writing. Not every store has them for deleting: there an empty object stands for none."""

    def _delete(self, key: str, version: Version | None) -> bool:
        return super()._delete(key, None) if version is None else self._put(key, b"", version)

    def _split(self, key: str) -> tuple[str, str]:
        """The name of the bucket, and the key in it."""
        bucket, _, path = self._path(key).partition("/")
        return bucket, path


class GcsBucket(ConditionalBucket):
    """Versions are generations."""

    tries = 2
    """gcsfs itself tries each request six times, for half a minute."""

    def _get(self, key: str) -> tuple[bytes | None, Version]:
        headers, data = self._fs.call("GET", self._fs.url(self._path(key)))
        return bytes(data) or None, headers["x-goog-generation"]

    def _put(self, key: str, data: bytes, version: Version | None) -> bool:
        bucket, path = self._split(key)
        condition = {} if version is None else {"ifGenerationMatch": version or "0"}
        border = secrets.token_hex(16)
        head = f"--{border}\r\nContent-Type: application/json; charset=UTF-8\r\n\r\n"
        middle = f"\r\n--{border}\r\nContent-Type: application/octet-stream\r\n\r\n"
        name = json.dumps({"name": path})
        self._fs.call(
            "POST",
            f"{self._fs._location}/upload/storage/v1/b/{bucket}/o",
            uploadType="multipart",
            headers={"Content-Type": f'multipart/related; boundary="{border}"'},
            data=f"{head}{name}{middle}".encode() + data + f"\r\n--{border}--".encode(),
            **condition,
        )
        return True


class S3Bucket(ConditionalBucket):
    """Versions are ETags."""

    _quoted = True
    """Whether the store compares ETags as it gives them, in quotes; Ceph wants them without."""

    def _get(self, key: str) -> tuple[bytes | None, Version]:
        import fsspec.asyn

        async def get() -> tuple[bytes, str]:
            bucket, path = self._split(key)
            response = await self._fs._call_s3("get_object", Bucket=bucket, Key=path)
            async with response["Body"] as body:
                return await body.read(), response["ETag"]

        data, tag = fsspec.asyn.sync(self._fs.loop, get)
        return data or None, tag

    def _put(self, key: str, data: bytes, version: Version | None) -> bool:
        if version is None:
            return self._put_where(key, data, {})
        if version == ABSENT:
            return self._put_where(key, data, {"IfNoneMatch": "*"})
        if self._put_where(key, data, {"IfMatch": version if self._quoted else version.strip('"')}):
            return True
        if not self._quoted or self.get(key)[1] != version:
            return False
        # It is that version, and yet the precondition failed: this store compares without quotes.
        self._quoted = not self._put_where(key, data, {"IfMatch": version.strip('"')})
        return not self._quoted

    def _put_where(self, key: str, data: bytes, condition: dict[str, str]) -> bool:
        bucket, path = self._split(key)
        try:
            self._fs.call_s3("put_object", Bucket=bucket, Key=path, Body=data, **condition)
        except OSError as error:
            response = getattr(error.__cause__, "response", {})
            if response.get("ResponseMetadata", {}).get("HTTPStatusCode") == 412:
                return False
            raise
        return True


def is_transient(error: BaseException) -> bool:
    """Whether the same request may succeed in a moment: time-outs, lost connections, an overloaded server."""
    if isinstance(error, MarinError) or _is_about_credentials(error):
        return False
    if isinstance(error, TimeoutError | ConnectionError):
        return True
    if isinstance(error, OSError) and error.errno in _TRANSIENT_ERRNO:
        return True
    with contextlib.suppress(TypeError, ValueError):
        code = int(getattr(error, "code", 0) or 0)
        if code in (408, 429) or 500 <= code < 600:
            return True
    return type(error).__module__.startswith(_NETWORK_PACKAGES)


def _is_about_credentials(error: BaseException) -> bool:
    return "Credential" in type(error).__name__ or type(error).__module__.startswith("google.auth")


def _line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:300]}" if text else type(error).__name__
