"""Arguments of ``@fsdp_conformance``, without a pytest run."""

from __future__ import annotations

import inspect
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from pytest_fsdp_meta import fsdp_conformance, fsdp_spmd
from pytest_fsdp_meta.catalogue import built_in
from pytest_fsdp_meta.plugin.markers import read_conformance_spec


def test_numpy_numbers_are_accepted() -> None:
    numpy = pytest.importorskip("numpy")
    arguments = {"world_size": numpy.int64(2), "steps": numpy.int8(4), "tolerance": numpy.float64(1e-3)}
    spec = read_conformance_spec((), arguments, (1,), built_in())
    assert (spec.meshes, spec.steps, spec.tolerance) == (({"dp_shard": 2},), 4, {"*": 1e-3})
    assert type(spec.steps) is int


def test_a_loader_decorated_twice_is_guarded_once() -> None:
    def test_loader() -> None: ...

    once = fsdp_conformance(test_loader)
    twice = fsdp_conformance(steps=1)(once)
    assert twice is once
    assert twice.__fsdp_body__ is test_loader


@pytest.mark.parametrize("decorator", [fsdp_conformance, fsdp_spmd], ids=["loader", "spmd"])
def test_the_signature_has_all_arguments(decorator: Callable[..., object]) -> None:
    """What ``help()`` and IDEs show; each argument has a type, and the docstring names it."""
    parameters = inspect.signature(decorator).parameters
    assert len(parameters) == {"fsdp_conformance": 11, "fsdp_spmd": 5}[decorator.__name__]
    assert all(one.kind is one.KEYWORD_ONLY and one.annotation is not one.empty for one in parameters.values())
    assert all(f"``{name}``" in (decorator.__doc__ or "") for name in parameters)


def test_only_what_is_given_is_in_the_mark() -> None:
    def test_loader() -> None: ...

    marked = fsdp_conformance(steps=3, world_size=None, mesh={"dp_shard": 2}, wrold_size=2)(test_loader)  # type: ignore[call-overload]
    (mark,) = marked.pytestmark
    assert mark.kwargs == {"mesh": {"dp_shard": 2}, "wrold_size": 2}


@pytest.mark.nightly
def test_type_checkers_know_the_arguments(tmp_path: Path) -> None:
    file = tmp_path / "typed.py"
    file.write_text(
        "from pytest_fsdp_meta import fsdp_conformance, fsdp_spmd\n"
        "@fsdp_conformance(world_size=(1, 2), process_group='loader')\n"
        "def test_loader(fsdp: object) -> int: return 1\n"
        "@fsdp_spmd\n"
        "def test_body() -> None: ...\n"
        "reveal_type(test_loader)\n"
        "reveal_type(test_body)\n"
        "fsdp_conformance(wrold_size=2)\n"
        "fsdp_spmd(process_group='loaded')\n"
    )
    command = [sys.executable, "-m", "mypy", "--config-file=pyproject.toml", str(file)]
    root = Path(__file__).parents[2]
    shown = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False).stdout
    assert 'typed.py:6: note: Revealed type is "def (fsdp: object) -> int"' in shown
    assert 'typed.py:7: note: Revealed type is "def ()"' in shown
    assert 'typed.py:8: error: Unexpected keyword argument "wrold_size"' in shown
    assert "typed.py:9: error: No overload variant" in shown
