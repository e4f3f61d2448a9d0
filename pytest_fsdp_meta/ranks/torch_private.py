"""Access the private names of torch that observers need because no public ones exist.

Each function declares the names that it uses, and what cannot be judged without them: see ``torch_names``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from traceback import walk_tb
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.nn import Module, Parameter
from torch.optim import Optimizer

from pytest_fsdp_meta.ranks.torch_names import borrow, needs

WATCHED = ("collectives", "draws", "memory", "training", "training_mode", "simulation")
"""The observations that watch torch's operators."""
if TYPE_CHECKING:
    from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
    from torch.distributed._functional_collectives import AsyncCollectiveTensor as AsyncCollectiveTensor
    from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
    from torch.utils._pytree import tree_leaves as tree_leaves
    from torch.utils._pytree import tree_map as tree_map
else:
    FakeTensorMode = borrow("torch._subclasses.fake_tensor:FakeTensorMode", ("simulation",))
    AsyncCollectiveTensor = borrow("torch.distributed._functional_collectives:AsyncCollectiveTensor", ("inventory",))
    TorchDispatchMode = borrow("torch.utils._python_dispatch:TorchDispatchMode", WATCHED)
    tree_leaves = borrow("torch.utils._pytree:tree_leaves", ("simulation",), lambda tree: [tree])
    tree_map = borrow("torch.utils._pytree:tree_map", ("simulation",), lambda _, tree: tree)

STATE = "torch.distributed.fsdp._fully_shard._fsdp_state:FSDPState"
GROUP = "torch.distributed.fsdp._fully_shard._fsdp_param_group:FSDPParamGroup"
PARAM = "torch.distributed.fsdp._fully_shard._fsdp_param:FSDPParam"
INFO = "torch.distributed.fsdp._fully_shard._fsdp_param:ParamModuleInfo"
GROUPS = (
    "torch.distributed.fsdp:FSDPModule._get_fsdp_state",
    f"{STATE}._fsdp_param_groups|_fsdp_param_group",  # before torch 2.12 a module had one group
    f"{GROUP}.fsdp_params",
)
"""How to find the parameters that FSDP2 manages."""
FLAT = "torch.distributed.fsdp._flat_param"
PLACES = tuple(f"{INFO}.{name}" for name in ("module", "param_name", "shared_modules", "shared_param_names"))
"""Where modules register a parameter that FSDP2 manages."""
WAITING = ("get", "multi_get", "wait", "add", "append", "compare_set", "check")
"""The functions of a store whose result depends on other ranks."""


REPLICATED = ("dtensor_placements", "nothing_left_unsharded")
"""The checks that take parameters as right because replicate(), which is DDP without a wrapper, holds them whole."""
replicate = borrow(
    "torch.distributed._composable.replicate:replicate", REPLICATED, SimpleNamespace(state=lambda _: None)
)
ReplicateState = borrow("torch.distributed._composable.replicate_with_fsdp:_ReplicateState", REPLICATED)


def _nothing(*_: Any, **__: Any) -> tuple[()]:
    return ()


@needs(GROUPS[0], f"{STATE}._mp_policy", spoils=("training",), of=FSDPModule, instead=lambda _: MixedPrecisionPolicy())
def mixed_precision(module: FSDPModule) -> MixedPrecisionPolicy:
    """Return the policy that ``fully_shard`` was given; public torch has no way to read it back."""
    policy = module._get_fsdp_state()._mp_policy
    assert isinstance(policy, MixedPrecisionPolicy)
    return policy


@needs(GROUPS[0], spoils=REPLICATED, of=FSDPModule, instead=lambda _: False)
def is_replicated(module: Module) -> bool:
    """Whether replicate() was applied to the module; it is DDP without a wrapper, which public torch cannot detect."""
    by_fsdp = isinstance(module, FSDPModule) and isinstance(module._get_fsdp_state(), ReplicateState)
    return by_fsdp or replicate.state(module) is not None


@needs(
    "torch.optim:Optimizer._optimizer_step_pre_hooks",
    "torch.optim:Optimizer._optimizer_step_post_hooks",
    spoils=("training",),
    instead=lambda _: [],
)
def step_hooks(optimizer: Optimizer) -> list[tuple[bool, Callable[..., Any]]]:
    """Return (whether it runs before the step, hook) for the optimizer's step hooks; public torch only adds them.

    An optimizer that does not call ``Optimizer.__init__`` has none.
    """
    before: Mapping[int, Any] = getattr(optimizer, "_optimizer_step_pre_hooks", {})
    after: Mapping[int, Any] = getattr(optimizer, "_optimizer_step_post_hooks", {})
    return [*((True, hook) for hook in before.values()), *((False, hook) for hook in after.values())]


@needs(
    "torch.optim:Optimizer._optimizer_step_pre_hooks",
    "torch.optim:Optimizer._optimizer_step_post_hooks",
    spoils=("training",),
    instead=lambda *_: nullcontext(),
)
@contextmanager
def without_step_hooks(optimizer: Optimizer) -> Iterator[None]:
    """Call none of the optimizer's step hooks in the block; public torch removes a hook by its handle only."""
    names = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
    kept = {name: dict(hooks) for name in names if (hooks := getattr(optimizer, name, None))}
    for name in kept:
        getattr(optimizer, name).clear()
    try:
        yield
    finally:
        for name, hooks in kept.items():
            getattr(optimizer, name).update(hooks)


@needs("torch.optim:Optimizer._optimizer_step_pre_hooks", spoils=("training",), instead=lambda *_: nullcontext())
@contextmanager
def before_other_step_hooks(optimizer: Optimizer, hook: Callable[..., Any]) -> Iterator[None]:
    """Call the hook before the optimizer's other hooks at each step; public torch only appends one."""
    handle = optimizer.register_step_pre_hook(hook)
    optimizer._optimizer_step_pre_hooks.move_to_end(handle.id, last=False)
    try:
        yield
    finally:
        handle.remove()


@needs(
    "torch.distributed.fsdp:FullyShardedDataParallel._handle",
    *(f"{FLAT}:FlatParamHandle.{name}" for name in ("uses_sharded_strategy", "flat_param")),
    *(f"{FLAT}:FlatParameter.{name}" for name in ("_params", "_shapes", "_shard_param_infos")),
    f"{FLAT}:_ShardParamInfo.intra_param_start_idx",
    spoils=("inventory",),
    of=FullyShardedDataParallel,
    instead=_nothing,
)
def flat_parameters(model: Module) -> Iterator[tuple[Tensor, tuple[int, ...], int]]:
    """Yield (parameter, its whole shape, position of its first element on this rank) for what FSDP1 shards.

    The parameter has this rank's elements, possibly none. Public torch gives neither the shape nor the position
    without gathering a state dict.
    """
    for module in FullyShardedDataParallel.fsdp_modules(model):
        handle: Any = module._handle
        if handle is not None and handle.uses_sharded_strategy:
            flat = handle.flat_param
            for parameter, shape, info in zip(flat._params, flat._shapes, flat._shard_param_infos, strict=True):
                yield parameter, tuple(shape), info.intra_param_start_idx or 0


@needs(
    *GROUPS,
    *PLACES,
    "torch.nn:Module._parameters",
    f"{GROUP}._reset_sharded_params",
    *(f"{PARAM}.{name}" for name in ("_module_info", "sharded_state", "sharded_param", "_unsharded_param")),
    spoils=("managed_params_are_registered",),
    of=FSDPModule,
    instead=_nothing,
)
def managed_places(model: Module) -> Iterator[tuple[Module, str, bool]]:
    """Yield (module, name in it, whether FSDP2 manages the parameter registered there) for all that FSDP2 manages.

    FSDP2 stores the Parameter objects that it found or created; public torch shows only what modules register.
    """
    for group in _groups_of(model):
        for managed in group.fsdp_params:
            yield from _places(managed, adopts=not group._reset_sharded_params)


def _groups_of(model: Module) -> list[Any]:
    """Return the groups of parameters that FSDP2 manages, each once: several modules may share one."""
    modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
    return list({id(group): group for module in modules for group in _param_groups(module)}.values())


def _param_groups(module: FSDPModule) -> list[Any]:
    state: Any = module._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [state._fsdp_param_group] if state._fsdp_param_group is not None else []  # before torch 2.12


def _places(managed: Any, adopts: bool) -> Iterator[tuple[Module, str, bool]]:
    """Yield the places of one managed parameter.

    Until its first forward, FSDP2 ``adopts`` the DTensor that it finds in the parameter's first place.
    """
    info, state = managed._module_info, managed.sharded_state.name
    registered = info.module._parameters.get(info.param_name)
    own = {
        "SHARDED": managed.sharded_param,
        "SHARDED_POST_FORWARD": getattr(managed, "_sharded_post_forward_param", None),
        "UNSHARDED": getattr(managed, "_unsharded_param", None),
    }[state]
    if adopts and state == "SHARDED" and isinstance(registered, DTensor):
        own = registered
    if registered is not None:
        yield info.module, info.param_name, registered is own
    for module, name in zip(info.shared_modules, info.shared_param_names, strict=True):
        twin = module._parameters.get(name)
        if twin is not None:  # two objects that share memory are one parameter to everything but the optimizer
            yield module, name, twin is own or _address(twin) == _address(own)


def _address(parameter: Tensor) -> int:
    local: Tensor = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    return int(local.data_ptr())


@needs("torch.nn:Module._non_persistent_buffers_set", spoils=("inventory",), instead=lambda _: set[str]())
def non_persistent_names(module: Module) -> set[str]:
    """Return the names, in the module, of its buffers that a state dict leaves out."""
    return set(module._non_persistent_buffers_set)


_Operator = type(torch.ops.aten.detach.default)


def is_operator(func: object) -> bool:
    """Whether a function that a dispatch mode sees is an operator with a schema, not a higher-order operator."""
    return isinstance(func, _Operator)


@needs("torch:Tensor._base", spoils=("step_memory_bounded",), instead=lambda tensor: tensor)
def base_of(tensor: Tensor) -> Tensor:
    """Return the base of a view, as autograd knows it, or the tensor itself."""
    return tensor if tensor._base is None else tensor._base


@needs("torch:Tensor._is_view", "torch:Tensor._version", spoils=("traces",), instead=lambda _: False)
def is_written_view(tensor: Tensor) -> bool:
    """Whether the tensor is a view, and was written to in place, or its base was."""
    return bool(tensor._is_view() and tensor._version)


@needs("torch:Tensor._version", spoils=("training", "traces"), instead=lambda _: 0)
def write_count(tensor: Tensor) -> int:
    """Return how often the tensor has been written to in place; public torch only raises where autograd notices."""
    return int(tensor._version)


def operator_name(func: Any) -> str:
    """Return the operator's name without namespace and overload: "all_reduce"."""
    return str(func.overloadpacket.__name__)


@needs("torch._ops:OpOverload._schema", spoils=WATCHED, instead=lambda func, args, kwargs: dict(kwargs))
def operator_arguments(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the operator's arguments by the names of its schema."""
    return {spec.name: value for spec, value in zip(func._schema.arguments, args, strict=False)} | dict(kwargs)


@needs(
    "torch.distributed.distributed_c10d:_resolve_process_group",
    "torch.distributed:ProcessGroup.unbox",
    spoils=("collectives", "simulation"),
    instead=lambda _: dist.group.WORLD,
)
def process_group(argument: Any) -> dist.ProcessGroup:
    """Return the process group that a collective's operator was given.

    Operators get it as a TorchScript object (``c10d``) or by its name (``_c10d_functional``); public torch converts a
    group to either, but not back.
    """
    if isinstance(argument, str):
        return distributed_c10d._resolve_process_group(argument)
    return dist.ProcessGroup.unbox(argument) if isinstance(argument, torch.ScriptObject) else argument


@needs(
    *(f"torch.distributed.distributed_c10d:{name}=" for name in ("_object_to_tensor", "_tensor_to_object")),
    spoils=("simulation",),
    instead=nullcontext,
)
@contextmanager
def refusing_objects(refuse: Callable[[str, BaseException | None], Exception]) -> Iterator[None]:
    """Raise ``refuse(function, None)`` where a function of torch.distributed, as ``gather_object``, pickles objects.

    All of these functions pickle and unpickle by these two; the public ones may have been imported by name. A receiver
    allocates as much as the sender says before it unpickles, which without a sender is any number: if that fails, or is
    refused, ``refuse`` also gets the error, because the call that it is about has ended by then.
    """

    def stop(*_: Any) -> Any:
        frame = sys._getframe(1)
        while frame.f_back is not None and frame.f_back.f_code.co_filename == distributed_c10d.__file__:
            frame = frame.f_back
        raise refuse(frame.f_code.co_name, None)

    with (
        mock.patch.object(distributed_c10d, "_object_to_tensor", stop),
        mock.patch.object(distributed_c10d, "_tensor_to_object", stop),
    ):
        try:
            yield
        except (RuntimeError, MemoryError, ValueError) as error:
            names = [
                frame.f_code.co_name
                for frame, _ in walk_tb(error.__traceback__)
                if frame.f_code.co_filename == distributed_c10d.__file__
            ]
            if not names or not names[0].endswith(("_object", "_object_list")):
                raise
            raise refuse(names[0], error) from error


@contextmanager
def refusing_stores(refuse: Callable[[str], Exception]) -> Iterator[None]:
    """Raise ``refuse(function)`` where something other than torch's process groups waits for a key of a store."""

    def stopping(name: str) -> Callable[..., Any]:
        wait = getattr(dist.Store, name)

        def stop(*args: Any, **kwargs: Any) -> Any:
            if sys._getframe(1).f_code.co_filename == distributed_c10d.__file__:
                return wait(*args, **kwargs)
            raise refuse(name)

        return stop

    with ExitStack() as stack:
        for name in WAITING:
            stack.enter_context(mock.patch.object(dist.Store, name, stopping(name)))
        yield


@needs("torch.distributed.fsdp._fully_shard._fsdp_param:_chunk_with_empty=", instead=nullcontext)  # it is only slower
@contextmanager
def cutting_own_shards() -> Iterator[None]:
    """Let ``fully_shard`` cut only the shards that it reads, not those of thousands of other ranks as well."""
    with mock.patch("torch.distributed.fsdp._fully_shard._fsdp_param._chunk_with_empty", _Chunks):
        yield


class _Chunks(Sequence[Tensor]):
    """The parts into which ``torch.chunk`` cuts a tensor, and empty tensors for ranks that get none."""

    def __init__(self, tensor: Tensor, num_chunks: int, dim: int) -> None:
        self._tensor, self._count, self._dim = tensor, num_chunks, dim

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: Any) -> Any:
        length = self._tensor.shape[self._dim]
        size = -(-length // self._count)
        start = index * size
        if start >= length > 0:
            return self._tensor.new_empty(0)
        return self._tensor.narrow(self._dim, start, min(size, length - start))

    def joined(self, dim: int) -> Tensor:
        """Return an empty tensor with the shape of parts of one size that are joined on another dim."""
        shape = list(self._tensor.shape)
        shape[self._dim] //= self._count
        shape[dim] *= self._count
        return self._tensor.new_empty(shape)


@needs("torch.distributed.fsdp._fully_shard._fsdp_collectives:torch=", instead=nullcontext)  # it is only slower
@contextmanager
def rearranging_shapes_only() -> Iterator[None]:
    """Let FSDP2 compute the shape of what it rearranges, where it has no values.

    For parameters that are sharded on another dim than 0, it cuts a tensor into a piece for each rank and joins these
    on another dim, which takes seconds per layer among a thousand ranks.
    """
    with mock.patch("torch.distributed.fsdp._fully_shard._fsdp_collectives.torch", _ShapesOfTorch()):
        yield


class _ShapesOfTorch:
    """torch with a ``chunk`` that cuts nothing, and a ``cat`` for what it returns."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def chunk(self, tensor: Tensor, chunks: int, dim: int = 0) -> _Chunks:
        return _Chunks(tensor, chunks, dim)

    def cat(self, tensors: Sequence[Tensor], dim: int = 0, *, out: Tensor | None = None) -> Tensor:
        if not isinstance(tensors, _Chunks):
            return torch.cat(tensors, dim, out=out)
        return tensors.joined(dim) if out is None else out


@dataclass(frozen=True)
class ManagedGroup:
    """Sharded parameters that FSDP2 gathers and reduces together."""

    modules: tuple[Module, ...]
    parameters: tuple[Parameter, ...]
    reshards: bool
    """Whether FSDP2 frees the gathered parameters after the forward."""
    replicates: bool
    """Whether gradients are reduced over a second mesh dimension as well (HSDP)."""
    ranks: int
    """How many ranks share the parameters; replicate() does not shard."""


@needs(
    *GROUPS,
    *(f"{GROUP}.{name}" for name in ("modules", "post_forward_mesh_info", "mesh_info")),
    f"{PARAM}.sharded_param",
    "torch.distributed.fsdp._fully_shard._fsdp_common:HSDPMeshInfo.replicate_mesh_dim",
    "torch.distributed.fsdp._fully_shard._fsdp_common:FSDPMeshInfo.shard_mesh_size",
    spoils=("collectives_within_budget", "unsharded_modules_are_not_gathered", "step_memory_bounded"),
    of=FSDPModule,
    instead=_nothing,
)
def fsdp_groups(model: Module) -> Iterator[ManagedGroup]:
    """Yield the groups of parameters that FSDP2 manages; only its private state has them."""
    for group in _groups_of(model):
        yield ManagedGroup(
            modules=tuple(group.modules),
            parameters=tuple(managed.sharded_param for managed in group.fsdp_params),
            reshards=group.post_forward_mesh_info is not None,
            replicates=getattr(group.mesh_info, "replicate_mesh_dim", None) is not None,
            ranks=getattr(group.mesh_info, "shard_mesh_size", 1),
        )


def register_fake_collectives() -> None:
    """Let collectives take fake tensors; torch 2.9 registers their fake versions only where this module is imported."""
    if find_spec("torch.distributed._meta_registrations") is None:
        import_module("torch.distributed._tools.fake_collectives")


@needs(
    *GROUPS,
    f"{GROUP}._partial_reduce_output=",
    f"{PARAM}._unsharded_param",
    spoils=("training",),
    of=FSDPModule,
    instead=_nothing,
)
def drop_unreduced_gradients(model: Module) -> None:
    """Drop what FSDP2 has accumulated and not reduced: it adds the next backward to it, and no parameter shows it."""
    for group in _groups_of(model):
        group._partial_reduce_output = None  # HSDP's, which is scattered and not yet reduced over the replicas
        for managed in group.fsdp_params:
            if "unsharded_accumulated_grad" in vars(managed):  # since torch 2.15 it is the gradient below
                managed.unsharded_accumulated_grad = None
            if (unsharded := getattr(managed, "_unsharded_param", None)) is not None:
                unsharded.grad = None


@needs(
    "torch.nn:Module._modules",
    "torch.nn:Module._compiled_call_impl",
    spoils=("step_memory_bounded",),
    instead=lambda _: False,
)
def is_compiled(module: Module) -> bool:
    """Return whether ``torch.compile`` has wrapped the module, or compiles its calls in place."""
    # The class of a wrapped module is in torch._dynamo, which takes a second to import.
    return "_orig_mod" in module._modules or getattr(module, "_compiled_call_impl", None) is not None


@needs("torch._C._functorch:is_functorch_wrapped_tensor", spoils=WATCHED, instead=lambda _: False)
def is_wrapped_by_functorch(tensor: Tensor) -> bool:
    """Return whether the tensor is one of those that torch.func computes with."""
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(tensor))


class ManagedWeight:
    """One parameter as one FSDP2 group manages it; a tied parameter may be managed by several groups.

    Public torch shows the parameter that modules register at the moment: the shard, or what was gathered from it.
    """

    def __init__(self, managed: Any) -> None:
        self._managed = managed

    @property
    def places(self) -> tuple[tuple[Module, str], ...]:
        """The modules that register the parameter, each with its name in the module."""
        info = self._managed._module_info
        shared = zip(info.shared_modules, info.shared_param_names, strict=True)
        return ((info.module, info.param_name), *shared)

    @property
    def shard(self) -> Tensor:
        """This rank's shard, also while it is gathered."""
        return local_tensor(self._managed.sharded_param)

    @property
    def trainable(self) -> bool:
        return bool(self._managed.sharded_param.requires_grad)

    @property
    def whole(self) -> Tensor | None:
        """The gathered parameter, which is the same object in every forward; None before the first."""
        return getattr(self._managed, "_unsharded_param", None)

    def gathers_from_shard(self) -> bool:
        """Whether the group gathers from the shard's memory.

        The all-gather reads ``_sharded_param_data``, except for tensor subclasses that gather by their own rules.
        """
        shard, source = self.shard, self._managed._sharded_param_data
        if not shard.numel() or hasattr(shard, "fsdp_pre_all_gather") or type(source) is not Tensor:
            return True
        return bool(source.untyped_storage().data_ptr() == shard.untyped_storage().data_ptr())

    def own_slice(self, gathered: Tensor) -> Tensor | None:
        """Return the slice of a gathered parameter that belongs to this rank; None for a tensor that is not whole."""
        managed, whole = self._managed, local_tensor(gathered)
        if whole.shape != managed._orig_size:
            return None
        dim = managed.fsdp_placement.dim
        rank = getattr(managed.mesh_info, "shard_mesh_rank", 0)  # replicate() does not shard
        start = min(rank * managed.padded_sharded_param_size[dim], whole.shape[dim])
        return whole.narrow(dim, start, min(self.shard.shape[dim], whole.shape[dim] - start))


@needs(
    "torch.distributed.tensor:DTensor._local_tensor", instead=lambda t: t.to_local() if isinstance(t, DTensor) else t
)
def local_tensor(tensor: Tensor) -> Tensor:
    """Return this rank's memory of the tensor.

    ``to_local()``, which is public, takes ten times as long, and makes a view of a parameter, for which torchao's NF4
    lacks the operator.
    """
    local: Tensor = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    return local


@needs(
    *GROUPS,
    *PLACES,
    "torch.nn:Module._parameters",
    *(f"{PARAM}.{name}" for name in ("_module_info", "sharded_param", "_unsharded_param", "_sharded_param_data")),
    *(f"{PARAM}.{name}" for name in ("_orig_size", "fsdp_placement", "mesh_info", "padded_sharded_param_size")),
    "torch.distributed.fsdp._fully_shard._fsdp_common:FSDPMeshInfo.shard_mesh_rank",
    spoils=("forward_sees_current_weights",),
    of=FSDPModule,
    instead=lambda _: [],
)
def managed_weights(model: Module) -> list[ManagedWeight]:
    """Return the parameters that FSDP2 manages, once for each group."""
    return [ManagedWeight(managed) for group in _groups_of(model) for managed in group.fsdp_params]


@needs("torch._C:_FunctionBase._sequence_nr", spoils=("forward_sees_current_weights",), instead=lambda _: 0)
def sequence_number(node: torch.autograd.graph.Node) -> int:
    """Return the position of an autograd node among the nodes that this thread has made."""
    return int(node._sequence_nr())


@needs("torch._C:_current_graph_task_id", spoils=("traces",), instead=lambda: False)
def is_in_backward() -> bool:
    """Whether autograd runs this code in a backward, as it does where activation checkpointing repeats a forward."""
    return bool(torch._C._current_graph_task_id() != -1)
