#!/usr/bin/env bash
# The workflow tests on the oldest Snakemake that pyproject.toml allows, in an environment of their own.
set -euo pipefail
cd "$(dirname "$0")/../.."

oldest=$(sed -n 's/.*"snakemake>=\([0-9.]*\),.*/\1/p' pyproject.toml)
environment=$(mktemp -d)
trap 'rm -rf "$environment"' EXIT
python3 -m venv "$environment"
"$environment/bin/pip" install --quiet -e '.[dev]' "snakemake==$oldest.0"
"$environment/bin/python" -m pytest tests/workflow "$@"
