"""Evidence about training: gradients, clipping, updates, buffers and losses."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from pytest_fsdp_meta.checks.memory.facts import StepMemory
from pytest_fsdp_meta.checks.random_numbers.facts import Draw
from pytest_fsdp_meta.checks.structure.facts import OptimizerFacts, PartFacts, RankInventory
from pytest_fsdp_meta.checks.values.facts import Comparison

GRADIENTS = ("gradients", "second", "accumulated", "short")
BUFFERS = FIRST_BUFFERS, LAST_BUFFERS = "first_buffers", "buffers"
"""Snapshots of gradients, and of buffers after the first and the last step; the others are of parameters."""
UNKNOWN_DTYPE = "unknown"
"""The dtype of a loss that a step of the author's returned as a number."""


FORWARD, BETWEEN, UPDATE, END = "forward", "between", "update", "end"
"""The moments of a step: before its first forward, before another forward or a backward, before the optimizer's step
with its hooks, and at the end."""
AFTER = -1
"""The step that follows the training, with fewer rows."""
OWN_CHANGES, GIVEN_BUFFERS, GIVEN_STATE = "own changes", "given buffers", "given state"
"""What ranks record for the reference."""
FIRST_BACKWARD = "first backward"
"""The key of the ranks' state under which what was seen of the first step stays."""


class Moment(NamedTuple):
    """What a rank has recorded for the reference: a buffer before an event of a step, or a parameter's state."""

    step: int
    event: str
    """Or the key in the optimizer's state of a parameter."""
    name: str

    @property
    def key(self) -> str:
        """The name in the record of the ranks."""
        return " ".join(map(str, self))


class RecordedPart(NamedTuple):
    """Where the elements that a rank has recorded lie in the whole tensor, and their digest."""

    facts: PartFacts
    digest: str


@dataclass(frozen=True)
class Movement:
    """How much of one trainable parameter changed in training, by rows (dim 0) of a rank's shard.

    ``due`` rows should have changed and ``still`` of them did not; where every row changed, all may count as due.
    ``first`` is the global index of the first unchanged row; it is None if there is none or the tensor has no dims.
    """

    name: str
    due: int
    still: int
    first: int | None = None


@dataclass(frozen=True)
class Accumulation:
    """The gradients of the first batch, or of its first half, over micro-batches, compared with the reference's.

    ``early`` names the parameters whose gradients were already reduced after the first micro-batch although
    synchronisation was switched off.
    """

    gradients: tuple[Comparison, ...] = ()
    without_gradient: tuple[str, ...] = ()
    early: tuple[str, ...] = ()
    problem: str = ""
    """Why the batch cannot be divided into micro-batches, or empty."""
    refused: str = ""
    """The error that a hook of the optimizer's step raised, or the author's step, or empty."""


@dataclass(frozen=True)
class Clipping:
    """The gradients of the first step, clipped by the author's function to half of the reference's norm.

    They are divided by the scale that clipping should apply, so that right ones equal the reference's own gradients.
    """

    gradients: tuple[Comparison, ...] = ()
    own: tuple[Comparison, ...] = ()
    """Clipped to ``OwnClipping.bound`` and compared with what the same function left of the reference's gradients."""
    changed: tuple[Comparison, ...] = ()
    """The gradients that clipping to a bound of twice the norm changes, compared with the same before."""


@dataclass(frozen=True)
class OwnClipping:
    """What the author's function does to the reference's gradients of the first step, if torch's does otherwise."""

    norm: float
    """The norm that it returns."""
    bound: float | None = None
    """Half of that norm; a quarter, an eighth and so on if half makes no gradient smaller. None if no bound does."""


@dataclass(frozen=True)
class SecondStep:
    """What the first step left behind: the parameters after it, and the gradients of the second step."""

    parameters: tuple[Comparison, ...] = ()
    """The measures are of how far each parameter moved in the first step."""
    gradients: tuple[Comparison, ...] = ()
    without_gradient: tuple[str, ...] = ()
    left_over: tuple[str, ...] = ()
    """The parameters whose gradient still contains that of the first step."""


@dataclass(frozen=True)
class TensorNoise:
    """How far a tensor of the reference moves if it rounds as the loader does, in the slice that a rank holds.

    ``distance`` is the norm of the change, ``factor`` the relative change of its length along its own direction, which
    is far smaller: the changes of many elements cancel there. It is infinite if it was not measured.
    """

    distance: float
    factor: float = math.inf


@dataclass(frozen=True)
class Noise:
    """How far the reference's own training moves if it rounds as the loader does, in the slices that a rank holds.

    Each mapping is by tensor: of the first and the second gradient, of the update over all steps and over the first, of
    the accumulated gradient and that of a short step, and of buffers after the first and the last step. ``losses`` and
    ``norm`` are those of the whole batch.
    """

    losses: tuple[float, ...] = ()
    norm: float = 0.0
    own_norm: float = 0.0
    """The noise of ``OwnClipping.norm``."""
    gradients: Mapping[str, TensorNoise] = field(default_factory=dict)
    second: Mapping[str, TensorNoise] = field(default_factory=dict)
    updates: Mapping[str, TensorNoise] = field(default_factory=dict)
    first_updates: Mapping[str, TensorNoise] = field(default_factory=dict)
    accumulated: Mapping[str, TensorNoise] = field(default_factory=dict)
    short: Mapping[str, TensorNoise] = field(default_factory=dict)
    first_buffers: Mapping[str, TensorNoise] = field(default_factory=dict)
    buffers: Mapping[str, TensorNoise] = field(default_factory=dict)
    problem: str = ""
    """Why it could not be measured, or empty."""
    ended: bool = False
    """Whether the problem is that the reference's world ended, which says nothing about the model."""


@dataclass(frozen=True)
class StaleWeight:
    """A parameter whose old values a module computes with after an optimizer step."""

    name: str
    module: str
    """The FQN of the module; empty for the model itself."""
    step: int
    """The first training step, counted from 0, whose forward used old values."""
    how: str
    """"padded apart": its FSDP2 group gathers from other memory than the registered parameter's; "gathered": what the
    group gathered differs from this rank's shard; "copied": the loss depends on a copy made in an earlier step."""


@dataclass(frozen=True)
class ForwardWeights:
    """The weights that the forwards of the training steps computed with."""

    forwards: int
    """How many forwards were observed."""
    stale: tuple[StaleWeight, ...] = ()


@dataclass(frozen=True)
class TrainedBuffers:
    """The buffers that training changed on a rank or in the reference, compared with the reference's.

    ``first`` are those after the first step, ``last`` after the last one. The measures are of how far each moved.
    """

    first: tuple[Comparison, ...] = ()
    last: tuple[Comparison, ...] = ()
    forwards: int = 0
    """How many forwards of the model the author's steps trained; 0 if each step is a plain one, or calls submodules."""
    broadcast: tuple[str, ...] = ()
    """The buffers that DDP overwrites with those of one rank before each forward."""
    by_step: tuple[str, ...] = ()
    """The buffers that the author's step changed itself: not in a forward, a backward or a step of the optimizer."""
    by_evaluation: tuple[str, ...] = ()
    """The buffers that a forward in ``eval()`` and without gradients changed, within the author's step."""
    written_parameters: tuple[str, ...] = ()
    """Those that the author's step itself writes to, between forwards, backwards and the optimizer's steps."""


@dataclass(frozen=True)
class Followed:
    """What an object beside the model keeps in a low precision, and how it followed the parameters in the training.

    ``moved`` of its elements changed, and ``due`` of those of the parameters that they are named after.
    """

    owner: str
    dtype: str
    moved: int
    due: int


@dataclass(frozen=True)
class FirstBackward:
    """What a rank's first step of the author's differentiates."""

    pieces: tuple[tuple[int, int], ...]
    """The half-open range of the rank's rows that each backward differentiates; empty if that is not known."""
    values: tuple[float, ...]
    """The losses from which the backwards begin."""
    norms: tuple[tuple[float, bool], ...]
    """Before and after each backward, and before the optimizer's step: the norm of this rank's gradients, and whether
    they are a multiple of those at the moment before."""


@dataclass(frozen=True)
class Objective:
    """What ``Subject(loss=...)`` makes of the first piece of ``FirstBackward``, with the loaded weights."""

    loss: float
    factor: float
    """The gradient that reaches the outputs of the author's first forward, in multiples of what reaches them here."""
    residual: float
    """How far it is from that multiple, as a fraction of its length."""
    whole: tuple[float, float] = (math.nan, math.nan)
    """The loss of all rows of the rank, and the norm of this rank's gradients after its backward."""


@dataclass(frozen=True)
class RankTraining:
    """The training steps of one rank; ``losses`` are those of its own slice of the batch, one for each step."""

    losses: tuple[float, ...]
    data_parallel: tuple[int, int]
    """The (index, size) of that slice."""
    rows: int = 0
    """How many rows of the first batch it has; 0 if no tensor of the batch has rows."""
    loss_dtype: str = ""
    """The dtype in which the loss was returned."""
    autocast: tuple[str, ...] = ()
    """The dtypes of ``torch.autocast`` in the training steps, around the model or within it."""
    left: tuple[str, ...] = ()
    """As in ``RankTrainingMode``, of the first of the author's steps and a later one."""
    batches: tuple[str, ...] = ()
    """A hash of the global batch of each step."""
    backwards: tuple[int, ...] = ()
    """How many backwards each step ran."""
    first_backward: FirstBackward | None = None
    """None without a step of the author's."""
    objective: Objective | None = None
    """None unless the first step differs from the reference's."""
    gradients: tuple[Comparison, ...] = ()
    parameters: tuple[Comparison, ...] = ()
    labels: tuple[tuple[int, int], ...] = ()
    """For each step, the labels in this rank's rows that are not ignored: (all, all but the first of each row)."""
    without_gradient: tuple[str, ...] = ()
    """The trainable parameters that have no gradient after the first backward."""
    only_here: Mapping[str, float] = field(default_factory=dict)
    """The root mean square of each gradient there that is not zero, and that the reference has not."""
    norm: float | None = None
    """The norm of all gradients of the first step, as clipping computes it."""
    norm_problem: str = ""
    """Why that norm could not be computed, or empty."""
    after: RankInventory | None = None
    """The inventory after the last step."""
    optimizer: OptimizerFacts | None = None
    movements: tuple[Movement, ...] = ()
    accumulation: Accumulation | None = None
    short: Accumulation | None = None
    """A step of the author's with half of this rank's first rows; None if there is none, or nothing to compare with."""
    unclipped: tuple[Comparison, ...] = ()
    """The gradients of one more step of the author's on the first batch, if they are too small to be clipped.

    Empty if they do not follow the scale of the backward, or the author declares no bound.
    """
    unclipped_refused: str = ""
    """The error that the author's step raised there, or empty."""
    clipped: Clipping | None = None
    """None if the author declares no function that clips, or no reference to compare with."""
    second: SecondStep | None = None
    """None if there was only one step, or no reference to compare with."""
    late: tuple[Comparison, ...] = ()
    """The parameters before the last step, and how far they had moved."""
    noise: Noise | None = None
    """None if nothing differs from the reference by more than the smallest tolerance: then it is not needed."""
    swallowed: tuple[str, ...] = ()
    """The parameters whose updates are all rounded away: nothing moves, neither here nor in the reference."""
    steps_by_chance: bool = False
    """Whether random numbers were drawn between a backward and the end of its step, as by stochastic rounding."""
    forward: ForwardWeights = ForwardWeights(0)
    rates: tuple[tuple[float, ...], ...] = ()
    """The learning rate of each parameter group, for each step."""
    beside: tuple[Comparison, ...] = ()
    """What the author keeps beside the model, after the last step; the measures are of how far each tensor moved."""
    beside_alone: tuple[str, ...] = ()
    """The tensors beside the model that have no counterpart in what the reference keeps."""
    beside_aliases: tuple[str, ...] = ()
    """The tensors of averages that are parameters which train, or views of them."""
    followed: tuple[Followed, ...] = ()
    drawing: tuple[str, ...] = ()
    """The modules that drew random numbers in the second step, although dropout was off."""
    dropouts: Mapping[str, float] = field(default_factory=dict)
    """The fraction that each dropout drops before the training, by the module and its attribute."""
    buffers: TrainedBuffers = TrainedBuffers()
    memory: StepMemory = field(default=StepMemory(0))

    @property
    def compared(self) -> dict[str, tuple[Comparison, ...]]:
        """The comparisons by the names of the snapshots, which the fields of ``Noise`` have as well."""
        second, accumulated = self.second or SecondStep(), self.accumulation or Accumulation()
        return {
            "gradients": self.gradients,
            "second": second.gradients,
            "accumulated": accumulated.gradients,
            "short": (self.short or Accumulation()).gradients,
            "first_updates": second.parameters,
            "updates": self.parameters,
            FIRST_BUFFERS: self.buffers.first,
            LAST_BUFFERS: self.buffers.last,
        }


@dataclass(frozen=True)
class RankTrainingMode:
    """One more step of a rank in the author's modes, with dropout on, from the random state that the loader left."""

    data_parallel: tuple[int, int]
    """(index, size) of this rank's slice of the batch."""
    draws: tuple[Draw, ...] = ()
    hidden: bool = False
    """Whether a generator has advanced although no operator was seen to draw: custom kernels are not seen."""
    evaluating: tuple[str, ...] = ()
    """The outermost modules that ran in ``eval()`` with parameters of their own that train, or with dropout between
    such, while others ran in ``train()``; "" for all, if ``train()`` was called in the step."""
    left: tuple[str, ...] = ()
    """The outermost modules that ran in ``train()``, and in ``eval()`` in the next step of the author's; "" for all."""
    dropping: tuple[str, ...] = ()
    """The modules that drop elements in ``eval()``, in one more forward."""
    evaluation_problem: str = ""
    """Why that forward failed, or empty."""
    after: RankInventory | None = None
    """The inventory after the step; None if nothing is trainable."""
    repeating: tuple[str, ...] = ()
    """The modules that drew in the author's next step, on other rows, if all drew the same numbers as before."""
    frozen_in_train: tuple[str, ...] = ()
    """The modules that ran in ``train()`` and have buffers, but nothing that trains."""
    frozen_dropping: tuple[str, ...] = ()
    """The modules of frozen parts that act by their mode and ran in ``train()``."""
    norms_in_eval: tuple[str, ...] = ()
    """The batch norms that ran in ``eval()`` in this step or the next, in parts that train, but synchronised ones."""


@dataclass(frozen=True)
class StepNotFinite:
    """Steps of the author's in which the model returned NaN on the ranks of one slice of the batch."""

    data_parallel: tuple[int, int]
    """(index, size) of this rank's slice of the batch."""
    moved: tuple[bool, ...] = ()
    """Whether the step changed any trainable parameter of this rank: one with NaN in the first slice and, if it changed
    nothing on any rank, one with NaN in the last slice. Empty if the step calls neither the model nor its parts, or
    if these return no floating tensors."""
    kept: tuple[str, ...] = ()
    """The parameters that are NaN after the next step, a right one, if all ranks skipped these."""
    changed: tuple[str, ...] = ()
    """What else belongs to a step, such as the schedule, and changed in these, if all ranks skipped them."""
    replaced: bool = False
    """Whether a step with NaN on all ranks moved this rank's parameters, and left them numbers."""
    waiting: str = ""
    """How the step did not end on some ranks, or empty."""
