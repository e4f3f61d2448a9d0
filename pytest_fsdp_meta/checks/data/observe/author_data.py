"""Read the author's own loader of batches: one epoch, and the rest of it after resuming from a checkpoint within it."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer

from pytest_fsdp_meta.checks.checkpoint.observe.round_trip import as_built, handed_over, renew_optimizer
from pytest_fsdp_meta.checks.data.observe.rows import digest_rows
from pytest_fsdp_meta.checks.materialisation.observe import LEFT_BY_LOADER, loaded_subject, resharded_subject
from pytest_fsdp_meta.checks.training.observe.beside import Beside
from pytest_fsdp_meta.evidence import RankBatches
from pytest_fsdp_meta.loader.subject import Subject, SubjectError
from pytest_fsdp_meta.loader.validation import is_stateful, yields_batches
from pytest_fsdp_meta.ranks.batches import batch_slice, calling, calling_field
from pytest_fsdp_meta.ranks.generators import set_all
from pytest_fsdp_meta.ranks.poison import NOTICES
from pytest_fsdp_meta.ranks.sending import PackedFunction, pack_for_one_rank, unpack_on_one_rank
from pytest_fsdp_meta.text import first_line
from pytest_fsdp_meta.worlds import SEED, Rank, current, doing, forward_warnings

MOST_BATCHES = 256
"""Batches that are read on each rank; an epoch may have more, or never end."""
SAVED_AFTER = 2
"""Batches before the checkpoint: one alone may be the only one that a loader has not prefetched."""
END = object()
"""What a loader without more batches returns."""


def pack_data() -> PackedFunction | None:
    """Return rank 0's ``data`` for a world of one rank; None on the other ranks."""
    rank = current()
    if rank.rank:
        return None
    data = loaded_subject(rank).data
    if not _is_function(data):
        return PackedFunction(problem="data is a loader that exists on the ranks only, and not a function")
    return pack_for_one_rank(data)


def read_epoch(folder: str | None) -> RankBatches:
    """Return the batches of an epoch, and save in ``folder``, if it is given, after the first ones.

    Nothing is saved if neither the author nor the loader can do it.
    """
    rank, subject = current(), resharded_subject()
    loader = _begin_epoch(rank, subject)
    savable = subject.save is not None or is_stateful(loader)
    after = min(SAVED_AFTER, max(1, _length(loader) - 1)) if folder and savable else 0
    return _read_and_save(rank, subject, loader, MOST_BATCHES, folder, after)


def resume_epoch(folder: str, most: int, again: str | None) -> RankBatches:
    """Resume from the checkpoint in ``folder``, and return at most this many of the batches that follow.

    Save in the folder ``again``, if it is given, after the first of them.
    """
    rank, subject = current(), resharded_subject()
    loader = _begin_epoch(rank, subject, Path(folder))
    file = _file(Path(folder), rank)
    if subject.save is None and file.exists() and is_stateful(loader):
        state = torch.load(file, weights_only=False)
        with calling("load_state_dict() of Subject(data=...)"):
            loader.load_state_dict(state)
    return _read_and_save(rank, subject, loader, most, again, SAVED_AFTER if again else 0)


def read_alone(packed: PackedFunction, ranks: int) -> RankBatches | str:
    """Return the epoch of ``data`` in a world of one rank, or why there is none.

    ``ranks`` is the number of data-parallel ranks, whose epoch has as many batches each.
    """
    torch.manual_seed(SEED)
    most = MOST_BATCHES * ranks
    try:
        with forward_warnings(NOTICES):
            loader = _open(unpack_on_one_rank(packed))
            batches = tuple(_read(loader, most))
    except Exception as error:  # the author's code, in a world that it was perhaps not written for
        cause = error.__cause__ or error
        return f"data() raises {type(cause).__name__} in a world of one rank: {first_line(cause)}"
    return RankBatches((0, 1), batches, len(batches) < most)


def _read_and_save(
    rank: Rank, subject: Subject, loader: Iterable[Any], most: int, folder: str | None, after: int
) -> RankBatches:
    """Read at most this many batches, and save in the folder ``after`` some of them, if that is not 0."""
    batches = []
    for batch in _read(loader, most):
        batches.append(batch)
        if folder and len(batches) == after:
            _save(rank, subject, loader, Path(folder))
    if folder and len(batches) < after and subject.save is not None:
        _save(rank, subject, loader, Path(folder))  # the other ranks wait for this one in save()
    place = batch_slice(subject, rank)
    return RankBatches(place, tuple(batches), len(batches) < most, subject.data is not None, after)


def _is_function(data: object) -> bool:
    return callable(data) and not hasattr(type(data), "__iter__")


def _begin_epoch(rank: Rank, subject: Subject, resumed_from: Path | None = None) -> Any:
    """Return the loader, with the random numbers as they were after loading, and after ``resume`` if it is declared."""
    if subject.data is not None:
        set_all(rank.state[LEFT_BY_LOADER], rank.device)
    if resumed_from is not None and subject.resume is not None:
        doing("resuming within an epoch")
        with calling_field("resume"):
            optimizer, kept = _optimizer(rank, subject)
            subject.resume(
                subject.model, as_built(subject, optimizer), resumed_from, **handed_over(subject, "resume", kept)
            )
    return () if subject.data is None else _open(subject.data)


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
        with calling_field("save"):
            optimizer, kept = _optimizer(rank, subject)
            subject.save(subject.model, as_built(subject, optimizer), folder, **handed_over(subject, "save", kept))
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
