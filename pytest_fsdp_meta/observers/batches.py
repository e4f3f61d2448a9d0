"""What the subject's author declares about training, called and checked: batches, slices of them, the loss."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Module

from pytest_fsdp_meta.evidence import splits_experts, splits_model
from pytest_fsdp_meta.loader.subject import Subject, SubjectError
from pytest_fsdp_meta.observers.adapters.dtensor import local_part, mesh_facts
from pytest_fsdp_meta.observers.support.bits import digest
from pytest_fsdp_meta.observers.support.poison import NOTICES
from pytest_fsdp_meta.worlds import SEED, CallFailed, Misuse, Rank, telling

IGNORED_LABEL = -100
"""The label that torch's cross entropy, and with it every loss of transformers, leaves out of its mean."""


def own_share(subject: Subject, me: Rank) -> tuple[int, int]:
    """(index, size) of this rank's slice of the batch, as declared, else by the mesh."""
    return subject.data_parallel or data_parallel(subject.model, me)


def data_parallel(model: Module, me: Rank) -> tuple[int, int]:
    """(index, size) of this rank's slice of the batch, from the mesh that most parameters lie on, else the world's."""
    meshes: dict[tuple[Any, ...], int] = {}
    for parameter in model.parameters():
        if isinstance(parameter, DTensor):
            mesh = mesh_facts(parameter)
            if mesh.coordinate is not None and not any(map(splits_experts, mesh.dims)):
                key = (mesh.dims, mesh.shape, mesh.coordinate)
                meshes[key] = meshes.get(key, 0) + parameter.numel()
    if meshes:
        dims, shape, coordinate = max(meshes, key=lambda key: meshes[key])
    elif me.has_mesh:
        dims, shape = tuple(me.mesh.mesh_dim_names or ()), tuple(me.mesh.shape)
        coordinate = tuple(me.mesh.get_coordinate() or ())
    else:
        return me.rank, me.world_size
    index = 0
    for dim, size, position in zip(dims, shape, coordinate, strict=True):
        if not splits_model(dim):
            index = index * size + position
    return index, math.prod(size for dim, size in zip(dims, shape, strict=True) if not splits_model(dim))


@contextmanager
def calling(where: str) -> Iterator[None]:
    """Names whose call it was that failed; what the user wrote wrong in one line is told as it is."""
    try:
        with telling(NOTICES):
            yield
    except Misuse:
        raise
    except Exception as error:
        raise CallFailed(where) from error


def global_batch(subject: Subject, step: int) -> Mapping[str, Any]:
    """The whole batch of a step, the same on every rank."""
    assert subject.batch is not None
    torch.manual_seed(SEED + step)  # so that a batch drawn at random is the same on every rank
    with calling(f"Subject(batch=...), batch({step})"):
        batch = subject.batch(step)
    if not hasattr(batch, "items"):
        raise SubjectError("batch", f"batch({step}) is {type(batch).__name__}, but should be a dict of tensors")
    return dict(batch.items())


def batch_digest(batch: Mapping[str, Any]) -> str:
    tensors = {str(key): local_part(value) for key, value in batch.items() if isinstance(value, Tensor)}
    return " ".join(f"{key}={digest(tensor)}" for key, tensor in sorted(tensors.items()))


def own_rows(batch: Mapping[str, Any], step: int, share: tuple[int, int], device: torch.device) -> dict[str, Any]:
    """The slice ``(index, size)`` of every tensor of the batch, on ``device``."""
    return {key: _rows(key, value, step, share, device) for key, value in batch.items()}


def indivisible(batch: Mapping[str, Any], size: int) -> str:
    """The entry that ``size`` slices cannot share equally, with its rows; empty where there is none."""
    for key, value in batch.items():
        if isinstance(value, Tensor) and value.ndim and value.shape[0] % size:
            return f"{key!r} has {value.shape[0]} rows"
    return ""


def counted_labels(rows: Mapping[str, Any]) -> tuple[int, int]:
    """How many of these labels a loss counts: all but the ignored ones, and so without the first of each row.

    A causal model predicts the next token, so the first label of a row counts for nothing.
    """
    labels = rows.get("labels")
    if not isinstance(labels, Tensor) or isinstance(labels, DTensor) or labels.is_floating_point():
        return 0, 0
    counted = labels != IGNORED_LABEL
    return int(counted.sum()), int((counted[..., 1:] if counted.ndim > 1 else counted).sum())


def loss_of(subject: Subject, rows: dict[str, Any]) -> Tensor:
    """The loss of these rows: a scalar, with a gradient where gradients are on."""
    if subject.loss is not None:
        with calling("Subject(loss=...)"):
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
        shown = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
        raise SubjectError("loss", f"it gave {shown}, but should give a scalar tensor")
    if torch.is_grad_enabled() and not loss.requires_grad:
        raise SubjectError("loss", "it gave a loss without gradient: detached, or computed under no_grad")
    return loss


def scalar(loss: Tensor) -> float:
    with torch.no_grad():
        return float(loss.full_tensor() if isinstance(loss, DTensor) else loss)


def _rows(key: str, value: Any, step: int, share: tuple[int, int], device: torch.device) -> Any:
    if not isinstance(value, Tensor):
        return value
    index, size = share
    if value.ndim:
        rows = value.shape[0]
        if rows % size:
            raise SubjectError(
                "batch",
                f"batch({step})[{key!r}] has {rows} rows, which {size} data-parallel ranks cannot share equally; "
                f"make it a multiple of {size}",
            )
        value = value[index * rows // size : (index + 1) * rows // size]
    return value.to(device)
