"""Evidence of one loader in one world: what its author declared, and every observation that was taken or is missing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from typing import Any

from pytest_fsdp_meta.checks.checkpoint.facts import Export, RankResumed, RankSaved, RankStateDict, Resharded
from pytest_fsdp_meta.checks.collectives.facts import RankCollectives
from pytest_fsdp_meta.checks.data.facts import Epoch, RankBatches
from pytest_fsdp_meta.checks.drawn.facts import DrawnTensor, RankDraws
from pytest_fsdp_meta.checks.memory.facts import RankMemory, StepMemory
from pytest_fsdp_meta.checks.sharding.facts import held_by_stages, stages_of
from pytest_fsdp_meta.checks.simulation.facts import SimulatedSize
from pytest_fsdp_meta.checks.structure.facts import RankInventory, describe_mesh
from pytest_fsdp_meta.checks.tracing.facts import RankTrace
from pytest_fsdp_meta.checks.training.facts import OwnClipping, RankTraining, RankTrainingMode, StepNotFinite
from pytest_fsdp_meta.checks.values.facts import Comparison
from pytest_fsdp_meta.text import name_ranks


@dataclass(frozen=True)
class SubjectFacts:
    """What the author declared, with patterns already resolved to the model's names."""

    frozen: Mapping[str, str] = field(default_factory=dict)
    """Maps frozen names to their names in the verifier."""
    tied: tuple[tuple[str, ...], ...] = ()
    drawn: tuple[str, ...] = ()
    """Tensors that the loader draws instead of loading."""
    drawn_rows: Mapping[str, tuple[int | None, int | None]] = field(default_factory=dict)
    """The drawn tensors whose other rows are loaded, each with the start and stop of its drawn rows (dim 0)."""
    on_some_ranks: tuple[str, ...] = ()
    """Tensors that some ranks may lack."""
    stages: tuple[tuple[int, ...], ...] = ()
    """The ranks of each stage of a pipeline, if the mesh has stages."""
    by_stage: tuple[str, ...] = ()
    """Tensors that whole stages have and others lack."""
    unsharded: tuple[str, ...] = ()
    offloaded: tuple[str, ...] = ()
    placements: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    kept_attributes: tuple[str, ...] = ()
    whole_while_loading: tuple[int, ...] = ()
    """The ranks that may hold the whole model while loading."""
    loss_over_ranks: str = "mean"
    """How the ranks' losses make the global one: "mean", "sum" or "same"."""
    max_grad_norm: float | None = None
    """The bound to which the author's step clips."""
    engine: str = ""
    """The framework whose engine runs the backward and the optimizer's step, which only the author's step can call."""
    declared: frozenset[str] = frozenset()
    """The fields of Subject that the author set."""
    patterns: Mapping[str, str] = field(default_factory=dict)
    """The patterns and names that one rank declares, each with the error if nothing on this rank matches; else ""."""


def combine_subjects(
    ranks: Sequence[SubjectFacts], mesh: Sequence[tuple[str, int]], inventory: Sequence[RankInventory]
) -> SubjectFacts:
    """Return what the author declared for all ranks, which may have matched the patterns with different names."""
    stages = stages_of(mesh)
    ranks = [_with_ties(rank, own) for rank, own in zip(ranks, inventory, strict=True)]

    def joined(field: str) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name for rank in ranks for name in getattr(rank, field)))

    return replace(
        ranks[0],
        stages=stages,
        by_stage=held_by_stages(stages, inventory),
        tied=tuple({frozenset(group): group for rank in ranks for group in rank.tied}.values()),
        drawn=joined("drawn"),
        drawn_rows={name: rows for rank in ranks for name, rows in rank.drawn_rows.items()},
        on_some_ranks=joined("on_some_ranks"),
        unsharded=joined("unsharded"),
        offloaded=joined("offloaded"),
        frozen={name: source for rank in ranks for name, source in rank.frozen.items()},
        placements={name: placements for rank in ranks for name, placements in rank.placements.items()},
        whole_while_loading=tuple(
            own.rank for rank, own in zip(ranks, inventory, strict=True) if own.rank in rank.whole_while_loading
        ),
        declared=frozenset[str]().union(*(rank.declared for rank in ranks)),
        patterns={},
    )


def _with_ties(subject: SubjectFacts, inventory: RankInventory) -> SubjectFacts:
    """Return the declarations with those of one name of a tie for all its names: they are one parameter."""
    tied = inventory.tied_with

    def all_names(names: Iterable[str]) -> tuple[str, ...]:
        return tuple(dict.fromkeys(other for name in names for other in (name, *sorted(tied.get(name, ())))))

    return replace(
        subject,
        drawn=all_names(subject.drawn),
        unsharded=all_names(subject.unsharded),
        offloaded=all_names(subject.offloaded),
        on_some_ranks=all_names(subject.on_some_ranks),
        drawn_rows={other: rows for name, rows in subject.drawn_rows.items() for other in all_names([name])},
        placements={other: own for name, own in subject.placements.items() for other in all_names([name])},
    )


def partly_held(subject: SubjectFacts, inventory: Sequence[RankInventory]) -> frozenset[str]:
    """Return the tensors that some ranks have and others lack, as declared or because they are a stage's."""
    holders = {name: sum(name in rank.by_name for rank in inventory) for name in subject.on_some_ranks}
    return frozenset(name for name, count in holders.items() if 0 < count < len(inventory)).union(subject.by_stage)


VALUES_CHECKS = {
    "parameter": "params_equal_reference",
    "buffer": "buffers_equal_reference",
    "frozen": "frozen_weights_equal_verifier",
}
"""Kind of tensor -> the check that reports wrong values of it, and without which the reference adopts none."""


@dataclass(frozen=True)
class ReferenceFacts:
    """The reference: the unsharded model, built and trained on one device.

    ``source`` is "callable" or "checkpoint"; a checkpoint has no non-persistent buffers and cannot be trained.
    ``losses`` has one loss for each step and ``losses_again`` those of a second, identical run, which takes place only
    if the ranks' training differs from the first one. ``unstable`` names the
    tensors whose bits differ when the reference is built twice, ``uninitialised`` those that the reference itself never
    writes.
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
    """The size below which an element of these gradients is rounding error."""
    norm: float | None = None
    """The norm of all gradients of the first step, as torch computes it, after they were clipped."""
    norm_before_clipping: float | None = None
    """The same before torch has clipped them; None if nothing, or a function of the author's, did."""
    own_clipping: OwnClipping | None = None
    """None if the author declares no function that clips, or it does the same as torch's."""
    clip_problem: str = ""
    """Why the reference could not use the author's function, or empty."""
    after: RankInventory | None = None
    """The inventory after the last step."""
    state_dict: tuple[str, ...] = ()
    """The keys of its state dict, or of the checkpoint."""
    adopted: tuple[str, ...] = ()
    """Tensors whose values differ from the loader's; the reference trains from the loader's values of these."""
    retrained: tuple[str, ...] = ()
    """Parameters that are frozen or trainable as on the ranks, which differ from what it was built with."""
    changed_by_steps: tuple[str, ...] = ()
    """The buffers that the ranks' steps change by themselves: where the loss depends on one, all have the same values
    here at the same moments."""
    not_given: Mapping[str, str] = field(default_factory=dict)
    """What the ranks have and it could not be given although it may change the training, each with the reason: buffers
    that their steps change, and the state of the loader's optimizer."""
    hooks_left_out: tuple[str, ...] = ()
    """The step hooks of the loader's optimizer that could not run on the reference, each with the reason."""
    settings: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """As in ``OptimizerFacts``, of the optimizer that trains it."""
    steered_by_forward: tuple[str, ...] = ()
    """The buffers, and other untrained tensors, that its forward changes and that change its loss."""
    recomputing: tuple[str, ...] = ()
    """The modules with activation checkpointing, as far as their settings say; of a simulated world only."""
    reached_later: tuple[str, ...] = ()
    """The parameters whose gradient is zero in the first step and not in a later one."""
    idle: tuple[str, ...] = ()
    """The parameters of modules that did not run in its first step, such as a vision tower that gets text only."""
    autocast: tuple[str, ...] = ()
    """As in ``RankTraining``."""
    used: tuple[str, ...] = ()
    """The other parameters, in the order in which the first forward reached the modules that own them."""
    rates: tuple[tuple[float, ...], ...] = ()
    """As in ``RankTraining``."""
    memory: tuple[StepMemory, ...] = ()
    """With the rows of each data-parallel slice; empty if it is not trained."""
    seed: int | None = None
    """The seed that building it has left in torch's generator."""
    evaluated: str = ""
    """Why it was trained in ``eval()`` to be compared with the ranks, or could not be; else empty."""
    batch_norms: tuple[str, ...] = ()
    """The modules that stay in ``eval()``, because in ``train()`` they normalise by statistics of a rank's own rows."""
    dropouts: Mapping[str, float] = field(default_factory=dict)
    """As in ``RankTraining``."""
    in_eval: tuple[str, ...] = ()
    """The modules of frozen parts that it has in ``eval()`` itself, beside others that train."""

    @property
    def complete(self) -> bool:
        """Whether it has every tensor of the model; a checkpoint lacks the non-persistent buffers."""
        return self.source == "callable"


def autocast_of_ranks_only(runs: Sequence[RankTraining], reference: ReferenceFacts | None) -> tuple[str, ...]:
    """Return the dtypes of ``torch.autocast`` in the ranks' training steps that the reference's steps lack."""
    theirs = () if reference is None else reference.autocast
    return tuple(sorted({dtype for run in runs for dtype in run.autocast if dtype not in theirs}))


def frozen_sources(subject: SubjectFacts, reference: ReferenceFacts | None) -> dict[str, str]:
    """Map the frozen tensors to their names in the verifier: the declared ones, else those frozen in the reference.

    Tensors that the loader draws were taken from no verifier.
    """
    frozen = dict(subject.frozen)
    if not frozen and reference is not None and reference.complete:
        tensors = reference.inventory.tensors
        frozen = {t.name: t.name for t in tensors if t.kind == "parameter" and not t.requires_grad}
    return {name: source for name, source in frozen.items() if name not in subject.drawn}


MOST_SIMULATED = 2**17
"""The largest world that is simulated: torch lists all of its ranks."""
MOST_RUN = 1024
"""Most ranks that run, as ``worlds`` limits them: each is a process."""


@dataclass(frozen=True)
class WorldFacts:
    """The world that a loader ran in: its size, mesh, device type and backend.

    ``mesh`` has (name, size) pairs. ``devices`` has the name of each rank's GPU, empty on CPU. ``library`` is the
    communication library, with its version where torch reports one ("NCCL 2.27.5").
    """

    size: int
    mesh: tuple[tuple[str, int], ...]
    device_type: str
    backend: str
    devices: tuple[str, ...] = ()
    library: str = ""
    simulated: tuple[int, ...] = ()
    """The only ranks that ran, each alone and without values; empty: all ran."""
    device_memory: int = 0
    """Bytes of the device that each simulated rank would have; 0: unknown."""
    memory_reserve: float = 0.0
    """The share of it that is not for tensors."""

    def check_stored(self) -> None:
        """Raise ValueError for sizes that no run has: a stored file may hold them, and its readers list all ranks."""
        if not 0 <= self.size <= MOST_SIMULATED or (len(self.simulated) or self.size) > MOST_RUN:
            raise ValueError(
                f"a world of {self.size}, but at most {MOST_RUN} ranks run, or {MOST_SIMULATED} are simulated"
            )
        if self.mesh and (any(size < 1 for _, size in self.mesh) or prod(dict(self.mesh).values()) != self.size):
            raise ValueError(f"the mesh {describe_mesh(self.mesh)} does not make a world of {self.size}")
        if any(not 0 <= rank < self.size for rank in self.simulated):
            raise ValueError(f"{name_ranks(self.simulated)} cannot be of a world of {self.size}")

    @property
    def usable_memory(self) -> int:
        """The bytes of a device that tensors may take; 0: unknown."""
        return round(self.device_memory * (1 - self.memory_reserve))

    @property
    def ranks(self) -> Sequence[int]:
        """The ranks that ran."""
        return self.simulated or range(self.size)

    def __str__(self) -> str:
        mesh = [describe_mesh(self.mesh)] if len(self.mesh) > 1 else []
        if self.simulated:
            shown = f" ({mesh[0]})" if mesh else ""
            return f"world of {self.size}{shown}, simulated by {len(self.simulated)} of its ranks"
        return f"world of {self.size} ({', '.join([*mesh, f'{self.backend} on {self.device_type}'])})"


@dataclass(frozen=True)
class Unavailable:
    """Why an observation was not taken.

    ``error`` is True if taking it failed, or would; its checks are then errors, and ``detail`` has the traceback or a
    similar long text. ``names`` are the tensors that the error names: findings about one of them explain it, as do any
    of the checks ``by``. ``error`` is False if the author did not declare what the observation needs; its checks are
    then skipped. ``kind`` is "undeclared" if declaring a field of Subject would make it possible, "unselected" if no
    selected check asked for it, "unsupported" if this release of torch lacks a private name that it needs, and
    "refused" if all ranks raise the same in what only this observation asks of them, such as a world of another size.
    """

    summary: str
    error: bool = False
    detail: str = ""
    kind: str = ""
    missing_field: str = ""
    """The field of Subject that is not declared, where it is a single one."""
    names: tuple[str, ...] = ()
    by: tuple[str, ...] = ()


@dataclass(frozen=True)
class SmallerWorld:
    """What the checks that failed find in a smaller world: of one rank, or along one dimension of the mesh alone.

    ``mesh`` has (name, size) pairs. ``failed`` maps a check to the tensors in which it finds something there, "" for
    the whole model; ``passed`` has those that find nothing. ``problem`` says why the loader could not be judged there.
    ``draws`` are those of its first rank.
    """

    mesh: tuple[tuple[str, int], ...]
    failed: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    passed: tuple[str, ...] = ()
    problem: str = ""
    draws: tuple[DrawnTensor, ...] = ()


def not_declared(field: str) -> Unavailable:
    """Return the reason for an observation that needs a field of Subject which the author did not set."""
    return Unavailable(f"Subject({field}=...) is not declared", kind="undeclared", missing_field=field)


@dataclass(frozen=True)
class Evidence:
    """Everything observed in one trial; ``unavailable`` says why an observation is absent, or a check not supported.

    Tuples of ranks are in rank order; ``values`` and ``verifier`` have a tuple of comparisons for each rank.
    """

    world: WorldFacts
    subject: SubjectFacts = field(default_factory=SubjectFacts)
    inventory: tuple[RankInventory, ...] = ()
    reference: ReferenceFacts | None = None
    values: tuple[tuple[Comparison, ...], ...] | None = None
    verifier: tuple[tuple[Comparison, ...], ...] | None = None
    draws: tuple[RankDraws, ...] | None = None
    training: tuple[RankTraining, ...] | None = None
    collectives: tuple[RankCollectives, ...] | None = None
    memory: tuple[RankMemory, ...] | None = None
    repetition: tuple[RankInventory, ...] | None = None
    """The inventory of a second load in a fresh world."""
    state_dict: tuple[RankStateDict, ...] | None = None
    export: Export | None = None
    saved: tuple[RankSaved, ...] | None = None
    restored: tuple[RankSaved, ...] | None = None
    """The same values after loading the checkpoint into a second load of the model."""
    resharded: Resharded | None = None
    continued: tuple[RankResumed, ...] | None = None
    resumed: tuple[RankResumed, ...] | None = None
    """As ``continued``, after loading the checkpoint into a second load of the model."""
    saved_again: tuple[RankResumed, ...] | None = None
    """As ``continued``, at a second checkpoint that is saved after the training steps that follow the first."""
    restored_again: tuple[RankResumed, ...] | None = None
    """As ``saved_again``, after loading the second checkpoint into a second load of the model."""
    training_mode: tuple[RankTrainingMode, ...] | None = None
    not_finite: tuple[StepNotFinite, ...] | None = None
    batches: Epoch | None = None
    batches_resumed: tuple[RankBatches, ...] | None = None
    """The batches of another load that resumed from the checkpoint that was saved within the epoch."""
    batches_resharded: tuple[RankBatches, ...] | None = None
    """The same in a world of another size."""
    simulation: tuple[SimulatedSize, ...] | None = None
    """What ranks hold and send in a simulated world, and in smaller ones; the first is the world itself."""
    traces: tuple[RankTrace, ...] | None = None
    """What every module got and returned in one more first step; None if nothing departed in it."""
    smaller: tuple[SmallerWorld, ...] = ()
    """What failed checks find in smaller worlds, the one of a single rank first; empty if nothing failed."""
    unavailable: Mapping[str, Unavailable] = field(default_factory=dict)
    tolerance: Mapping[str, float] = field(default_factory=dict)
    """Relative tolerances that the author set, by check id; "*" applies to all checks."""

    @property
    def computes_in(self) -> tuple[str, ...]:
        """The dtypes in which the loader computes: those of its policies, and of autocast that only its steps use."""
        autocast = autocast_of_ranks_only(self.training or (), self.reference)
        return tuple(sorted({*self.inventory[0].computes_in, *autocast}))

    @cached_property
    def memo(self) -> dict[str, Any]:
        """A cache in which judges keep values derived from this evidence; it is neither pickled nor stored."""
        return {}

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "memo"}
