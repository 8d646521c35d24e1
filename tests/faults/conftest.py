"""Fixtures of the fault tests."""

from repository import gate, new_repository, repository, snakemake

__all__ = ["gate", "new_repository", "repository", "snakemake"]
