"""The export that is put together from the ranks' state dicts, without loaders."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from pytest_fsdp_meta import Part, Subject
from pytest_fsdp_meta.checks.checkpoint.facts import Assembled, RankExport
from pytest_fsdp_meta.checks.checkpoint.observe.state_dict import compare_export, export
from pytest_fsdp_meta.evidence import Export, PartFacts
from pytest_fsdp_meta.ranks.adapters.lookup import remember
from pytest_fsdp_meta.ranks.assembly import AssembledRecord, put_together, write_part
from pytest_fsdp_meta.ranks.reference_record import Record, record_at, write_record
from pytest_fsdp_meta.worlds import World, current
from tests.world_help import world_of

ROWS, SHAPE = 8, (8, 3)
BLOCKS = {0: [(0, 2), (4, 6)], 1: [(2, 4), (6, 8)]}
"""The rows of each rank, as of a fused weight of two blocks."""


def whole(name: str = "a", dtype: torch.dtype = torch.float32) -> Tensor:
    values = torch.arange(24.0).reshape(SHAPE) + (100 if name == "b" else 0)
    return (values / 7).to(dtype)


def holding(**tensors: Tensor) -> nn.Module:
    model = nn.Module()
    for name, tensor in tensors.items():
        model.register_parameter(name, nn.Parameter(tensor, requires_grad=tensor.is_floating_point()))
    return model


def own_rows(tensor: Tensor, rank: int | None = None) -> Tensor:
    return torch.cat([tensor[start:stop] for start, stop in BLOCKS[current().rank if rank is None else rank]])


def as_blocks(name: str, tensor: Tensor) -> Part:
    return Part.blocks(tensor, SHAPE, BLOCKS[current().rank])


def fused(**state: Any) -> Subject:
    """Return a subject whose ranks hold blocks; ``state`` replaces values of its state dict, None leaves them out."""
    model = holding(a=own_rows(whole()))
    if not state:
        return Subject(model, adapter=as_blocks)

    def state_dict(model: nn.Module) -> dict[str, Any]:
        found = {**model.state_dict(), **state}
        return {key: value for key, value in found.items() if value is not None}

    return Subject(model, adapter=as_blocks, state_dict=state_dict)


def on_rank_1(value: Any) -> dict[str, Any]:
    return {"a": value} if current().rank == 1 else {}


def as_run() -> Subject:
    rank = current().rank
    return Subject(holding(a=whole()[4 * rank : 4 * rank + 4]), adapter=lambda n, t: Part.run(t, SHAPE, 12 * rank))


def split_otherwise_than_placed() -> Subject:
    """Rank 0 has 5 of the 8 rows, and rank 1 has 3: the shards of megatron-fsdp are such DTensors."""
    start, stop = [(0, 5), (5, 8)][current().rank]
    rows = DTensor.from_local(whole()[start:stop], current().mesh, [Shard(0)], shape=SHAPE, stride=(3, 1))
    return Subject(
        holding(a=rows),
        adapter=lambda n, t: Part.block(t.to_local(), SHAPE, (start, 0)),
        state_dict=lambda model: model.state_dict(),
    )


def empty_on_rank_1() -> Subject:
    start = ROWS * current().rank
    return Subject(holding(a=whole()[start:]), adapter=lambda n, t: Part.block(t, SHAPE, (start, 0)))


def tied() -> Subject:
    model = holding(a=own_rows(whole()))
    model.b = model.a
    return Subject(model, adapter=as_blocks)


def buffer() -> Subject:
    model = nn.Module()
    model.register_buffer("a", own_rows(whole()))
    return Subject(model, adapter=as_blocks)


def replicas(change: Callable[[Tensor], Tensor] = lambda value: value, dtype: torch.dtype = torch.float32) -> Subject:
    """Return a subject that both ranks hold in part alike; ``change`` is what the state dict of rank 1 has."""
    rank, model = current().rank, holding(a=whole(dtype=dtype)[:6])
    state = {"a": change(model.a.detach()) if rank == 1 else model.a.detach()}
    return Subject(model, adapter=lambda n, t: Part.block(t, SHAPE, (0, 0)), state_dict=lambda model: state)


def one_each() -> Subject:
    """Rank 0 has ``a``, and rank 1 has ``b``."""
    name = "ab"[current().rank]
    return Subject(holding(**{name: whole(name)}))


def one_each_as_dtensors() -> Subject:
    """The first two ranks have ``a``, the others ``b``: each pair shards its tensor."""
    mesh = current().mesh
    name = "ab"[mesh.get_local_rank("ep")]
    return Subject(holding(**{name: distribute_tensor(whole(name), mesh["dp"], [Shard(0)])}))


def whole_on_rank_0() -> Subject:
    """Rank 0 gathers both tensors by hand, also the one that it does not hold; rank 1 returns a placeholder."""
    name = "ab"[current().rank]
    state = {"a": whole("a"), "b": whole("b")} if current().rank == 0 else {"b": torch.empty(0)}
    return Subject(holding(**{name: own_rows(whole(name))}), adapter=as_blocks, state_dict=lambda model: state)


SUBJECTS: dict[str, Callable[[], Subject]] = {
    "blocks": fused,
    "run": as_run,
    "empty on rank 1": empty_on_rank_1,
    "split otherwise than placed": split_otherwise_than_placed,
    "tied": tied,
    "buffer": buffer,
    "one each": one_each,
    "one each as DTensors": one_each_as_dtensors,
    "whole on rank 0": whole_on_rank_0,
    "whole on every rank": lambda: fused(a=whole()),
    "other order": lambda: fused(**on_rank_1(own_rows(whole()).roll(2, 0))),
    "stale": lambda: fused(**on_rank_1(torch.zeros(4, 3))),
    "the neighbour's": lambda: fused(**on_rank_1(own_rows(whole(), 0))),
    "transposed": lambda: fused(**on_rank_1(own_rows(whole()).t())),
    "left out": lambda: fused(**on_rank_1(None)),
    "no tensor": lambda: fused(**on_rank_1("a string")),
    "rounded": lambda: fused(**on_rank_1(own_rows(whole()).bfloat16())),
    "in double": lambda: fused(**on_rank_1(own_rows(whole()).double())),
    "extra": lambda: fused(extra=torch.ones(2), a_extra_state={"count": 1}),
    "replicas": replicas,
    "replicas differ": lambda: replicas(lambda value: value + 1),
    "replicas in float8": lambda: replicas(dtype=torch.float8_e4m3fn),
    "replicas in complex": lambda: replicas(dtype=torch.complex64),
    "replicas in complex differ": lambda: replicas(lambda value: value + 1j, dtype=torch.complex64),
}


def exported(case: str, names: list[str], folder: str) -> RankExport:
    subject = SUBJECTS[case]()
    remember(subject.model, subject.adapter)
    current().state["subject"] = subject
    return export(folder, names)


def compared(folder: str, exports: list[RankExport], dtype: str, tied: bool) -> Export:
    reference = holding(**{name: whole(name, getattr(torch, dtype)) for name in ("a", "b")})
    if tied:
        reference.b = reference.a
    current().state["reference"] = reference
    write_record(record_at(folder, "values"), reference.named_parameters())
    return compare_export(folder, str(record_at(folder, "values")), exports)


@pytest.fixture(scope="module")
def worlds():
    """Return the two ranks of most cases and the rank of the reference; they keep nothing from one case to the next."""
    with world_of(2) as ranks, world_of(1) as alone:
        yield ranks, alone


@pytest.fixture
def run(worlds, tmp_path):
    """Return a function that exports a case, and compares it with the reference of ``a`` and ``b``."""

    def observe(case: str, *names: str, dtype: str = "float32", ranks: World = worlds[0], tied: bool = False) -> Export:
        exports = ranks.run(exported, case, list(names or ["a"]), str(tmp_path))
        found: Export = worlds[1].run(compared, str(tmp_path), exports, dtype, tied)[0]
        return found

    return observe


def equal_on(found: Assembled) -> dict[int, bool]:
    return {part.rank: part.comparison is not None and part.comparison.equal for part in found.parts}


@pytest.mark.parametrize(
    "case", ["blocks", "run", "empty on rank 1", "split otherwise than placed", "buffer", "replicas"]
)
def test_parts_make_the_whole(run, case):
    found = run(case)
    (a,) = found.assembled
    assert (found.missing, found.unexpected, found.comparisons, found.rounded) == (("b",), (), (), {})
    assert (equal_on(a), a.elements, a.diverging) == ({0: True, 1: True}, 24, ())
    missing = (6, (6, 0), ()) if case == "replicas" else (0, None, ())
    assert (a.absent, a.index, a.lacking) == missing
    assert {part.rounded for part in a.parts} == {""}


def test_tied_names_are_both_exported(run):
    found = run("tied", "a", "b")
    a, b = found.assembled
    assert (found.missing, a.name, b.name) == ((), "a", "b")
    assert equal_on(a) == {0: True, 1: True}
    assert equal_on(b) == {0: False, 1: False}, "the reference's b has other values"


def test_loading_one_name_of_a_tie_loads_the_other(run):
    assert run("blocks", tied=True).missing == ()
    assert run("blocks").missing == ("b",)


@pytest.mark.parametrize(
    ("case", "mesh", "equal"),
    [
        ("one each", {"dp": 2}, {"a": {0: True}, "b": {1: True}}),
        ("one each as DTensors", {"ep": 2, "dp": 2}, {"a": {0: True, 1: True}, "b": {2: True, 3: True}}),
        ("whole on rank 0", {"dp": 2}, {"a": {0: True}, "b": {0: True}}),
    ],
)
def test_names_of_some_ranks_are_united(run, worlds, case, mesh, equal):
    """What one rank gathers by hand counts alone."""
    with nullcontext(worlds[0]) if len(mesh) == 1 else world_of(4, mesh=mesh) as ranks:
        found = run(case, "a", "b", ranks=ranks)
    assert (found.missing, found.unexpected) == ((), ())
    assert {a.name: equal_on(a) for a in found.assembled} == equal
    assert [a.absent for a in found.assembled] == [0, 0]


def test_what_every_rank_gathers_by_hand_is_compared_once(run):
    assert [equal_on(a) for a in run("whole on every rank").assembled] == [{0: True}]


@pytest.mark.parametrize("case", ["other order", "stale", "the neighbour's"])
def test_a_part_with_other_values_has_its_rank_and_global_index(run, case):
    (a,) = run(case).assembled
    assert (equal_on(a), a.absent, a.diverging) == ({0: True, 1: False}, 0, ())
    comparison = a.parts[1].comparison
    assert (comparison.index, comparison.differing, comparison.elements) == ((2, 0), 12, 12)


def test_a_value_that_is_neither_whole_nor_a_part(run):
    (a,) = run("transposed").assembled
    assert (equal_on(a), a.elements, a.absent) == ({0: True, 1: False}, 0, 0)
    comparison = a.parts[1].comparison
    assert (comparison.problem, comparison.should_be) == ("shape (3, 4)", "(8, 3), as in the reference")


@pytest.mark.parametrize("case", ["left out", "no tensor"])
def test_elements_that_no_rank_exports(run, case):
    (a,) = run(case).assembled
    assert (equal_on(a), a.elements, a.absent, a.index, a.lacking) == ({0: True}, 24, 12, (2, 0), (1,))


@pytest.mark.parametrize(("case", "rounded"), [("rounded", "bfloat16"), ("in double", "")])
def test_a_part_in_another_dtype(run, case, rounded):
    (a,) = run(case).assembled
    assert [part.rounded for part in a.parts] == ["", rounded]
    assert a.parts[1].comparison.cast


def test_other_keys_are_gathered_as_before(run):
    found = run("extra")
    assert (found.missing, found.unexpected, len(found.assembled)) == (("b",), ("extra",), 1)


def test_replicas_that_export_other_values(run):
    (a,) = run("replicas differ").assembled
    assert (a.diverging, a.before) == ((1,), (0,))
    assert equal_on(a) == {0: True, 1: False}


@pytest.mark.parametrize(
    ("case", "diverging"),
    [("replicas in float8", ()), ("replicas in complex", ()), ("replicas in complex differ", (1,))],
)
def test_replicas_of_odd_dtypes(run, case, diverging):
    (a,) = run(case, dtype="float8_e4m3fn" if "float8" in case else "complex64").assembled
    assert (a.diverging, equal_on(a)) == (diverging, {0: True, 1: not diverging})


def test_parts_are_put_together_one_tensor_at_a_time(tmp_path):
    held = [{"a": PartFacts((4,), (((0, 1), (3, 4)),)), "b": PartFacts((2, 2), (((1, 3),),), flat=True)}, {}]
    write_record(tmp_path / "0", [("a", torch.tensor([1.0, 4.0])), ("b", torch.tensor([2.0, 3.0]))])
    write_record(tmp_path / "1", [])
    records = [Record(Path(tmp_path, str(rank))) for rank in range(2)]
    found = {name: values.tolist() for name, values in put_together(held, records)}
    assert found == {"a": [1.0, 0.0, 0.0, 4.0], "b": [[0.0, 2.0], [3.0, 0.0]]}
    kept = dict(put_together(held, records, lambda name, facts, values: torch.full(facts.shape, 9.0)))
    assert kept["a"].tolist() == [1.0, 9.0, 9.0, 4.0]


def test_an_assembled_record_is_read_like_one_of_whole_tensors(tmp_path):
    square = torch.arange(12.0).reshape(4, 3)
    by_rows = [{"a": PartFacts((4, 3), (rows, ((0, 3),)))} for rows in (((0, 1), (3, 4)), ((1, 3),))]
    flat = [{"b": PartFacts((4, 3), (span,), flat=True)} for span in (((0, 5),), ((5, 12),))]
    paths = [tmp_path / "0", tmp_path / "1"]
    write_record(paths[0], [("a", square[[0, 3]]), ("b", square.reshape(-1)[:5].bfloat16())])
    write_record(paths[1], [("a", square[1:3]), ("b", square.reshape(-1)[5:].bfloat16())])
    record = AssembledRecord([{**a, **b} for a, b in zip(by_rows, flat, strict=True)], paths, "what was saved")
    assert (record.names(), "a" in record, "c" in record) == (["a", "b"], True, False)
    assert [(record.shape(name), record.dtype(name)) for name in "ab"] == [((4, 3), "float32"), ((4, 3), "bfloat16")]
    assert torch.equal(record.read_whole("a"), square)
    assert torch.equal(record.read("a", (((0, 1), (2, 4)), ((1, 2),))), square[[0, 2, 3], 1:2])
    assert record.read_run("b", ((2, 4), (5, 8))).tolist() == [2.0, 3.0, 5.0, 6.0, 7.0]
    assert torch.equal(record.read("a", (((3, 4),), ((0, 3),))), square[3:])


def test_a_scalar_and_an_empty_part_are_written():
    scalar, row = torch.zeros(()), torch.zeros(3)
    write_part(scalar, PartFacts((), ()), torch.tensor(2.0))
    write_part(row, PartFacts((3,), ((),)), torch.empty(0))
    assert (scalar.item(), row.tolist()) == (2.0, [0.0, 0.0, 0.0])
    assert (PartFacts((), ()).whole, PartFacts((3,), ((),)).whole, PartFacts((0,), ((),)).whole) == (True, False, True)
