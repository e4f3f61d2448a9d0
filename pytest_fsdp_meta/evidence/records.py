"""What was seen: plain data that travels from the ranks to the judges.

Nothing here holds a live tensor and nothing here imports torch, so evidence can be pickled, kept, and judged again
long after the ranks are gone. Shapes are in elements; everything that is per rank is in rank order.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from pytest_fsdp_meta.evidence.checkpoint import RankResumed, RankSaved, RankStateDict
from pytest_fsdp_meta.evidence.collectives import RankCollectives, RankMemory
from pytest_fsdp_meta.evidence.tensors import RankInventory
from pytest_fsdp_meta.evidence.training import Comparison, RankTraining


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
