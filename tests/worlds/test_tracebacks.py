"""Tracebacks of ranks: what is shown of an exception and of those that led to it."""

from __future__ import annotations

import re
import traceback
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from pytest_fsdp_meta.worlds.rank.main import _describe_failure
from pytest_fsdp_meta.worlds.rank.tracebacks import (
    describe_long_chain,
    format_traceback,
    tensors_in_use,
    user_place,
)

NOWHERE = Path("/nowhere")


def chained(times: int) -> BaseException:
    """Return an exception with ``times`` exceptions that led to it, by turns as a cause and as a context."""
    last: Exception = ValueError("attempt 0")
    for number in range(1, times + 1):
        try:
            try:
                raise last
            except Exception as earlier:
                if number % 2:
                    raise RuntimeError(f"attempt {number}") from earlier
                raise KeyError(f"attempt {number}")  # noqa: B904
        except Exception as error:
            last = error
    return last


@pytest.mark.parametrize("times", [0, 1, 4])
def test_a_short_chain_is_shown_as_python_shows_it(times: int) -> None:
    error = chained(times)
    assert format_traceback(error, NOWHERE) == "".join(traceback.format_exception(error))
    assert not describe_long_chain(error)


def test_a_suppressed_context_is_not_shown() -> None:
    error = chained(1)
    assert "attempt 0" in format_traceback(error, NOWHERE)
    error.__cause__ = None  # as "from None" does; __suppress_context__ stays set
    assert "attempt 0" not in format_traceback(error, NOWHERE)


def test_a_chain_that_leads_back_to_itself_ends() -> None:
    first, second = ValueError("first"), RuntimeError("second")
    first.__cause__, second.__cause__ = second, first
    assert format_traceback(first, NOWHERE).count("ValueError: first") == 1


def test_a_long_chain_shows_its_ends() -> None:
    error = chained(5000)
    shown = re.findall(r"^(?:\w+Error: .*|\.\.\. .*)$", format_traceback(error, NOWHERE), re.MULTILINE)
    assert shown == [
        *("ValueError: attempt 0", "RuntimeError: attempt 1", "... 4996 more exceptions ..."),
        *("KeyError: 'attempt 4998'", "RuntimeError: attempt 4999", "KeyError: 'attempt 5000'"),
    ]
    assert describe_long_chain(error) == "5000 exceptions led to this one, the first of them: ValueError: attempt 0"


def test_the_place_is_the_innermost_line_of_the_users_code() -> None:
    with pytest.raises(ValueError) as caught:
        int("x", 1000)
    line = traceback.extract_tb(caught.value.__traceback__)[-1].lineno
    assert user_place(caught.value) == f"{__file__}:{line}"
    with pytest.raises(re.error) as caught:  # type: ignore[assignment]
        re.compile("(")
    line = traceback.extract_tb(caught.value.__traceback__)[0].lineno
    assert user_place(caught.value) == f"{__file__}:{line}"
    assert user_place(ValueError("never raised")) == ""


class Compiled(nn.Module):
    """A model behind a wrapper, whose name its tensors do not have."""

    def __init__(self) -> None:
        super().__init__()
        self._orig_mod = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(3)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._orig_mod(x)


@pytest.mark.parametrize(
    ("act", "found"),
    [
        (lambda model: model(torch.ones(2, 3)), ("0.weight", "0.bias")),
        (lambda model: model(torch.ones(4, 2)), tuple(f"1.1.{name}" for name in nn.BatchNorm1d(3).state_dict())),
        (lambda model: model.load_state_dict({"_orig_mod.0.weight": torch.ones(3)}), ()),
        (lambda model: model.wieght, ()),
        (lambda model: 1 / 0, ()),
    ],
    ids=["a forward", "a forward further down", "the model itself", "its attribute", "no module"],
)
def test_an_exception_is_raised_in_a_module_with_these_tensors(act, found):
    with pytest.raises(Exception) as caught:
        act(Compiled())
    assert tensors_in_use(caught.value) == found


def test_an_error_has_no_colours_and_no_note_that_is_longer_than_what_it_leaves_out():
    task: Any = SimpleNamespace(place=SimpleNamespace(rank=0))
    failure = _describe_failure(task, ValueError(f"\x1b[31mbad\x1b[0m {'x' * 320}"))
    assert failure.summary == f"raised ValueError: bad {'x' * 320}"
    assert "(100 characters)" in _describe_failure(task, ValueError("x" * 400)).summary
