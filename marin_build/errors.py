"""Errors for people: one line first, details after, and an exit code that scripts can rely on.

    MarinError              1  anything else
    ├── RequestError        2  usage, recipe, unknown target, unusable input
    │   └── RecipeError        names file, line, field, value seen, values allowed
    ├── DriftError          3  a finished or partial artifact of another recipe
    ├── DamageError         4  damaged, or a verification that failed
    ├── LeasedError         5  somebody else is building the target
    ├── Stopped             6  stopped by a signal; what was done is kept and resumes
    ├── NumericalError      7  NaN or Inf
    └── RefusedError        8  refused by a gate or a budget

A user's mistake is always one of these and prints without a traceback.
"""

from __future__ import annotations


class MarinError(Exception):
    """The message's first line says what is wrong; the lines after it give details and the next command."""

    exit_code = 1


class RequestError(MarinError):
    exit_code = 2


class RecipeError(RequestError):
    pass


class DriftError(MarinError):
    exit_code = 3


class DamageError(MarinError):
    exit_code = 4


class LeasedError(MarinError):
    exit_code = 5


class Stopped(MarinError):
    exit_code = 6


class NumericalError(MarinError):
    exit_code = 7


class RefusedError(MarinError):
    exit_code = 8


FINAL_EXIT_CODES = frozenset({2, 3, 4, 7, 8})
"""A retry cannot help after these: the job notes them and a retry of the same run stops at once."""
