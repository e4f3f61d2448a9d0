"""Evidence about worlds that do not run: what a rank would hold and send, from shapes alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from pytest_fsdp_meta.checks.memory.facts import GatheredGroup
from pytest_fsdp_meta.text import as_bytes

NO_VALUES = "simulated: the ranks have no values, and send nothing"
"""Why what needs values is not observed."""
FACTORS = (8, 64)
"""By how much smaller the worlds are, at most, that a simulated one is compared with."""
BACKWARD = "autograd"


@dataclass(frozen=True)
class ModuleTraffic:
    """The part of the traffic that is for one module, or for all modules whose names differ in numbers only.

    ``module`` is a name with ``*`` for numbers. It is empty for the root, and for what is sent outside of all modules;
    ``BACKWARD`` for what autograd sends, whose module is unknown.
    """

    module: str
    count: int
    nbytes: int


@dataclass(frozen=True)
class Traffic:
    """What one rank sends in one step by one kind of collective, over the ranks of some mesh dimensions.

    ``nbytes`` counts what leaves the rank with a ring: (n - 1) times its shard for an all_gather among n ranks,
    (n - 1) / n of the whole for a reduce_scatter, and twice that for an all_reduce. ``dims`` is empty for a group that
    is no mesh dimension's.
    """

    op: str
    dims: tuple[str, ...]
    ranks: int
    count: int
    nbytes: int
    modules: tuple[ModuleTraffic, ...] = ()
    """The parts of it."""

    @property
    def where(self) -> str:
        """The mesh dimensions, or the number of ranks."""
        return " and ".join(self.dims) or f"{self.ranks} ranks"


FORWARD, BACKWARD_PASS, REDUCTION, STEPPING = "forward", "backward", "reduction", "the optimizer's step"
"""The phases of a step."""
HELD, GRADIENTS, OPTIMIZER = "held", "gradients", "optimizer"
GATHERED, ACTIVATIONS, TEMPORARY = "gathered", "activations", "temporary"
PARTS = {
    HELD: "parameters and buffers",
    GRADIENTS: "gradients",
    OPTIMIZER: "optimizer state",
    GATHERED: "gathered parameters",
    ACTIVATIONS: "activations",
    TEMPORARY: "temporary tensors",
}
"""What memory is taken for; activations are what the forward keeps for the backward."""


@dataclass(frozen=True)
class PhasePeak:
    """The most that all tensors take at a time in one phase of a step, and the module that ran then.

    ``parts`` has the bytes of each of ``PARTS``, if any.
    """

    phase: str
    module: str
    parts: Mapping[str, int]

    @property
    def nbytes(self) -> int:
        return sum(self.parts.values())

    @property
    def large_parts(self) -> dict[str, int]:
        """The parts that are more than 2% of the peak."""
        return {name: nbytes for name, nbytes in self.parts.items() if nbytes > self.nbytes / 50}

    @property
    def composition(self) -> str:
        """The large parts, largest first, such as "47 GiB of activations, 5 GiB of gathered parameters"."""
        ordered = sorted(self.large_parts.items(), key=lambda part: part[1], reverse=True)
        return ", ".join(f"{as_bytes(nbytes)} of {PARTS[name]}" for name, nbytes in ordered)


@dataclass(frozen=True)
class Assumptions:
    """What a simulated step was run with: ``batch`` has the shape of each tensor on the rank."""

    batch: Mapping[str, tuple[int, ...]]
    optimizer: str = ""
    recomputes: bool = False
    """Whether the backward computed modules again."""
    checkpointed: bool = False
    """Whether modules have activation checkpointing, as far as their settings say."""
    meshes: tuple[str, ...] = ()
    """Those that the parameters lie on, such as "dp_replicate=4 x dp_shard=256"."""


@dataclass(frozen=True)
class SimulatedStep:
    """Bytes of one training step on one rank.

    ``gathered`` is the most that one all_gather fills. ``problem`` says why nothing was counted.
    """

    gradients: int = 0
    optimizer: int = 0
    gathered: int = 0
    peaks: tuple[PhasePeak, ...] = ()
    traffic: tuple[Traffic, ...] = ()
    problem: str = ""
    error: bool = False
    """Whether the problem is one of the author's, and not of the simulation."""
    missing: str = ""
    """The field of Subject without which no step can be run, or empty."""
    assumed: Assumptions = Assumptions({})
    groups: tuple[GatheredGroup, ...] = ()
    """Not in reports, where the names of all parameters would be most of the file."""
    unstepped: str = ""
    """Why what the optimizer needs while it steps is unknown, or empty."""

    @property
    def peak(self) -> PhasePeak:
        """That of the phase that takes most."""
        return max(self.peaks, key=lambda peak: peak.nbytes)

    @property
    def most(self) -> int:
        """The most that all tensors take at any time."""
        return max((peak.nbytes for peak in self.peaks), default=0)

    @property
    def sent(self) -> int:
        return sum(part.nbytes for part in self.traffic)

    @property
    def sent_by_dims(self) -> dict[str, int]:
        """What the rank sends over each mesh dimension, or among so many ranks."""
        sent: dict[str, int] = {}
        for part in self.traffic:
            sent[part.where] = sent.get(part.where, 0) + part.nbytes
        return sent


@dataclass(frozen=True)
class RankSize:
    """What one rank holds, in bytes; ``step`` is None on ranks whose step was not simulated."""

    rank: int
    parameters: int
    buffers: int
    step: SimulatedStep | None = None


@dataclass(frozen=True)
class BytesOfRanks:
    """The parameters of the ranks of a world, those that do not run included, in bytes."""

    minimum: int
    median: int
    maximum: int


@dataclass(frozen=True)
class SimulatedSize:
    """A world of one size, and those of its ranks that were simulated; none if ``problem`` says why."""

    mesh: tuple[tuple[str, int], ...]
    ranks: tuple[RankSize, ...]
    problem: str = ""
    parameters: BytesOfRanks | None = None
    """None if what the other ranks hold does not follow from placements."""

    @property
    def size(self) -> int:
        return prod(size for _, size in self.mesh)

    @property
    def largest(self) -> int:
        """The parameters of the rank that holds most."""
        return self.parameters.maximum if self.parameters else max(rank.parameters for rank in self.ranks)

    @property
    def step(self) -> SimulatedStep | None:
        """The step that needs most, if any was simulated."""
        steps = [rank.step for rank in self.ranks if rank.step is not None and rank.step.peaks]
        return max(steps, key=lambda step: step.most, default=None)
