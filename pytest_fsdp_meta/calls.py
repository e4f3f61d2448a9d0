"""A test's function and the values of its fixtures, on their way from the pytest process to the ranks."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pytest_fsdp_meta.worlds import Misuse, Rank

BODY = "__fsdp_body__"
"""The attribute in which a guard keeps the function that it guards (markers.py)."""


@dataclass(frozen=True)
class Call:
    """What is sent: the function, and each argument pickled by itself, so that one that cannot be read is named.

    ``wants_rank`` is the name of the parameter that takes the rank itself, or None.
    """

    function: bytes
    arguments: Mapping[str, bytes] = field(default_factory=dict)
    wants_rank: str | None = None

    def unpack(self, rank: Rank) -> tuple[Callable[..., Any], dict[str, Any]]:
        """On a rank: the function and its arguments. Raises Misuse for a value that cannot be read here."""
        values = {name: _unpack(name, value) for name, value in self.arguments.items()}
        if self.wants_rank is not None:
            values[self.wants_rank] = rank
        return body(pickle.loads(self.function)), values


def body(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function itself: without the guard of our decorators and the wrapper of ``@given``; bound as it was."""
    plain = getattr(function, "__func__", function)
    while (inner := getattr(plain, BODY, None) or drawn_function(plain)) is not None:
        plain = inner
    owner = getattr(function, "__self__", None)
    bound: Callable[..., Any] = plain if owner is None else plain.__get__(owner)
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
            f"fixture {name!r}: its value cannot be read on the ranks ({type(error).__name__}: {error}); "
            "return plain data, such as a path or a config, and build the rest on the ranks"
        ) from error
