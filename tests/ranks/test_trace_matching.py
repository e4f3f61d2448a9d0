"""Which part of the reference's activation a rank's should equal, by shapes, placements and values."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from pytest_fsdp_meta.checks.tracing.observe.matching import Layout, Match, is_in_another_order, match, sketch
from pytest_fsdp_meta.ranks.reference_record import Record
from tests.world_help import world_of

WHOLE = (4, 6, 8)


def spans(found: Match | None) -> list[tuple[int, int]] | None:
    return None if found is None else [runs[0] for runs in found.regions]


@pytest.mark.parametrize(
    ("shape", "layout", "expected", "split"),
    [
        ((4, 6, 8), Layout(), [(0, 4), (0, 6), (0, 8)], None),
        ((2, 6, 8), Layout((1, 2)), [(2, 4), (0, 6), (0, 8)], None),
        ((1, 6, 8), Layout((3, 4)), [(3, 4), (0, 6), (0, 8)], None),
        ((4, 6, 4), Layout((0, 1), ((1, 2),)), [(0, 4), (0, 6), (4, 8)], 2),
        ((4, 3, 8), Layout((0, 1), ((1, 2),)), [(0, 4), (3, 6), (0, 8)], 1),
        ((2, 6, 4), Layout((1, 2), ((0, 2),)), [(2, 4), (0, 6), (0, 4)], 2),
        # Rows come first, also where as many ranks share them out as see them.
        ((2, 6, 8), Layout((0, 2), ((1, 2),)), [(0, 2), (0, 6), (0, 8)], None),
        # Without a dim of rows, such as positions: the same on all ranks.
        ((4, 6, 8), Layout((1, 2)), [(0, 4), (0, 6), (0, 8)], None),
        # Another dim may be that of the rows, or a part of the model.
        ((4, 3, 8), Layout((1, 2)), [(0, 4), (3, 6), (0, 8)], None),
    ],
)
def test_a_plain_tensor_is_placed_by_the_only_way_in_which_it_fits(shape, layout, expected, split):
    found = match(torch.zeros(shape), WHOLE, layout)
    assert spans(found) == expected
    assert found is not None
    assert found.split == split


@pytest.mark.parametrize(
    ("shape", "layout"),
    [
        ((4, 6), Layout()),
        ((3, 6, 8), Layout((0, 2))),
        ((4, 3, 8), Layout((0, 2), ((1, 2),))),  # rows or a part of the model?
        ((4, 3, 8), Layout((0, 1), ((1, 2), (0, 2)))),  # along which dimension of the mesh?
        ((4, 3, 4), Layout((0, 1), ((1, 2), (0, 2)))),
        ((), Layout()),
    ],
)
def test_what_fits_in_no_way_or_in_several_is_not_compared(shape, layout):
    assert match(torch.zeros(shape), WHOLE, layout) is None


def test_a_part_that_may_lie_elsewhere_has_the_other_regions():
    found = match(torch.zeros(2, 3, 8), WHOLE, Layout((0, 2), ((1, 2),)))
    assert spans(found) == [(0, 2), (3, 6), (0, 8)]
    assert found is not None
    assert found.others == ((((2, 4),), ((0, 3),), ((0, 8),)),)
    alone = match(torch.zeros(2, 6, 8), WHOLE, Layout((0, 2)))
    assert alone is not None
    assert alone.others == ()


def test_tensors_that_are_no_arrays_are_not_compared():
    assert match(torch.zeros(4, 6).to_sparse(), (4, 6), Layout()) is None


def placed() -> list[object]:
    """Match DTensors of the rows of one data-parallel rank of two."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    layout = Layout((1, 2), ((mesh.get_local_rank(), 2),))
    local = torch.zeros(2, 6, 4)
    whole = torch.zeros(2, 6, 8)
    found = [
        match(DTensor.from_local(local, mesh, [Shard(2)]), WHOLE, layout),
        match(DTensor.from_local(whole, mesh, [Replicate()]), WHOLE, layout),
        match(DTensor.from_local(whole, mesh, [Partial()]), WHOLE, layout),
        match(DTensor.from_local(whole, mesh, [Replicate()]), (4, 6, 9), layout),
    ]
    return [spans(one) for one in found]


def test_a_dtensor_is_placed_by_its_placements():
    with world_of(2) as world:
        for rank, found in enumerate(world.run(placed)):
            assert found == [
                [(2, 4), (0, 6), (4 * rank, 4 * rank + 4)],
                [(2, 4), (0, 6), (0, 8)],
                None,
                None,
            ]


def recorded(tmp_path, tensor: Tensor) -> Record:
    save_file({"x": tensor.contiguous()}, tmp_path / "x.safetensors")
    return Record(tmp_path / "x.safetensors")


def is_permuted(tmp_path, whole: Tensor, own: Tensor, allowed: float = 1e-4) -> bool:
    found = match(own, tuple(whole.shape), Layout((0, 1), ((0, 2),)))
    assert found is not None
    return is_in_another_order(own.double(), found, recorded(tmp_path, whole), "x", allowed)


def test_a_fused_tensor_has_its_slices_in_another_order(tmp_path):
    torch.manual_seed(0)
    whole = torch.randn(3, 12)
    fused = torch.cat([part.chunk(2, dim=1)[0] for part in whole.chunk(3, dim=1)], dim=1)
    assert is_permuted(tmp_path, whole, fused)
    assert is_permuted(tmp_path, whole, fused * (1 + 1e-6))
    assert not is_permuted(tmp_path, whole, fused * 1.01)
    # In its own order it is no other one, however wrong its values are.
    assert not is_permuted(tmp_path, whole, whole[:, :6].clone())
    assert not is_permuted(tmp_path, whole, torch.randn(3, 6))


def test_a_whole_tensor_has_no_other_order(tmp_path):
    whole = torch.randn(3, 4)
    found = match(whole, (3, 4), Layout())
    assert found is not None
    assert not is_in_another_order(whole.flip(1).double(), found, recorded(tmp_path, whole), "x", 1e-4)


def test_sketches_of_parts_add_up_to_that_of_their_sum():
    torch.manual_seed(0)
    parts = [torch.randn(5, 7) for _ in range(3)]
    summed = [sum(numbers) for numbers in zip(*map(sketch, parts), strict=True)]
    assert summed == pytest.approx(sketch(sum(parts)), abs=1e-5)  # type: ignore[arg-type]
    assert len(set(sketch(parts[0]))) == 3
