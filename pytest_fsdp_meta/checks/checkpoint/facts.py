"""Evidence about checkpoints: the keys saved, and the values after loading them again, here or in another world.

A digest is a short string that is the same for the same bytes, on every device, and a fingerprint describes any value.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from pytest_fsdp_meta.checks.random_numbers.facts import RandomState
from pytest_fsdp_meta.checks.structure.facts import PartFacts
from pytest_fsdp_meta.checks.values.facts import Comparison

FOREIGN = "a DTensor on a mesh of another world"
"""The problem of a comparison: what was loaded belongs to the ranks of the world that saved it."""
NO_STATE = "no state"
"""The problem of a comparison of the optimizer's state: it was saved, and this rank has none of it."""


@dataclass(frozen=True)
class Fingerprint:
    """Any value of a state dict; those of equal values are equal, however the values were pickled.

    ``content`` is the value as text or a digest of it, of a tensor without dtype and shape.
    """

    content: str
    number: float | None = field(default=None, compare=False)  # NaN would differ from itself
    """The value, if it is one number, also in a tensor."""
    dtype: str = ""
    shape: tuple[int, ...] | None = None
    """Of a tensor; None for other values."""

    def __str__(self) -> str:
        return self.content if self.shape is None else f"{self.dtype} {self.shape} {self.content}"


@dataclass(frozen=True)
class RankStateDict:
    """The keys under which a rank saves the model.

    ``refused`` is the error that torch's own ``get_model_state_dict`` raised for the model, or empty. If it is set,
    the keys are those of ``model.state_dict()`` without the prefixes that torch's wrappers insert.
    """

    keys: tuple[str, ...]
    refused: str = ""


@dataclass(frozen=True)
class RankSaved:
    """The checkpointed values on one rank, either before saving or after loading.

    ``tensors`` maps parameters and persistent buffers to digests of this rank's shard. ``extra`` has the
    ``_extra_state`` of modules. ``left_out`` names the tensors without a key in the state dict. The loaded
    model is filled with other values before loading; ``untouched`` names the tensors that still have them afterwards.
    ``moved`` names the parameters that the author's save() itself changes, and ``rounded`` the tensors that it changes
    within rounding only; of these, ``tensors`` has the values after save(). ``transient`` has the digests of
    non-persistent buffers, which no checkpoint has.
    """

    tensors: Mapping[str, str]
    extra: Mapping[str, Fingerprint] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()
    untouched: tuple[str, ...] = ()
    moved: tuple[str, ...] = ()
    rounded: tuple[str, ...] = ()
    transient: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class RankResumed:
    """Model and optimizer of one rank at a checkpoint, and the losses of the training steps that follow it.

    ``state`` is the optimizer's state by parameter and key, and ``groups`` has the hyperparameters of its parameter
    groups.
    """

    model: RankSaved
    state: Mapping[str, Mapping[str, Fingerprint]]
    groups: tuple[Mapping[str, Fingerprint], ...]
    losses: tuple[float, ...] = ()
    frozen: tuple[str, ...] = ()
    """The parameters that require no gradient."""
    tied: tuple[tuple[str, ...], ...] = ()
    """The groups of parameters that have one memory."""
    exported: Mapping[str, Fingerprint] = field(default_factory=dict)
    """What the author's ``state_dict(model)`` returned, if it is declared, by key."""
    rates: tuple[tuple[float, ...], ...] = ()
    """The learning rate of each parameter group, for each step that follows."""
    evaluating: tuple[str, ...] = ()
    """The outermost modules that act by their mode and run in ``eval()`` in these steps."""
    kept: tuple[str, ...] = ()
    """The modules of frozen parts that are in ``eval()`` after these steps, and that act by their mode."""
    resting: tuple[str, ...] = ()
    """All modules that are in ``eval()`` then."""
    dropouts: Mapping[str, float] = field(default_factory=dict)
    """The settings of dropouts then, by module and attribute."""
    beside: Mapping[str, Fingerprint] = field(default_factory=dict)
    """The scheduler's state and what is kept beside the model, by entry, such as "scheduler.last_epoch"."""
    rounded: Mapping[str, Fingerprint] = field(default_factory=dict)
    """The same of tensors in float32 after rounding to the dtype of the parameters, if that is a lower one."""
    plain: tuple[str, ...] = ()
    """The entries of ``beside`` that are not DTensors."""
    beside_before: Mapping[str, Fingerprint] = field(default_factory=dict)
    """``beside`` before the checkpoint was loaded."""
    running: bool = False
    """Whether save() returned while threads or processes that it had started were still running."""
    saved_in_train: tuple[str, ...] = ()
    """The classes of optimizers with modes that are in ``train()`` all the time while the author's save() runs."""
    empty_entries: bool = False
    """Whether the optimizer's state has entries without a value after loading."""
    copies: Mapping[str, bool] = field(default_factory=dict)
    """The float32 copies that the optimizer keeps of low-precision parameters: "<parameter>: <key>" -> whether the copy
    is more precise than the parameter."""
    generators: Mapping[str, RandomState] = field(default_factory=dict)
    """Torch's default generators while the author's save() or resume() runs, by device type."""


@dataclass(frozen=True)
class FirstStep:
    """The optimizer of one rank after its first step.

    ``unloadable`` says why torch cannot load the optimizer's state, or is empty. ``stateless`` names the trainable
    parameters that have no optimizer state because they received no gradient.
    """

    unloadable: str
    stateless: tuple[str, ...]


@dataclass(frozen=True)
class RankExport:
    """What one rank exports: the keys of its state dict, and the parts of tensors that are put together from parts.

    ``held`` has the parts that its model holds of those tensors, ``exported`` the parts that its state dict has.
    """

    keys: tuple[str, ...]
    held: Mapping[str, PartFacts] = field(default_factory=dict)
    exported: Mapping[str, PartFacts] = field(default_factory=dict)
    changed: tuple[str, ...] = ()
    """The frozen parameters that the author's state_dict() changes."""
    loss: float | str = ""
    """The loss of this rank's rows of the first batch, without dropout, or why it was not computed."""


@dataclass(frozen=True)
class ExportedPart:
    """What one rank's state dict has of a tensor, compared with the same part of the reference.

    The comparison is None if the reference has no such tensor.
    """

    rank: int
    comparison: Comparison | None = None
    rounded: str = ""
    """The dtype of the part, if that cannot hold the reference's values."""


@dataclass(frozen=True)
class Assembled:
    """A tensor of the export that is put together from the parts in the ranks' state dicts.

    No state dict has ``absent`` of its ``elements``, the first of them at ``index``; the ranks ``lacking`` hold them.
    The ranks ``diverging`` export other values than the ranks ``before`` them for the same elements.
    """

    name: str
    parts: tuple[ExportedPart, ...] = ()
    elements: int = 0
    absent: int = 0
    index: tuple[int, ...] | None = None
    lacking: tuple[int, ...] = ()
    diverging: tuple[int, ...] = ()
    before: tuple[int, ...] = ()


@dataclass(frozen=True)
class Export:
    """The gathered (full) state dict compared with the reference: missing and unexpected keys, and every tensor.

    ``comparisons`` has the tensors that are gathered whole, ``assembled`` those that are put together from parts, which
    an adapter describes or which only some ranks have.
    """

    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    comparisons: tuple[Comparison, ...] = ()
    rounded: Mapping[str, str] = field(default_factory=dict)
    """The tensors whose dtype in the export cannot hold the reference's values, with that dtype."""
    assembled: tuple[Assembled, ...] = ()
    changed: tuple[tuple[str, ...], ...] = ()
    """For each rank, the frozen parameters that the author's state_dict() changes."""
    unchanged: tuple[str, ...] = ()
    """The tensors that differ from a declared export_reference, and have the values of the reference instead."""
    live: tuple[tuple[float, ...], ...] = ()
    """The loss of the first batch on each rank, as loaded and after the training; empty if it was not computed."""
    losses: tuple[float, ...] = ()
    """Those of a model that has loaded what the ranks exported then."""
    rounding: float = 0.0
    """How much the dtypes of the export may change a loss, relatively."""
    as_loaded: bool = False
    """Whether it is compared as loaded only, as the declared ``export_reference`` is a dict or a checkpoint."""
    no_losses: str = ""
    """Why the losses were not computed, although there was a training; empty if they were, or if there was none."""


@dataclass(frozen=True)
class Resharded:
    """A checkpoint loaded in a world of another size; ``comparisons`` has one entry for each rank of that world.

    ``refused`` is the first line of the error that loading raised there, although loading in a world of the same size
    succeeds; ``ranks`` are the ranks that raised it.
    """

    mesh: tuple[tuple[str, int], ...]
    comparisons: tuple[tuple[Comparison, ...], ...] = ()
    refused: str = ""
    ranks: tuple[int, ...] = ()
    optimizer: tuple[tuple[Comparison, ...], ...] = ()
    """The optimizer's state after loading, by "<parameter>: <key>", compared with what was saved; empty if the
    checkpoint has none."""
    optimizer_problem: str = ""
    """Why the optimizer's state, which the checkpoint has, was not compared; or empty."""
    optimizer_refused: bool = False
    """Whether loading the optimizer raised, and not loading the model."""
    saved_over: Resharded | None = None
    """The same for what the smaller world itself saves in this folder, after more training, and loads again."""
