"""Read the author's own loader of batches: its epochs, and what follows a checkpoint within one after resuming."""

from __future__ import annotations

import hashlib
import pickle
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import is_dataclass, replace
from itertools import chain, islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer
from torch.utils.data import DataLoader, RandomSampler, Sampler

from pytest_fsdp_meta.checks.checkpoint.observe.author import call_author
from pytest_fsdp_meta.checks.checkpoint.observe.round_trip import renew_optimizer
from pytest_fsdp_meta.checks.materialisation.observe import LEFT_BY_LOADER, loaded_subject, resharded_subject
from pytest_fsdp_meta.checks.training.observe.author_step import describe_cause
from pytest_fsdp_meta.checks.training.observe.beside import Beside
from pytest_fsdp_meta.evidence import RankBatches
from pytest_fsdp_meta.loader.subject import Subject, SubjectError
from pytest_fsdp_meta.loader.validation import is_stateful, yields_batches
from pytest_fsdp_meta.ranks.adapters.dtensor import local_part
from pytest_fsdp_meta.ranks.batches import batch_slice, calling, calling_field, has_rows
from pytest_fsdp_meta.ranks.bits import NOTICES, digest
from pytest_fsdp_meta.ranks.generators import set_all
from pytest_fsdp_meta.ranks.sending import PackedFunction, pack_function, unpack_function
from pytest_fsdp_meta.text import first_line
from pytest_fsdp_meta.worlds import SEED, CallFailed, Rank, current, doing, forward_warnings

MOST_BATCHES = 256
"""Batches that are read on each rank; an epoch may have more, or never end."""
SAVED_AFTER = 2
"""Batches before the checkpoint: one alone may be the only one that a loader has not prefetched."""
READ = "data"
"""In the state of a rank: the loader whose first epoch was read."""
DEEPEST = 3
"""Wrappers around a DataLoader that are looked into."""
END = object()
"""What a loader without more batches returns."""


def pack_data() -> PackedFunction | None:
    """Return rank 0's ``data`` for a world of one rank; None on the other ranks, and for a loader that was built."""
    rank = current()
    data = loaded_subject(rank).data
    if rank.rank or not _is_function(data):
        return None
    packed = pack_function(data, Module(), None, one_rank=True)
    if packed.problem:
        return PackedFunction(problem=f"data cannot be sent to a world of one rank: {packed.problem}")
    return packed


def read_epoch(folder: str | None) -> tuple[RankBatches, bool]:
    """Read an epoch, saving after its first batches. Return the batches, and whether a second epoch can be read.

    Nothing is saved if ``folder`` is None, or if neither the author nor the loader can do it.
    """
    rank, subject = current(), resharded_subject()
    loader = rank.state[READ] = _begin_epoch(rank, subject)
    after = _saved_after(subject, loader, folder)
    first = _read_and_save(loader, _read(loader, MOST_BATCHES), MOST_BATCHES, folder, after)
    return first, not first.loader or (first.ended and bool(first.batches) and not isinstance(loader, Iterator))


def save_at_end(folder: str) -> None:
    """Save once the second epoch has ended, as ``read_epoch`` does within it."""
    rank, subject = current(), resharded_subject()
    if _saved_after(subject, rank.state[READ], folder):
        _save(rank, subject, rank.state[READ], Path(folder))


def read_later_epoch(folder: str | None) -> RankBatches:
    """Return the batches of the second epoch in ``later``, and save as ``read_epoch`` does.

    If the loader refuses to begin again, or has no batches then, ``refused`` says so.
    """
    rank, subject = current(), resharded_subject()
    loader = rank.state[READ]
    has_set_epoch = _set_epoch(loader, 1)
    batches = _read(loader, MOST_BATCHES)
    try:
        begun = list(islice(batches, 1))
    except CallFailed as error:  # perhaps a loader for one epoch; the first one raised nothing
        refused = f"it raises {describe_cause(error)}"
        return RankBatches(batch_slice(subject, rank), loader=subject.data is not None, refused=refused)
    if not begun and subject.data is not None:
        return RankBatches(batch_slice(subject, rank), refused="it has no batches")
    after = _saved_after(subject, loader, folder)
    found = _read_and_save(loader, chain(begun, batches), MOST_BATCHES, folder, after)
    return replace(found, later=found.batches, shuffled_by=_shuffler(loader), has_set_epoch=has_set_epoch)


def resume_epoch(folder: str, most: int, number: int, again: str | None = None, after: int = 0) -> RankBatches:
    """Resume from ``folder`` in epoch ``number``, and return at most this many batches; save ``again`` after some."""
    rank, subject = current(), resharded_subject()
    loader = _begin_epoch(rank, subject, Path(folder), number)
    file = _file(Path(folder), rank)
    if subject.save is None and file.exists() and is_stateful(loader):
        state = torch.load(file, weights_only=False)
        with calling("load_state_dict() of Subject(data=...)"):
            loader.load_state_dict(state)
    if number > 1:
        _set_epoch(loader, number)  # which begins an epoch, as a trainer does after it has loaded
    # What the author's function returns after resuming may be meant for this epoch only: the rest of a DataLoader.
    begins_again = not _is_function(subject.data) or (subject.save is None and is_stateful(loader))
    rank.state[READ] = loader if begins_again else None
    return _read_and_save(loader, _read(loader, most), most, again, after)


def count_third_epoch() -> int | None:
    """Return how many rows follow when the loader begins again; None if it cannot, or this rank declares none."""
    loader = current().state[READ]
    if loader is None or loader == () or isinstance(loader, Iterator):
        return None
    _set_epoch(loader, 2)
    try:
        return sum(map(len, _read(loader, MOST_BATCHES)))
    except CallFailed:
        return 0


def read_alone(packed: PackedFunction, ranks: int) -> RankBatches | str:
    """Return the epoch of ``data`` in a world of one rank, or why there is none.

    ``ranks`` is the number of data-parallel ranks, whose epoch has as many batches each.
    """
    torch.manual_seed(SEED)
    most = MOST_BATCHES * ranks
    try:
        with forward_warnings(NOTICES):
            loader = _open(unpack_function(packed, Module(), None))
            batches = tuple(_read(loader, most))
    except Exception as error:  # the author's code, in a world that it was perhaps not written for
        cause = error.__cause__ or error
        return f"data() raises {type(cause).__name__} in a world of one rank: {first_line(cause)}"
    return RankBatches((0, 1), batches, len(batches) < most)


def _read_and_save(
    loader: Iterable[Any], coming: Iterable[tuple[str, ...]], most: int, folder: str | None, after: int
) -> RankBatches:
    """Read the batches that are ``coming``, and save in the folder ``after`` some of them.

    With fewer than ``most``, the epoch has ended.
    """
    rank, subject = current(), resharded_subject()
    batches = []
    for batch in coming:
        batches.append(batch)
        if folder and len(batches) == after:
            _save(rank, subject, loader, Path(folder))
    if folder and len(batches) < after and subject.save is not None:
        _save(rank, subject, loader, Path(folder))  # the other ranks wait for this one in save()
    place = batch_slice(subject, rank)
    return RankBatches(place, tuple(batches), len(batches) < most, subject.data is not None, saved_after=after)


def _is_function(data: object) -> bool:
    return callable(data) and not hasattr(type(data), "__iter__")


def _begin_epoch(rank: Rank, subject: Subject, resumed_from: Path | None = None, number: int = 0) -> Any:
    """Return the loader, with the random numbers as they were after loading, and after ``resume`` if it is declared.

    Where the author seeds nothing, a load that resumes has other random numbers, as a job that starts again has.
    ``number`` is that of the epoch in which it resumes.
    """
    data = subject.data
    if data is not None:
        set_all(rank.state[LEFT_BY_LOADER], rank.device)
        if resumed_from is not None and torch.initial_seed() == SEED:
            torch.manual_seed(SEED + 1)
    if number == 1 and not _is_function(data):
        _set_epoch(data, 1)  # set_epoch() may go back to the beginning, so the position is loaded after it
    if resumed_from is not None and subject.resume is not None:
        doing("resuming within an epoch")
        optimizer, kept = _optimizer(rank, subject)
        call_author("resume", subject, optimizer, resumed_from, kept)
    loader = () if data is None else _open(data)
    # The author's resume() restores the epoch of a loader of their own, whose set_epoch() may begin it again.
    if number == 1 and _is_function(data) and not (subject.resume is not None and hasattr(loader, "set_epoch")):
        _set_epoch(loader, 1)
    return loader


def _saved_after(subject: Subject, loader: Any, folder: str | None) -> int:
    savable = subject.save is not None or is_stateful(loader)
    return min(SAVED_AFTER, max(1, _length(loader) - 1)) if folder and savable else 0


def _set_epoch(loader: Any, number: int) -> bool:
    """Call ``set_epoch()`` of the loader or of its parts, as a trainer does; return whether there is one."""
    parts: list[Any] = [getattr(loader, name, None) for name in ("sampler", "batch_sampler", "dataset")]
    parts.append(getattr(parts[1], "sampler", None))
    found = [part for part in ([loader] if hasattr(loader, "set_epoch") else parts) if hasattr(part, "set_epoch")]
    for part in found:
        with calling(f"set_epoch() of {type(part).__name__} in Subject(data=...)"):
            part.set_epoch(number)
    return bool(found)


def _shuffler(loader: Any) -> str:
    """Return the class of what shuffles: a ``RandomSampler``, a sampler or the loader with ``shuffle`` set; or "".

    Of several DataLoaders within a loader, it is not known which one its rows are from.
    """
    if getattr(loader, "shuffle", None) is True:
        return type(loader).__name__
    loaders: list[DataLoader[Any]] = []
    waiting = [(loader, 0)]
    while waiting:
        part, depth = waiting.pop(0)
        if isinstance(part, DataLoader):
            loaders.append(part)
        elif depth < DEEPEST:
            held = getattr(part, "__dict__", {}).values()
            waiting += [(value, depth + 1) for value in held if hasattr(type(value), "__iter__")]
    if len(loaders) != 1:
        return ""
    own = loaders[0]
    every = (own.sampler, own.batch_sampler, getattr(own.batch_sampler, "sampler", None))
    samplers = [sampler for sampler in every if isinstance(sampler, Sampler)]
    shuffling = [s for s in samplers if isinstance(s, RandomSampler) or getattr(s, "shuffle", None) is True]
    return type(shuffling[0]).__name__ if shuffling else ""


def _open(data: Callable[[], Iterable[Any]] | Iterable[Any]) -> Iterable[Any]:
    if not _is_function(data):
        return data  # type: ignore[return-value]
    doing("opening data")
    with calling_field("data"):
        loader = data()  # type: ignore[operator]
    if not yields_batches(loader):
        raise SubjectError(
            "data",
            f"data() returned {type(loader).__name__}, but should return an iterable of batches, such as a DataLoader",
        )
    return loader


def _read(loader: Iterable[Any], most: int) -> Iterator[tuple[str, ...]]:
    """Yield the digests of the rows of at most this many batches."""
    with calling("Subject(data=...)"):
        batches = islice(iter(loader), most)
    for number in range(most):
        doing(f"batch {number} of data")
        with calling("Subject(data=...)"):
            batch = next(batches, END)
        if batch is END:
            return
        with calling("Subject(data=...)"):
            rows = digest_rows(batch, number)
        yield rows


def _length(loader: Iterable[Any]) -> int:
    """Return the number of batches, or a large number if the loader does not know."""
    try:
        return len(loader)  # type: ignore[arg-type]
    except Exception:  # a loader need not have a length, and this one is only a hint
        return MOST_BATCHES


def _save(rank: Rank, subject: Subject, loader: Any, folder: Path) -> None:
    doing("saving within an epoch")
    folder.mkdir(parents=True, exist_ok=True)
    if subject.save is not None:
        optimizer, kept = _optimizer(rank, subject)
        call_author("save", subject, optimizer, folder, kept)
        return
    with calling("state_dict() of Subject(data=...)"):
        # Pickled at once: the loader may go on to change what it returned.
        state = pickle.loads(pickle.dumps(loader.state_dict()))
    torch.save(state, _file(folder, rank))


def _optimizer(rank: Rank, subject: Subject) -> tuple[Optimizer | None, Beside | None]:
    """Return the optimizer to save, and what is beside it: those that have trained, if any.

    Both are None where nothing is trainable.
    """
    if not any(parameter.requires_grad for parameter in subject.model.parameters()):
        return None, None
    if "resumable" not in rank.state:
        renew_optimizer(subject, rank)
    return rank.state["resumable"], rank.state["beside"]


def _file(folder: Path, rank: Rank) -> Path:
    return folder / f"data{rank.rank}.pt"


MOST_ROWS = 1024
"""Rows of one batch. With more, dim 0 is that of packed tokens, and the whole batch counts as one row."""
PACKED = "cu_seq"
"""Part of the name of an entry with the boundaries of sequences that are packed along dim 0."""
MASK = "attention_mask"
SCALARS = (str, bytes, bool, int, float, type(None))
RAGGED = (torch.jagged, torch.sparse_coo, torch.sparse_csr)


def digest_rows(batch: Any, number: int) -> tuple[str, ...]:
    """Return a short hash of each row, of all its entries together; ``number`` is that of the batch, for errors.

    Where there is an ``attention_mask``, what it masks is left out: padding depends on the other rows of a batch.
    """
    are_samples = isinstance(batch, list) and len(batch) > 1 and all(isinstance(sample, Mapping) for sample in batch)
    if are_samples and len({frozenset(sample) for sample in batch}) == 1:  # the rows were not collated
        return tuple(_hash(_describe(sample)) for sample in batch)
    entries = dict(_entries(batch))
    sizes = Counter(value.shape[0] for value in entries.values() if has_rows(value))
    if not sizes:
        raise SubjectError(
            "data",
            f"batch {number} is {type(batch).__name__} without a tensor that has rows, but should be a tensor, or a "
            "dict or sequence of tensors with its rows in dim 0",
        )
    rows = sizes.most_common(1)[0][0]
    if not rows:
        raise SubjectError("data", f"batch {number} has no rows")
    if rows > MOST_ROWS or any(PACKED in path for path in entries):
        return (_hash(_describe(batch)),)
    columns = {
        path: value
        for path, value in entries.items()
        if (value.shape[:1] == (rows,) if isinstance(value, Tensor) else len(value) == rows)
    }
    masks = [value for path, value in columns.items() if path.rpartition(".")[2] == MASK and isinstance(value, Tensor)]
    kept = masks[0] != 0 if len(masks) == 1 and masks[0].ndim == 2 else None
    return tuple(_hash(_describe_row(columns, row, kept)) for row in range(rows))


def _entries(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each tensor, and each list of plain values, with its path in the batch."""
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.ndarray):
        value = torch.as_tensor(value) if value.dtype.kind in "biufc" else value.tolist()
    if isinstance(value, Tensor):
        if value.layout not in RAGGED and not value.is_quantized:
            yield path, local_part(value).detach().cpu()
    elif hasattr(value, "items"):
        for key, part in value.items():
            yield from _entries(part, f"{path}.{key}")
    elif isinstance(value, (list, tuple)):
        if value and all(isinstance(part, SCALARS) for part in value):
            yield path, list(value)
            return
        for key, part in enumerate(value):
            yield from _entries(part, f"{path}.{key}")
    elif is_dataclass(value):
        yield from _entries(vars(value), path)


def _describe_row(columns: Mapping[str, Any], row: int, kept: Tensor | None) -> Iterator[str]:
    for path, value in columns.items():
        if not isinstance(value, Tensor):
            yield f"{path}={value[row]!r}"
            continue
        own = value[row]
        if kept is not None and value.shape[: kept.ndim] == kept.shape:
            own = own[kept[row]]
        yield f"{path}={tuple(own.shape)} {digest(own)}"


def _describe(value: Any) -> Iterator[str]:
    for path, part in _entries(value):
        yield f"{path}={tuple(part.shape)} {digest(part)}" if isinstance(part, Tensor) else f"{path}={part!r}"


def _hash(parts: Iterator[str]) -> str:
    return hashlib.sha256("\n".join(parts).encode(), usedforsecurity=False).hexdigest()[:16]
