"""Call and check what the author declares about training: batches, their slices, and the loss."""

from __future__ import annotations

import inspect
import re
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import takewhile
from operator import itemgetter
from typing import Any, TypeGuard

import torch
from torch import Tensor
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.tensor import DTensor
from torch.nn import Module

from pytest_fsdp_meta.checks.sharding.facts import splits_batch
from pytest_fsdp_meta.evidence import splits_experts, splits_model, splits_stages
from pytest_fsdp_meta.loader.subject import SIGNATURES, Subject, SubjectError
from pytest_fsdp_meta.loader.validation import shorten
from pytest_fsdp_meta.ranks.adapters.dtensor import local_part, mesh_facts
from pytest_fsdp_meta.ranks.bits import NOTICES, digest
from pytest_fsdp_meta.worlds import SEED, CallFailed, Misuse, Rank, forward_warnings

IGNORED_LABEL = -100
"""The default ``ignore_index`` of torch's cross entropy, which the losses of transformers use as well."""


def batch_slice(subject: Subject, rank: Rank) -> tuple[int, int]:
    """Return the (index, size) of this rank's slice of the batch: as declared, else by the mesh of most parameters.

    Where the marker's mesh has more ranks that see rows of their own, it counts: a model that is sharded on a part of
    it still has to learn from all rows.
    """
    if subject.data_parallel:
        return subject.data_parallel
    own, world = _parameter_mesh(subject.model), _world_mesh(rank)
    if not own[0] and not world[0]:
        return rank.rank, rank.world_size
    place = _slice(own if own[0] else world, lambda dim: not splits_model(dim))
    if len(world[0]) == 1 or any(splits_model(dim) and dim not in world[0] for dim in own[0]):
        return place  # the default mesh, or the loader's own
    return max(place, _slice(world, splits_batch), key=itemgetter(1))


def _slice(mesh: _Mesh, counts: Callable[[str | None], bool]) -> tuple[int, int]:
    """Return the (index, size) of this rank in the mesh, by the dimensions that count."""
    index, whole = 0, 1
    for dim, size, position in zip(*mesh, strict=True):
        if counts(dim):
            index, whole = index * size + position, whole * size
    return index, whole


def has_stages(rank: Rank) -> bool:
    """Return whether the ranks are the stages of a pipeline, as the mesh of the marker says."""
    return rank.has_mesh and any(map(splits_stages, rank.mesh.mesh_dim_names or ()))


def model_splits(model: Module, rank: Rank) -> tuple[tuple[int, int], ...]:
    """Return the (index, size) of this rank along each mesh dimension that splits the model, larger than 1.

    A tensor that is split by hand lies on no mesh, so the world's mesh counts where that of the parameters lacks one.
    """
    places = dict[str, tuple[int, int]]()
    for dims, shape, coordinate in (_parameter_mesh(model), _world_mesh(rank)):
        for dim, size, index in zip(dims, shape, coordinate, strict=True):
            if dim is not None and splits_model(dim) and size > 1:
                places.setdefault(dim, (index, size))
    return tuple(places.values())


_Mesh = tuple[tuple[str | None, ...], tuple[int, ...], tuple[int, ...]]
"""The names and sizes of the dimensions of a mesh, and this rank's place; all are empty where there is none."""


def _parameter_mesh(model: Module) -> _Mesh:
    """Return the mesh of most parameters, without those of experts."""
    meshes: dict[_Mesh, int] = {}
    for parameter in model.parameters():
        if isinstance(parameter, DTensor):
            mesh = mesh_facts(parameter)
            if mesh.coordinate is not None and not any(map(splits_experts, mesh.dims)):
                key = (mesh.dims, mesh.shape, mesh.coordinate)
                meshes[key] = meshes.get(key, 0) + parameter.numel()
    return max(meshes, key=lambda key: meshes[key], default=((), (), ()))


def _world_mesh(rank: Rank) -> _Mesh:
    if not rank.has_mesh:
        return (), (), ()
    return tuple(rank.mesh.mesh_dim_names or ()), tuple(rank.mesh.shape), tuple(rank.mesh.get_coordinate() or ())


def calling_field(field: str) -> AbstractContextManager[None]:
    """Name the field of Subject whose function is called, and how it is called, in errors that it raises."""
    return calling(f"Subject({field}=...)", SIGNATURES[field].partition(" -> ")[0])


def call_field(field: str, function: Callable[..., Any], *given: Any, **more: Any) -> Any:
    """Call the function of a field of Subject; errors name the field and show the call as it was made.

    Arguments go to the parameters of their names, in any order; the others in order to the parameters that are left.
    """
    names = re.findall(r"\w+", SIGNATURES[field])[1 : len(given) + 1]
    values = {**dict(zip(names, given, strict=True)), **more}
    in_order, by_name = _arrange(function, names, more)
    shown = {name: "None" if value is None else name for name, value in values.items()}
    call = [*(shown[name] for name in in_order), *(f"{slot}={shown[name]}" for slot, name in by_name.items())]
    with calling(f"Subject({field}=...)", f"{field}({', '.join(call)})"):
        return function(*map(values.__getitem__, in_order), **{slot: values[name] for slot, name in by_name.items()})


def _arrange(
    function: Callable[..., Any], names: Sequence[str], more: Collection[str]
) -> tuple[Sequence[str], Mapping[str, str]]:
    """Return which arguments to pass in order, and which parameter gets which of the others.

    All ``names`` in order, and ``more`` by name, unless the parameters have names in another order.
    """
    plain: tuple[Sequence[str], Mapping[str, str]] = names, {name: name for name in more}
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # nothing describes its parameters
        return plain
    own = signature.parameters
    if any(slot.kind is slot.VAR_POSITIONAL for slot in own.values()):  # it hands on what it gets, as it gets it
        return plain
    given = [*names, *more]
    slots = [name for name, slot in own.items() if slot.kind is slot.POSITIONAL_OR_KEYWORD]
    free = [name for name in slots if name not in given]
    renamed = dict(zip((name for name in names if name not in own), free, strict=False))
    by_name = {renamed.get(name, name): name for name in given}
    try:
        signature.bind(**by_name)
    except TypeError:  # they do not fit: let the usual call say so
        return plain
    return plain if [*by_name][: len(names)] == slots[: len(names)] else ((), by_name)


@contextmanager
def calling(where: str, call: str = "") -> Iterator[None]:
    """Name the author's function in errors that it raises. Errors whose message says where already pass unchanged.

    Errors of a function that cannot use its arguments also have the ``call``, such as "save(model, None, folder)". A
    function that cannot be called so is an error in one line.
    """
    try:
        with forward_warnings(NOTICES), requiring_parameters(where, call):
            yield
    except (Misuse, CallFailed):
        raise
    except Exception as error:
        shown = call and (_expects_others(error) or ("None" in call and "NoneType" in str(error)))
        raise CallFailed(f"{where}, called as {call}" if shown else where) from error
    except CheckpointException as error:
        raise CallFailed(where) from _first_failure(error)


REFUSED_CALL = re.compile(r" takes |missing \d+ required|unexpected keyword argument|multiple values for argument")
"""What Python says where a function cannot be called with the arguments that it gets."""


@contextmanager
def requiring_parameters(where: str, call: str) -> Iterator[None]:
    """Raise Misuse if the author's function cannot be called with these arguments, which ``call`` shows."""
    try:
        yield
    except TypeError as error:
        modules = [frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__)]
        # A function in C has no frame, so that the error may be one of its own.
        if call and REFUSED_CALL.search(str(error)) and all(map(_is_caller, modules)):
            short = str(error).rpartition("<locals>.")[2]  # "<lambda>() takes 1 positional argument but 2 were given"
            raise Misuse(f"{where}: give a function that can be called as {call}; {short}") from None
        raise


@contextmanager
def calling_torch(function: str, field: str) -> Iterator[None]:
    """Name torch's function that takes the place of a field, and what failed on the first rank, where ranks report."""
    try:
        yield
    except CheckpointException as error:
        where = f"{function}, the default of Subject({field}=...)"
        raise CallFailed(where) from _first_failure(error)


def _first_failure(error: CheckpointException) -> BaseException:
    """Return the failure of the first rank: the error itself, a BaseException, only counts the ranks."""
    first: BaseException = next((cause for cause, _ in error.failures.values()), error)
    return first


@contextmanager
def blaming_the_forward() -> Iterator[None]:
    """Name the model's forward in errors that FSDP raises: the loss has only called the model."""
    try:
        yield
    except Exception as error:
        *_, (frame, _) = traceback.walk_tb(error.__traceback__)
        if frame.f_globals.get("__name__", "").startswith("torch.distributed.fsdp."):
            raise CallFailed("the model's forward") from error
        raise


def _expects_others(error: Exception) -> bool:
    """Return whether the call itself failed, or the function finds other arguments than it expects."""
    if not isinstance(error, (TypeError, AttributeError)):
        return False
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    # A module of torch raises AttributeError in a method of its own.
    modules = [frame.f_globals.get("__name__", "") for frame in frames if frame.f_code.co_name != "__getattr__"]
    callers = takewhile(_is_caller, modules)
    return len(modules) - len(list(callers)) <= 1  # an error further down is about something else, such as the model


def _is_caller(module: str) -> bool:
    """Return whether a frame of this module calls the author's functions; those of ``transformers`` stand for them."""
    return module == "contextlib" or (
        module.startswith("pytest_fsdp_meta.") and not module.startswith("pytest_fsdp_meta.transformers")
    )


def global_batch(subject: Subject, step: int) -> Mapping[str, Any]:
    """Return the whole batch of a step, the same on every rank."""
    assert subject.batch is not None
    torch.manual_seed(SEED + step)  # a batch that is drawn at random must be the same on every rank
    with calling(f"Subject(batch=...), batch({step})"), requiring_parameters("Subject(batch=...)", "batch(step)"):
        batch = subject.batch(step)
    if not hasattr(batch, "items"):
        raise SubjectError("batch", f"batch({step}) returned {shorten(batch)}, but should return a dict of tensors")
    return dict(batch.items())


def batch_digest(batch: Mapping[str, Any]) -> str:
    """Return a hash of each tensor of the batch, by key."""
    tensors = {str(key): local_part(value) for key, value in batch.items() if isinstance(value, Tensor)}
    return " ".join(f"{key}={digest(tensor)}" for key, tensor in sorted(tensors.items()))


def own_rows(
    batch: Mapping[str, Any], step: int, data_parallel: tuple[int, int], device: torch.device
) -> dict[str, Any]:
    """Return the slice ``(index, size)`` of every tensor of the batch, on ``device``."""
    return {key: _own_rows(key, value, step, data_parallel, device) for key, value in batch.items()}


def rows_of_step(subject: Subject, step: int, data_parallel: tuple[int, int], device: torch.device) -> dict[str, Any]:
    """Return the slice ``(index, size)`` of the batch of a step, on ``device``."""
    return own_rows(global_batch(subject, step), step, data_parallel, device)


def has_rows(value: object) -> TypeGuard[Tensor]:
    """Return whether an entry of a batch is a tensor with at least one dim, the first of which are its rows."""
    return isinstance(value, Tensor) and value.ndim > 0


def count_labels(rows: Mapping[str, Any]) -> tuple[int, int]:
    """Return the number of labels that are not ignored: of all labels, and without the first of each row.

    A causal model predicts the next token, so its loss does not use the first label of a row.
    """
    labels = rows.get("labels")
    if not isinstance(labels, Tensor) or isinstance(labels, DTensor) or labels.is_floating_point():
        return 0, 0
    counted = labels != IGNORED_LABEL
    return int(counted.sum()), int((counted[..., 1:] if counted.ndim > 1 else counted).sum())


def count_rows(rows: Mapping[str, Any]) -> int:
    """Return how many rows the tensors of this slice of a batch have; 0 if none has a dimension."""
    return max((len(value) for value in rows.values() if has_rows(value)), default=0)


def loss_of(subject: Subject, rows: dict[str, Any]) -> Tensor:
    """Return the loss of these rows: a scalar, with a gradient where gradients are enabled."""
    if subject.loss is not None:
        with calling_field("loss"), blaming_the_forward():
            loss = subject.loss(subject.model, rows)
    else:
        with calling("model(**batch), the default of Subject(loss=...)"):
            output = subject.model(**rows)
        loss = getattr(output, "loss", None)
        if loss is None:
            raise SubjectError(
                "loss",
                f"model(**batch) returned {type(output).__name__} without a .loss; put labels into the batch or "
                "declare loss=lambda model, batch: ...",
            )
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        hint = "; reduce it with .mean() or .sum()" if isinstance(loss, Tensor) else ""
        raise SubjectError("loss", f"it returned {shorten(loss)}, but should return a scalar tensor{hint}")
    if loss.is_meta or not loss.is_floating_point():
        kind = "on the meta device" if loss.is_meta else f"of {str(loss.dtype).removeprefix('torch.')}"
        raise SubjectError("loss", f"it returned a tensor {kind}, but should return a real number of a floating dtype")
    if torch.is_grad_enabled() and not loss.requires_grad:
        raise SubjectError("loss", "the returned loss has no gradient: it is detached or was computed under no_grad")
    return loss


def scalar(value: Tensor | float) -> float:
    """Return a loss or a norm as a number; a DTensor is gathered first."""
    with torch.no_grad():
        return float(value.full_tensor() if isinstance(value, DTensor) else value)


def _own_rows(key: str, value: Any, step: int, data_parallel: tuple[int, int], device: torch.device) -> Any:
    if type(value).__module__ == "numpy" and value.ndim:
        # Not sliced, it would be the same rows on every rank.
        raise SubjectError("batch", f"batch({step})[{key!r}] is a numpy array; give a tensor: torch.from_numpy(...)")
    if not isinstance(value, Tensor):
        return value
    index, size = data_parallel
    if value.ndim:
        rows = value.shape[0]
        if rows % size:
            raise SubjectError(
                "batch",
                f"batch({step})[{key!r}] has {rows} rows, which do not divide among {size} data-parallel ranks; "
                f"make the number of rows a multiple of {size}",
            )
        value = value[index * rows // size : (index + 1) * rows // size]
    return value.to(device)
