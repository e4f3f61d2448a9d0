"""Warnings on a rank: those of the user's code go to the parent, which has the user's filters.

Others, which the plugin itself may cause, go to stderr under Python's default rules.
"""

from __future__ import annotations

import builtins
import inspect
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TextIO

KIND = "warning"
"""The kind of the notes that carry a warning."""
HIDDEN_BY_PYTHON = (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning)
"""Categories that Python ignores by default."""

_all_enabled = False


@dataclass(frozen=True)
class RankWarning:
    """One warning. ``classes`` are its category and the bases of that, each as "module:name"."""

    text: str
    classes: tuple[str, ...]
    file: str
    line: int
    module: str


class WarningForwarder:
    """Replaces ``warnings.showwarning``. Calls ``send`` once for each warning in a call of the world."""

    def __init__(self, send: Callable[[RankWarning], None]) -> None:
        self._send = send
        self._owner = os.getpid()
        self._unless: list[str] = []
        """For each ``forwarding`` that is active, the pattern of warnings that are dropped."""
        self._seen: set[RankWarning] = set()
        warnings.showwarning = self._show

    def forget(self) -> None:
        """Start a new call, in which each warning is forwarded once more."""
        self._seen.clear()

    @contextmanager
    def forwarding(self, unless: str) -> Iterator[None]:
        self._unless.append(unless)
        try:
            yield
        finally:
            self._unless.pop()

    def _show(
        self,
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        text = str(message)
        kinds = [base for base in category.__mro__ if issubclass(base, Warning)]
        classes = tuple(f"{base.__module__}:{base.__qualname__}" for base in kinds)
        one = RankWarning(text, classes, filename, lineno, _module(filename))
        forwarded = bool(self._unless) and os.getpid() == self._owner  # a forked child must not write to the pipe
        if file is None and one in self._seen:
            return
        self._seen.add(one)
        if forwarded and file is None:
            if not any(pattern and re.search(pattern, text) for pattern in self._unless):
                self._send(one)
        elif file is not None or not issubclass(category, HIDDEN_BY_PYTHON):
            print(warnings.formatwarning(text, category, filename, lineno, line), end="", file=file or sys.stderr)


def enable_all() -> None:
    """Enable every warning that Python ignores by default. Filters that modules add afterwards stay in force.

    Only the first call has an effect: the fork server does this before its imports, for all its ranks.
    """
    global _all_enabled
    if not _all_enabled:
        _all_enabled = True
        warnings.resetwarnings()
        warnings.simplefilter("always")


def _module(file: str) -> str:
    """Return the name of the module in ``file``, found by its frame on the stack; empty if it has none there."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_code.co_filename != file:
        frame = frame.f_back
    return "" if frame is None else str(frame.f_globals.get("__name__", ""))


def reissue(one: RankWarning, where: str) -> None:
    """Issue the warning in this process, at its original file and line, with ``where`` added to its text.

    Raises it if a filter turns it into an error.
    """
    category, known = find_category(one.classes)
    text = one.text if known else f"{one.classes[0].replace(':', '.')}: {one.text}"
    try:
        warning = category(f"{text} ({where})")
    except Exception:  # the category takes other arguments
        warning = UserWarning(f"{category.__name__}: {text} ({where})")
    warnings.warn_explicit(warning, type(warning), one.file, one.line, one.module or one.file.removesuffix(".py"))


def find_category(classes: Sequence[str]) -> tuple[type[Warning], bool]:
    """Return the category and True, or its nearest base that is imported here and False."""
    for name in classes:
        module, _, path = name.partition(":")
        found: object = builtins if module == "builtins" else sys.modules.get(module)
        for part in path.split("."):
            found = getattr(found, part, None)
        if isinstance(found, type) and issubclass(found, Warning):
            return found, name == classes[0]
    return UserWarning, False
