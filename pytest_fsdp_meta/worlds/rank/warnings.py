"""Warnings on a rank: those of the user's code are told to the parent, which knows what the user wants done with them.

The others, which our own doing may provoke, go to stderr under the rules that Python has by itself.
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
"""Of the notes."""
UNTOLD = (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning)
"""What Python hides by itself."""

_hears_all = False


@dataclass(frozen=True)
class Warned:
    """One warning. ``classes`` are the names of its class and the bases of that, each as "module:name"."""

    text: str
    classes: tuple[str, ...]
    file: str
    line: int
    module: str


class WarningForwarder:
    """Takes the place of ``warnings.showwarning``. ``tell`` is called once per call and warning."""

    def __init__(self, tell: Callable[[Warned], None]) -> None:
        self._tell = tell
        self._owner = os.getpid()
        self._unless: list[str] = []
        """The patterns of what is not told; one for each ``telling`` that is open."""
        self._seen: set[Warned] = set()
        warnings.showwarning = self._show

    def forget(self) -> None:
        """A new call begins: what it raises again is told again."""
        self._seen.clear()

    @contextmanager
    def telling(self, unless: str) -> Iterator[None]:
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
        one = Warned(text, _names(category), filename, lineno, _module(filename))
        told = bool(self._unless) and os.getpid() == self._owner  # a child that a rank has forked has no way to tell
        if file is None and one in self._seen:
            return
        self._seen.add(one)
        if told and file is None:
            if not any(pattern and re.search(pattern, text) for pattern in self._unless):
                self._tell(one)
        elif file is not None or not issubclass(category, UNTOLD):
            print(warnings.formatwarning(text, category, filename, lineno, line), end="", file=file or sys.stderr)


def hear_all() -> None:
    """Has every warning shown, whatever Python hides by itself; what modules hide while they are imported stays so.

    Done once, by the fork server for all its ranks.
    """
    global _hears_all
    if not _hears_all:
        _hears_all = True
        warnings.resetwarnings()
        warnings.simplefilter("always")


def _names(category: type[Warning]) -> tuple[str, ...]:
    return tuple(f"{base.__module__}:{base.__qualname__}" for base in category.__mro__ if issubclass(base, Warning))


def _module(file: str) -> str:
    """The name of the module in ``file``, whose frame is on the stack when it warns; empty where it is not."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_code.co_filename != file:
        frame = frame.f_back
    return "" if frame is None else str(frame.f_globals.get("__name__", ""))


def raise_again(one: Warned, where: str) -> None:
    """As if it were raised here, at the very place; the text says ``where`` it was. Raises it where it is an error."""
    category, known = category_of(one.classes)
    text = one.text if known else f"{one.classes[0].replace(':', '.')}: {one.text}"
    try:
        warning = category(f"{text} ({where})")
    except Exception:  # of a class that takes other arguments
        warning = UserWarning(f"{category.__name__}: {text} ({where})")
    warnings.warn_explicit(warning, type(warning), one.file, one.line, one.module or one.file.removesuffix(".py"))


def category_of(classes: Sequence[str]) -> tuple[type[Warning], bool]:
    """The class, and whether it is the very one: where only ranks have imported it, its nearest base stands for it."""
    for name in classes:
        module, _, path = name.partition(":")
        found: object = builtins if module == "builtins" else sys.modules.get(module)
        for part in path.split("."):
            found = getattr(found, part, None)
        if isinstance(found, type) and issubclass(found, Warning):
            return found, name == classes[0]
    return UserWarning, False
