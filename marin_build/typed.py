"""What a user typed → the target that was meant.

Also understood: `./x`, `x/`, the artifact's folder, its record, its recipe and its mirror.
"""

from __future__ import annotations

import os

from marin_build.settings import Settings

MIRRORS = ".marin/records"
ENDINGS = ("/.artifact.json", ".yaml", ".json")


def as_target(text: str, settings: Settings) -> str:
    """Strip folders and endings that lead to one artifact; what is left may or may not be a target.

    `artifacts/raw/a/dev/`, `config/raw/a/dev.yaml` and `/project/artifacts/raw/a/dev/.artifact.json` are `raw/a/dev`.
    """
    path = os.path.normpath(text)
    for folder in (settings.prefix, settings.recipes, MIRRORS):
        for front in (os.path.normpath(folder), os.path.abspath(folder)):
            path = path.removeprefix(f"{front}/")
    for ending in ENDINGS:
        path = path.removesuffix(ending)
    return path
