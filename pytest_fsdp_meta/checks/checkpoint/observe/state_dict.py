"""Observe state dicts: their keys, and the full one that is published, by the values in those of all ranks.

torch gathers DTensors and takes whole tensors from rank 0. It cannot gather what an adapter describes, nor what only
some ranks have: of these tensors, each rank records what its own state dict has, and the parts are put together in the
world of the reference. All values come from state dicts, so what a hook does to them is seen.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn import Module

from pytest_fsdp_meta.checks.checkpoint.facts import Assembled, ExportedPart, Fingerprint, RankExport, RankStateDict
from pytest_fsdp_meta.checks.checkpoint.observe.fingerprints import fingerprint
from pytest_fsdp_meta.checks.materialisation.observe import resharded_subject
from pytest_fsdp_meta.checks.training.observe.author_step import describe_cause
from pytest_fsdp_meta.checks.training.observe.reference import build_export_reference, declared_subject
from pytest_fsdp_meta.checks.values.facts import LOSS_TOLERANCE
from pytest_fsdp_meta.checks.values.observe import comparable, compare, differing, read_part
from pytest_fsdp_meta.evidence import Comparison, Export, PartFacts
from pytest_fsdp_meta.loader.adapter import Part
from pytest_fsdp_meta.loader.subject import Subject, SubjectError
from pytest_fsdp_meta.ranks.adapters import zero3
from pytest_fsdp_meta.ranks.adapters.dtensor import fits, local_part, own_part, placed_like, sizes, with_elements
from pytest_fsdp_meta.ranks.adapters.lookup import parts_of
from pytest_fsdp_meta.ranks.assembly import boxes_of, facts_of, record_parts, rows_of
from pytest_fsdp_meta.ranks.batches import batch_slice, calling_field, has_stages, loss_of, rows_of_step, scalar
from pytest_fsdp_meta.ranks.bits import digest
from pytest_fsdp_meta.ranks.inventory import memory_key, named_tensors, reshard, unwrapped
from pytest_fsdp_meta.ranks.modes import comparable_modes
from pytest_fsdp_meta.ranks.reference_record import Record, is_array, record_at, write_record
from pytest_fsdp_meta.text import clean_name, first_line
from pytest_fsdp_meta.worlds import CallFailed, current, doing

EXTRA_STATE = "_extra_state"
"""The last part of the key under which torch saves the extra state of a module."""


def observe_state_dict() -> RankStateDict:
    """Return the keys of the author's state dict, or else of torch's."""
    subject, refused = resharded_subject(), ""
    # torch does not know DeepSpeed's engine, which saves what is inside it.
    model = unwrapped(subject.model) if zero3.is_wrapper(subject.model) else subject.model
    try:
        keys = tuple(get_model_state_dict(model))
    except Exception as error:  # many types: torch looks up each key in the modules, and a hook may have renamed it
        keys = tuple(clean_name(key) for key in unwrapped(model).state_dict())
        refused = f"{type(error).__name__}: {first_line(error, 200)}"
    if subject.state_dict is not None:
        keys = tuple(author_state_dict(subject))
    return RankStateDict(keys, refused)


def fingerprint_state_dict() -> dict[str, Fingerprint]:
    """Return fingerprints of what the author's ``state_dict(model)`` returns now, by key."""
    return {key: fingerprint(value) for key, value in author_state_dict(resharded_subject()).items()}


def author_state_dict(subject: Subject) -> Mapping[str, Any]:
    """Return what the author's ``state_dict(model)`` returns. Raises SubjectError for anything but a dict by name."""
    assert subject.state_dict is not None
    with calling_field("state_dict"):
        state: object = subject.state_dict(subject.model)
    wanted = "but should return a dict with names as keys"
    if not isinstance(state, Mapping):
        raise SubjectError("state_dict", f"it returned {type(state).__name__}, {wanted}")
    for key in state:
        if not isinstance(key, str):
            kind = type(key).__name__
            raise SubjectError("state_dict", f"it returned a dict with a key of {kind} ({key!r:.80}), {wanted}")
    return state


NAME = "export"
"""The record of what rank 0 exports whole; each rank's parts are in another one."""
TRAINED = "trained export"
NO_RANK = -1
"""Instead of the rank that exports an element."""

# On the ranks.


def export(folder: str, from_parts: Collection[str] = ()) -> RankExport:
    """Record what this rank exports in ``folder``.

    Of the tensors ``from_parts``, each rank exports what its state dict has; all others are gathered, for rank 0.
    """
    subject, own = resharded_subject(), current()
    rank = own.rank
    doing("gathering the state dict")
    state: Mapping[str, Any]
    changed: tuple[str, ...] = ()
    if subject.state_dict is not None:
        before = _digests_of_frozen(subject.model)
        state = author_state_dict(subject)
        changed = tuple(name for name, own in _digests_of_frozen(subject.model).items() if own != before.get(name, own))
    elif from_parts:
        state = get_model_state_dict(subject.model)
    else:
        # With cpu_offload, FSDP1 on the CPU frees what it gathers before it has copied it (torch 2.13).
        offload = own.device.type != "cpu" or not FullyShardedDataParallel.fsdp_modules(subject.model)
        options = StateDictOptions(full_state_dict=True, cpu_offload=offload)
        state = get_model_state_dict(subject.model, options=options)
    tensors = {name: tensor for name, _, tensor in named_tensors(subject.model) if name in from_parts}
    parts = parts_of(subject.model)
    held = {name: parts.of(name, tensor) for name, tensor in tensors.items()}
    # In the order of names, because ranks that redistribute or gather a DTensor have to do so together.
    exported = {
        name: _part_in(state[name], tensors.get(name), held.get(name))
        for name in sorted(from_parts)
        if isinstance(state.get(name), Tensor) and is_array(state[name])
    }
    gathered = [(key, whole) for key, whole in _gathered(state, exported) if rank == 0]
    if rank == 0:
        write_record(record_at(folder, NAME), gathered)
    return RankExport(
        tuple(state),
        {name: facts_of(part) for name, part in held.items()},
        record_parts(exported, _own_file(rank, folder)) if from_parts else {},
        changed,
        "" if subject.state_dict is None or from_parts else first_loss(subject, batch_slice(subject, own)),
    )


def export_trained(folder: str) -> float | str:
    """Record what rank 0 exports after the training, and return the loss of this rank's rows of the first batch."""
    subject, rank = resharded_subject(), current()
    gathered = list(_gathered(author_state_dict(subject), ()))
    if rank.rank == 0:
        write_record(record_at(folder, TRAINED), gathered)
    return first_loss(subject, batch_slice(subject, rank))


def first_loss(subject: Subject, place: tuple[int, int]) -> float | str:
    """Return the loss of a slice of the first batch, without dropout, or why it is not computed."""
    if subject.batch is None or has_stages(current()):
        return "the model is split into stages, or batch is not declared"
    try:
        with comparable_modes(subject.model), torch.no_grad():
            return scalar(loss_of(subject, rows_of_step(subject, 0, place, current().device)))
    except (CallFailed, SubjectError) as error:  # of a train_step, the loss may be that of the whole model alone
        return describe_cause(error)


def _digests_of_frozen(model: Module) -> dict[str, str]:
    reshard(model)
    parts = parts_of(model)
    parameters = ((name, tensor) for name, kind, tensor in named_tensors(model) if kind == "parameter")
    frozen = ((name, parts.of(name, tensor).local) for name, tensor in parameters if not tensor.requires_grad)
    return {name: digest(local_part(local)) for name, local in frozen if is_array(local)}


def _part_in(value: Tensor, tensor: Tensor | None, held: Part | None) -> Part:
    """Return which part of the whole tensor the value is; one that is neither whole nor a part is a whole by itself."""
    if tensor is None or held is None:
        return own_part(value)
    if value.shape == tensor.shape:
        value = placed_like(tensor, value)
    # A DTensor laid out like the parameter has the parameter's elements, whatever its placements say.
    alike = isinstance(tensor, DTensor) and isinstance(value, DTensor) and value.placements == tensor.placements
    is_part = fits(value, held) and (alike or sizes(value) != held.shape)
    return with_elements(held, value) if is_part else own_part(value)


def _gathered(state: Mapping[str, Any], without: Collection[str]) -> Iterator[tuple[str, Tensor]]:
    for key in sorted(state):
        value = state[key]
        if isinstance(value, DTensor) and key not in without:
            value = value.to(value.device_mesh.device_type).full_tensor().cpu()
        if isinstance(value, Tensor) and key not in without:
            yield key, value


def _own_file(rank: int, folder: str) -> Path:
    return record_at(folder, f"{NAME}{rank}")


# In the world of the reference.


def compare_export(folder: str, record: str, exports: Sequence[RankExport], model_record: str = "") -> Export:
    """Load what the ranks recorded in ``folder`` into the reference, and compare each tensor with the ``record``.

    If that is of a declared export_reference, ``model_record`` has the values of the reference: only the names of the
    former are compared, and values may differ by rounding.
    """
    declared = bool(model_record)
    label = "Subject(export_reference=...)" if declared else "the reference"
    gathered, reference = Record(record_at(folder, NAME)), Record(record, label)
    common = [name for name in gathered.names() if name in reference]
    fitting = [name for name in common if gathered.shape(name) == reference.shape(name)]
    state = {name: gathered.read_whole(name) for name in gathered.names() if name in fitting or name not in reference}
    assembled = []
    for found, whole in _put_together(folder, exports, reference, declared):
        assembled.append(found)
        if whole is not None and (found.name not in reference or reference.shape(found.name) == tuple(whole.shape)):
            state[found.name] = whole
    memory: dict[str, object] = {}
    if declared:
        loaded = {reference.stored_as(name) for name in state if name in reference}  # of a tie, one name fills all
        lacking = [name for name in reference.names() if reference.stored_as(name) not in loaded]
        excess = [name for name in state if name not in reference]
    else:
        model = current().state["reference"]
        lacking, excess = model.load_state_dict(state, strict=False)
        memory = {name: memory_key(tensor) for name, _, tensor in named_tensors(model)}
    comparisons = [
        compare(name, own_part(gathered.read_whole(name)), reference, name, measuring=True) for name in common
    ]
    if declared:
        comparisons = [_within_rounding(c, gathered.dtype(c.name), reference) for c in comparisons]
    extra = {key for own in exports for key in own.keys if key.endswith(EXTRA_STATE)}
    known = extra | set(common) | {found.name for found in assembled}
    filled = {memory[name] for name in known if name in memory} - {None}  # of a tie, one name fills all
    return Export(
        missing=tuple(key for key in lacking if key not in known and memory.get(key) not in filled),
        unexpected=tuple(excess),
        comparisons=tuple(comparisons),
        rounded={
            name: gathered.dtype(name)
            for name in fitting
            if gathered.dtype(name) != reference.dtype(name)
            and _rounds(getattr(torch, gathered.dtype(name)), reference.read_whole(name))
        },
        assembled=tuple(assembled),
        changed=tuple(own.changed for own in exports),
        unchanged=_equal_in(Record(model_record), gathered, comparisons) if declared else (),
    )


def losses_of_exported(
    recipe: Mapping[str, bytes], folder: str, declared: bool
) -> tuple[tuple[float | str, ...], float]:
    """Return the losses of the reference, or of the ``declared`` export_reference, with both exports; and how much the
    dtypes of these round them. Instead of a loss, why it was not computed; empty for a dict or a checkpoint.
    """
    model = build_export_reference(recipe) if declared else current().state["reference"]
    if not isinstance(model, Module):
        return (), 0.0
    own, losses, dtypes = model.state_dict(), [], set[str]()
    for exported in (Record(record_at(folder, name)) for name in (NAME, TRAINED)):
        names = [name for name in exported.names() if name in own and exported.shape(name) == tuple(own[name].shape)]
        model.load_state_dict({name: exported.read_whole(name) for name in names}, strict=False)
        dtypes |= set(map(exported.dtype, names))
        losses.append(first_loss(declared_subject(model, recipe), (0, 1)))
    return tuple(losses), max((LOSS_TOLERANCE.get(dtype, 0.0) for dtype in dtypes), default=0.0)


def _equal_in(model: Record, gathered: Record, comparisons: Iterable[Comparison]) -> tuple[str, ...]:
    """Return the wrong tensors of the export that equal those of the model."""
    wrong = [c.name for c in comparisons if not c.equal and c.problem is None and c.name in model]
    found = (compare(name, own_part(gathered.read_whole(name)), model, name) for name in wrong)
    return tuple(c.name for c in found if c.equal)


def _within_rounding(comparison: Comparison, dtype: str, reference: Record) -> Comparison:
    """Return the comparison as one of equal tensors if all elements are within rounding of the largest one."""
    if comparison.equal or comparison.problem is not None:
        return comparison
    dtypes = dtype, reference.dtype(comparison.name)
    allowed = max((LOSS_TOLERANCE[dtype] for dtype in dtypes if dtype in LOSS_TOLERANCE), default=0.0)
    largest = float(reference.read_whole(comparison.name).abs().max())
    return replace(comparison, equal=comparison.max_abs <= allowed * largest)


def _rounds(dtype: torch.dtype, values: Tensor) -> bool:
    """Return whether this dtype cannot hold the values."""
    held = values.to(dtype).to(values.dtype)
    return bool(((held != values) & (values == values)).any())


def _put_together(
    folder: str, exports: Sequence[RankExport], reference: Record, declared: bool
) -> Iterator[tuple[Assembled, Tensor | None]]:
    """Yield each tensor that ranks export in parts, and the whole if each part fits into one whole."""
    names = list(dict.fromkeys(name for own in exports for name in own.exported))
    records = [Record(_own_file(rank, folder)) for rank in range(len(exports))] if names else []
    for name in names:
        held = {rank: own.held[name] for rank, own in enumerate(exports) if name in own.held}
        exported = {rank: own.exported[name] for rank, own in enumerate(exports) if name in own.exported}
        for rank, facts in exported.items():
            mine = held.get(rank)
            if facts.whole and (mine is None or (not mine.whole and mine.shape == facts.shape)):
                exported = {rank: facts}  # gathered by hand: what other ranks have beside it is not published
                break
        parts = {
            rank: Part(records[rank].read_whole(name), facts.shape, facts.regions, facts.flat)
            for rank, facts in exported.items()
        }
        compared = tuple(_compared(rank, name, part, reference, declared) for rank, part in parts.items())
        if len({facts.shape for facts in (*exported.values(), *held.values())}) > 1:
            yield Assembled(name, compared), None
            continue
        whole, found = _join(held, parts)
        yield Assembled(name, compared, elements=whole.numel(), **found), whole


def _compared(rank: int, name: str, part: Part, reference: Record, declared: bool) -> ExportedPart:
    if name not in reference:
        return ExportedPart(rank)
    comparison, dtype = compare(name, part, reference, name), str(part.local.dtype).removeprefix("torch.")
    if declared:
        comparison = _within_rounding(comparison, dtype, reference)
    rounds = comparison.problem is None and _rounds(part.local.dtype, read_part(part, reference, name))
    return ExportedPart(rank, comparison, dtype if rounds else "")


def _join(held: Mapping[int, PartFacts], parts: Mapping[int, Part]) -> tuple[Tensor, dict[str, Any]]:
    """Return the whole tensor; and the elements that no rank exports, or several with different values."""
    first = next(iter(parts.values()))
    whole = torch.zeros(first.shape, dtype=first.local.dtype)
    source = torch.full(first.shape, NO_RANK, dtype=torch.int16)
    diverging, before = set[int](), set[int]()
    for rank, part in parts.items():
        facts = facts_of(part)
        values, filled, known = rows_of(part.local, facts), rows_of(whole, facts), rows_of(source, facts)
        for box, own in boxes_of(facts):
            taken = known[box] != NO_RANK
            if taken.any() and (apart := taken & _differs(filled[box], values[own].to(whole.dtype))).any():
                diverging.add(rank)
                before |= set(known[box][apart].tolist())
            if not taken.all():
                filled[box].copy_(values[own])
                known[box].masked_fill_(~taken, rank)
    absent = source == NO_RANK
    found: dict[str, Any] = {"diverging": tuple(sorted(diverging)), "before": tuple(sorted(before))}
    if absent.any():
        lacking = (
            rank for rank, facts in held.items() if any(rows_of(absent, facts)[box].any() for box, _ in boxes_of(facts))
        )
        index = tuple(int(i) for i in absent.nonzero()[0])
        found |= {"absent": int(absent.sum()), "index": index, "lacking": tuple(lacking)}
    return whole, found


def _differs(ours: Tensor, theirs: Tensor) -> Tensor:
    differs = differing(comparable(ours), comparable(theirs))
    return differs.any(-1) if differs.ndim > ours.ndim else differs
