"""Holds what ``_pytest_private.py`` reads: this breaks when pytest moves it."""

from __future__ import annotations

import pytest

from pytest_fsdp_meta._pytest_private import fixtures_asking_for, parameters, requested_fixtures, resolved_fixture


@pytest.fixture
def inner() -> int:
    return 1


@pytest.fixture
def outer(inner: int) -> int:
    return inner


@pytest.mark.usefixtures("recwarn")
@pytest.mark.parametrize("n", [[7]])
def test_what_pytest_keeps_private(request: pytest.FixtureRequest, outer: int, n: list[int], size: int = 3) -> None:  # noqa: PT028
    item = request.node
    assert isinstance(item, pytest.Function)
    assert requested_fixtures(item) == ("request", "outer", "n")
    assert "inner" in item.fixturenames
    function = resolved_fixture(item, "outer")
    assert function is not None
    assert (function.__name__, function.__module__) == ("outer", __name__)
    assert resolved_fixture(item, "absent") is None
    assert fixtures_asking_for(item, "inner") == ["outer"]
    assert fixtures_asking_for(item, "outer") == []
    assert parameters(item) == {"n": [7]}
    # The same object for every item that it parametrizes: items of one loader are told apart by this.
    assert parameters(item)["n"] is n


class TestMethod:
    def test_self_is_no_fixture(self, request: pytest.FixtureRequest) -> None:
        assert requested_fixtures(request.node) == ("request",)
        assert parameters(request.node) == {}
