"""The one exception for mistakes a user can mend, and the words for a mistyped name."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable
from typing import Any


class UserError(ValueError):
    """Bad input. The message says what was wrong, what was expected and what to try; the command exits with 2."""


def once(what: str, instead: str) -> None:
    """For a backward pass that has no derivative of its own: UserError where one would be taken."""
    import torch

    if torch.is_grad_enabled() and not torch.compiler.is_compiling():  # only with create_graph
        raise UserError(f"{what} has no second derivative (create_graph=True); {instead}")


def too_large(error: Exception) -> bool:
    """Whether an error says that there is no such number or not so much memory, as PyTorch does in many words."""
    words = ("allocate", "overflow", "Overflow", "out of memory", "Storage size", "too large")
    return not isinstance(error, (RuntimeError, TypeError)) or any(word in str(error) for word in words)


def several(what: str, given: Any) -> list[Any]:
    """What is given as a list. UserError for one thing alone: a string would be taken letter by letter."""
    if isinstance(given, str) or not isinstance(given, Iterable):
        one = repr(given) if isinstance(given, (str, int, os.PathLike)) else type(given).__name__
        raise UserError(f"{what} must be a list, of one too: [{one}], not {one}")
    return list(given)


def nearest(wrong: str, known: Iterable[str]) -> str:
    """` Did you mean "x"?` for a close name, then the list of names that would work."""
    known = list(known)
    by_lower = {name.lower(): name for name in known}
    close = [by_lower[name] for name in difflib.get_close_matches(wrong.lower(), by_lower, n=3, cutoff=0.5)]
    hint = f" Did you mean {' or '.join(repr(c) for c in close)}?" if close else ""
    return f"{hint} Known: {', '.join(known)}." if known else hint
