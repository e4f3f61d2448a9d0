"""Hypothesis' ``@given``: examples are drawn in the pytest process, one for all ranks, and run wherever we say."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from pytest_fsdp_meta.calls import BODY


def given_test(function: Callable[..., Any]) -> Callable[..., Any] | None:
    """The test that ``@given`` made of ``function``, without our guard around it, bound as it was; else None."""
    plain = getattr(function, "__func__", function)
    while hasattr(plain, BODY):
        plain = getattr(plain, BODY)
    if not getattr(plain, "is_hypothesis_test", False):
        return None
    owner = getattr(function, "__self__", None)
    bound: Callable[..., Any] = plain if owner is None else plain.__get__(owner)
    return bound


def draw(test: Callable[..., Any], values: Mapping[str, Any], run: Callable[[dict[str, Any]], None]) -> None:
    """Lets Hypothesis call ``run`` with what it draws, beside the ``values`` of the other arguments.

    Raises what ``run`` raised for the smallest example, with Hypothesis' notes.
    """
    handle = getattr(test, "hypothesis")  # noqa: B009  (the wrapper has no type that says so)
    inner, owner = handle.inner_test, getattr(test, "__self__", object())

    @functools.wraps(inner)
    def example(*_: Any, **arguments: Any) -> None:
        run({name: value for name, value in arguments.items() if name not in values and value is not owner})

    handle.inner_test = example
    try:
        test(**values)
    finally:
        handle.inner_test = inner


def notes(error: BaseException) -> str:
    """What Hypothesis says of the example that raised this.

    Without the lines of code that it found to matter: it saw those of the pytest process, and the test ran elsewhere.
    """
    return "\n".join(getattr(error, "__notes__", ())).partition("\nExplanation:")[0]
