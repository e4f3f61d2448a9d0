"""Run the loader as one rank of a world that does not run: tensors have shapes but no values, and nothing is sent."""

from __future__ import annotations

import pickle
import re
import resource
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Module

from pytest_fsdp_meta.checks.collectives.observe import INPUTS, NAMESPACES, OPS
from pytest_fsdp_meta.checks.materialisation.observe import Loaded, call_loader, describe, judgeable_subject
from pytest_fsdp_meta.evidence import ReferenceFacts
from pytest_fsdp_meta.loader.call import Call
from pytest_fsdp_meta.ranks.inventory import MappedFiles, managed_names, named_tensors, take_inventory
from pytest_fsdp_meta.ranks.torch_names import lacking
from pytest_fsdp_meta.ranks.torch_private import (
    TorchDispatchMode,
    cutting_own_shards,
    is_operator,
    operator_arguments,
    operator_name,
    refusing_objects,
    refusing_stores,
    tree_leaves,
    tree_map,
)
from pytest_fsdp_meta.ranks.watching import watching
from pytest_fsdp_meta.text import as_bytes, clean_name, first_line
from pytest_fsdp_meta.worlds import SEED, CallFailed, Misuse, cause_of, current, doing
from pytest_fsdp_meta.worlds.rank.preload import TORCH_ON_FORK
from pytest_fsdp_meta.worlds.rank.tracebacks import user_line

GIVING_VALUES = ("all_reduce", "reduce", "all_gather", "gather")
"""Collectives, by how their names begin, that give a rank what others have computed."""
SENDING = ("broadcast", "scatter", "all_to_all", "recv")
"""Those that give it what one other has sent; often it is not looked at, as the values of a buffer."""
READING = ("_local_scalar_dense", "is_nonzero", "equal", "nonzero")
"""Operators by which Python code looks at values."""
OVERWRITING = ("fill_", "zero_", "_like")
"""How the names of operators end whose results have values of their own."""
MEMORY = 2 * 2**30
"""Bytes that a simulated rank may take for what has values, such as buffers and batches."""
NO_MEMORY = re.compile(r"can't allocate memory: you tried to allocate (\d+) bytes")
NOT_MAPPED = re.compile(r"unable to mmap (\d+) bytes from file <(.+?)>: Cannot allocate memory")
STATUS = Path("/proc/self/status")
WITHOUT_VALUES = (
    *("on meta tensors", "meta tensor", "Cannot copy out of", "materialized from meta device"),
    *("meta device type tensor", "tensor with unallocated storage", "data-independent implementation does not exist"),
    "no fake impl or Meta kernel",
)
"""What torch says when a value of a meta tensor is asked for."""
OF_FAKE_TENSORS = ("DataDependentOutputException", "DynamicOutputShapeException", "UnsupportedOperatorException")
"""What torch raises for fake tensors where values or an operator's shapes are not known."""
ASKS_CUDA = re.compile(
    rf"not compiled with CUDA|has no attribute '_cuda|No CUDA GPUs|Found no NVIDIA driver|{TORCH_ON_FORK}"
)
NOT_FAKED = re.compile(r"only implemented for GLOO|pure virtual function \"::c10d|csrc/distributed/c10d")
"""What torch says of collectives and stores that its fake process group does not have."""
NO_AMOUNT = re.compile(r"$|Unable to allocate")
"""What Python and numpy say when the system has no memory; a MemoryError of the author's own says what is missing."""
ON_META = "build the model with torch.device('meta') and materialise its shards on fsdp.device"


def load_simulated(call: Call) -> Loaded:
    """Call the loader and take the inventory.

    Raises Misuse where the loader asks for a value, for what another rank sends, or for the memory of a real model.
    """
    rank = current()
    doing("loading")
    loader, values = call.unpack(rank)
    if reason := lacking().get("simulation"):
        raise Misuse(f"worlds cannot be simulated: {reason}")
    torch.manual_seed(SEED)
    _limit_memory()
    with ExitStack() as stack:
        stack.enter_context(without_values("the loader", ON_META))
        stack.enter_context(refusing_objects(_refuse_objects))
        stack.enter_context(refusing_stores(_refuse_stores))
        stack.enter_context(watching(_ReductionsOfValues(), _ValuesOfOthers()))
        stack.enter_context(cutting_own_shards())
        stack.enter_context(_WithoutValuesOfShapes(str(rank.shapes_folder)))
        returned = call_loader(loader, values)
    doing("taking the inventory")
    subject = judgeable_subject(returned)
    rank.state.update({"subject": subject})
    return describe(subject, rank, managed_names(subject.model), poison_active=False)


def observe_reference(
    recipe: Mapping[str, bytes], frozen: tuple[str, ...], attributes: tuple[str, ...]
) -> ReferenceFacts:
    """Build the reference, without values if it can be, and return its names, shapes, dtypes and ties."""
    doing("building the reference")
    _limit_memory()
    build = pickle.loads(recipe["reference"])
    try:
        with torch.device("meta"):
            model = build()
    except (RuntimeError, TypeError):  # it reads a checkpoint, or computes with what it has built
        with without_values("Subject(reference=...)", "give a function that only builds the model, such as its class"):
            model = build()
    for name, kind, tensor in named_tensors(model):
        if kind == "parameter" and name in frozen:
            tensor.requires_grad_(False)
    inventory = take_inventory(model, 0, "meta", attributes)
    keys, recomputing = tuple(model.state_dict()), tuple(checkpointed_modules(model))
    return ReferenceFacts(source="callable", inventory=inventory, state_dict=keys, recomputing=recomputing)


def checkpointed_modules(model: Module) -> Iterator[str]:
    """Yield the modules that compute their forward again in backward: by transformers' flag, or torch's wrapper."""
    for name, module in model.named_modules():
        kinds = {kind.__name__ for kind in type(module).__mro__}  # FSDP2 makes a class of each that it shards
        if getattr(module, "gradient_checkpointing", False) is True or "CheckpointWrapper" in kinds:
            yield clean_name(name) or "the model"


def _limit_memory() -> None:
    """Let this process take ``MEMORY`` more, so that a model that is built with values ends it and not the machine.

    Files that are mapped do not count.
    """
    if not STATUS.exists():
        return  # not Linux
    held = int(STATUS.read_text().split("VmData:")[1].split()[0]) * 1024
    most = resource.getrlimit(resource.RLIMIT_DATA)[1]
    limit = held + MEMORY if most == resource.RLIM_INFINITY else min(held + MEMORY, most)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, most))


@contextmanager
def without_values(what: str, instead: str) -> Iterator[None]:
    """Raise Misuse for an error by which torch says that a tensor has no values, or that memory is used up.

    ``instead``: what to do so that no memory is needed.
    """
    try:
        yield
    except (RuntimeError, TypeError, ValueError, AssertionError, AttributeError, MemoryError, CallFailed) as error:
        cause = cause_of(error)
        if file := NOT_MAPPED.search(str(cause)):
            raise Misuse(
                f"{what} maps {as_bytes(int(file[1]))} of {file[2]} ({user_line(cause)}), and simulated ranks have no "
                "memory for values; read fsdp.checkpoint_of_shapes(folder) instead, which has none"
            ) from error
        asked = NO_MEMORY.search(str(cause))
        if asked or (isinstance(cause, MemoryError) and NO_AMOUNT.match(str(cause))):
            amount = as_bytes(int(asked[1])) if asked else f"more than {as_bytes(MEMORY)}"
            raise Misuse(
                f"{what} allocates {amount} ({user_line(cause)}), and simulated ranks have no memory for values; "
                f"{instead}"
            ) from error
        if ASKS_CUDA.search(str(cause)):
            raise Misuse(
                f"{what} asks CUDA for something ({user_line(cause)}), and simulated ranks have no GPU; use "
                "fsdp.device, or leave it out where fsdp.simulated is true"
            ) from error
        if NOT_FAKED.search(str(cause)):
            raise Misuse(
                f"{what} calls what torch's fake process group cannot do ({user_line(cause)}): {first_line(cause)}; "
                "leave it out where fsdp.simulated is true"
            ) from error
        if not asks_for_a_value(cause):
            raise
        raise Misuse(
            f"{what} asks for a value of a tensor, which simulated ranks do not have ({user_line(cause)}): "
            f"{first_line(cause)}"
        ) from error


def asks_for_a_value(error: BaseException) -> bool:
    """Return whether this is torch's error for a tensor without values."""
    return type(error).__name__ in OF_FAKE_TENSORS or any(text in str(error) for text in WITHOUT_VALUES)


class _ReductionsOfValues:
    """A watcher that refuses collectives whose result would be values: it may decide what the loader does next."""

    def before(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        op = OPS.get(operator_name(func), "") if func.namespace in NAMESPACES else ""
        if not op.startswith(GIVING_VALUES):
            return
        given = operator_arguments(func, args, kwargs)
        inputs = tree_leaves(next((given[name] for name in INPUTS if name in given), None))
        if any(isinstance(tensor, Tensor) and not tensor.is_meta for tensor in inputs):
            raise Misuse(
                f"the loader calls {op} with values ({user_line()}), but a simulated rank has no partner: leave it out "
                "where fsdp.simulated is true"
            )

    def after(self, func: Any, args: Sequence[Any], out: Any) -> None: ...


class _ValuesOfOthers:
    """A watcher that refuses to read values which another rank would have sent, or what was computed from them.

    ``tolist()`` and ``numpy()`` read without an operator, and are not seen.
    """

    def __init__(self) -> None:
        self._sent: dict[int, tuple[str, str]] = {}
        """Identity of a storage -> what would have sent its values, and where."""
        self._references: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def before(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        if operator_name(func) in READING and (found := self._of((args, kwargs))):
            raise Misuse(
                f"the loader reads ({user_line()}) what {found[0]} ({found[1]}) gets from other ranks, but a "
                "simulated rank has no partner: leave it out where fsdp.simulated is true"
            )

    def after(self, func: Any, args: Sequence[Any], out: Any) -> None:
        name = operator_name(func)
        op = "recv" if name.startswith("recv_") else OPS.get(name, "")
        if func.namespace in NAMESPACES and op.startswith(SENDING):
            # The first argument of those that return nothing gets the values.
            self._note((op, user_line()), (args[:1] if func.namespace == "c10d" else (), out))
        elif self._sent and name.endswith(OVERWRITING):
            for tensor in filter(_has_values, tree_leaves(out)):
                self._sent.pop(id(tensor.untyped_storage()), None)
        elif found := self._of(args[1:] if name == "copy_" else args):
            self._note(found, out)

    def _of(self, values: Any) -> tuple[str, str] | None:
        if not self._sent:
            return None
        held = (self._sent.get(id(tensor.untyped_storage())) for tensor in filter(_has_values, tree_leaves(values)))
        return next(filter(None, held), None)

    def _note(self, found: tuple[str, str], values: Any) -> None:
        for tensor in filter(_has_values, tree_leaves(values)):
            storage = tensor.untyped_storage()
            key = id(storage)
            self._sent[key] = found
            self._references[key] = weakref.ref(storage, partial(self._drop, key))

    def _drop(self, key: int, _: object) -> None:
        self._sent.pop(key, None)
        self._references.pop(key, None)


def _has_values(value: Any) -> bool:
    return isinstance(value, Tensor) and not isinstance(value, DTensor) and not value.is_meta and value.numel() > 0


def _refuse_objects(function: str, error: BaseException | None) -> Misuse:
    return Misuse(
        f"the loader calls torch.distributed.{function} ({user_line(error)}), which sends objects from rank to rank, "
        "but a simulated rank has no partner: compute them on each rank where fsdp.simulated is true"
    )


def _refuse_stores(function: str) -> Misuse:
    return Misuse(
        f"the loader calls {function}() of a store ({user_line()}), which waits for other ranks, but a simulated rank "
        "has no partner: leave it out where fsdp.simulated is true"
    )


WRAPPING = ("set_", "select", "_local_scalar_dense")
"""How ``torch.asarray``, which safetensors calls, wraps the memory of a file; it looks at the first element."""


class _WithoutValuesOfShapes(TorchDispatchMode):  # type: ignore[misc]
    """Put tensors on meta that are read from files in ``folder``, and leave tensors there that are moved from it."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self._folder = folder
        self._files = MappedFiles(folder)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not is_operator(func):
            return func(*args, **kwargs)
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor runs first, and dispatches plain tensors to this mode
        if operator_name(func) in WRAPPING:
            self._files.refresh()
            return func(*args, **kwargs)
        args, kwargs = tree_map(self._on_meta, (args, kwargs))
        if operator_name(func) == "_to_copy" and args[0].is_meta:
            kwargs = {**kwargs, "device": torch.device("meta")}
        return func(*args, **kwargs)

    def _on_meta(self, value: Any) -> Any:
        if type(value) is not Tensor or value.is_meta or not self._files.hold(value.untyped_storage()):
            return value
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
