"""``Subject``: the loaded model that a loader returns, with what its author declares about it."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from pytest_fsdp_meta.evidence import SubjectFacts
from pytest_fsdp_meta.loader.validation import LOSS_OVER_RANKS, SIGNATURES, SubjectError, check_fields, parse_placements
from pytest_fsdp_meta.text import describe_nearest, did_you_mean
from pytest_fsdp_meta.worlds import Misuse

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed.tensor import Placement
    from torch.nn import Module, Parameter
    from torch.optim import Optimizer

    from pytest_fsdp_meta.loader.adapter import Adapter

    Source: TypeAlias = Callable[[], Module] | str | os.PathLike[str]
    Placements: TypeAlias = str | Placement | Sequence[str | Placement]

__all__ = ["LOSS_OVER_RANKS", "SIGNATURES", "Subject", "SubjectError"]


@dataclass(eq=False, repr=False)
class Subject:
    """A loaded model and what its author declares about it. Only ``model`` is required.

    A loader returns a Subject, or a bare model. Checks that need a field which is not set are skipped and name it.
    ``docs/reference.md`` has the checks that each field enables, and an example of each. The fields by purpose:

    * What the model should be: ``reference``, ``frozen``, ``verifier``, ``tied``, ``drawn``, ``kept_attributes``.
    * How it trains: ``batch``, ``data_parallel``, ``loss``, ``loss_over_ranks``, ``optimizer``, ``scheduler``,
      ``train_step``, ``max_grad_norm``, ``clip_grad_norm``, ``data``.
    * What is saved: ``save``, ``resume``, ``beside``, ``state_dict``, ``export_reference``.
    * What is special about its layout: ``placements``, ``unsharded``, ``offloaded``, ``on_some_ranks``,
      ``whole_while_loading``, ``adapter``.

    Names are fully qualified names (FQNs) as in ``named_parameters()``, without the components that activation
    checkpointing and ``torch.compile`` insert. Patterns are shell patterns (``fnmatch``) in which ``*`` also matches
    dots. A pattern that matches nothing is an error, so that a typo cannot make a check pass; and so is a field that
    ranks declare differently.

    Raises SubjectError, a ValueError, for a wrong field. Types and values are checked on construction; names and
    patterns are matched with the model when the loader returns.
    """

    model: Module
    _: KW_ONLY

    # What the model should be
    reference: Source | None = None
    """The unsharded model that the loaded one should equal.

    A callable that builds it, on every call a new one; or a checkpoint directory with ``*.safetensors`` files. A
    checkpoint has no ties and no non-persistent buffers and cannot be trained, so fewer checks can use it.
    """
    frozen: str | Sequence[str] | Mapping[str, str] = ()
    """Names or patterns of weights that training must not change.

    By default what the reference freezes. A mapping gives the names in the verifier:
    ``{"layers.*.norm.weight": "model.layers.*.ln.weight"}``. The first ``*`` in the verifier's name
    stands for what the first wildcard (``*`` or ``?``) of the pattern matched, and so on.
    """
    verifier: Source | None = None
    """The model that frozen weights were copied from and must equal.

    A callable that builds it, or a checkpoint directory; by default the reference.
    """
    tied: Sequence[Sequence[str]] = ()
    """Groups of parameter names that are one weight; by default the ties of the reference."""
    drawn: str | Sequence[str] | Mapping[str, slice] = ()
    """Names or patterns of weights that the loader draws instead of loading: a new head, fresh LoRA adapters.

    A mapping gives the rows that are drawn, ``{"head.weight": slice(56, None)}`` after a vocabulary has grown from 56
    rows; the others are compared with those of the reference.

    They have to be written, finite and equal on all replicas, and different parts of one tensor have to be drawn with
    different numbers. Their values are not compared with those of the reference, which trains from the values that the
    loader drew; their spread is, where it is that of a draw as large as the shard. So the reference should draw them as
    the loader does on one device.
    """
    kept_attributes: Sequence[str] = ()
    """Names of custom parameter attributes that must survive sharding, such as ``_fsdp_no_shard``."""

    # How it trains
    batch: Callable[[int], Mapping[str, Any]] | None = None
    """The *global* batch of a training step: ``batch(step)`` returns a dict of tensors.

    ``step`` counts from 0, and the same step must give the same batch. Each data-parallel rank takes its slice of dim 0
    of every tensor.
    """
    data_parallel: tuple[int, int] | None = None
    """The slice of the batch on which this rank trains: ``(index, size)`` is slice ``index`` of ``size`` equal ones.

    By default derived from the mesh that the parameters lie on, else from the mesh of the decorator.
    """
    loss: Callable[[Module, Mapping[str, Any]], Tensor] | None = None
    """The loss of a batch: ``loss(model, batch)`` returns a scalar tensor; by default ``model(**batch).loss``.

    If it changes from step to step, put the step into the batch: ``{"step": torch.tensor(step), ...}``.
    """
    loss_over_ranks: Literal["mean", "sum", "same"] = "mean"
    """How the losses of the data-parallel ranks make the global loss.

    "mean": each rank returns the mean over its own rows. "sum": each rank returns its share, such as a sum over its own
    tokens divided by the tokens of all ranks. "same": every rank returns the global loss. Gradients are compared as
    they are: with "sum", FSDP2 has to sum them (``set_gradient_divide_factor(1.0)`` on every FSDP module).
    """
    optimizer: Callable[[Any], Optimizer] | Optimizer | None = None
    """The optimizer of the training: ``optimizer(parameters)`` returns it, or one that the loader built; default SGD.

    To choose parameter groups by name, name your function's parameter ``named_parameters`` (it gets pairs of name and
    parameter) or ``model`` (it gets the model). It is called on the reference as well.

    Of a framework's optimizer that wraps another one (accelerate, lightning), the inner one, its ``.optimizer``, is
    judged and trains; of one that contains several (torchtitan), all of its ``.optimizers``.
    """
    scheduler: Callable[[Any], Any] | Any | None = None
    """The learning rate scheduler: ``scheduler(optimizer)`` returns it; or a scheduler that the loader built.

    It steps once after each step of the optimizer, on the reference as well. A ``train_step`` that has a parameter
    ``scheduler`` gets it and steps it itself; it also has to step one that the loader built. Any object with
    ``step()``, ``state_dict()`` and ``load_state_dict()`` will do.
    """
    train_step: Callable[[Module, Any, dict[str, Any]], Tensor | float] | None = None
    """The training step on this rank's rows: ``train_step(model, optimizer, batch)`` returns the loss.

    The author's own step: forward, backward, accumulation over micro-batches, scaling, clipping, and one ``step()`` of
    the optimizer. Parameters of these names may come in any order; with a parameter ``scheduler`` or ``beside``, it
    gets what is declared under that name. Called on ranks only. The reference trains plainly: the ``loss`` of the whole
    batch, one backward, the same optimizer, and clipping to ``max_grad_norm``. Gradients are compared when the
    optimizer steps. Dropout has probability zero there, because it would differ between ranks and the reference; one
    more step, whose random numbers are compared between ranks, runs with dropout.
    """
    max_grad_norm: float | None = None
    """The norm to which ``train_step`` clips gradients. The reference clips to it as well, with ``clip_grad_norm``.

    The step runs twice more after the training, with gradients too small to be clipped, because clipping hides a wrong
    scale of the loss. Requires ``train_step``.
    """
    clip_grad_norm: Callable[[Iterable[Parameter], float], Any] | None = None
    """How gradients are clipped in place: ``clip_grad_norm(parameters, max_norm)`` returns their norm before.

    By default torch's function. Any norm will do, of all gradients or by group. Gradients within the bound must
    stay as they are. ``parameters`` is a list of those that have a gradient. Called on every rank, and on the reference
    in a world of one rank; if it raises there, or holds a mesh, the reference clips with torch's function and so by the
    2-norm of all.
    """
    data: Callable[[], Iterable[Any]] | Iterable[Any] | None = None
    """The loader of this rank's own batches: ``data()`` returns it; or the loader itself, such as a DataLoader.

    One pass over it is an epoch. A batch is a tensor, or a dict or sequence of tensors, with its rows in dim 0.
    Data-parallel ranks should see different rows, and ranks along other dimensions of the mesh the same ones. Called on
    every rank, after loading and again after ``resume``; a function is also called in a world of one rank, whose epoch
    shows all rows. ``save`` and ``resume``, or the loader's own ``state_dict`` and ``load_state_dict``, keep the
    position. Nothing is trained on these batches: see ``batch``.
    """

    # What is saved
    save: Callable[[Module, Optimizer | None, Path], object] | None = None
    """How a checkpoint is saved: ``save(model, optimizer, folder)``; by default torch.distributed.checkpoint.

    Called on every rank. Parameters of these names may come in any order. The optimizer is None if only the model is
    saved. With a parameter ``scheduler`` or ``beside``, a function gets the declared objects as well, or None if only
    the model is saved. If the model has dropout, the state of each rank's generators belongs to the checkpoint.
    Requires ``resume``.
    """
    resume: Callable[[Module, Optimizer | None, Path], object] | None = None
    """How a checkpoint is loaded into model and optimizer, in place: ``resume(model, optimizer, folder)``.

    Called on every rank, with the same arguments as ``save``: also ``scheduler`` and ``beside``, if it has parameters
    of these names. If it makes a new scheduler, it must return it. Requires ``save``.
    """
    beside: Mapping[str, Any] = field(default_factory=dict)
    """What is kept beside model and optimizer and belongs in a checkpoint: ``{"ema": ema, "scaler": scaler}``.

    Each value is an object with ``state_dict()`` and ``load_state_dict()``, or a function of the model that returns
    one. What a function returns is built for the reference as well, and compared after the training. If it has a
    method ``update_parameters(model)`` or ``update(model)``, that is called after each step; on the ranks not if
    ``train_step`` has a parameter ``beside``: it gets the mapping, and updates it itself.
    """
    state_dict: Callable[[Module], Mapping[str, Any]] | None = None
    """What is saved of the model, by name: ``state_dict(model)`` returns it.

    By default ``torch.distributed.checkpoint.state_dict.get_model_state_dict``. For tensors that ``adapter``
    describes, it may return only this rank's part; and of what is ``on_some_ranks``, only this rank's own keys.
    """
    export_reference: Source | None = None
    """The model that the export should equal, if it differs from the reference on purpose; default: the reference.

    For example with merged adapters, or without padding rows: a callable that builds it, or returns its tensors by
    name, as those of adapters alone; or a checkpoint directory. Only a built model's loss is compared after training.
    Names and shapes must be the same, and values within rounding, because merging may compute them in another order.
    """

    # What is special about its layout
    placements: Mapping[str, Placements] = ()  # type: ignore[assignment]
    """The placements of parameters: maps names or patterns to one placement for each mesh dimension, in order.

    The first match applies. Placements are strings (``"R, S(0)"``) or DTensor placements (``[Replicate(), Shard(0)]``).
    """
    unsharded: str | Sequence[str] = ()
    """Names or patterns of parameters that stay whole on every rank."""
    offloaded: str | Sequence[str] = ()
    """Names or patterns of parameters and buffers that are on the CPU on purpose."""
    on_some_ranks: str | Sequence[str] = ()
    """Names or patterns of parameters and buffers that some ranks register and others do not.

    For example experts that are numbered globally, of which each rank has its own. Together the ranks must have all
    names of the reference.
    """
    whole_while_loading: bool | Sequence[int] = False
    """The ranks that may hold the whole model while loading: True for all, or for example ``(0,)``."""
    adapter: Adapter | None = None
    """The part of a tensor that this rank holds: ``adapter(name, tensor)`` returns a Part of it, or None.

    For parameters sharded by hand, such as experts that each rank holds on its own. DTensors, plain tensors, FSDP1 and
    Megatron-FSDP need none; return None for them.
    """

    def __new__(cls, *given: Any, **fields: Any) -> Subject:
        if len(given) > 1:
            raise Misuse("Subject takes only the model by position; name the other fields: reference=..., ...")
        if fields and not given and "model" not in fields:  # without any fields, copy.copy() makes a subject
            raise SubjectError("model", f"missing; give the loaded model: Subject(model, {next(iter(fields))}=...)")
        known = cls.__dataclass_fields__
        for name in fields:
            if name not in known:
                hint = did_you_mean(name, known, f"the fields are {', '.join(known)}")
                raise SubjectError(name, f"no such field{hint}")
        return super().__new__(cls)

    def __post_init__(self) -> None:
        check_fields(self)
        self.placements = dict(self.placements)
        for declared in self.placements.values():
            parse_placements(declared)

    def resolve(
        self, parameters: Sequence[str], buffers: Sequence[str], transient: Collection[str] = (), world_size: int = 1
    ) -> SubjectFacts:
        """Return the declarations with every pattern resolved to names of this model.

        ``parameters`` and ``buffers`` are the names in the model; ``transient`` are those of the non-persistent
        buffers, which no checkpoint contains. Raises SubjectError for ranks that do not exist. The error of a name or
        pattern that matches nothing is in ``patterns``, because other ranks may have what it matches.
        """
        names = [*parameters, *buffers]
        matcher = _Matcher()
        rows: Mapping[str, slice] = self.drawn if isinstance(self.drawn, Mapping) else {}
        placements: dict[str, tuple[str, ...]] = {}
        for pattern, declared in self.placements.items():
            for name in matcher.match("placements", pattern, parameters):
                placements.setdefault(name, parse_placements(declared))
        for group in self.tied:
            for name in group:
                hint = "" if name in parameters else describe_nearest(name, parameters, "parameter")
                matcher.note("tied", name, name in parameters, f"is not a parameter of the model{hint}")
        return SubjectFacts(
            frozen=self._resolve_frozen(names, transient, matcher),
            tied=tuple(tuple(group) for group in self.tied),
            drawn=tuple(matcher.match_all("drawn", self.drawn, names)),
            drawn_rows={
                name: (rows[pattern].start, rows[pattern].stop)
                for pattern in reversed(list(rows))  # the first match applies
                for name in matcher.match("drawn", pattern, names)
            },
            on_some_ranks=tuple(matcher.match_all("on_some_ranks", self.on_some_ranks, names)),
            unsharded=tuple(matcher.match_all("unsharded", self.unsharded, parameters)),
            offloaded=tuple(matcher.match_all("offloaded", self.offloaded, names)),
            placements=placements,
            kept_attributes=tuple(_listed(self.kept_attributes)),
            whole_while_loading=_resolve_ranks(self.whole_while_loading, world_size),
            loss_over_ranks=self.loss_over_ranks,
            max_grad_norm=None if self.max_grad_norm is None else float(self.max_grad_norm),
            declared=frozenset(name for name, empty in UNDECLARED.items() if not _is_empty(getattr(self, name), empty)),
            patterns=matcher.patterns,
        )

    def _resolve_frozen(self, names: Sequence[str], transient: Collection[str], matcher: _Matcher) -> dict[str, str]:
        frozen: dict[str, str] = {}
        source = self.reference if self.verifier is None else self.verifier
        absent = transient if isinstance(source, (str, os.PathLike)) else ()
        mapping = self.frozen if isinstance(self.frozen, Mapping) else dict.fromkeys(_listed(self.frozen))
        for pattern, template in mapping.items():
            for name in matcher.match("frozen", pattern, names):
                # A pattern skips what a checkpoint cannot contain; a literal name asks for it explicitly.
                if name == pattern or name not in absent:
                    frozen.setdefault(name, name if template is None else _rename(name, pattern, template))
        return frozen


def _is_empty(value: Any, empty: Any) -> bool:
    """Return whether a field is not declared; an array cannot be compared with None."""
    return value is empty or (isinstance(value, (tuple, list, dict, str)) and value == empty)


UNDECLARED: dict[str, Any] = {
    **dict.fromkeys(("reference", "verifier", "batch", "data_parallel", "optimizer")),
    **dict.fromkeys(("train_step", "max_grad_norm", "clip_grad_norm", "save", "state_dict", "export_reference")),
    **dict.fromkeys(("scheduler", "data")),
    "beside": {},
    "frozen": (),
    "tied": (),
    "placements": {},
}
"""The fields that ``SubjectFacts.declared`` may name, with the values that they have when they are not declared."""


def _listed(patterns: str | Iterable[str]) -> list[str]:
    return [patterns] if isinstance(patterns, str) else list(patterns)


class _Matcher:
    """Match patterns with the names of this rank, and note those that match, and the errors of the others."""

    def __init__(self) -> None:
        self.patterns: dict[str, str] = {}

    def match(self, field: str, pattern: str, names: Sequence[str]) -> list[str]:
        found = [name for name in names if name == pattern or fnmatchcase(name, pattern)]
        noun = "parameter" if field in ("placements", "unsharded") else "tensor"
        hint = "" if found else describe_nearest(pattern, names, noun)
        self.note(field, pattern, bool(found), f"matches no {noun} of the model{hint}")
        return found

    def match_all(self, field: str, patterns: str | Iterable[str], names: Sequence[str]) -> list[str]:
        return list(dict.fromkeys(name for pattern in _listed(patterns) for name in self.match(field, pattern, names)))

    def note(self, field: str, pattern: str, found: bool, problem: str) -> None:
        self.patterns[f"{field} {pattern}"] = "" if found else str(SubjectError(field, f"{pattern!r} {problem}"))


def _rename(name: str, pattern: str, template: str) -> str:
    """Fill each ``*`` of ``template``, in order, with what the wildcards of ``pattern`` matched in ``name``."""
    matched = re.fullmatch(re.escape(pattern).replace(r"\*", "(.*)").replace(r"\?", "(.)"), name)
    parts = template.split("*")
    if matched is None or len(matched.groups()) != len(parts) - 1:
        raise SubjectError(
            "frozen",
            f"{pattern!r}: {template!r} should have one * for each * or ? of the pattern, which may not contain [...]",
        )
    return "".join(part + filled for part, filled in zip(parts, (*matched.groups(), ""), strict=True))


def _resolve_ranks(value: bool | Iterable[int], world_size: int) -> tuple[int, ...]:
    if isinstance(value, bool):
        return tuple(range(world_size)) if value else ()
    ranks = tuple(sorted(set(value)))
    if ranks and ranks[-1] >= world_size:
        raise SubjectError("whole_while_loading", f"rank {ranks[-1]} does not exist in a world of {world_size}")
    return ranks
