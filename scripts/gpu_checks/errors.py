"""What ends the check with one sentence for its user."""

from __future__ import annotations


class CheckError(Exception):
    """Says in one sentence what is wrong and what to do; the program ends with exit code 1."""
