"""From pytest items to ranks: what is sent, and the command that runs an item again."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

from pytest_fsdp_meta.loader.call import ByName, Call, body
from pytest_fsdp_meta.plugin._pytest_private import requested_fixtures
from pytest_fsdp_meta.plugin.collection import ARGUMENT
from pytest_fsdp_meta.plugin.hypothesis_given import given_test
from pytest_fsdp_meta.trial import LoaderFailed


class Unsendable(LoaderFailed):
    """The test or a fixture value cannot be pickled; the message says what to do."""


def pack_call(item: pytest.Function) -> Call:
    """The test and its fixture values, pickled one by one. Raises Unsendable."""
    import cloudpickle

    wanted = [name for name in requested_fixtures(item) if name != ARGUMENT]
    arguments = {name: _pack_fixture(name, item.funcargs[name]) for name in wanted if name != "fsdp"}
    try:
        function = cloudpickle.dumps(_by_name(item.obj))
    except Exception as error:
        what = "the test and its instance (self)" if item.cls else "the test"
        raise Unsendable(f"{what} cannot be sent to the ranks: {type(error).__name__}: {error}") from error
    return Call(function, arguments, "fsdp" if "fsdp" in wanted else None)


def _by_name(function: Any) -> Any:
    if given_test(function) is None:
        return function
    inner, owner = body(function), getattr(function, "__self__", None)
    if "<locals>" in inner.__qualname__:
        return inner  # made by a function, so that no name leads to it
    return ByName(inner.__module__, inner.__qualname__, owner)


def _pack_fixture(name: str, value: Any) -> bytes:
    if isinstance(value, pytest.MonkeyPatch):
        value = pytest.MonkeyPatch()  # one of the rank's own, undone there after the body
    elif (getattr(value, "__module__", None) or "").startswith("_pytest.") and not isinstance(
        value, pytest.TempPathFactory
    ):
        raise Unsendable(
            f"fixture {name!r} is pytest's own, and sees nothing of what happens on the ranks; leave it out, and use "
            "what works in the body itself, such as pytest.warns or contextlib.redirect_stdout"
        )
    return pack(value, f"fixture {name!r} gives a {type(value).__name__}, which", "return")


def pack_drawn(name: str, value: Any) -> bytes:
    """An argument that Hypothesis drew. Raises Unsendable."""
    return pack(value, f"argument {name!r} is a {type(value).__name__}, which", "let @given draw")


def pack(value: Any, what: str, do: str) -> bytes:
    """Raises Unsendable, which says ``what`` cannot be sent, and to ``do`` so with plain data."""
    import cloudpickle

    try:
        packed = cloudpickle.dumps(value)
    except Exception as error:
        raise Unsendable(
            f"{what} cannot be sent to the ranks ({type(error).__name__}: {error}); {do} plain data, such as a path or "
            "a config, and build the rest on the ranks"
        ) from error
    assert isinstance(packed, bytes)
    return packed


def pack_run(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[bytes, list[bytes], dict[str, bytes]]:
    """What is handed to ``fsdp_world.run``. Raises Unsendable, which names what cannot be sent."""

    def argument(name: object, value: Any) -> bytes:
        return pack(value, f"argument {name!r} of fsdp_world.run is a {type(value).__name__}, which", "pass")

    called = getattr(function, "__name__", type(function).__name__)
    return (
        pack(function, f"the function {called} of fsdp_world.run, or what it refers to,", "let it refer to"),
        [argument(number, value) for number, value in enumerate(args, 1)],
        {name: argument(name, value) for name, value in kwargs.items()},
    )
