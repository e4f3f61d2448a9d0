"""Arguments of ``@fsdp_conformance``, without a pytest run."""

from __future__ import annotations

import pytest

from pytest_fsdp_meta import fsdp_conformance
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
