"""On a rank: what a test has there, the body of an SPMD test above all, and its failure as pytest would show it."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from pytest_fsdp_meta.loader.call import Call
from pytest_fsdp_meta.worlds import CallFailed, current, telling
from pytest_fsdp_meta.worlds.rank.rendezvous import seed

BODY, FUNCTION = f"{__name__}:run_body", f"{__name__}:run_function"
"""What a world calls."""
ASSUMING = "Using `assume` outside a property-based test"
"""By intent: the ranks say that an example is of no use, and the pytest process tells Hypothesis."""


@dataclass(frozen=True)
class Style:
    """How the user wants failures shown: the options of pytest that say so."""

    traceback: Any = "long"
    locals: bool = False


def run_body(call: Call, style: Style, votes: frozenset[str]) -> str | None:
    """Runs the body; the class of what it returns, which should be nothing.

    Raises what a vote is as it is, and anything else as CallFailed, whose detail is pytest's own account of it.
    """
    function, arguments = call.unpack(current())
    seed(current().device.type)  # one world runs all examples of Hypothesis, which are to be alike
    try:
        with telling(unless=ASSUMING):
            returned = function(**arguments)
    except BaseException as error:
        if f"{type(error).__module__}.{type(error).__qualname__}" in votes:
            raise
        raise CallFailed(detail=_account(error, style)) from error
    finally:
        for value in arguments.values():
            if isinstance(value, pytest.MonkeyPatch):
                value.undo()
    return None if returned is None else type(returned).__name__


def run_function(function: bytes, args: Sequence[bytes], kwargs: Mapping[str, bytes]) -> Any:
    """Calls what a test has handed to ``fsdp_world.run``, each value pickled by itself."""
    called = pickle.loads(function)
    with telling(unless=ASSUMING):
        return called(*map(pickle.loads, args), **{name: pickle.loads(value) for name, value in kwargs.items()})


def _account(error: BaseException, style: Style) -> str:
    """The traceback from the body on, with its source lines."""
    own = error.__traceback__
    assert own is not None
    info = pytest.ExceptionInfo.from_exception(error.with_traceback(own.tb_next or own))
    bare = isinstance(error, pytest.fail.Exception) and not error.pytrace
    told = str(info.getrepr(style="value" if bare else style.traceback, showlocals=style.locals, chain=True))
    # str() strips the indentation of the first source line, and of no other.
    return told if bare or style.traceback == "short" or told.startswith((">", "E")) else f"    {told}"
