"""Calling the loader on this rank, and keeping what it returned for the observers that follow."""

from __future__ import annotations

import gc
import inspect
import os
import sys
from collections.abc import Callable, Collection, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FlatParameter
from torch.distributed.tensor import DTensor
from torch.nn import Module
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from pytest_fsdp_meta.evidence import RankInventory, SubjectFacts
from pytest_fsdp_meta.evidence.collectives import Collective, RankMemory
from pytest_fsdp_meta.loader.call import Call
from pytest_fsdp_meta.loader.subject import Subject, SubjectError
from pytest_fsdp_meta.observers.adapters import lookup
from pytest_fsdp_meta.observers.adapters.dtensor import local_part
from pytest_fsdp_meta.observers.batches import own_share
from pytest_fsdp_meta.observers.collectives import Recorder
from pytest_fsdp_meta.observers.inventory import managed_names, named_tensors, non_persistent, reshard, take_inventory
from pytest_fsdp_meta.observers.memory import Peak
from pytest_fsdp_meta.observers.optimizers import optimizer_facts, pack_optimizer
from pytest_fsdp_meta.observers.support.mapped import MAPS
from pytest_fsdp_meta.observers.support.poison import NOTICES, poisoned_memory, restore_defaults
from pytest_fsdp_meta.observers.support.precision import precision
from pytest_fsdp_meta.observers.support.watching import watching
from pytest_fsdp_meta.worlds import SEED, Misuse, Rank, current, doing, telling

MUCH = 2**26
"""Bytes of a model worth looking for."""
SENT_FIELDS = ("reference", "verifier", "batch", "loss", "optimizer")


@dataclass(frozen=True)
class Loaded:
    """What comes back from one rank. ``recipe`` holds the subject's callables, each still pickled."""

    inventory: RankInventory
    subject: SubjectFacts
    recipe: Mapping[str, bytes]
    checkpoints: Mapping[str, str]
    """The sources among the recipe that are directories."""
    data_parallel: tuple[int, int] = (0, 1)
    gpu: str = ""
    library: str = ""
    """What moves data between the ranks, with its version where it tells one."""
    collectives: tuple[Collective, ...] | None = None
    memory: RankMemory | None = None
    """What the loader did; None where nobody asked."""


def load(call: Call, watch: Collection[str] = ()) -> Loaded:
    """Calls the loader under poison, checks what it declares and takes the inventory.

    ``watch`` says what to observe while the loader runs: "collectives", "memory", or nothing.
    """
    me = current()
    doing("loading")
    loader, values = call.unpack(me)
    recorder = Recorder() if "collectives" in watch else None
    peak = Peak(me.device) if "memory" in watch and MAPS.exists() else None
    with poisoned_memory() as poison, peak.measured() if peak else nullcontext():
        torch.manual_seed(SEED)
        watchers = (recorder, peak.meter if peak else None)
        with watching(*(watcher for watcher in watchers if watcher is not None)):
            returned = _call(loader, values)
            _require_process_group(me)
    doing("taking the inventory")
    restore_defaults()
    subject = _as_subject(returned)
    _require_judgeable(subject.model)
    _require_living_groups(subject.model)
    managed = managed_names(subject.model)  # to reshard puts back what FSDP manages, and hides what took its place
    reshard(subject.model)  # a loader may have run a forward to warm up
    me.state.update(subject=subject, watch=watch)
    return replace(
        _told(subject, me, managed, poison.kept),
        collectives=recorder.told(subject.model) if recorder else None,
        memory=peak.facts(subject.model) if peak else None,
    )


def _told(subject: Subject, me: Rank, managed: Mapping[str, bool], poison_kept: bool) -> Loaded:
    """What the subject says of itself, and what there is of it on this rank."""
    names = _names(subject.model)
    facts = subject.resolve(names["parameter"], names["buffer"], non_persistent(subject.model), me.world_size)
    lookup.remember(subject.model, subject.adapter)
    inventory = take_inventory(subject.model, me.rank, str(me.device), facts.kept_attributes)
    built = subject.optimizer if isinstance(subject.optimizer, torch.optim.Optimizer) else None
    computes_in, reduces_in = precision(subject.model)
    inventory = replace(
        inventory,
        tensors=tuple(replace(tensor, managed=managed.get(tensor.name)) for tensor in inventory.tensors),
        poison_kept=poison_kept,
        computes_in=computes_in,
        reduces_in=reduces_in,
        optimizer=None if built is None else optimizer_facts(built, subject.model),
    )
    sources = {field: getattr(subject, field) for field in ("reference", "verifier")}
    checkpoints = {
        field: os.path.abspath(path) for field, path in sources.items() if isinstance(path, (str, os.PathLike))
    }
    share = own_share(subject, me)
    return Loaded(
        inventory=inventory,
        subject=facts,
        recipe=pack_recipe(subject) if me.rank == 0 else {},
        checkpoints=checkpoints,
        data_parallel=share,
        gpu=torch.cuda.get_device_name(me.device) if me.device.type == "cuda" else "",
        library=_library(),
    )


def _library() -> str:
    backend = dist.get_backend()
    return f"NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}" if backend == "nccl" else str(backend)


def _call(loader: Callable[..., Any], values: Mapping[str, Any]) -> Any:
    try:
        with telling(NOTICES):
            return loader(**values)
    except ValueError as error:
        if "initialize the default process group twice" in str(error) and current().has_mesh:
            raise Misuse(
                "the loader calls init_process_group, but the plugin has made the process group already; call it only "
                'where torch.distributed.is_initialized() is false, or set @fsdp_conformance(process_group="loader")'
            ) from error
        raise


def _require_process_group(me: Rank) -> None:
    """Only the plugin's own has a mesh; a loader that makes one itself may not need it for its model."""
    if me.has_mesh and not dist.is_initialized():
        raise Misuse(
            "the loader ended the process group (destroy_process_group); the checks need it: leave it to the plugin"
        )


def _require_living_groups(model: Module) -> None:
    """Without its group a DTensor still has its shard and its mesh, and fails deep inside torch when it is used."""
    if not dist.is_initialized() and any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        raise Misuse(
            "the loader ended its process group (destroy_process_group), on which its model lies; the checks train and "
            "save it: leave the group to the plugin, which ends it with the ranks"
        )


def release() -> None:
    """Lets go of the subject, whose turn is over, for the memory that another load takes."""
    me = current()
    held = sum(local_part(t).nbytes for _, _, t in named_tensors(loaded_subject(me).model) if not local_part(t).is_meta)
    me.state.clear()
    if held < MUCH:
        return  # looking for cycles takes a second in a process that has imported so much
    gc.collect()
    if me.device.type == "cuda":
        torch.cuda.empty_cache()


def loaded_subject(me: Rank) -> Subject:
    subject = me.state["subject"]
    assert isinstance(subject, Subject)
    return subject


def _as_subject(returned: object) -> Subject:
    if isinstance(returned, Subject):
        return returned
    if isinstance(returned, Module):
        return Subject(returned)
    hint = ""
    if inspect.iscoroutine(returned) or inspect.isgenerator(returned):
        hint = "; it is a coroutine or generator function, a loader is a plain function"
    elif returned is None:
        hint = "; is a return statement missing?"
    raise Misuse(
        f"the loader returned {type(returned).__name__}, but should return the loaded model or a Subject{hint}"
    )


def _require_judgeable(model: Module) -> None:
    for name, _, tensor in named_tensors(model):
        if isinstance(tensor, FlatParameter):
            raise SubjectError(
                "model",
                f"{name!r} is a parameter that FSDP1 made of others, whose names are lost; shard with "
                "FullyShardedDataParallel(use_orig_params=True), or fully_shard",
            )
        if isinstance(tensor, (UninitializedParameter, UninitializedBuffer)):
            raise SubjectError("model", f"{name!r} is a lazy parameter without a shape; run a forward before sharding")


def _names(model: Module) -> dict[str, list[str]]:
    names: dict[str, list[str]] = {"parameter": [], "buffer": []}
    for name, kind, _ in named_tensors(model):
        names[kind].append(name)
    return names


def pack_recipe(subject: Subject) -> dict[str, bytes]:
    """What the reference run needs of the subject. Raises SubjectError for a field that cannot be sent."""
    import cloudpickle

    packed = {}
    for field in SENT_FIELDS:
        value = getattr(subject, field)
        if isinstance(value, torch.optim.Optimizer):
            packed[field] = pack_optimizer(value, subject.model)
            continue
        try:
            packed[field] = cloudpickle.dumps(value)
        except Exception as error:
            raise SubjectError(
                field,
                f"it cannot be sent to the reference ({type(error).__name__}: {error}); it probably captures the "
                "sharded model or a mesh: capture paths and configs, and build everything else inside it",
            ) from error
    return packed


LATE = (
    "torch.distributed.checkpoint._fsspec_filesystem",  # by dcp.save and dcp.load, with fsspec
    "torch.utils.serialization.config",
    "torch.profiler._cupti_monitor",  # by an optimizer's first step
    "numpy.ctypeslib",  # by torch.from_file, with which safetensors are mapped
)


def warm_up() -> None:
    """To be called last: transformers is of interest only where a module of downstream has imported it."""
    for name in LATE:
        with suppress(ImportError):
            import_module(name)
    if any(name.startswith("transformers.models.") for name in list(sys.modules)):
        with suppress(ImportError):  # transformers 4 converts nothing
            # Nine hundred patterns of how checkpoints name things, compiled when the first one is asked for.
            import_module("transformers.conversion_mapping").get_checkpoint_conversion_mapping("")
            import_module("transformers.modeling_utils")
