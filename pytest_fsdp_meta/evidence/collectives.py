"""Evidence of what a rank says to others, and of what it holds while it loads: plain data, no torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Collective:
    """One collective as one rank issued it; point-to-point transfers are none.

    ``group`` and ``ranks`` are the name and the members of its process group. ``shapes`` are those of what the rank
    hands over; ``reduction`` is empty where torch does not tell it. ``tensors`` are the parameters and buffers whose
    memory it is, or whose copy; none where it is something else: a gradient, a batch, a buffer of FSDP2's.
    ``by_fsdp`` tells that FSDP2 gathers or reduces a group.
    """

    op: str
    group: str
    ranks: tuple[int, ...]
    dtype: str = ""
    shapes: tuple[tuple[int, ...], ...] = ()
    root: int | None = None
    reduction: str = ""
    tensors: tuple[str, ...] = ()
    by_fsdp: bool = False
    optimizing: bool = False
    """Whether it came after the backward, from the optimizer's step on."""


@dataclass(frozen=True)
class FsdpGroup:
    """Parameters that FSDP2 gathers together, as one rank saw them in one training step."""

    parameters: tuple[str, ...]
    forwards: int
    """How often its forward ran, recomputation by activation checkpointing included."""
    reshards: bool
    """Whether the parameters are freed after the forward, and gathered again for the backward."""
    trainable: bool
    replicates: bool = False
    """Whether they are reduced over replicas as well (HSDP)."""


@dataclass(frozen=True)
class RankCollectives:
    """Every collective of one rank, in order. ``step`` and ``groups`` are None where no step was watched."""

    loading: tuple[Collective, ...]
    step: tuple[Collective, ...] | None = None
    groups: tuple[FsdpGroup, ...] | None = None


@dataclass(frozen=True)
class RankMemory:
    """What was alive at one time while the loader ran, beyond what was there before it.

    Mapped files do not count: the system may drop their pages. ``host`` and ``device`` are the most bytes of either;
    ``device`` is None where the ranks' device is the host. ``whole`` is the most elements that were held on the host,
    at one time, by tensors as large as whole parameters; ``beyond`` the most bytes that, while as much as the whole
    model was alive there, two copies of this rank's own shards do not explain. ``timeline`` has what was alive on the
    host as (seconds since the load began, bytes), in order: every change, or the highest of each stretch of time.
    """

    host: int
    whole: int = 0
    beyond: int = 0
    device: int | None = None
    timeline: tuple[tuple[float, int], ...] = ()
