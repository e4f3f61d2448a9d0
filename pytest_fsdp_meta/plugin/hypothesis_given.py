"""Hypothesis' ``@given``: examples are drawn in the pytest process, one for all ranks, and run wherever we say."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from pytest_fsdp_meta.loader.call import BODY, bind

OF_CODE = re.compile(
    r"^ *(?:Explanation:| {7}.+:\d+$|These lines were always|Failed to reproduce exception)", re.MULTILINE
)
"""How the notes of Hypothesis begin that are about code."""


def given_test(function: Callable[..., Any]) -> Callable[..., Any] | None:
    """The test that ``@given`` made of ``function``, without our guard around it, bound as it was; else None."""
    plain = getattr(function, "__func__", function)
    while hasattr(plain, BODY):
        plain = getattr(plain, BODY)
    if not getattr(plain, "is_hypothesis_test", False):
        return None
    return bind(plain, getattr(function, "__self__", None))


def relax(test: Callable[..., Any]) -> None:
    """Takes Hypothesis' default deadline off: ranks wait for each other, and a loader is no function of 0.2 s.

    One that the user has set stays. Hypothesis has no public way to change settings that a test has.
    """
    from hypothesis import settings

    function: Any = getattr(test, "__func__", test)
    given, usual = function._hypothesis_internal_use_settings, settings.get_profile("default")
    if given.deadline == usual.deadline:
        function._hypothesis_internal_use_settings = settings(given, deadline=None)


def same_draws(test: Callable[..., Any], seed: int) -> None:
    """Lets every test that is given this seed draw the same, unless the user has said how they are drawn."""
    import hypothesis

    function: Any = getattr(test, "__func__", test)
    if function._hypothesis_internal_use_seed is None and not function._hypothesis_internal_use_settings.derandomize:
        hypothesis.seed(seed)(function)


def draw(
    test: Callable[..., Any], values: Mapping[str, Any], run: Callable[[dict[str, Any]], None], key: str = ""
) -> None:
    """Lets Hypothesis call ``run`` with what it draws, beside the ``values`` of the other arguments.

    Tests of one ``key`` share the examples that Hypothesis keeps. Raises what ``run`` raised for the smallest
    example, with Hypothesis' notes; of several failures that differ the first, with a note of the others.
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
        told = "\n\n".join((f"({error.args[0]})\n{notes(error)}".rstrip(), *map(_brief, others)))
        vars(first)["__notes__"] = [*getattr(first, "__notes__", ()), told]
        raise first from None
    finally:
        handle.inner_test = inner


def _leaves(error: BaseException) -> list[BaseException]:
    """What an exception group is of. By attribute: Python 3.10 has no class of groups, but Hypothesis has."""
    within = getattr(error, "exceptions", None)
    return [error] if within is None else [leaf for one in within for leaf in _leaves(one)]


def _brief(error: BaseException) -> str:
    return "\n".join((*str(error).splitlines()[:1], notes(error)))


def notes(error: BaseException) -> str:
    """What Hypothesis says of the example that raised this.

    Without lines and tracebacks of code: it saw those of the pytest process, and the test ran elsewhere.
    """
    told = [re.split(OF_CODE, note)[0].rstrip() for note in getattr(error, "__notes__", ())]
    return "\n".join(filter(None, told))


def reject() -> NoReturn:
    """Tells Hypothesis that the example is of no use."""
    import hypothesis

    hypothesis.reject()
