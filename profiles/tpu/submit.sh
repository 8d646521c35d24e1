#!/bin/sh
# Called by Snakemake with a job script for each job that would start.
echo "marin_build: launching TPU slices is not built yet; on a TPU host itself, use: snakemake --profile local TARGET" >&2
exit 8
