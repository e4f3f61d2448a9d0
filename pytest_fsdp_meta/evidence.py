"""What was seen: plain data that travels from the ranks to the judges.

Nothing here holds a live tensor and nothing here imports torch, so evidence can be pickled, kept, and judged again
long after the ranks are gone. Shapes are in elements; everything that is per rank is in rank order.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Any

from pytest_fsdp_meta.saved import RankResumed, RankSaved, RankStateDict
from pytest_fsdp_meta.traffic import RankCollectives, RankMemory

DATA_WORDS = frozenset({"dp", "ddp", "fsdp", "hsdp", "edp", "data", "shard", "replicate"})
EXPERT_DIMS = frozenset({"ep", "etp", "expert"})
SEQUENCE_DIMS = frozenset({"cp", "context", "sp"})
MODEL_DIMS = (
    frozenset({"tp", "tensor", "tensor_parallel", "model", "mp", "pp", "pipe", "pipeline"})
    | EXPERT_DIMS
    | SEQUENCE_DIMS
)


def splits_model(dim: str | None) -> bool:
    """Whether a mesh dimension, by its name, splits the model and not the batch.

    Its ranks see the same rows, and a plan decides how each parameter lies on it.
    """
    return dim is not None and (dim.lower() in MODEL_DIMS or _ends(dim, "tp", "cp", "pp", "ep"))


def splits_experts(dim: str | None) -> bool:
    """Whether a mesh dimension splits experts: they cut up the ranks in a way of their own."""
    return dim is not None and (dim.lower() in EXPERT_DIMS or _ends(dim, "ep"))


def splits_sequence(dim: str) -> bool:
    """Whether ranks along a mesh dimension see other parts of the same rows."""
    return dim.lower() in SEQUENCE_DIMS or _ends(dim, "cp")


def replicates(dim: str | None) -> bool:
    """Whether ranks along a mesh dimension, by its name, are to hold the same."""
    return dim is not None and ("replica" in dim.lower() or dim.lower() == "ddp")


def _ends(dim: str, *endings: str) -> bool:
    """``my_tp`` ends in ``tp``; what is named for data parallelism (dp_shard_cp, dp_shard_mod_ep) splits the batch."""
    words = dim.lower().split("_")
    return len(words) > 1 and words[-1] in endings and not DATA_WORDS & set(words)


def sharded_dim(placement: str) -> int | None:
    """The dim that a placement shards: 0 for ``S(0)`` and for ``_S(0, 2)``; None where it shards none."""
    found = re.match(r"_?S\((\d+)", placement)
    return int(found[1]) if found else None


Region = tuple[tuple[int, int], ...]
"""The half-open runs of indices that a rank holds of one dimension of a tensor."""


@dataclass(frozen=True)
class MeshFacts:
    """A device mesh as one rank sees it; ``coordinate`` is None on a rank outside the mesh."""

    dims: tuple[str | None, ...]
    shape: tuple[int, ...]
    coordinate: tuple[int, ...] | None

    def __str__(self) -> str:
        return " x ".join(f"{name or 'unnamed'}={size}" for name, size in zip(self.dims, self.shape, strict=True))


@dataclass(frozen=True)
class TensorFacts:
    """One parameter or buffer on one rank.

    ``regions`` says, dimension by dimension of ``extent``, which global indices this rank holds. ``storage`` is equal
    for two tensors of one rank exactly when they are the same memory in one shape (None where there is none: meta,
    empty); ``identity`` is equal exactly when they are the same Python object. ``poisoned`` counts the elements that
    still hold the value that uninitialised memory was filled with (NaN, the integer maximum).
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    local_shape: tuple[int, ...]
    regions: tuple[Region, ...]
    dtype: str
    device: str
    requires_grad: bool = False
    persistent: bool = True
    placements: tuple[str, ...] | None = None
    mesh: MeshFacts | None = None
    storage: str | None = None
    identity: int = 0
    attributes: Mapping[str, str] = field(default_factory=dict)
    nan: int = 0
    poisoned: int = 0
    digest: str | None = None
    ddp: bool = False
    """Whether DistributedDataParallel or replicate() holds it: whole on every rank by intent, its gradients reduced."""
    flat: bool = False
    """Whether this rank holds a run of the elements of the tensor laid out as one row, and no block of it."""
    sharded_by: str = ""
    """Who sharded it, where it is no DTensor that says so by itself: the adapter's name."""
    managed: bool | None = None
    """Whether the registered parameter is the one that FSDP2 manages in its place; None where it manages none."""
    width: int = 0  # bytes per element
    backing: str | None = None  # equal where one storage is behind two tensors of a rank
    backing_bytes: int = 0  # the size of that storage; 0 for a mapped file, which is no memory
    unreadable: str = ""
    """Why torch could not read its elements (sparse, packed, without storage); nothing is known of its values then."""

    @property
    def on_meta(self) -> bool:
        return self.device.split(":")[0] == "meta"

    @property
    def numel(self) -> int:
        """Elements of the local shard."""
        return prod(self.local_shape)

    @property
    def extent(self) -> tuple[int, ...]:
        """The shape that ``regions`` are indices of: where ``flat``, of the tensor laid out as one row."""
        return (prod(self.shape),) if self.flat else self.shape

    @property
    def whole(self) -> bool:
        """Whether this rank holds all of it."""
        return all(
            sum(stop - start for start, stop in runs) == size
            for runs, size in zip(self.regions, self.extent, strict=False)  # on disk there are no regions
        )


@dataclass(frozen=True)
class OptimizerFacts:
    """``held``: how often its groups hold each parameter of the model; ``stepped``: those that it keeps a state of.

    ``others`` are (dtype, whether without memory) of what it holds and the model does not register.
    """

    kind: str
    held: Mapping[str, int] = field(default_factory=dict)
    others: tuple[tuple[str, bool], ...] = ()
    stepped: frozenset[str] = frozenset()


@dataclass(frozen=True)
class RankInventory:
    """Every parameter and buffer of one rank, in the order in which the model names them."""

    rank: int
    device: str
    tensors: tuple[TensorFacts, ...]
    poison_kept: bool = True
    """False when the loader switched off what fills uninitialised memory."""
    computes_in: tuple[str, ...] = ()
    """The dtypes that mixed-precision policies cast parameters to for the forward, where they name one."""
    reduces_in: tuple[str, ...] = ()
    """The dtypes that such policies reduce gradients in."""
    optimizer: OptimizerFacts | None = None
    """Of an optimizer that the loader built itself."""
    custom_attributes: tuple[str, ...] = ()
    """The names of all that tensors carry; noted where attributes are asked for."""

    @cached_property
    def by_name(self) -> dict[str, TensorFacts]:
        return {tensor.name: tensor for tensor in self.tensors}

    def ties(self) -> tuple[tuple[str, ...], ...]:
        """Groups of parameter names that are one object or one memory."""
        groups: dict[object, list[str]] = {}
        alias: dict[int, object] = {}
        for tensor in self.tensors:
            if tensor.kind == "parameter":
                key = alias.setdefault(tensor.identity, tensor.storage or tensor.identity)
                groups.setdefault(key, []).append(tensor.name)
        return tuple(tuple(names) for names in groups.values() if len(names) > 1)

    @cached_property
    def tied_with(self) -> dict[str, frozenset[str]]:
        """The group of each parameter that is tied, itself included."""
        return {name: frozenset(group) for group in self.ties() for name in group}


@dataclass(frozen=True)
class Measure:
    """A rank's shard and the same slice of the truth as vectors: their lengths, their distance, their product.

    ``grain`` is what one rounding of every element may come to.
    """

    actual: float
    truth: float
    apart: float
    dot: float
    elements: int
    grain: float = 0.0

    @property
    def factor(self) -> float:
        """The multiple of the truth that comes nearest; zero where the truth is zero."""
        return self.dot / self.truth**2 if self.truth else 0.0

    @property
    def residual(self) -> float:
        """What that multiple does not explain, relative to the rank's own length."""
        square = self.actual**2 - (self.dot / self.truth) ** 2 if self.truth else self.actual**2
        return max(square, 0.0) ** 0.5 / self.actual if self.actual else 0.0


@dataclass(frozen=True)
class Movement:
    """Of one trainable parameter: rows (dim 0) of a rank's shard that must move in training, and those that do not.

    ``first`` is the global index of the first of them; None where there is none, or no row.
    """

    name: str
    due: int
    still: int
    first: int | None = None


@dataclass(frozen=True)
class Comparison:
    """A rank's own shard beside the same slice of the truth.

    ``problem`` is set, and nothing else, when the two cannot be laid side by side (a shape differs). ``cast`` tells
    that the truth was cast to the shard's dtype first. ``index`` is the first differing *global* index.
    """

    name: str
    equal: bool
    elements: int = 0
    differing: int = 0
    max_abs: float = 0.0
    max_rel: float = 0.0
    index: tuple[int, ...] | None = None
    expected: float | None = None
    actual: float | None = None
    cast: bool = False
    problem: str | None = None
    should_be: str = ""
    """What ``problem`` is in place of."""
    measure: Measure | None = None
    """Taken of gradients, of how far trained parameters moved, and of loaded values that differ."""


@dataclass(frozen=True)
class Accumulation:
    """The gradients of the first batch in micro-batches, reduced with the last, beside the reference's.

    ``early`` names the parameters whose gradients were reduced in the first already, though told not to.
    """

    gradients: tuple[Comparison, ...] = ()
    without_gradient: tuple[str, ...] = ()
    early: tuple[str, ...] = ()
    problem: str = ""
    """Why none was made."""


@dataclass(frozen=True)
class RankTraining:
    """K training steps as one rank saw them. ``losses`` are this rank's own, over its slice of the batch."""

    losses: tuple[float, ...]
    data_parallel: tuple[int, int]
    batches: tuple[str, ...] = ()
    """A hash of the global batch of each step."""
    gradients: tuple[Comparison, ...] = ()
    parameters: tuple[Comparison, ...] = ()
    unreduced: bool = False
    """True when every parameter is a plain tensor and no DDP wraps the model: nobody reduces its gradients."""
    labels: tuple[tuple[int, int], ...] = ()
    """Of each step: the labels of this rank's rows that are not ignored, and so without the first of each row."""
    without_gradient: tuple[str, ...] = ()
    """Trainable parameters that the first backward left without a gradient."""
    norm: float | None = None
    """Of all gradients of the first step, as clipping sees it."""
    norm_problem: str = ""
    """Why torch gave none."""
    after: RankInventory | None = None
    """The inventory once the steps are over."""
    optimizer: OptimizerFacts | None = None
    movements: tuple[Movement, ...] = ()
    accumulation: Accumulation | None = None


@dataclass(frozen=True)
class Export:
    """The gathered state dict beside the reference: keys too few and too many, and each tensor compared."""

    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    comparisons: tuple[Comparison, ...] = ()


@dataclass(frozen=True)
class Resharded:
    """A checkpoint loaded in a world of another size: each of its ranks beside the reference.

    ``refused`` is what loading raised there, in one line, though it is loaded in a world of the same size; ``ranks``
    are those that raised it.
    """

    mesh: tuple[tuple[str, int], ...]
    comparisons: tuple[tuple[Comparison, ...], ...] = ()
    refused: str = ""
    ranks: tuple[int, ...] = ()


@dataclass(frozen=True)
class SubjectFacts:
    """What the author declared, patterns already resolved to the names of the model."""

    frozen: Mapping[str, str] = field(default_factory=dict)
    """Frozen name -> name in the verifier."""
    tied: tuple[tuple[str, ...], ...] = ()
    unsharded: tuple[str, ...] = ()
    offloaded: tuple[str, ...] = ()
    placements: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    kept_attributes: tuple[str, ...] = ()
    whole_while_loading: tuple[int, ...] = ()  # the ranks that may hold the whole model meanwhile
    declared: frozenset[str] = frozenset()
    """The fields of Subject that the author filled in."""


@dataclass(frozen=True)
class ReferenceFacts:
    """The single-device truth.

    ``source`` is "callable" or "checkpoint"; a checkpoint holds no non-persistent buffers and cannot be trained.
    ``unstable`` names the tensors whose bits differ when the reference is built twice, ``uninitialised`` those that
    the reference itself never writes.
    """

    source: str
    inventory: RankInventory
    losses: tuple[float, ...] | None = None
    losses_again: tuple[float, ...] | None = None
    batches: tuple[str, ...] = ()
    unstable: tuple[str, ...] = ()
    uninitialised: tuple[str, ...] = ()
    gradients: Mapping[str, float] = field(default_factory=dict)
    """The root mean square of each gradient of the first step."""
    noise: float = 0.0
    """The size below which an element of these gradients is rounding."""
    norm: float | None = None
    after: RankInventory | None = None
    """The inventory once the steps are over."""
    sensitivity: float = 1.0
    """How many times larger than a change of its parameters that of its accumulated gradients is, both relative."""
    state_dict: tuple[str, ...] = ()
    """The keys of its state dict, or of the checkpoint."""

    @property
    def complete(self) -> bool:
        """Whether every tensor of the model is in it (a checkpoint leaves out what it does not persist)."""
        return self.source == "callable"


def frozen_sources(subject: SubjectFacts, reference: ReferenceFacts | None) -> dict[str, str]:
    """What is laid beside the verifier, with its name there: what is declared frozen, else what a reference freezes."""
    if subject.frozen or reference is None or not reference.complete:
        return dict(subject.frozen)
    frozen = (t.name for t in reference.inventory.tensors if t.kind == "parameter" and not t.requires_grad)
    return {name: name for name in frozen}


@dataclass(frozen=True)
class WorldFacts:
    """``devices`` are the GPUs of the ranks by name, in rank order, and ``library`` is what moves data between them."""

    size: int
    mesh: tuple[tuple[str, int], ...]
    device_type: str
    backend: str
    devices: tuple[str, ...] = ()
    library: str = ""

    def __str__(self) -> str:
        return f"world of {self.size} ({self.backend} on {self.device_type})"


@dataclass(frozen=True)
class Unavailable:
    """Why an observation was not taken.

    ``error`` is False when the author did not declare what it needs (checks are skipped) or when an earlier finding
    rules it out, and True when taking it went wrong (checks are errors). ``detail`` is then the full story.
    ``kind`` is "undeclared" where a field of Subject would make it possible, "blocked" where mending what a check has
    found would, "unselected" where no check that was selected asked for it.
    """

    summary: str
    error: bool = False
    detail: str = ""
    kind: str = ""


def not_declared(field: str) -> Unavailable:
    return Unavailable(f"Subject({field}=...) is not declared", kind="undeclared")


@dataclass(frozen=True)
class Evidence:
    """All that one trial saw. An observation that was not taken is absent, and ``unavailable`` says why."""

    world: WorldFacts
    subject: SubjectFacts = field(default_factory=SubjectFacts)
    inventory: tuple[RankInventory, ...] = ()
    reference: ReferenceFacts | None = None
    values: tuple[tuple[Comparison, ...], ...] | None = None
    verifier: tuple[tuple[Comparison, ...], ...] | None = None
    training: tuple[RankTraining, ...] | None = None
    state_dict: tuple[RankStateDict, ...] | None = None
    saved: tuple[RankSaved, ...] | None = None
    restored: tuple[RankSaved, ...] | None = None
    """What was saved, in a second load that it was loaded into."""
    continued: tuple[RankResumed, ...] | None = None
    resumed: tuple[RankResumed, ...] | None = None
    """As ``continued``, in a second load that the checkpoint was loaded into."""
    repetition: tuple[RankInventory, ...] | None = None
    """The inventory of a second load, in a fresh world."""
    export: Export | None = None
    resharded: Resharded | None = None
    collectives: tuple[RankCollectives, ...] | None = None
    memory: tuple[RankMemory, ...] | None = None
    unavailable: Mapping[str, Unavailable] = field(default_factory=dict)
    tolerance: Mapping[str, float] = field(default_factory=dict)
    """Relative tolerances that the author set, by check id; "*" holds for all."""

    @cached_property
    def memo(self) -> dict[str, Any]:
        """Room for judges to keep what they derived from this evidence, so that forty checks derive it once."""
        return {}

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "memo"}
