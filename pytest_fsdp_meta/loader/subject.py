"""What a loader hands over: the loaded model, and what its author declares about it."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from fnmatch import fnmatchcase
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from pytest_fsdp_meta.evidence import SubjectFacts
from pytest_fsdp_meta.text import counted
from pytest_fsdp_meta.worlds import Misuse

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed.tensor import Placement
    from torch.nn import Module, Parameter
    from torch.optim import Optimizer

    from pytest_fsdp_meta.loader.adapter import Adapter

    Source: TypeAlias = Callable[[], Module] | str | os.PathLike[str]
    Placements: TypeAlias = str | Placement | Sequence[str | Placement]


class SubjectError(Misuse):
    """A field of Subject is wrong; the message names the field, what is wrong and what would be right."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"Subject({field}=...): {problem}")


@dataclass(eq=False, repr=False)
class Subject:
    """A loaded model with the declarations of its author. Only ``model`` is required.

    Names are fully qualified (FQNs) as ``named_parameters()`` gives them, without the components that activation
    checkpointing and ``torch.compile`` insert. Patterns are shell patterns whose ``*`` also crosses dots; a pattern
    that matches nothing is an error, so that a typo never turns a check green. A wrong field raises SubjectError (a
    ValueError) that names it, when the subject is made or when the loader returns it.
    """

    model: Module
    _: KW_ONLY
    reference: Source | None = None
    """Builds the same model unsharded, anew on every call; or a checkpoint directory with safetensors."""
    batch: Callable[[int], Mapping[str, Any]] | None = None
    """``batch(step)``: the *global* batch; each data-parallel rank takes its slice of dim 0 of every tensor."""
    data_parallel: tuple[int, int] | None = None
    """``(index, size)`` of this rank's slice; default from the mesh of the parameters, else the marker's mesh."""
    loss: Callable[[Module, Mapping[str, Any]], Tensor] | None = None
    """``loss(model, batch)``: a scalar; default ``model(**batch).loss``."""
    optimizer: Callable[[Iterable[Parameter]], Optimizer] | Optimizer | None = None
    """``optimizer(parameters)``, or an optimizer that holds this model's parameters; default SGD."""
    clip_grad_norm: Callable[[Iterable[Parameter], float], Any] | None = None
    """``clip_grad_norm(parameters, max_norm)`` -> the norm before clipping; default as ``torch.nn.utils`` has it."""
    save: Callable[[Module, Optimizer | None, Path], object] | None = None
    """``save(model, optimizer, folder)``, called on every rank; default torch.distributed.checkpoint. With resume."""
    resume: Callable[[Module, Optimizer | None, Path], object] | None = None
    """``resume(model, optimizer, folder)``: loads into both what ``save`` left in the folder; the optimizer may be
    None in either, where the model alone is saved."""
    state_dict: Callable[[Module], Mapping[str, Any]] | None = None
    """``state_dict(model)``: what the author saves of the model, by name; default torch's get_model_state_dict."""
    frozen: str | Sequence[str] | Mapping[str, str] = ()
    """Names or patterns of frozen weights; a mapping gives the name in the verifier, its ``*`` filled in order."""
    verifier: Source | None = None
    """Where frozen weights were taken from; default the reference."""
    tied: Sequence[Sequence[str]] = ()
    """Groups of names that are one weight; default the ties of the reference."""
    unsharded: str | Sequence[str] = ()
    """Patterns of parameters that stay whole on every rank."""
    offloaded: str | Sequence[str] = ()
    """Patterns of parameters and buffers that live on the CPU by intent."""
    kept_attributes: Sequence[str] = ()
    """Custom attributes of parameters that survive sharding, such as ``_fsdp_no_shard``."""
    whole_while_loading: bool | Sequence[int] = False
    """The ranks that may hold the whole model while loading: True for all, or some, as ``(0,)``."""
    placements: Mapping[str, Placements] = ()  # type: ignore[assignment]
    """``{pattern: "S(0)"}`` or DTensor placements, one per mesh dimension in order; the first match wins."""
    adapter: Adapter | None = None
    """``adapter(name, tensor)``: the Part of it that this rank holds, where neither DTensor nor FSDP1 tells, else None.

    For parameters sharded by hand, such as the experts that each rank has of its own.
    """

    def __new__(cls, *_: Any, **given: Any) -> Subject:
        for name in given:
            if name not in cls.__dataclass_fields__:
                near = difflib.get_close_matches(name, cls.__dataclass_fields__, n=1)
                hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(cls.__dataclass_fields__)}"
                raise SubjectError(name, f"there is no such field; {hint}")
        return super().__new__(cls)

    def __post_init__(self) -> None:
        _require_module(self.model)
        for name in ("reference", "verifier"):
            _require_source(name, getattr(self, name))
        for name in SIGNATURES:
            value = getattr(self, name)
            if value is not None and not callable(value):
                raise SubjectError(name, f"{_shown(value)} is not callable; give a function of {SIGNATURES[name]}")
        for name, other in (("save", "resume"), ("resume", "save")):
            if getattr(self, name) is not None and getattr(self, other) is None:
                raise SubjectError(name, f"it is declared without {other}; declare both, or neither")
        _require_optimizer(self.optimizer)
        _require_slice(self.data_parallel)
        for name in ("frozen", "unsharded", "offloaded"):
            _require_names(name, getattr(self, name), mapping=name == "frozen")
        _require_attributes(self.kept_attributes)
        _require_groups(self.tied)
        _require_ranks("whole_while_loading", self.whole_while_loading)
        self.placements = _as_mapping("placements", self.placements)
        for pattern, declared in self.placements.items():
            _require_names("placements", [pattern])
            parse_placements(declared)

    def resolve(
        self, parameters: Sequence[str], buffers: Sequence[str], transient: Collection[str] = (), world_size: int = 1
    ) -> SubjectFacts:
        """The declarations with every pattern resolved to names of this model. Raises SubjectError.

        ``transient`` are the buffers that no checkpoint holds, because they are not persistent.
        """
        names = [*parameters, *buffers]
        placements: dict[str, tuple[str, ...]] = {}
        for pattern, declared in self.placements.items():
            for name in _match("placements", pattern, parameters):
                placements.setdefault(name, parse_placements(declared))
        for group in self.tied:
            for name in group:
                if name not in parameters:
                    raise SubjectError("tied", f"{name!r} is not a parameter of the model{_nearest(name, parameters)}")
        defaults: dict[str, Any] = dict.fromkeys(("reference", "verifier", "batch", "optimizer", "save", "state_dict"))
        defaults |= {"frozen": (), "tied": (), "placements": {}}
        return SubjectFacts(
            frozen=self._resolve_frozen(names, transient),
            tied=tuple(tuple(group) for group in self.tied),
            unsharded=tuple(_match_all("unsharded", self.unsharded, parameters)),
            offloaded=tuple(_match_all("offloaded", self.offloaded, names)),
            placements=placements,
            kept_attributes=tuple(_listed(self.kept_attributes)),
            whole_while_loading=_resolve_ranks(self.whole_while_loading, world_size),
            declared=frozenset(name for name, empty in defaults.items() if getattr(self, name) != empty),
        )

    def _resolve_frozen(self, names: Sequence[str], transient: Collection[str]) -> dict[str, str]:
        frozen: dict[str, str] = {}
        source = self.reference if self.verifier is None else self.verifier
        unheld = transient if isinstance(source, (str, os.PathLike)) else ()
        mapping = self.frozen if isinstance(self.frozen, Mapping) else dict.fromkeys(_listed(self.frozen))
        for pattern, template in mapping.items():
            for name in _match("frozen", pattern, names):
                # A pattern such as "layers.*" means what the checkpoint has of them; a literal name insists.
                if name == pattern or name not in unheld:
                    frozen.setdefault(name, name if template is None else _rename(name, pattern, template))
        return frozen


SIGNATURES = {
    "batch": "the step: batch(step) -> dict of tensors",
    "loss": "model and batch: loss(model, batch) -> scalar",
    "clip_grad_norm": "parameters and a bound: clip_grad_norm(parameters, max_norm) -> norm",
    "adapter": "name and tensor: adapter(name, tensor) -> Part or None",
    "save": "model, optimizer and folder: save(model, optimizer, folder)",
    "resume": "model, optimizer and folder: resume(model, optimizer, folder)",
    "state_dict": "the model: state_dict(model) -> dict by name",
}


def short_placement(placement: object) -> str:
    """A placement as messages write it: ``S(0)``, ``R``, ``P(sum)``, ``_S(0, 2)`` for a strided shard."""
    dim = getattr(placement, "dim", None)
    if dim is not None:
        factor = getattr(placement, "split_factor", None)
        return f"S({dim})" if factor is None else f"_S({dim}, {factor})"
    kind = type(placement).__name__
    if kind == "Partial":
        return f"P({getattr(placement, 'reduce_op', 'sum')})"
    return "R" if kind == "Replicate" else str(placement)


PLACEMENT = re.compile(
    r"(?:(?P<replicate>R|Replicate\(\))|(?:S|Shard)\((?:dim=)?(?P<dim>\d+)\)"
    r"|(?:_S|_StridedShard)\((?:dim=)?(?P<strided>\d+),\s*(?:sf=|split_factor=)?(?P<factor>\d+)\))\s*(?:,\s*|$)"
)


def parse_placements(declared: Any) -> tuple[str, ...]:
    """Declared placements in the short form, one per mesh dimension. Raises SubjectError for what is none."""
    if isinstance(declared, str):
        found, position = [], 0
        while match := PLACEMENT.match(declared, position):
            found.append(_canonical(match))
            position = match.end()
            if position == len(declared):
                return tuple(found)
        raise SubjectError(
            "placements", f"{declared!r} is no placement; write 'S(0)', 'R' or, on two mesh dimensions, 'R, S(0)'"
        )
    if isinstance(declared, Sequence) and declared:
        return tuple(part for one in declared for part in parse_placements(one))
    short = short_placement(declared)
    if not PLACEMENT.fullmatch(short):
        raise SubjectError("placements", f"{declared!r} is no placement; write 'S(0)' or use Shard(0), Replicate()")
    return (short,)


def _canonical(match: re.Match[str]) -> str:
    if match["replicate"]:
        return "R"
    return f"S({match['dim']})" if match["dim"] else f"_S({match['strided']}, {match['factor']})"


def _listed(patterns: str | Iterable[str]) -> list[str]:
    return [patterns] if isinstance(patterns, str) else list(patterns)


def _match(field: str, pattern: str, names: Sequence[str]) -> list[str]:
    found = [name for name in names if name == pattern or fnmatchcase(name, pattern)]
    if not found:
        what = "parameter" if field in ("placements", "unsharded") else "name"
        raise SubjectError(field, f"{pattern!r} matches no {what} of the model{_nearest(pattern, names, what)}")
    return found


def _match_all(field: str, patterns: str | Sequence[str], names: Sequence[str]) -> list[str]:
    return list(dict.fromkeys(name for pattern in _listed(patterns) for name in _match(field, pattern, names)))


def _nearest(name: str, names: Sequence[str], what: str = "parameter") -> str:
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.4)
    return f"; the nearest is {near[0]!r}" if near else f"; it has {counted(len(names), what)}"


def _rename(name: str, pattern: str, template: str) -> str:
    """``template`` with its ``*`` filled, in order, by what the ``*`` of ``pattern`` matched in ``name``."""
    matched = re.fullmatch(re.escape(pattern).replace(r"\*", "(.*)").replace(r"\?", "(.)"), name)
    parts = template.split("*")
    if matched is None or len(matched.groups()) != len(parts) - 1:
        raise SubjectError("frozen", f"{pattern!r}: {template!r} should have as many * as the pattern, and no [...]")
    return "".join(part + filled for part, filled in zip(parts, (*matched.groups(), ""), strict=True))


def _require_module(model: object) -> None:
    from torch.nn import Module

    if isinstance(model, Module):
        return
    raise SubjectError("model", f"{_shown(model)} is not a torch.nn.Module; hand over the loaded model itself")


def _require_source(field: str, value: object) -> None:
    if value is None:
        return
    from torch.nn import Module

    if isinstance(value, Module):
        raise SubjectError(field, "a model is no source: ranks need a fresh one; wrap it: lambda: build_the_model()")
    if isinstance(value, (str, os.PathLike)):
        folder = Path(value)
        if not folder.is_dir() or not any(folder.glob("*.safetensors")):
            raise SubjectError(field, f"{os.fspath(value)!r} is not a directory that holds *.safetensors files")
    elif not callable(value):
        raise SubjectError(
            field, f"{_shown(value)} should be a callable that builds the model, or a checkpoint directory"
        )


def _require_optimizer(value: object) -> None:
    if value is None or callable(value):
        return
    from torch.optim import Optimizer

    if not isinstance(value, Optimizer):
        raise SubjectError("optimizer", f"{_shown(value)} should be optimizer(parameters), or an Optimizer")


def _require_slice(value: object) -> None:
    if value is None:
        return
    right = isinstance(value, tuple) and len(value) == 2 and all(map(_is_number, value))
    if not right or not 0 <= value[0] < value[1]:  # type: ignore[index]
        raise SubjectError("data_parallel", f"{value!r} should be (index, size) with 0 <= index < size")


def _as_mapping(field: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping) and value != ():
        raise SubjectError(
            field, f"{_shown(value)} should be a mapping of patterns to placements: {{'*.weight': 'S(0)'}}"
        )
    return dict(value)


def _require_names(field: str, value: Any, mapping: bool = False) -> None:
    listed = [value] if isinstance(value, str) else value
    right = isinstance(listed, (list, tuple, set, frozenset)) or (mapping and isinstance(listed, Mapping))
    if not right:
        raise SubjectError(field, f"{_shown(value)} should be a name, a pattern, or a list of them")
    texts = [*listed, *(listed.values() if isinstance(listed, Mapping) else ())]
    for text in texts:
        if not isinstance(text, str) or not text:
            raise SubjectError(field, f"{text!r} should be a name or a pattern such as 'layers.*.weight'")


def _require_attributes(value: Any) -> None:
    listed = [value] if isinstance(value, str) else value
    if not isinstance(listed, (list, tuple, set, frozenset)):
        raise SubjectError("kept_attributes", f"{_shown(value)} should be a name, or a list of them")
    from torch.nn import Parameter

    for name in listed:
        if not isinstance(name, str) or not name:
            raise SubjectError("kept_attributes", f"{name!r} should be the name of an attribute")
        if hasattr(Parameter, name):
            raise SubjectError(
                "kept_attributes", f"every parameter has {name!r}; give custom attributes, such as '_fsdp_no_shard'"
            )


def _is_number(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)  # numpy's too


def _require_ranks(field: str, value: object) -> None:
    listed = () if isinstance(value, bool) else value
    right = isinstance(listed, (list, tuple, set, frozenset, range))
    if not right or not all(_is_number(rank) and rank >= 0 for rank in listed):  # type: ignore[attr-defined]
        raise SubjectError(field, f"{value!r} should be True, or the ranks that do, as (0,)")


def _resolve_ranks(value: bool | Iterable[int], world_size: int) -> tuple[int, ...]:
    if isinstance(value, bool):
        return tuple(range(world_size)) if value else ()
    ranks = tuple(sorted(set(value)))
    if ranks and ranks[-1] >= world_size:
        raise SubjectError("whole_while_loading", f"rank {ranks[-1]} does not exist in a world of {world_size}")
    return ranks


def _require_groups(value: object) -> None:
    for group in value if isinstance(value, (list, tuple)) else [value]:
        if isinstance(group, str) or not isinstance(group, (list, tuple)) or len(group) < 2:
            raise SubjectError("tied", f"{group!r} should be a group of two or more names: tied=[('a', 'b')]")
        _require_names("tied", group)
        if len(set(group)) < len(group):
            twice = next(name for name in group if list(group).count(name) > 1)
            raise SubjectError("tied", f"{group!r} has {twice!r} twice; a group needs two different names")


def _shown(value: object) -> str:
    return "None" if value is None else f"{type(value).__name__} {str(value)[:60]!r}"
