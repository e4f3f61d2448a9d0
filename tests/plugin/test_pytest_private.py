"""The private names of pytest that ``_pytest_private.py`` uses: these tests fail when pytest changes one."""

from __future__ import annotations

import subprocess
import sys
import unittest
from pathlib import Path

import pytest

from pytest_fsdp_meta.loader.call import ASSUME, SKIPS, XFAIL
from pytest_fsdp_meta.plugin._pytest_private import (
    expectation,
    fixtures_asking_for,
    fixtures_instead,
    ini_keys,
    parameters,
    recreate,
    requested_fixtures,
    resolved_fixture,
    rewritten_modules,
    skipped,
)


@pytest.fixture
def inner() -> int:
    return 1


@pytest.fixture
def outer(inner: int) -> int:
    return inner


@pytest.mark.usefixtures("recwarn")
@pytest.mark.parametrize("n", [[7]])
def test_fixtures_and_parameters(request: pytest.FixtureRequest, outer: int, n: list[int], size: int = 3) -> None:  # noqa: PT028
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
    # Every item with this parameter has the same object: items with the same node id are compared by identity.
    assert parameters(item)["n"] is n


def test_fixtures_that_there_are_instead_of_one_that_does_not_exist(request: pytest.FixtureRequest) -> None:
    with pytest.raises(pytest.FixtureLookupError) as caught:
        request.getfixturevalue("iner")
    assert {"inner", "outer", "tmp_path"} <= set(fixtures_instead(caught.value))
    with pytest.raises(pytest.FixtureLookupError) as caught:
        request.getfixturevalue("asks_for_itself")
    assert fixtures_instead(caught.value) == []


@pytest.fixture
def asks_for_itself(asks_for_itself: object) -> object:
    return asks_for_itself


def test_keys_of_the_ini_file(pytester: pytest.Pytester) -> None:
    pytester.makeini("[pytest]\nfirst = 1\ntestpaths = x")
    assert ini_keys(pytester.parseconfig("-osecond=2")) == ["first", "testpaths", "second"]


class Own(pytest.Function):
    pass


@pytest.mark.slow
@pytest.mark.parametrize("n", [7])
def test_an_item_of_another_class_is_the_same_test(request: pytest.FixtureRequest, n: int) -> None:
    item = recreate(Own, request.node)
    assert type(item) is Own
    for name in ("nodeid", "name", "originalname", "obj", "parent", "own_markers", "fixturenames", "callspec"):
        assert getattr(item, name) == getattr(request.node, name), name
    assert {"slow", "parametrize", "7"} <= set(item.keywords)
    skip = skipped("no such machine")
    assert (type(skip), str(skip)) == (pytest.skip.Exception, "no such machine")
    assert skip._use_item_location  # type: ignore[attr-defined]


class TestMethod:
    def test_self_is_not_a_fixture(self, request: pytest.FixtureRequest) -> None:
        assert requested_fixtures(request.node) == ("request",)
        assert parameters(request.node) == {}


@pytest.mark.parametrize(
    ("mark", "found"),
    [
        (pytest.mark.slow, ""),
        (pytest.mark.skip, "skip"),
        (pytest.mark.skipif(False, reason="no"), ""),
        (pytest.mark.skipif(True, reason="yes"), "skip"),
        (pytest.mark.skipif(True), "skip"),  # invalid without a reason: an error when the item runs
        (pytest.mark.xfail, "xfail"),
        (pytest.mark.xfail(False, reason="no"), ""),
        (pytest.mark.xfail(raises=(OSError, pytest.fail.Exception)), "xfail"),
        (pytest.mark.xfail(raises=OSError), ""),
    ],
)
def test_what_a_mark_will_do_to_an_item(request: pytest.FixtureRequest, mark: pytest.MarkDecorator, found: str) -> None:
    item = pytest.Function.from_parent(request.node.parent, name="test_it", callobj=lambda: None)
    item.add_marker(mark)
    assert expectation(item) == found


def test_qualified_names_of_outcomes() -> None:
    hypothesis = pytest.importorskip("hypothesis.errors")
    skips = dict(zip(SKIPS, (pytest.skip.Exception, unittest.SkipTest), strict=True))
    kinds = skips | {XFAIL: pytest.xfail.Exception, ASSUME: hypothesis.UnsatisfiedAssumption}
    for name, kind in kinds.items():
        assert name == f"{kind.__module__}.{kind.__qualname__}"


def test_modules_passed_to_register_assert_rewrite() -> None:
    pytest.register_assert_rewrite("tests.no_such_module")
    assert "tests.no_such_module" in rewritten_modules()


REWRITING = """
import os
from pytest_fsdp_meta.plugin._pytest_private import rewrite_asserts
os.environ["PYTEST_PLUGINS"] = "no_such_plugin"
for _ in range(2):
    rewrite_asserts(os.getcwd(), "2", "odd_name")
assert os.environ["PYTEST_PLUGINS"] == "no_such_plugin" and "PYTEST_DISABLE_PLUGIN_AUTOLOAD" not in os.environ
try:
    import odd_name
except AssertionError as error:
    print(error)
"""


def test_asserts_are_rewritten_without_a_session(tmp_path: Path) -> None:
    (tmp_path / "odd_name.py").write_text("left = ['100%', 2]\nassert left == ['100%', 3]")
    run = subprocess.run([sys.executable, "-c", REWRITING], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert run.stderr == ""
    assert run.stdout.splitlines()[:3] == ["assert ['100%', 2] == ['100%', 3]", "  ", "  At index 1 diff: 2 != 3"]
