"""Run one training step without values, and count what the rank holds and sends."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Module, Parameter
from torch.optim import Optimizer

from pytest_fsdp_meta.checks.collectives.observe import GROUPS, INPUTS, NAMESPACES, OPS
from pytest_fsdp_meta.checks.materialisation.observe import loaded_subject
from pytest_fsdp_meta.checks.memory.observe.peak import Meter, noting_resizes
from pytest_fsdp_meta.checks.simulation.facts import BACKWARD, ModuleTraffic, RankSize, SimulatedStep, Traffic
from pytest_fsdp_meta.loader.subject import Subject
from pytest_fsdp_meta.ranks.adapters.dtensor import local_part
from pytest_fsdp_meta.ranks.batches import global_batch, loss_of
from pytest_fsdp_meta.ranks.inventory import named_tensors, unwrapped
from pytest_fsdp_meta.ranks.joined_optimizer import parts_of_optimizer
from pytest_fsdp_meta.ranks.module_watch import RunningModule
from pytest_fsdp_meta.ranks.optimizers import built_optimizer, make_optimizer
from pytest_fsdp_meta.ranks.torch_private import (
    FakeTensorMode,
    TorchDispatchMode,
    is_in_backward,
    operator_arguments,
    operator_name,
    process_group,
    rearranging_shapes_only,
    register_fake_collectives,
    tree_leaves,
)
from pytest_fsdp_meta.ranks.watching import watching
from pytest_fsdp_meta.text import clean_name, first_line
from pytest_fsdp_meta.worlds import Rank, current, doing
from pytest_fsdp_meta.worlds.rank.tracebacks import user_line

FSDP_SPAN = re.compile(r"FSDP::(?:all_gather|post_backward_reduce)(?: \((?P<module>.+)\))?$")
"""How FSDP2 names what it does for the profiler; the root's groups have no module's name."""
NUMBER = re.compile(r"(?<!\w)\d+(?!\w)")


def observe_size(stepping: int, shares: int, rows: Mapping[str, int]) -> RankSize:
    """Return what this rank holds, and what a step needs if the rank is ``stepping``.

    It has so many ``rows`` of each tensor of the batch, or one of so many ``shares``, at least one row.
    """
    rank = current()
    subject = loaded_subject(rank)
    held = Counter[str]()
    for kind, tensor in {id(t): (kind, t) for _, kind, t in named_tensors(subject.model)}.values():
        held[kind] += local_part(tensor).nbytes
    steps = rank.rank == stepping and subject.batch is not None
    step = simulate_step(subject, rank, shares, rows) if steps else None
    return RankSize(rank.rank, held["parameter"], held["buffer"], step)


def simulate_step(subject: Subject, rank: Rank, shares: int, rows: Mapping[str, int]) -> SimulatedStep:
    """Run a forward, a backward and the optimizer's step with this rank's rows."""
    doing("simulating a step")
    register_fake_collectives()
    if subject.train_step is not None:
        return SimulatedStep(problem="train_step is not simulated")
    try:
        with FakeTensorMode(allow_non_fake_inputs=True), GroupedProductsOfAnyDtype(), rearranging_shapes_only():
            return _step(subject, rank, shares, rows)
    except Exception as error:  # of any type: what the model raises where it asks for a value
        cause = error.__cause__ or error
        return SimulatedStep(problem=f"{type(cause).__name__} at {user_line(cause)}: {first_line(cause)}")


def _step(subject: Subject, rank: Rank, shares: int, rows: Mapping[str, int]) -> SimulatedStep:
    model, built = subject.model, built_optimizer(subject)
    replaced = materialise(model)
    for group in [] if built is None else built.param_groups:
        group["params"] = [replaced.get(id(parameter), parameter) for parameter in group["params"]]
    batch = _own_rows(global_batch(subject, 0), shares, rows)
    meter, recorder = _FakeMeter(), _TrafficRecorder(rank, model)
    model.train()
    meter.after(torch.ops.aten.detach.default, (), [local_part(t) for t in (*model.parameters(), *model.buffers())])
    with watching(meter, recorder), noting_resizes(meter), recorder.running.watching():
        loss_of(subject, batch).backward()
    optimizer = built or make_optimizer(subject)
    state = _state_bytes(optimizer)
    gradients = sum(local_part(p.grad).nbytes for p in model.parameters() if p.grad is not None)
    held = sum(local_part(tensor).nbytes for tensor in (*model.parameters(), *model.buffers()))
    temporary, unstepped = 0, ""
    if optimizer is not None:
        try:
            temporary = max(map(_temporary_bytes, parts_of_optimizer(optimizer)))
        except Exception as error:  # of any type: an optimizer may need DTensors, or values
            unstepped = f"{type(error).__name__}: {first_line(error)}"
    return SimulatedStep(
        gradients=gradients,
        optimizer=state,
        stepping=held + gradients + state + temporary,
        unstepped=unstepped,
        gathered=recorder.gathered,
        peak=_peak(meter) + state,  # from the second step on
        traffic=tuple(recorder.traffic()),
        rows={key: len(value) for key, value in batch.items() if _has_rows(value)},
    )


def _state_bytes(optimizer: Optimizer | None) -> int:
    """Return the bytes of the state after a step; of parameters alike in shape and dtype, one takes it for all."""
    alike: dict[tuple[Any, ...], list[Tensor]] = {}
    for number, group in enumerate([] if optimizer is None else optimizer.param_groups):
        for parameter in group["params"]:
            if parameter.grad is not None:
                shapes = tuple(parameter.shape), tuple(local_part(parameter).shape)
                alike.setdefault((number, *shapes, parameter.dtype), []).append(parameter)
    if optimizer is None or not alike:
        return 0
    kept = [(parameters[0], parameters[0].grad) for parameters in alike.values()]
    gradients = [(p, p.grad) for parameters in alike.values() for p in parameters]
    for parameter, _ in gradients:
        parameter.grad = None
    for parameter, gradient in kept:
        parameter.grad = gradient
    optimizer.step()
    for parameter, gradient in gradients:
        parameter.grad = gradient
    return sum(
        len(parameters) * sum(local_part(value).nbytes for value in _tensors(optimizer.state[parameters[0]]))
        for parameters in alike.values()
    )


def _temporary_bytes(optimizer: Optimizer) -> int:
    """Return the most bytes that a step of the optimizer takes besides parameters, gradients and state.

    It steps plain tensors of the sizes of the shards: for DTensors, torch computes shapes on other tensors, which would
    count. As on a GPU, ``foreach`` is the default: it has temporaries of all parameters at a time.
    """
    groups, state = optimizer.param_groups, optimizer.state
    optimizer.param_groups = [{**group, "params": [*map(_local_parameter, _with_gradient(group))]} for group in groups]
    for group in optimizer.param_groups:
        if group.get("foreach", True) is None and not group.get("fused"):
            group["foreach"] = True
    try:
        optimizer.state = defaultdict(dict)
        optimizer.step()  # which creates the state
        meter = _FakeMeter()
        tensors = [t for group in optimizer.param_groups for p in group["params"] for t in (p, p.grad)]
        meter.after(None, (), [*tensors, *(t for own in optimizer.state.values() for t in _tensors(own))])
        before = _peak(meter)
        with watching(meter):
            optimizer.step()
        return _peak(meter) - before
    finally:
        optimizer.param_groups, optimizer.state = groups, state


def _with_gradient(group: Mapping[str, Any]) -> Iterator[Parameter]:
    return (parameter for parameter in group["params"] if parameter.grad is not None)


def _local_parameter(parameter: Parameter) -> Parameter:
    local = Parameter(local_part(parameter).detach(), parameter.requires_grad)
    local.grad = local_part(parameter.grad)
    return local


def _tensors(state: Mapping[str, Any]) -> Iterator[Tensor]:
    return (value for value in state.values() if isinstance(value, Tensor))


def materialise(model: Module) -> dict[int, Parameter]:
    """Give the model tensors with a device and without values, and leave weights tied that are.

    Return the new parameters by the identities of those that they replace.
    """
    tied: dict[int, list[tuple[Module, str]]] = {}
    for module in unwrapped(model).modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            tied.setdefault(id(parameter), []).append((module, name))
    model.to_empty(device="cpu")
    for (first, name), *others in tied.values():
        for module, other in others:
            module.register_parameter(other, first.get_parameter(name))
    return {before: module.get_parameter(name) for before, ((module, name), *_) in tied.items()}


def _own_rows(batch: Mapping[str, Any], shares: int, rows: Mapping[str, int]) -> dict[str, Any]:
    """Return as many rows as a rank gets; which ones does not matter without values."""
    return {
        key: value[: rows.get(key) or max(1, len(value) // shares)] if _has_rows(value) else value
        for key, value in batch.items()
    }


def _has_rows(value: Any) -> bool:
    return isinstance(value, Tensor) and value.ndim > 0


def _peak(meter: Meter) -> int:
    alive = most = 0
    for before, after, *_ in meter.changes:
        alive += after - before
        most = max(most, alive)
    return most


def _leaves(values: Any) -> Iterator[Tensor]:
    """Yield the tensors that stand for memory; of a DTensor, the operations on its part follow."""
    return (leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor) and not isinstance(leaf, DTensor))


class _FakeMeter(Meter):
    def _is_mapped(self, storage: torch.UntypedStorage) -> bool:
        return False  # without values there is no memory, and its address cannot be asked for

    def before(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        self.after(func, args, args)

    def after(self, func: Any, args: Sequence[Any], out: Any) -> None:
        for tensor in _leaves(out):
            self._track(tensor, maybe_mapped=False)


Sent = tuple[str, tuple[str, ...], int]
"""What is added up: the collective, the mesh dimensions and the number of ranks."""


class _TrafficRecorder:
    """A watcher that adds up what this rank sends, and for which modules.

    FSDP2 names the module of each group while it sends, in the backward and ahead of time too. Other collectives in the
    forward are of the module that runs, which for a hook on a module's output is the one around it; in the backward no
    module runs.
    """

    def __init__(self, rank: Rank, model: Module) -> None:
        self.gathered = 0
        self.running = RunningModule(model)
        self._names = dict(_dims_by_group(rank, model))
        self._spans: list[str | None] = []
        """The modules that FSDP2 names in the spans that are open now; None for other spans."""
        self._sent: dict[Sent, dict[str, Counter[str]]] = {}

    def before(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        if func.namespace == "profiler":
            self._follow_span(operator_name(func), args)
        op = OPS.get(operator_name(func)) if func.namespace in NAMESPACES else None
        if op is None or op == "barrier":
            return
        given = operator_arguments(func, args, kwargs)
        group = process_group(next(given[name] for name in GROUPS if name in given))
        inputs = _leaves(next((given[name] for name in INPUTS if name in given), None))
        nbytes, ranks = sum(tensor.nbytes for tensor in inputs), group.size()
        if op.startswith("all_gather"):
            self.gathered = max(self.gathered, nbytes * ranks)
        modules = self._sent.setdefault((op, self._names.get(group.group_name, ()), ranks), {})
        counted = modules.setdefault(NUMBER.sub("*", self._module()), Counter())
        counted["count"] += 1
        counted["nbytes"] += _leaving(op, nbytes, ranks)

    def after(self, func: Any, args: Sequence[Any], out: Any) -> None: ...

    def traffic(self) -> Iterator[Traffic]:
        for (op, dims, ranks), modules in self._sent.items():
            parts = tuple(ModuleTraffic(name, one["count"], one["nbytes"]) for name, one in modules.items())
            count, nbytes = sum(part.count for part in parts), sum(part.nbytes for part in parts)
            yield Traffic(op, dims, ranks, count, nbytes, parts)

    def _follow_span(self, operator: str, args: Sequence[Any]) -> None:
        if operator.startswith("_record_function_enter"):
            found = FSDP_SPAN.match(str(args[0]))
            self._spans.append(found and clean_name(found["module"] or ""))
        elif self._spans:
            self._spans.pop()

    def _module(self) -> str:
        named = [span for span in self._spans if span is not None]
        return named[-1] if named else self.running.name or (BACKWARD if is_in_backward() else "")


def _leaving(op: str, nbytes: int, ranks: int) -> int:
    """Return how many bytes of an input leave the rank with a ring."""
    if op.startswith("all_gather"):
        return nbytes * (ranks - 1)
    share = nbytes * (ranks - 1) // ranks
    return 2 * share if op == "all_reduce" else share


def _dims_by_group(rank: Rank, model: Module) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield the name of each group with the dimensions of the mesh that it is for, the loader's own or the world's."""
    own = {parameter.device_mesh for parameter in model.parameters() if isinstance(parameter, DTensor)}
    worlds = [rank.mesh] if rank.has_mesh else [mesh for mesh in own if mesh.size() == rank.world_size][:1]
    yield dist.group.WORLD.group_name, (worlds[0].mesh_dim_names or ()) if worlds else ()
    for mesh in (*own, *worlds):
        for name in mesh.mesh_dim_names or ():
            yield mesh.get_group(name).group_name, (name,)


GROUPED_PRODUCT = "_grouped_mm"


class GroupedProductsOfAnyDtype(TorchDispatchMode):  # type: ignore[misc]
    """Give grouped products of other dtypes their shape; what does not fit together is left to torch to refuse."""

    supports_higher_order_operators = True
    """Without it, flex attention and other higher-order operators refuse to run."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor runs first, and multiplies what this rank has
        if getattr(func, "namespace", "") == "aten" and operator_name(func) == GROUPED_PRODUCT:
            given = operator_arguments(func, args, kwargs)
            one, other = given["self"], given["mat2"]
            shape = product_shape(one, other, given.get("offs"))
            if one.dtype != torch.bfloat16 and shape is not None:
                return torch.empty(shape, dtype=given.get("out_dtype") or one.dtype, device=one.device)
        return func(*args, **kwargs)


def product_shape(one: Tensor, other: Tensor, offsets: Tensor | None) -> tuple[int, ...] | None:
    """Return the shape of the product of each group's rows, columns or matrices; None if these do not fit together."""
    if one.ndim not in (2, 3) or other.ndim not in (2, 3) or one.shape[-1] != other.shape[-2]:
        return None
    rows, columns = one.shape[-2], other.shape[-1]
    if one.ndim == other.ndim == 3:
        return (len(one), rows, columns) if len(one) == len(other) and offsets is None else None
    if offsets is None or any(tensor.ndim == 3 and len(tensor) != len(offsets) for tensor in (one, other)):
        return None
    return (len(offsets), rows, columns) if one.ndim == other.ndim else (rows, columns)
