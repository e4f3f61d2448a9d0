"""Hypothesis' ``@given``: the pytest process draws one example for all ranks, and a callback runs it on them."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from typing import Any

from pytest_fsdp_meta.loader.call import BODY, bind

OF_CODE = re.compile(
    r"^ *(?:Explanation:| {7}.+:\d+$|These lines were always|Failed to reproduce exception)", re.MULTILINE
)
"""The beginning of those notes of Hypothesis that are about lines of code."""


def given_test(function: Callable[..., Any]) -> Callable[..., Any] | None:
    """Return the test that ``@given`` made, bound to its instance and without our guard; None for other functions."""
    plain = getattr(function, "__func__", function)
    while hasattr(plain, BODY):
        plain = getattr(plain, BODY)
    if not getattr(plain, "is_hypothesis_test", False):
        return None
    return bind(plain, getattr(function, "__self__", None))


def disable_deadline(test: Callable[..., Any]) -> None:
    """Disable Hypothesis' default deadline of 200 ms: loading, and waiting for other ranks, takes longer.

    A deadline that the user has set stays. Hypothesis has no public way to change the settings of an existing test.
    """
    from hypothesis import settings

    function: Any = getattr(test, "__func__", test)
    given, usual = function._hypothesis_internal_use_settings, settings.get_profile("default")
    if given.deadline == usual.deadline:
        function._hypothesis_internal_use_settings = settings(given, deadline=None)


def share_seed(test: Callable[..., Any], seed: int) -> None:
    """Make all tests with the same seed draw the same examples, unless the user has set a seed or ``derandomize``."""
    import hypothesis

    function: Any = getattr(test, "__func__", test)
    if function._hypothesis_internal_use_seed is None and not function._hypothesis_internal_use_settings.derandomize:
        hypothesis.seed(seed)(function)


def run_examples(
    test: Callable[..., Any], values: Mapping[str, Any], run: Callable[[dict[str, Any]], None], key: str = ""
) -> None:
    """Let Hypothesis call ``run`` with the values that it draws; ``values`` are those of the other arguments.

    Tests with the same ``key`` share Hypothesis' database of examples. Raises what ``run`` raised for the smallest
    example, with Hypothesis' notes. Where examples fail in several ways, the first is raised, and a note names the
    others.
    """
    handle = getattr(test, "hypothesis")  # noqa: B009  (the wrapper has no type that says so)
    inner, owner = handle.inner_test, getattr(test, "__self__", object())

    @functools.wraps(inner)
    def example(*_: Any, **arguments: Any) -> None:
        run({name: value for name, value in arguments.items() if name not in values and value is not owner})

    if key:
        example._hypothesis_internal_add_digest = key.encode()  # type: ignore[attr-defined]
    handle.inner_test = example
    try:
        test(**values)
    except BaseException as error:
        first, *others = _leaves(error)
        if first is error:
            raise
        also = ("\n".join((*str(other).splitlines()[:1], join_notes(other))) for other in others)
        note = "\n\n".join((f"({error.args[0]})\n{join_notes(error)}".rstrip(), *also))
        vars(first)["__notes__"] = [*getattr(first, "__notes__", ()), note]
        raise first from None
    finally:
        handle.inner_test = inner


def _leaves(error: BaseException) -> list[BaseException]:
    """Return the exceptions in a group, or the exception itself.

    By attribute, not by type: Python 3.10 has no ExceptionGroup, and Hypothesis brings a backport.
    """
    within = getattr(error, "exceptions", None)
    return [error] if within is None else [leaf for inner in within for leaf in _leaves(inner)]


def join_notes(error: BaseException) -> str:
    """Return Hypothesis' notes about the example that raised ``error``.

    Without notes about lines of code: Hypothesis traced the pytest process, and the test ran on ranks.
    """
    notes = [re.split(OF_CODE, note)[0].rstrip() for note in getattr(error, "__notes__", ())]
    return "\n".join(filter(None, notes))
