"""Specifications of worlds: meshes with an open size, wrong sizes, and the errors about them."""

from __future__ import annotations

import pytest

from pytest_fsdp_meta.worlds import WorldSpec, resolve_mesh


@pytest.mark.parametrize(
    ("mesh", "world_size", "resolved"),
    [
        ({"dp_shard": 2}, None, {"dp_shard": 2}),
        ({"dp_shard": 2}, 2, {"dp_shard": 2}),
        ({"dp_shard": -1}, 8, {"dp_shard": 8}),
        ({"dp_replicate": 2, "dp_shard": -1}, 8, {"dp_replicate": 2, "dp_shard": 4}),
        ({"dp_replicate": -1, "tp": 8}, 8, {"dp_replicate": 1, "tp": 8}),
        ({"dp": 1}, 1, {"dp": 1}),
    ],
)
def test_an_open_size_is_computed(mesh: dict[str, int], world_size: int | None, resolved: dict[str, int]) -> None:
    result = resolve_mesh(mesh, world_size)
    assert list(result.items()) == list(resolved.items()), "dimensions keep the order in which the user named them"


def test_numpy_ints_are_sizes() -> None:
    numpy = pytest.importorskip("numpy")
    resolved = resolve_mesh({"dp_shard": -1, "tp": numpy.int32(2)}, 4)
    assert resolved == {"dp_shard": 2, "tp": 2}
    assert {type(size) for size in resolved.values()} == {int}


@pytest.mark.parametrize(
    ("mesh", "world_size", "message"),
    [
        ({}, 2, "mesh has no dimensions; write for example mesh={'dp_shard': 2}"),
        ({"": 2}, 2, "mesh dimension '' is not a name; use one such as 'dp_shard' or 'tp'"),
        ({"dp shard": 2}, 2, "mesh dimension 'dp shard' is not a name; use one such as 'dp_shard' or 'tp'"),
        ({0: 2}, 2, "mesh dimension 0 is not a name; use one such as 'dp_shard' or 'tp'"),
        ({"dp": 0}, 2, "mesh size dp=0 should be a positive int, or -1 for the remaining ranks"),
        ({"dp": -2}, 2, "mesh size dp=-2 should be a positive int, or -1 for the remaining ranks"),
        ({"dp": True}, 2, "mesh size dp=True should be a positive int, or -1 for the remaining ranks"),
        ({"dp": 2.0}, 2, "mesh size dp=2.0 should be a positive int, or -1 for the remaining ranks"),
        ({"dp": "2"}, 2, "mesh size dp='2' should be a positive int, or -1 for the remaining ranks"),
        ({"dp": -1, "tp": -1}, 4, "mesh dp=-1 x tp=-1 leaves 2 sizes open; only one may be -1"),
        ({"dp": -1, "tp": 2}, None, "mesh dp=-1 x tp=2 leaves dp open; set world_size as well, to compute it from"),
        ({"dp": -1, "tp": 4}, 6, "mesh dp=-1 x tp=4 does not fit a world of 6, which is not a multiple of 4"),
        ({"dp": -1, "tp": 4}, 2, "mesh dp=-1 x tp=4 does not fit a world of 2, which is not a multiple of 4"),
        ({"dp": 2, "tp": 2}, 8, "mesh dp=2 x tp=2 has 4 ranks, but the world size is 8"),
    ],
)
def test_an_impossible_mesh_is_an_error(mesh: dict[str, int], world_size: int | None, message: str) -> None:
    with pytest.raises(ValueError) as caught:
        resolve_mesh(mesh, world_size)
    assert str(caught.value) == message


def test_size_is_the_product_of_the_mesh() -> None:
    assert WorldSpec({"dp_replicate": 2, "dp_shard": 3, "tp": 4}).size == 24
    assert WorldSpec({"dp_shard": 1}).size == 1


def test_spec_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        WorldSpec({"dp": 2}).timeout = 1.0  # type: ignore[misc]
