"""Fixtures of the workflow tests."""

from repository import gate, new_repository, repository, snakemake

__all__ = ["gate", "new_repository", "repository", "snakemake"]
