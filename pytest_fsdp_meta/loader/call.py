"""``Call``: a test function and its arguments, as they are sent from the pytest process to the ranks."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from importlib import import_module
from operator import attrgetter
from typing import Any

from pytest_fsdp_meta.worlds import Misuse, Rank

BODY = "__fsdp_body__"
"""The attribute in which the wrapper made by our decorators (plugin/markers.py) keeps the decorated function."""

SKIPS = ("builtins.Skipped", "unittest.case.SkipTest")
XFAIL, ASSUME = "_pytest.outcomes.XFailed", "hypothesis.errors.UnsatisfiedAssumption"
"""Exceptions of pytest, unittest and Hypothesis by qualified name, so that ranks need not import them to match."""
UNANIMOUS_OUTCOMES = {
    **dict.fromkeys(SKIPS, "skipped"),
    XFAIL: "expected to fail",
    ASSUME: "did not assume what was drawn",
}
"""Exceptions that are the test's outcome if all ranks raise them, with the phrase for ranks that raise one alone."""


@dataclass(frozen=True)
class Call:
    """A pickled function and its arguments, each pickled separately so that errors can name the argument.

    ``wants_rank`` is the name of the parameter that receives the rank itself, or None.
    """

    function: bytes
    arguments: Mapping[str, bytes] = field(default_factory=dict)
    wants_rank: str | None = None

    @property
    def names(self) -> list[str]:
        """The names of all parameters that receive a value."""
        return [*self.arguments, *([self.wants_rank] if self.wants_rank else ())]

    def with_drawn(self, packed: Mapping[str, bytes]) -> Call:
        """Return a copy with the values that Hypothesis drew for one example, each pickled separately."""
        return replace(self, arguments={**self.arguments, **packed})

    def unpack(self, rank: Rank) -> tuple[Callable[..., Any], dict[str, Any]]:
        """Return the function and its arguments; runs on a rank. Raises Misuse for a value that cannot be unpickled."""
        values = {name: _unpack(name, value) for name, value in self.arguments.items()}
        if self.wants_rank is not None:
            values[self.wants_rank] = rank
        return body(pickle.loads(self.function)), values


class ByName:
    """A test that pickles as its module and name, and is bound to ``owner``, if any, when it is unpickled on a rank.

    For tests wrapped by ``@given``: no importable name leads to the wrapped function, so cloudpickle would pickle it by
    value, together with Hypothesis.
    """

    def __init__(self, module: str, name: str, owner: object | None = None) -> None:
        self._arguments = module, name, owner

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str, str, object | None]]:
        return _resolve, self._arguments


def _resolve(module: str, name: str, owner: object | None) -> Callable[..., Any]:
    return bind(attrgetter(name)(import_module(module)), owner)


def body(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function without the wrappers of our decorators and of ``@given``, bound to the same instance."""
    unwrapped = getattr(function, "__func__", function)
    while (inner := getattr(unwrapped, BODY, None) or drawn_function(unwrapped)) is not None:
        unwrapped = inner
    return bind(unwrapped, getattr(function, "__self__", None))


def bind(function: Any, owner: object | None) -> Callable[..., Any]:
    """Return the function bound as a method of ``owner``, or unchanged if ``owner`` is None."""
    binds = owner is not None and hasattr(function, "__get__")  # functions written in C may not be descriptors
    bound: Callable[..., Any] = function.__get__(owner) if binds else function
    return bound


def drawn_function(function: Callable[..., Any]) -> Callable[..., Any] | None:
    """Return the function that ``@given`` wraps, by Hypothesis' public handle, or None for other functions."""
    handle = getattr(function, "hypothesis", None)
    return handle.inner_test if handle is not None and getattr(function, "is_hypothesis_test", False) else None


def _unpack(name: str, value: bytes) -> Any:
    try:
        return pickle.loads(value)
    except Exception as error:
        raise Misuse(
            f"{name!r}: its value cannot be unpickled on the ranks ({type(error).__name__}: {error}); "
            "return plain data, such as a path or a config, and build the rest on the ranks"
        ) from error
