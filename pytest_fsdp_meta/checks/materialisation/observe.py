"""Call the loader on this rank, check what it returned, and store the subject for the other observers."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from types import CodeType
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FlatParameter, FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from pytest_fsdp_meta.checks.collectives.facts import Collective
from pytest_fsdp_meta.checks.collectives.observe import Recorder
from pytest_fsdp_meta.checks.memory.facts import RankMemory
from pytest_fsdp_meta.checks.memory.observe import Peak, accelerator_of
from pytest_fsdp_meta.checks.training.observe.beside import scheduler_for_reference
from pytest_fsdp_meta.evidence import RankInventory, SubjectFacts
from pytest_fsdp_meta.loader.call import Call
from pytest_fsdp_meta.loader.subject import Subject, SubjectError
from pytest_fsdp_meta.loader.validation import is_stateful
from pytest_fsdp_meta.ranks.adapters import lookup, zero3
from pytest_fsdp_meta.ranks.batches import batch_slice
from pytest_fsdp_meta.ranks.bits import NOTICES, poisoned_memory, restore_defaults
from pytest_fsdp_meta.ranks.generators import read_all
from pytest_fsdp_meta.ranks.inventory import MAPS, managed_names, named_tensors, non_persistent, reshard, take_inventory
from pytest_fsdp_meta.ranks.modes import kept_in_evaluation, train_model
from pytest_fsdp_meta.ranks.module_watch import innermost_modules
from pytest_fsdp_meta.ranks.optimizers import built_optimizer, optimizer_facts, pack_optimizer
from pytest_fsdp_meta.ranks.sending import pack_function
from pytest_fsdp_meta.ranks.torch_names import lacking
from pytest_fsdp_meta.ranks.torch_private import is_compiled, mixed_precision
from pytest_fsdp_meta.ranks.watching import DTensorDraws, watching
from pytest_fsdp_meta.text import grouped
from pytest_fsdp_meta.worlds import SEED, Misuse, Rank, current, doing, forward_warnings

LEFT_BY_LOADER = "random states"
"""The key, in a rank's state, of the states of its generators when the loader returned."""
LEFT_IN_TRAINING = "modules in training"
"""The key, in a rank's state, of the modules that were in ``train()`` then."""
PLACEHOLDERS = {"ds_id": "DeepSpeed's ZeRO-3"}
"""Attribute of parameters that may be placeholders -> who made it one."""
FROM_RANK_0 = ("reference", "verifier", "export_reference", "batch", "loss", "optimizer", "scheduler")
"""What is sent from rank 0 to the reference as it is, whatever other ranks declare."""
OF_EACH_RANK = ("train_step", "save", "resume", "state_dict")
"""Functions that every rank needs, and calls as its own: those of two stages of a pipeline may differ."""
WRAPPERS = (DistributedDataParallel, FullyShardedDataParallel)


@dataclass(frozen=True)
class Loaded:
    """What one rank returns after loading."""

    inventory: RankInventory
    subject: SubjectFacts
    declared: Mapping[tuple[str, tuple[str, ...]], str]
    """A text of each declaration, by the field and the tensors that it is about."""
    recipe: Mapping[str, bytes]
    """The pickled values of the fields that the reference gets; empty on other ranks than 0."""
    checkpoints: Mapping[str, str]
    """The paths of reference and verifier, where they are checkpoint directories."""
    lacking: Mapping[str, str]
    """The observations and checks for which this torch lacks a private name, each with the reason."""
    data_parallel: tuple[int, int] = (0, 1)
    """(index, size) of this rank's slice of the batch."""
    gpu: str = ""
    library: str = ""
    """The library that moves data between the ranks, with its version if it has one."""
    collectives: tuple[Collective, ...] | None = None
    """The collectives of the loader; None where they were not recorded."""
    unknown_operators: tuple[str, ...] = ()
    """Operators of torch that communicated, and that the recorder does not know."""
    memory: RankMemory | None = None
    """The memory that the loader needed; None where it was not measured."""


def load(call: Call, watch: Collection[str] = ()) -> Loaded:
    """Call the loader under poison, check what it declares, and take the inventory.

    ``watch`` has what to observe while the loader runs: "collectives", "draws", "memory"; draws also for "values".
    """
    rank = current()
    doing("loading")
    loader, values = call.unpack(rank)
    watch = set(watch).difference(lacking())
    recorder = Recorder() if "collectives" in watch else None
    draws = DTensorDraws() if {"draws", "values"} & watch else None
    peak = Peak(rank.device) if "memory" in watch and MAPS.exists() else None
    with poisoned_memory() as poison, peak.measured() if peak else nullcontext():
        torch.manual_seed(SEED)
        watchers = (recorder, peak.meter if peak else None)
        with watching(*(watcher for watcher in watchers if watcher is not None), draws=draws):
            returned = call_loader(loader, values)
            # A group that the loader created itself may be gone: its model may not need it.
            if rank.has_mesh and not dist.is_initialized():
                raise Misuse(
                    "the loader destroyed the process group (destroy_process_group), which the checks need; "
                    "leave that to the plugin"
                )
    doing("taking the inventory")
    restore_defaults()
    left = read_all(rank.device)
    subject = judgeable_subject(returned)
    managed = managed_names(subject.model)  # before reshard(), which puts parameters back that the loader replaced
    reshard(subject.model)  # a loader may have run a forward to warm up
    inside = innermost_modules(subject.model).values()  # without wrappers, which stay in train() whatever they contain
    if subject.train_step is not None and not any(module.training for module in inside):
        train_model(subject.model)  # as a trainer does before its loop: transformers loads models in eval()
    training = [module for module in subject.model.modules() if module.training]
    rank.state |= {"subject": subject, "watch": watch, "draws": draws}
    rank.state |= {LEFT_BY_LOADER: left, LEFT_IN_TRAINING: training}
    return replace(
        describe(subject, rank, managed, poison.active),
        collectives=recorder.collectives(subject.model) if recorder else None,
        unknown_operators=tuple(sorted(recorder.unknown)) if recorder else (),
        memory=peak.facts(subject.model, built_optimizer(subject)) if peak else None,
    )


def loaded_subject(rank: Rank) -> Subject:
    """Return the subject that ``load`` stored on this rank."""
    subject = rank.state["subject"]
    assert isinstance(subject, Subject)
    return subject


def resharded_subject() -> Subject:
    """Return this rank's subject, with the parameters freed that a forward gathered."""
    subject = loaded_subject(current())
    reshard(subject.model)
    return subject


def describe(subject: Subject, rank: Rank, managed: Mapping[str, bool], poison_active: bool) -> Loaded:
    """Return what the subject declares, and the inventory of its model on this rank."""
    names = grouped((kind, name) for name, kind, _ in named_tensors(subject.model))
    parameters, buffers = names.get("parameter", []), names.get("buffer", [])
    facts = subject.resolve(parameters, buffers, non_persistent(subject.model), rank.world_size)
    facts = replace(facts, engine=zero3.ENGINE if zero3.adapter(subject.model) else "")
    lookup.remember(subject.model, subject.adapter)
    _require_elements(subject.model)
    inventory = take_inventory(subject.model, rank.rank, str(rank.device), facts.kept_attributes)
    built, backend = built_optimizer(subject), dist.get_backend()
    computes_in, reduces_in = precision(subject.model)
    inventory = replace(
        inventory,
        tensors=tuple(replace(tensor, managed=managed.get(tensor.name)) for tensor in inventory.tensors),
        poison_kept=poison_active,
        compiled=any(map(is_compiled, subject.model.modules())),
        evaluating=kept_in_evaluation(subject.model),
        computes_in=computes_in,
        reduces_in=reduces_in,
        optimizer=None if built is None else optimizer_facts(built, subject),
    )
    sources = {field: getattr(subject, field) for field in ("reference", "verifier", "export_reference")}
    checkpoints = {
        field: os.path.abspath(path) for field, path in sources.items() if isinstance(path, (str, os.PathLike))
    }
    return Loaded(
        inventory=inventory,
        subject=facts,
        declared=describe_declarations(subject, facts),
        recipe=_pack_recipe(subject) if rank.rank == 0 else {},
        checkpoints=checkpoints,
        data_parallel=batch_slice(subject, rank),
        gpu="" if (accelerator := accelerator_of(rank.device)) is None else accelerator.get_device_name(rank.device),
        library=f"NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}" if "nccl" in backend else str(backend),
        lacking=lacking(subject.model),
    )


def call_loader(loader: Callable[..., Any], values: Mapping[str, Any]) -> Any:
    """Call the loader. Raises Misuse for a process group that it makes although it has one."""
    try:
        with forward_warnings(NOTICES):
            return loader(**values)
    except ValueError as error:
        if "initialize the default process group twice" in str(error) and current().has_mesh:
            raise Misuse(
                "the loader calls init_process_group, but the plugin has already created the process group; call it "
                'only if torch.distributed.is_initialized() is false, or set @fsdp_conformance(process_group="loader")'
            ) from error
        raise


def judgeable_subject(returned: object) -> Subject:
    """Return what the loader returned as a Subject. Raises Misuse or SubjectError for what cannot be judged."""
    subject = _as_subject(returned)
    _require_judgeable(subject.model)
    # The use of a DTensor that has lost its process group would fail deep inside torch.
    if not dist.is_initialized() and any(isinstance(parameter, DTensor) for parameter in subject.model.parameters()):
        raise Misuse(
            "the loader destroyed the process group (destroy_process_group) that its model is sharded over, and the "
            "checks train and save the model; leave the group to the plugin, which destroys it with the ranks"
        )
    return subject


def _as_subject(returned: object) -> Subject:
    if isinstance(returned, Subject):
        return returned
    if isinstance(returned, Module):
        return Subject(returned)
    hint = ""
    if inspect.iscoroutine(returned) or inspect.isgenerator(returned):
        hint = "; a loader must be a plain function, not a coroutine or generator function"
    elif returned is None:
        hint = "; is a return statement missing?"
    elif isinstance(returned, (tuple, list, dict)):
        hint = _as_fields(returned.values() if isinstance(returned, dict) else returned)
    kind = "None" if returned is None else type(returned).__name__
    raise Misuse(f"the loader returned {kind}, but should return the loaded model or a Subject{hint}")


def _as_fields(parts: Collection[object]) -> str:
    """Return a hint how to return these parts in a Subject; "" if none of them is the model."""
    if not any(isinstance(part, Module) for part in parts):
        return ""
    kinds = {"optimizer": Optimizer, "scheduler": LRScheduler}
    fields = [f"{field}={field}" for field, kind in kinds.items() if any(isinstance(part, kind) for part in parts)]
    return f"; return Subject({', '.join(['model', *fields])})"


def _require_judgeable(model: Module) -> None:
    for name, _, tensor in named_tensors(model):
        if isinstance(tensor, FlatParameter):
            raise SubjectError(
                "model",
                f"{name!r} is a flat parameter in which FSDP1 merged several, so their names are lost; shard with "
                "FullyShardedDataParallel(use_orig_params=True) or fully_shard",
            )
        if isinstance(tensor, (UninitializedParameter, UninitializedBuffer)):
            raise SubjectError("model", f"{name!r} is a lazy parameter without a shape; run a forward before sharding")
        if tensor.is_nested and tensor.layout is torch.strided:
            raise SubjectError("model", f"{name!r} is a nested tensor without a shape; use layout=torch.jagged")


def _require_elements(model: Module) -> None:
    """Raise SubjectError for a parameter whose elements a framework keeps where no adapter finds them."""
    parts = lookup.parts_of(model)
    for name, _, tensor in named_tensors(model):
        framework = next((text for mark, text in PLACEHOLDERS.items() if hasattr(tensor, mark)), "")
        if framework and not tensor.numel() and not parts.of(name, tensor).by:
            raise SubjectError(
                "model",
                f"{name!r} is a placeholder without elements, which {framework} leaves outside of the forward; "
                "describe what the ranks hold with Subject(adapter=...)",
            )


def _pack_recipe(subject: Subject) -> dict[str, bytes]:
    """Pickle the fields that the reference needs. Raises SubjectError for a field that cannot be pickled."""
    from pytest_fsdp_meta.worlds.system.pickling import dumps

    packed, built = {}, built_optimizer(subject)
    for field in (*FROM_RANK_0, "max_grad_norm", "beside"):
        value = getattr(subject, field)
        if field == "optimizer" and built is not None:
            packed[field] = pack_optimizer(built, subject.model)
            continue
        if field == "scheduler":
            value = scheduler_for_reference(subject, built)
        elif field == "beside":
            value = {name: kept for name, kept in subject.beside.items() if not is_stateful(kept)}
        try:
            packed[field] = dumps(value)
        except Exception as error:
            raise SubjectError(
                field,
                f"it cannot be sent to the reference ({type(error).__name__}: {error}); it probably captures the "
                "sharded model, fsdp or a process group: capture only paths and configs, and build the rest inside it",
            ) from error
    if subject.clip_grad_norm is not None:
        # Functions that clip often hold a mesh or a group. The reference then clips with torch's.
        function = pack_function(subject.clip_grad_norm, subject.model, built)
        packed["clip_grad_norm"] = dumps(function)
    return packed


def describe_declarations(subject: Subject, facts: SubjectFacts) -> dict[tuple[str, tuple[str, ...]], str]:
    """Return a text of each declaration, by the field and the tensors that it is about.

    ``data``, ``adapter``, ``whole_while_loading`` and the index of ``data_parallel`` are a rank's own, and left out.
    """
    share, kept = subject.data_parallel, sorted(subject.beside.items())
    plain = {
        **{field: _describe(getattr(subject, field)) for field in (*FROM_RANK_0, "clip_grad_norm")},
        **{field: "declared" for field in OF_EACH_RANK if getattr(subject, field) is not None},
        "beside": ", ".join(name if is_stateful(one) else f"{name}: {_describe(one)}" for name, one in kept),
        "data_parallel": f"a slice of {share[1]}" if share else "",
        "loss_over_ranks": "" if facts.loss_over_ranks == "mean" else facts.loss_over_ranks,
        "max_grad_norm": str(facts.max_grad_norm or ""),
        "kept_attributes": ", ".join(sorted(facts.kept_attributes)),
    }
    by_name = {
        "unsharded": dict.fromkeys(facts.unsharded, "declared"),
        "offloaded": dict.fromkeys(facts.offloaded, "declared"),
        "on_some_ranks": dict.fromkeys(facts.on_some_ranks, "declared"),
        "frozen": {name: "declared" if source == name else source for name, source in facts.frozen.items()},
        "drawn": {name: str(facts.drawn_rows.get(name, "declared")) for name in facts.drawn},
        "placements": {name: ", ".join(placements) for name, placements in facts.placements.items()},
    }
    return {
        **{(field, ()): text for field, text in plain.items() if text},
        **{("tied", tuple(sorted(group))): "declared" for group in facts.tied},
        **{(field, (name,)): text for field, names in by_name.items() for name, text in names.items()},
    }


def _describe(value: Any) -> str:
    """Describe a path by itself, a function by its place and its code, and another object by its class.

    What a function holds or is bound to is left out: a mesh, a device or a number may be the rank's own.
    """
    if value is None or isinstance(value, (str, os.PathLike)):
        return "" if value is None else os.path.abspath(value)
    while isinstance(value, partial):
        value = value.func
    function = inspect.unwrap(value)
    code = getattr(function, "__code__", None)
    if not isinstance(code, CodeType):
        return str(getattr(function, "__qualname__", type(function).__qualname__))
    constants = [repr(one) for one in code.co_consts if not isinstance(one, (CodeType, frozenset))]
    digest = crc32(repr((code.co_code, code.co_names, constants)).encode())  # two functions may be on one line
    return f"{function.__name__} ({os.path.basename(code.co_filename)}:{code.co_firstlineno}, code {digest:08x})"


def precision(model: Module) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return ``computes_in`` and ``reduces_in`` of a RankInventory."""
    policies: list[tuple[torch.dtype | None, torch.dtype | None]] = []
    for module in model.modules():
        if isinstance(module, FSDPModule):
            policy = mixed_precision(module)
            policies.append((policy.param_dtype, policy.reduce_dtype))
        elif isinstance(module, WRAPPERS) and module.mixed_precision is not None:
            policies.append((module.mixed_precision.param_dtype, module.mixed_precision.reduce_dtype))
    return _names(policy[0] for policy in policies), _names(policy[1] for policy in policies)


def _names(dtypes: Iterator[torch.dtype | None]) -> tuple[str, ...]:
    return tuple(sorted({str(dtype).removeprefix("torch.") for dtype in dtypes if dtype is not None}))
