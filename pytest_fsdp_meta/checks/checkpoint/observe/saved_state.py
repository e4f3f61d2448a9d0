"""Record the model and the optimizer's state that each rank saves, to compare them in a world of another size."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from pytest_fsdp_meta.checks.checkpoint.facts import FOREIGN, NO_STATE
from pytest_fsdp_meta.checks.checkpoint.observe.round_trip import persistent_parts
from pytest_fsdp_meta.checks.materialisation.observe import loaded_subject, resharded_subject
from pytest_fsdp_meta.checks.values.observe import compare_all
from pytest_fsdp_meta.evidence import Comparison, PartFacts
from pytest_fsdp_meta.loader.adapter import Part
from pytest_fsdp_meta.ranks.adapters.dtensor import fits, local_part, own_part, placed_like, with_elements
from pytest_fsdp_meta.ranks.adapters.lookup import parts_of
from pytest_fsdp_meta.ranks.assembly import AssembledRecord, record_parts
from pytest_fsdp_meta.ranks.inventory import named_tensors
from pytest_fsdp_meta.ranks.reference_record import Record, is_array, record_at
from pytest_fsdp_meta.text import first_line
from pytest_fsdp_meta.worlds import current

Held = dict[str, PartFacts]
"""Name -> where the elements lie that one rank has recorded."""


def record_model(folder: str) -> Held | str:
    """Record this rank's part of each parameter and persistent buffer; or return why that fails."""
    return _record("model", persistent_parts(resharded_subject().model).items(), folder)


def record_state(folder: str) -> Held | str:
    """Record this rank's part of each tensor in the state of its optimizer; or return why that fails."""
    return _record("optimizer", _state_parts(), folder)


def compare_model(held_by_rank: Sequence[Held], folder: str) -> tuple[Comparison, ...]:
    """Compare this rank's parameters and persistent buffers with what the ranks of another world have recorded."""
    return _compare_model(_recorded("model", held_by_rank, folder))


def compare_loaded(record: str) -> tuple[Comparison, ...]:
    """Compare this rank's parameters and persistent buffers with the record of the reference."""
    return _compare_model(Record(record))


def _compare_model(record: Record) -> tuple[Comparison, ...]:
    model = resharded_subject().model
    tensors = ((name, tensor) for name, _, tensor in named_tensors(model))
    return *_foreign(tensors), *compare_all(persistent_parts(model).items(), record)


def compare_state(held_by_rank: Sequence[Held], folder: str) -> tuple[Comparison, ...]:
    """Compare the state of this rank's optimizer with what the ranks of another world have recorded of theirs."""
    record, found = _recorded("optimizer", held_by_rank, folder), dict(_state_parts())
    model = loaded_subject(current()).model
    parts = parts_of(model)
    held = {name for name, _, tensor in named_tensors(model) if parts.of(name, tensor).local.numel()}
    missing = [name for name in record.names() if name not in found and name.rpartition(": ")[0] in held]
    return (
        *_foreign((f"{name}: {key}", value) for name, _, key, value in _state()),
        *compare_all(found.items(), record),
        *(Comparison(name, False, problem=NO_STATE) for name in missing),
    )


def _foreign(tensors: Iterable[tuple[str, Any]]) -> Iterator[Comparison]:
    """Yield the DTensors that are on a mesh of another world.

    One that was pickled comes back with the mesh and the coordinate of the rank that saved it. Its part then equals
    what was saved, but the parts of other ranks are nowhere, or each rank has the part of one.
    """
    for name, tensor in tensors:
        if isinstance(tensor, DTensor):
            ranks, coordinate = tensor.device_mesh.mesh, tensor.device_mesh.get_coordinate()
            own = coordinate is None or int(ranks[tuple(coordinate)]) == dist.get_rank()
            if not own or int(ranks.max()) >= dist.get_world_size():
                yield Comparison(name, False, problem=FOREIGN)


def _state() -> Iterator[tuple[str, Tensor, str, Any]]:
    """Yield each parameter by its first name, with each key and value of its state."""
    rank = current()
    optimizer: Optimizer = rank.state["resumable"]
    seen = set[int]()
    for name, kind, parameter in named_tensors(loaded_subject(rank).model):
        if kind == "parameter" and id(parameter) not in seen:
            seen.add(id(parameter))
            for key, value in optimizer.state.get(parameter, {}).items():
                yield name, parameter, key, value


def _state_parts() -> Iterator[tuple[str, Part]]:
    """Yield "<parameter>: <key>" and this rank's part of each tensor that describes all elements of a parameter."""
    parts = parts_of(loaded_subject(current()).model)
    for name, parameter, key, value in _state():
        if isinstance(value, Tensor) and (part := _part_like(parts.of(name, parameter), parameter, value)):
            yield f"{name}: {key}", part


def _part_like(part: Part, parameter: Tensor, value: Tensor) -> Part | None:
    """Return which part of the whole state the value is; None if it has another shape than its parameter."""
    if value.shape != parameter.shape or not value.ndim or not is_array(local_part(value)):
        return None
    # Placements of a DTensor whose shards an adapter describes say something else.
    if isinstance(value, DTensor) and isinstance(parameter, DTensor) and not part.by:
        return own_part(placed_like(parameter, value))
    return with_elements(part, value) if fits(value, part) else None


def _record(what: str, parts: Iterable[tuple[str, Part]], folder: str) -> Held | str:
    try:
        own = {name: part for name, part in parts if part.local.numel()}
        return record_parts(own, _own_file(what, current().rank, folder))
    except Exception as error:  # odd tensors must not end a world that still has to save
        return f"{type(error).__name__}: {first_line(error)}"


def _recorded(what: str, held_by_rank: Sequence[Held], folder: str) -> AssembledRecord:
    files = [_own_file(what, rank, folder) for rank in range(len(held_by_rank))]
    return AssembledRecord(held_by_rank, files, "what was saved")


def _own_file(what: str, rank: int, folder: str) -> Path:
    return record_at(folder, f"saved_{what}{rank}")
