"""What profiles ask before Snakemake reads them: is the plugin there that they name?

Without this, a missing plugin is an "invalid choice" of the argument parser. Standard library only.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec


def require(executor: str, extra: str) -> None:
    """End the program with one clear line unless the plugin of `executor` is installed."""
    if find_spec(f"snakemake_executor_plugin_{executor.replace('-', '_')}") is None:
        print(
            f"Error: this profile runs jobs through the Snakemake executor {executor!r}, which is not installed\n"
            f"  pip install 'marin_build[{extra}]'",
            file=sys.stderr,
        )
        sys.exit(1)
