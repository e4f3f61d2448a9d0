"""Evidence about collectives and memory: what one rank communicates, and how much it holds while loading."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Collective:
    """One collective as one rank issued it; point-to-point transfers are not recorded.

    ``group`` is the name of its process group and ``ranks`` the members of that group. ``shapes`` are the shapes of
    this rank's inputs. ``reduction`` is empty where torch does not report the operation. ``tensors`` names the
    parameters and buffers whose memory, or a copy of it, is communicated; it is empty for anything else, such as
    gradients, batches and FSDP2's own buffers. ``by_fsdp`` is True where FSDP2 gathers or reduces a parameter group.
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
    """Whether an optimizer's step issued it."""


@dataclass(frozen=True)
class FsdpGroup:
    """The parameters that FSDP2 gathers together, as one rank saw them in one training step."""

    parameters: tuple[str, ...]
    forwards: int
    """How often the group's forward ran, including recomputation by activation checkpointing."""
    reshards: bool
    """Whether the gathered parameters are freed after the forward and gathered again for the backward."""
    trainable: bool
    replicates: bool = False
    """Whether gradients are also reduced over replicas (HSDP)."""
    ranks: int = 2
    """How many ranks share the parameters; replicate() does not shard."""


@dataclass(frozen=True)
class RankCollectives:
    """All collectives of one rank, in order; ``step`` and ``groups`` are None if no training step was observed."""

    loading: tuple[Collective, ...]
    step: tuple[Collective, ...] | None = None
    groups: tuple[FsdpGroup, ...] | None = None
    unknown: tuple[str, ...] = ()
    """Operators of torch that communicate, and that the recorder does not know."""
