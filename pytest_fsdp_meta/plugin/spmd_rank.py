"""What runs on a rank for a test: the body of an SPMD test, or a function passed to ``fsdp_world.run``."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from pytest_fsdp_meta.loader.call import Call
from pytest_fsdp_meta.worlds import CallFailed, current, forward_warnings
from pytest_fsdp_meta.worlds.rank.rendezvous import seed
from pytest_fsdp_meta.worlds.rank.tracebacks import describe_long_chain

BODY, FUNCTION = f"{__name__}:run_body", f"{__name__}:run_function"
"""The names by which a world calls the two functions."""
ASSUMING = "Using `assume` outside a property-based test"
"""A warning of Hypothesis that is not shown: ranks call ``assume``, and the pytest process rejects the example."""


def run_body(call: Call, style: Any, showlocals: bool, unanimous_outcomes: frozenset[str]) -> str | None:
    """Run the body of a test and return the class name of its result, None where it returned None.

    Raises exceptions named in ``unanimous_outcomes`` unchanged, and anything else as CallFailed with pytest's
    traceback, in the style of ``--tb``, as its detail.
    """
    function, arguments = call.unpack(current())
    seed(current().device.type)  # one world runs all examples of Hypothesis, which must not depend on their order
    try:
        with forward_warnings(unless=ASSUMING):
            returned = function(**arguments)
    except BaseException as error:
        if f"{type(error).__module__}.{type(error).__qualname__}" in unanimous_outcomes:
            raise
        raise CallFailed(detail=_format_traceback(error, style, showlocals)) from error
    finally:
        for value in arguments.values():
            if isinstance(value, pytest.MonkeyPatch):
                value.undo()
    return None if returned is None else type(returned).__name__


def run_function(function: bytes, args: Sequence[bytes], kwargs: Mapping[str, bytes]) -> Any:
    """Call the function passed to ``fsdp_world.run``; it and each argument are pickled one by one."""
    called = pickle.loads(function)
    with forward_warnings(unless=ASSUMING):
        return called(*map(pickle.loads, args), **{name: pickle.loads(value) for name, value in kwargs.items()})


def _format_traceback(error: BaseException, style: Any, showlocals: bool) -> str:
    """Return pytest's traceback with source lines, without the frame of ``run_body``."""
    own = error.__traceback__
    assert own is not None
    info = pytest.ExceptionInfo.from_exception(error.with_traceback(own.tb_next or own))
    bare = isinstance(error, pytest.fail.Exception) and not error.pytrace
    earlier = describe_long_chain(error)
    text = str(info.getrepr(style="value" if bare else style, showlocals=showlocals, chain=not earlier))
    # str() strips the indentation of the first source line, and of no other.
    indented = text if bare or style == "short" or text.startswith((">", "E")) else f"    {text}"
    return f"{earlier}\n\n{indented}" if earlier else indented
