"""Test that a record of tensors on disk is read back slice by slice."""

from __future__ import annotations

import json
from itertools import product

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from pytest_fsdp_meta.checks.structure.facts import regions
from pytest_fsdp_meta.ranks.reference_record import (
    Record,
    RecordWriter,
    checkpoint_entries,
    write_record,
)


@pytest.fixture
def record(tmp_path):
    """Return a function that writes tensors to a record and opens it."""

    def write(*tensors: tuple[str, torch.Tensor]) -> Record:
        write_record(tmp_path / "values.safetensors", tensors)
        return Record(tmp_path / "values.safetensors")

    return write


def whole(tensor: torch.Tensor):
    return regions(tensor.shape, (), (), ())


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(12.0).reshape(3, 4),
        torch.arange(12, dtype=torch.bfloat16),
        torch.tensor([1.5, -0.0, float("nan"), float("inf")]),
        torch.arange(4.0).to(torch.float8_e4m3fn),
        torch.tensor([True, False]),
        torch.tensor([2**62], dtype=torch.int64),
        torch.tensor(3.5),
        torch.empty(0, 4),
        torch.arange(12.0).reshape(3, 4).t(),
        torch.arange(4.0).expand(3, 4),
        torch.arange(12.0)[3:7],
        torch.tensor([1 + 2j, 3 - 4j], dtype=torch.complex64),
        torch.tensor([[1 + 2j], [1e-300 - 4j]], dtype=torch.complex128),
        torch.tensor(3 - 4j, dtype=torch.complex128),
        torch.empty(0, 4, dtype=torch.complex128),
        torch.tensor([1 + 2j, 3 - 4j]).conj(),
        torch.tensor([2**32 - 1], dtype=torch.uint32),
        torch.tensor([2**64 - 1], dtype=torch.uint64),
        torch.arange(4.0).to(torch.float8_e4m3fnuz),
    ],
    ids=lambda tensor: f"{tensor.dtype}{list(tensor.shape)}",
)
def test_every_kind_of_tensor_is_restored(record, tensor):
    stored = record(("a", tensor))
    assert "a" in stored
    assert stored.names() == ["a"]
    assert stored.shape("a") == tuple(tensor.shape)
    assert stored.dtype("a") == str(tensor.dtype).removeprefix("torch.")
    read = stored.read("a", whole(tensor))
    assert (read.dtype, read.shape) == (tensor.dtype, tensor.shape)
    same = (read == tensor) | ((read != read) & (tensor != tensor))
    assert bool(same.all())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.complex128, torch.complex64, torch.uint16])
@pytest.mark.parametrize(
    "held",
    [
        (((0, 8),), ((0, 6),)),
        (((2, 4),), ((0, 6),)),
        (((0, 2), (4, 6)), ((0, 6),)),
        (((0, 1), (3, 4), (7, 8)), ((1, 2), (4, 6))),
        ((), ((0, 6),)),
        (((0, 2), (4, 6)), ()),
        ((), ()),
    ],
)
def test_the_runs_of_a_shard_are_read(record, dtype, held):
    """Also of dtypes that are stored as bytes."""
    numbers = torch.arange(48).reshape(8, 6)
    tensor = numbers.to(dtype)
    stored = record(("a", tensor), ("tied", tensor), ("plain", torch.ones(8, 6)))
    rows, columns = ([index for run in runs for index in range(*run)] for runs in held)
    for name in ("a", "tied"):
        assert (stored.shape(name), stored.dtype(name)) == ((8, 6), str(dtype).removeprefix("torch."))
        read = stored.read(name, held)
        assert (read.shape, read.dtype) == ((len(rows), len(columns)), dtype)
        assert read.tolist() == numbers[rows][:, columns].to(dtype).tolist()
    assert stored.read("plain", held).dtype == torch.float32


PACKED = [name for name in ("float4_e2m1fn_x2", "float8_e8m0fnu", "uint4") if hasattr(torch, name)]


@pytest.mark.parametrize("name", PACKED)
def test_packed_dtypes_are_restored(record, name):
    data = torch.arange(12, dtype=torch.uint8).reshape(3, 4)
    stored = record(("a", data.view(getattr(torch, name))))
    assert (stored.shape("a"), stored.dtype("a")) == ((3, 4), name)
    read = stored.read("a", (((1, 3),), ((0, 4),)))
    assert (read.dtype, read.shape) == (getattr(torch, name), (2, 4))
    assert torch.equal(read.view(torch.uint8), data[1:])


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_sparse_and_quantized_tensors_are_left_out(record):
    sparse = torch.eye(2).to_sparse()
    quantized = torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)
    stored = record(("a", sparse), ("b", torch.ones(2)), ("c", quantized))
    assert stored.names() == ["b"]
    assert [name in stored for name in "abc"] == [False, True, False]


@pytest.mark.parametrize("size", [8, 7, 5, 3, 1])
def test_strided_and_uneven_shards_cover_the_tensor(record, size):
    tensor = torch.arange(3.0 * size).reshape(size, 3)
    stored = record(("a", tensor))
    places = [(dp, tp) for tp, dp in product(range(2), repeat=2)]
    right_to_left = [stored.read("a", regions(tensor.shape, [(0, 2), (0, 1)], (2, 2), place)) for place in places]
    assert torch.equal(torch.cat(right_to_left), tensor)


def test_tied_names_are_written_once(record, tmp_path):
    weight = torch.arange(4000.0)
    stored = record(("embed", weight), ("head", weight), ("other", weight.clone()), ("view", weight.view(4000)))
    assert stored.names() == ["embed", "other", "head", "view"]
    for name in ("embed", "head", "other", "view"):
        assert name in stored
        assert (stored.shape(name), stored.dtype(name)) == ((4000,), "float32")
        assert torch.equal(stored.read(name, [((1000, 2000),)]), weight[1000:2000])
    assert 2 * weight.nbytes < (tmp_path / "values.safetensors").stat().st_size < 2.5 * weight.nbytes


def test_a_tied_scalar_is_read_under_both_names(record):
    scalar = torch.tensor(4.0)
    stored = record(("a", scalar), ("b", scalar))
    assert (stored.read("a", ()), stored.read("b", ())) == (scalar, scalar)


def test_another_view_of_the_same_memory_is_not_a_tie(record):
    square = torch.arange(9.0).reshape(3, 3)
    stored = record(("a", square), ("b", square.t()), ("c", square.view(torch.int32)), ("d", square[:2]))
    assert torch.equal(stored.read("a", whole(square)), square)
    assert torch.equal(stored.read("b", whole(square)), square.t())
    assert torch.equal(stored.read("c", whole(square)), square.view(torch.int32))
    assert torch.equal(stored.read("d", whole(square[:2])), square[:2])


def test_empty_tensors_are_not_taken_for_ties(record):
    stored = record(("a", torch.empty(0, 3)), ("b", torch.empty(0, 3)), ("c", torch.empty(0)))
    assert stored.names() == ["a", "b", "c"]


def test_parameters_are_copied_when_they_are_written(record):
    weight = torch.nn.Parameter(torch.ones(2))
    stored = record(("a", weight))
    with torch.no_grad():
        weight.zero_()
    read = stored.read("a", whole(weight))
    assert read.tolist() == [1.0, 1.0]
    assert not read.requires_grad


def test_a_writer_writes_what_the_tensors_held(tmp_path):
    weights = torch.arange(100_000.0).view(-1, 10)
    named = [("weight", weights), ("tied", weights), ("turned", weights.t()), ("row", weights[3])]
    before = [tensor.clone() for _, tensor in named]
    with RecordWriter() as writer:
        writer.write(tmp_path / "first", named)
        weights += 1
        writer.write(tmp_path / "second", named)
        weights += 1
        writer.write(tmp_path / "other", [("weight", weights[:2])])
        weights += 1
        writer.write(tmp_path / "third", named)
    records = [Record(tmp_path / name) for name in ("first", "second", "third")]
    assert records[0].names() == ["row", "turned", "weight", "tied"]
    for (name, _), tensor in zip(named, before, strict=True):
        for record, steps in zip(records, (0, 1, 3), strict=True):
            assert torch.equal(record.read_whole(name), tensor + steps)
    assert torch.equal(Record(tmp_path / "other").read_whole("weight"), before[0][:2] + 2)


def test_errors_of_a_writer_are_raised(tmp_path):
    weight = [("weight", torch.ones(2))]
    with pytest.raises(SafetensorError, match="No such file"), RecordWriter() as writer:
        writer.write(tmp_path / "missing" / "values", weight)
    with RecordWriter() as writer:
        writer.write(tmp_path / "missing" / "values", weight)
        writer.write(tmp_path / "second", weight)
        with pytest.raises(SafetensorError, match="No such file"):
            writer.write(tmp_path / "third", weight)


def test_a_name_that_is_not_there(record):
    empty = record()
    assert empty.names() == []
    assert "a" not in empty
    with pytest.raises(KeyError, match="b"):
        record(("a", torch.ones(2))).shape("b")


def test_a_checkpoint_of_several_files(tmp_path):
    save_file({"a": torch.ones(2, 3), "b": torch.zeros(4, dtype=torch.bfloat16)}, tmp_path / "model-1.safetensors")
    save_file({"c": torch.tensor(5)}, tmp_path / "model-2.safetensors", metadata={"format": "pt"})
    assert checkpoint_entries(tmp_path) == {"a": ((2, 3), "float32"), "b": ((4,), "bfloat16"), "c": ((), "int64")}
    stored = Record(str(tmp_path))
    assert torch.equal(stored.read("a", (((1, 2),), ((0, 2),))), torch.ones(1, 2))
    assert stored.read("c", ()) == 5


def test_only_the_files_of_the_index_are_the_checkpoint(tmp_path):
    # mistralai's repositories have the same weights a second time, under other names.
    save_file({"tok_embeddings": torch.zeros(2)}, tmp_path / "consolidated.safetensors")
    save_file({"embed": torch.ones(2)}, tmp_path / "model-00001-of-00001.safetensors")
    assert set(checkpoint_entries(tmp_path)) == {"tok_embeddings", "embed"}
    index = {"metadata": {}, "weight_map": {"embed": "model-00001-of-00001.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    other = {"weight_map": {"tok_embeddings": "consolidated.safetensors"}}
    (tmp_path / "consolidated.safetensors.index.json").write_text(json.dumps(other))
    assert set(checkpoint_entries(tmp_path)) == {"embed"}
