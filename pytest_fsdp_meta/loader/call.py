"""A test's function and the values of its fixtures, on their way from the pytest process to the ranks."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from importlib import import_module
from operator import attrgetter
from typing import Any

from pytest_fsdp_meta.worlds import Misuse, Rank

BODY = "__fsdp_body__"
"""The attribute in which a guard keeps the function that it guards (markers.py)."""

SKIPS = ("builtins.Skipped", "unittest.case.SkipTest")
XFAIL, ASSUME = "_pytest.outcomes.XFailed", "hypothesis.errors.UnsatisfiedAssumption"
"""What pytest, unittest and Hypothesis raise, by qualified name: no rank has to import them to know."""
UNANIMOUS_OUTCOMES = {
    **dict.fromkeys(SKIPS, "skipped"),
    XFAIL: "expected to fail",
    ASSUME: "did not assume what was drawn",
}
"""What counts when every rank raises it, and how a rank that raises it alone is told."""


@dataclass(frozen=True)
class Call:
    """What is sent: the function, and each argument pickled by itself, so that one that cannot be read is named.

    ``wants_rank`` is the name of the parameter that takes the rank itself, or None.
    """

    function: bytes
    arguments: Mapping[str, bytes] = field(default_factory=dict)
    wants_rank: str | None = None

    @property
    def names(self) -> list[str]:
        """Of all parameters that get a value."""
        return [*self.arguments, *([self.wants_rank] if self.wants_rank else ())]

    def with_drawn(self, packed: Mapping[str, bytes]) -> Call:
        """The same with what Hypothesis drew for one example, each value pickled by itself."""
        return replace(self, arguments={**self.arguments, **packed})

    def unpack(self, rank: Rank) -> tuple[Callable[..., Any], dict[str, Any]]:
        """On a rank: the function and its arguments. Raises Misuse for a value that cannot be read here."""
        values = {name: _unpack(name, value) for name, value in self.arguments.items()}
        if self.wants_rank is not None:
            values[self.wants_rank] = rank
        return body(pickle.loads(self.function)), values


class ByName:
    """A test on its way: on the ranks it is what its module has under this name, bound to ``owner`` if there is one.

    For what ``@given`` made: its own ``__qualname__`` leads nowhere, so pickle would copy it, Hypothesis and all.
    """

    def __init__(self, module: str, name: str, owner: object | None = None) -> None:
        self._arguments = module, name, owner

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str, str, object | None]]:
        return _resolve, self._arguments


def _resolve(module: str, name: str, owner: object | None) -> Callable[..., Any]:
    return bind(attrgetter(name)(import_module(module)), owner)


def body(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function itself: without the guard of our decorators and the wrapper of ``@given``; bound as it was."""
    plain = getattr(function, "__func__", function)
    while (inner := getattr(plain, BODY, None) or drawn_function(plain)) is not None:
        plain = inner
    return bind(plain, getattr(function, "__self__", None))


def bind(function: Any, owner: object | None) -> Callable[..., Any]:
    """The method of ``owner``, or the function itself where there is none."""
    binds = owner is not None and hasattr(function, "__get__")  # what is written in C need not
    bound: Callable[..., Any] = function.__get__(owner) if binds else function
    return bound


def drawn_function(function: Callable[..., Any]) -> Callable[..., Any] | None:
    """What ``@given`` wraps, where it does: Hypothesis offers it to those who run tests in other ways."""
    handle = getattr(function, "hypothesis", None)
    return handle.inner_test if handle is not None and getattr(function, "is_hypothesis_test", False) else None


def _unpack(name: str, value: bytes) -> Any:
    try:
        return pickle.loads(value)
    except Exception as error:
        raise Misuse(
            f"{name!r}: its value cannot be read on the ranks ({type(error).__name__}: {error}); "
            "return plain data, such as a path or a config, and build the rest on the ranks"
        ) from error
