"""The build system for language models: type the path of an artifact, and Snakemake makes it."""

__version__ = "0.1.0"
