"""A few training steps, with what a rank sees of them: losses, gradients of the first step, parameters at the end."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel

from pytest_fsdp_meta.evidence import RankTraining, splits_experts, splits_model
from pytest_fsdp_meta.observers.bits import digest
from pytest_fsdp_meta.observers.inventory import local_part, mesh_facts, named_tensors, reshard
from pytest_fsdp_meta.observers.loading import loaded_subject
from pytest_fsdp_meta.observers.poison import deterministic
from pytest_fsdp_meta.observers.values import compare_all
from pytest_fsdp_meta.reference import Record
from pytest_fsdp_meta.subject import Subject, SubjectError
from pytest_fsdp_meta.worlds import SEED, CallFailed, Misuse, Rank, current


def observe_training(steps: int, gradients: str, parameters: str) -> RankTraining:
    """Trains this rank's subject and compares with the records of the reference at the two paths."""
    me = current()
    subject = loaded_subject(me)
    part = subject.data_parallel or data_parallel(subject.model, me)
    compared: list[Any] = []

    def first_gradients() -> None:
        compared.append(compare_all(gradients_of(subject.model), Record(gradients)))

    losses, batches = train(subject, me.device, steps, part, first_gradients)
    reshard(subject.model)
    after = ((name, tensor) for name, kind, tensor in named_tensors(subject.model) if kind == "parameter")
    return RankTraining(
        losses=losses,
        batches=batches,
        data_parallel=part,
        gradients=compared[0] if compared else (),
        parameters=compare_all(after, Record(parameters)),
        unreduced=_unreduced(subject.model),
    )


def train(
    subject: Subject,
    device: torch.device,
    steps: int,
    part: tuple[int, int],
    after_backward: Callable[[], None] = lambda: None,
) -> tuple[tuple[float, ...], tuple[str, ...]]:
    """(losses, hashes of the global batches) of ``steps`` steps, dropout off, deterministic, seeded by the step.

    ``after_backward`` is called once, between the first backward and the first optimizer step. Without a trainable
    parameter the losses of the forward are all there is.
    """
    model, losses, batches = subject.model, [], []
    model.eval()  # dropout off, functional dropout too
    model.zero_grad(set_to_none=True)  # a loader may have run a backward to warm up
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = _optimizer(subject, trainable) if trainable else None
    with deterministic():
        for step in range(steps):
            batch = _batch(subject, step)
            with _calling(f"Subject(batch=...), the tensors of batch({step})"):
                batches.append(_batch_digest(batch))
                rows = _slice(batch, step, part, device)
            torch.manual_seed(SEED + step)
            with torch.set_grad_enabled(optimizer is not None):
                loss = _loss(subject, rows)
            losses.append(_scalar(loss))
            if optimizer is not None:
                loss.backward()
                if step == 0:
                    after_backward()
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
    return tuple(losses), tuple(batches)


def gradients_of(model: Module) -> list[tuple[str, Tensor]]:
    return [
        (name, tensor.grad)
        for name, kind, tensor in named_tensors(model)
        if kind == "parameter" and tensor.grad is not None
    ]


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


def _unreduced(model: Module) -> bool:
    plain = not any(isinstance(parameter, DTensor) for parameter in model.parameters())
    return plain and not any(isinstance(module, DistributedDataParallel) for module in model.modules())


def _optimizer(subject: Subject, trainable: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    declared = subject.optimizer
    if isinstance(declared, torch.optim.Optimizer):
        return declared
    if declared is None:
        # foreach kernels refuse a list that mixes DTensors and plain tensors.
        return torch.optim.SGD(trainable, lr=0.1, foreach=False)
    with _calling("Subject(optimizer=...)"):
        built = declared(trainable)
    if not isinstance(built, torch.optim.Optimizer):
        raise SubjectError("optimizer", f"it returned {type(built).__name__}, but should return an Optimizer")
    return built


@contextmanager
def _calling(where: str) -> Iterator[None]:
    """Names whose call it was that failed; what the user wrote wrong in one line is told as it is."""
    try:
        yield
    except Misuse:
        raise
    except Exception as error:
        raise CallFailed(where) from error


def _batch(subject: Subject, step: int) -> Mapping[str, Any]:
    assert subject.batch is not None
    torch.manual_seed(SEED + step)  # so that a batch drawn at random is the same on every rank
    with _calling(f"Subject(batch=...), batch({step})"):
        batch = subject.batch(step)
    if not hasattr(batch, "items"):
        raise SubjectError("batch", f"batch({step}) is {type(batch).__name__}, but should be a dict of tensors")
    return dict(batch.items())


def _batch_digest(batch: Mapping[str, Any]) -> str:
    tensors = {str(key): local_part(value) for key, value in batch.items() if isinstance(value, Tensor)}
    return " ".join(f"{key}={digest(tensor)}" for key, tensor in sorted(tensors.items()))


def _slice(batch: Mapping[str, Any], step: int, part: tuple[int, int], device: torch.device) -> dict[str, Any]:
    return {key: _rows(key, value, step, part, device) for key, value in batch.items()}


def _rows(key: str, value: Any, step: int, part: tuple[int, int], device: torch.device) -> Any:
    if not isinstance(value, Tensor):
        return value
    index, size = part
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


def _loss(subject: Subject, batch: dict[str, Any]) -> Tensor:
    if subject.loss is not None:
        with _calling("Subject(loss=...)"):
            loss = subject.loss(subject.model, batch)
    else:
        with _calling("model(**batch), the default of Subject(loss=...)"):
            output = subject.model(**batch)
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


def _scalar(loss: Tensor) -> float:
    with torch.no_grad():
        return float(loss.full_tensor() if isinstance(loss, DTensor) else loss)
