"""Where an artifact comes from: commit, command, person, machine, packages, code, time. No secrets, and no identity:
nothing here decides whether anything is built.
"""

from __future__ import annotations

import os
import platform
import re
import socket
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import marin_build
from marin_build.artifact.digest import hash_bytes
from marin_build.artifact.owner import user
from marin_build.foreign import HIDDEN, hide

GIT_SECONDS = 20

PACKAGES = {
    "marin_build": "marin_build",
    "jax": "jax",
    "jaxlib": "jaxlib",
    "flax": "flax",
    "optax": "optax",
    "orbax": "orbax-checkpoint",
    "numpy": "numpy",
    "pyarrow": "pyarrow",
    "datasets": "datasets",
    "tokenizers": "tokenizers",
    "transformers": "transformers",
    "huggingface_hub": "huggingface_hub",
    "zstandard": "zstandard",
    "orjson": "orjson",
    "xxhash": "xxhash",
    "pydantic": "pydantic",
}
"""Distribution name by module name, of the packages whose version may matter to the bytes made."""

_SECRET = r"[\w.\-]*(?:token|secret|password|passwd|credential|api[_\-]?key|access[_\-]?key|private[_\-]?key)[\w.\-]*"
_SECRET_OPTION = re.compile(rf"-{{1,2}}{_SECRET}", re.IGNORECASE)
_SECRET_VALUE = re.compile(rf"(?<![\w.\-])({_SECRET}\s*[=:]\s*)[^\s,}}]+", re.IGNORECASE)


def hidden(arguments: Sequence[str]) -> list[str]:
    """A command line with everything hidden that looks like a secret: by its option's or key's name, or its form."""
    shown: list[str] = []
    for argument in arguments:
        if shown and _SECRET_OPTION.fullmatch(shown[-1]) and not argument.startswith("-"):
            argument = HIDDEN
        shown.append(_SECRET_VALUE.sub(rf"\1{HIDDEN}", hide(argument)))
    return shown


def circumstances(recipes: Path, command: Sequence[str]) -> dict[str, Any]:
    """What is known when an attempt starts: commit, command, user, host, system."""
    return {
        **_git(recipes),
        "command": hidden(command),
        "user": user(),
        "host": socket.gethostname(),
        "system": platform.platform(),
        "python": platform.python_version(),
    }


def package_versions() -> dict[str, str]:
    """Versions of the packages that were loaded and may matter."""
    found = {}
    for module, distribution in PACKAGES.items():
        if module in sys.modules:
            try:
                found[distribution] = version(distribution)
            except PackageNotFoundError:  # used from a source tree, without an installation
                found[distribution] = str(getattr(sys.modules[module], "__version__", "unknown"))
    return found


@cache
def _package_folder() -> Path:
    return Path(marin_build.__file__).parent


def code_hashes() -> dict[str, str]:
    """Hash of each module file of the package as it is on disk now, by relative path."""
    folder = _package_folder()
    return {path.relative_to(folder).as_posix(): hash_bytes(path.read_bytes()) for path in folder.rglob("*.py")}


def loaded_modules() -> list[str]:
    """Relative paths of the package's modules that this process has loaded, sorted."""
    front = f"{_package_folder()}/"
    files = (getattr(module, "__file__", None) for module in list(sys.modules.values()))
    return sorted({file.removeprefix(front) for file in files if file and file.startswith(front)})


def code(at_start: Mapping[str, str]) -> dict[str, Any]:
    """The modules used, a digest of them as they were at the start, and those that were edited since."""
    modules = [path for path in loaded_modules() if path in at_start]
    at_end = code_hashes()
    edited = [path for path in modules if at_end.get(path) != at_start[path]]
    found = {"digest": _code_digest(at_start, modules), "modules": modules}
    return {**found, "edited_while_building": edited} if edited else found


def code_changed(provenance: Mapping[str, Any]) -> bool:
    """True when the modules that made an artifact are others now. It is shown; it never rebuilds."""
    noted = provenance.get("code")
    return noted is not None and _code_digest(code_hashes(), noted["modules"]) != noted["digest"]


def _code_digest(hashes: Mapping[str, str], modules: Iterable[str]) -> str:
    return hash_bytes("".join(f"{path} {hashes.get(path)}\n" for path in modules).encode())


_GIT = ("git", "--no-optional-locks", "-c", "core.fsmonitor=false", "-c", "core.hooksPath=/dev/null")
_NO_FETCHING = {"GIT_ALLOW_PROTOCOL": "none", "GIT_NO_LAZY_FETCH": "1", "GIT_TERMINAL_PROMPT": "0"}
_DIFF = ("diff", "HEAD", "--binary", "--no-ext-diff", "--no-textconv", "--ignore-submodules=dirty")
"""A repository's own configuration may name programs for git to start, and a copied folder brings it along: what git
is asked here starts none of them."""


def _git(folder: Path) -> dict[str, str | None]:
    """Commit of the repository that holds the recipes, and a digest of what differs from it; None without one."""
    commit = _git_output(folder, "rev-parse", "HEAD")
    changes = _git_output(folder, *_without_filters(folder), *_DIFF) if commit else None
    return {
        "commit": commit.decode().strip() if commit else None,
        "uncommitted_changes_digest": hash_bytes(changes) if changes else None,
    }


def _without_filters(folder: Path) -> list[str]:
    """Options that switch off the filters which the repository's own configuration defines."""
    query = ("config", "--local", "--includes", "--null", "--name-only", "--get-regexp", r"^filter\.")
    names = (_git_output(folder, *query) or b"").decode(errors="surrogateescape").split("\0")
    settings = (f"{name}={'false' if name.endswith('.required') else ''}" for name in names if name)
    return [word for setting in settings for word in ("-c", setting)]


def _git_output(folder: Path, *arguments: str) -> bytes | None:
    command = [*_GIT, "-C", str(folder), *arguments]
    environment = os.environ | _NO_FETCHING
    try:
        done = subprocess.run(
            command, capture_output=True, timeout=GIT_SECONDS, check=True, stdin=subprocess.DEVNULL, env=environment
        )
    except (OSError, subprocess.SubprocessError):  # no git, no repository, or a repository too large to compare
        return None
    return done.stdout
