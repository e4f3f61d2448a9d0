"""Evidence about the author's own loader of batches: which rows each rank saw, before and after resuming."""

from __future__ import annotations

from dataclasses import dataclass

Batch = tuple[str, ...]
"""A digest of each row."""


@dataclass(frozen=True)
class RankBatches:
    """The batches that one rank saw in an epoch, each as a digest of every row.

    ``data_parallel`` is the (index, size) of the rank. ``ended`` is False if the loader had more batches than are read.
    ``loader`` is False if this rank declares no ``data``, because others send it their batches.
    """

    data_parallel: tuple[int, int]
    batches: tuple[Batch, ...] = ()
    ended: bool = True
    loader: bool = True
    later: tuple[Batch, ...] | None = None
    """The batches of the second epoch; None if the first has not ended, or if the loader hands out one epoch only."""
    refused: str = ""
    """Why the second epoch was not read, or empty."""
    shuffled_by: str = ""
    """The class of what shuffles in the loader, if that can be seen."""
    has_set_epoch: bool = False
    """Whether ``set_epoch(1)`` of the loader, or of its sampler or dataset, was called before the second epoch."""
    saved_after: int = 0
    """How many batches came before the checkpoint; 0 if none was saved."""
    next_rows: int | None = None
    """How many rows the third epoch has, after this second one; None if it was not begun."""
    resumed_again: tuple[Batch, ...] | None = None
    """The batches of another load that resumed from that checkpoint, where this rank had itself resumed."""
    rows_after_end: int | None = None
    """How many rows the third epoch has in another load that resumed from the end of the second; None if unknown."""

    @property
    def resumable(self) -> tuple[Batch, ...]:
        """The batches of the epoch from which resuming is judged: the second, if there is one."""
        return self.batches if self.later is None else self.later

    @property
    def first_pass(self) -> int:
        """How many batches come before the first one with a row that was seen before."""
        seen: set[str] = set()
        for number, batch in enumerate(self.batches):
            if not seen.isdisjoint(batch):
                return number
            seen.update(batch)
        return len(self.batches)

    @property
    def rows(self) -> tuple[str, ...]:
        return tuple(row for batch in self.batches for row in batch)


@dataclass(frozen=True)
class Epoch:
    """The epochs of ``data`` on every rank and, where ``data`` is a function, in a world of one rank.

    ``problem`` says why no epoch was read in a world of one rank.
    """

    ranks: tuple[RankBatches, ...]
    alone: RankBatches | None = None
    problem: str = ""
