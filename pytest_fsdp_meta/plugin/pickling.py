"""Pickles what ranks need from the pytest process: a test, its fixture values, arguments of ``fsdp_world.run``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

from pytest_fsdp_meta.loader.call import ByName, Call, body
from pytest_fsdp_meta.plugin._pytest_private import requested_fixtures
from pytest_fsdp_meta.plugin.hypothesis_given import given_test
from pytest_fsdp_meta.trial import LoaderFailed


class Unsendable(LoaderFailed):
    """The test or a fixture value cannot be pickled; the message says what to do."""


def pack_call(item: pytest.Function) -> Call:
    """Pickle the test and its fixture values one by one, so that an error can name one. Raises Unsendable."""
    from pytest_fsdp_meta.worlds.system.pickling import dumps

    requested = requested_fixtures(item)
    arguments = {name: _pack_fixture(name, item.funcargs[name]) for name in requested if name != "fsdp"}
    try:
        function = dumps(_by_name(item.obj))
    except Exception as error:
        what = "the test and its instance (self)" if item.cls else "the test"
        raise Unsendable(f"{what} cannot be sent to the ranks: {type(error).__name__}: {error}") from error
    return Call(function, arguments, "fsdp" if "fsdp" in requested else None)


def _by_name(function: Any) -> Any:
    if given_test(function) is None:
        return function
    inner, owner = body(function), getattr(function, "__self__", None)
    if "<locals>" in inner.__qualname__:
        return inner  # defined in a function, so ranks cannot import it by name
    return ByName(inner.__module__, inner.__qualname__, owner)


def _pack_fixture(name: str, value: Any) -> bytes:
    if isinstance(value, pytest.MonkeyPatch):
        value = pytest.MonkeyPatch()  # each rank gets its own, undone there after the body
    elif (getattr(value, "__module__", None) or "").startswith("_pytest.") and not isinstance(
        value, pytest.TempPathFactory
    ):
        raise Unsendable(
            f"fixture {name!r} works in the pytest process only; use something inside the body instead, such as "
            "pytest.warns or contextlib.redirect_stdout"
        )
    return _pack(value, f"fixture {name!r} returns a {type(value).__name__}, which", "return")


def pack_drawn(name: str, value: Any) -> bytes:
    """Pickle an argument that Hypothesis drew. Raises Unsendable."""
    return _pack(value, f"argument {name!r} is a {type(value).__name__}, which", "let @given draw")


def _pack(value: Any, what: str, verb: str) -> bytes:
    """Pickle a value. Raises Unsendable: "``what`` cannot be sent ...; ``verb`` plain data ..."."""
    from pytest_fsdp_meta.worlds.system.pickling import dumps

    try:
        return dumps(value)
    except Exception as error:
        raise Unsendable(
            f"{what} cannot be sent to the ranks ({type(error).__name__}: {error}); {verb} plain data, such as a "
            "path or a config, and build the rest on the ranks"
        ) from error


def pack_run(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[bytes, list[bytes], dict[str, bytes]]:
    """Pickle the function and each argument of ``fsdp_world.run``. Raises Unsendable, which names the value."""

    def argument(name: object, value: Any) -> bytes:
        return _pack(value, f"argument {name!r} of fsdp_world.run is a {type(value).__name__}, which", "pass")

    called = getattr(function, "__name__", type(function).__name__)
    return (
        _pack(function, f"function {called} of fsdp_world.run, or something it refers to,", "let it refer to"),
        [argument(number, value) for number, value in enumerate(args, 1)],
        {name: argument(name, value) for name, value in kwargs.items()},
    )
