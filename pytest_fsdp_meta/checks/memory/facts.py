"""Evidence about the memory of a training step: what is gathered at a time, and what is kept for the backward."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class GatheredGroup:
    """The parameters that FSDP2 gathers together."""

    parameters: tuple[str, ...]
    ranks: int
    """How many ranks share them."""


@dataclass(frozen=True)
class StepMemory:
    """What one rank, or the reference with the rows of one, holds in a forward and a backward besides its weights.

    The rows are the first micro-batch of the first batch, or all of a rank's where nothing is accumulated.

    ``kept`` is the most that autograd keeps for the backward at a time, in bytes of storages that belong to no
    parameter or buffer; None if that was not observed, for the reason in ``problem``. ``modules`` has the bytes that
    each module keeps at that moment, largest first. ``groups`` is empty where FSDP2 manages nothing.
    """

    kept: int | None
    modules: Mapping[str, int] = field(default_factory=dict)
    groups: tuple[GatheredGroup, ...] = ()
    problem: str = ""


COPIES = 2
"""Times that a loader may hold its shards: in the model, and in the tensors that it copies into the model."""


@dataclass(frozen=True)
class RankMemory:
    """The peak memory of one rank while the loader ran, beyond what was allocated before it started.

    Memory-mapped files do not count, because the system may drop their pages. ``host`` and ``device`` are peaks in
    bytes; ``device`` is None if the ranks run on the CPU. ``whole`` is the largest number of elements held at one time,
    on the host and the device, by tensors as large as whole parameters. ``beyond`` is the largest number of bytes
    there that ``COPIES`` of this rank's own shards do not explain, counted only while at least the whole model was
    held.
    """

    host: int
    whole: int = 0
    beyond: int = 0
    device: int | None = None
