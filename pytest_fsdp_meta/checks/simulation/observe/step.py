"""Run one training step without values, and count what the rank holds and sends."""

from __future__ import annotations

import logging
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from traceback import walk_tb
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Module, Parameter
from torch.optim import Optimizer

from pytest_fsdp_meta.checks.collectives.observe import GROUPS, INPUTS, NAMESPACES, OPS
from pytest_fsdp_meta.checks.materialisation.observe import loaded_subject
from pytest_fsdp_meta.checks.memory.observe import gathered_groups, noting_resizes
from pytest_fsdp_meta.checks.simulation.facts import (
    BACKWARD,
    BACKWARD_PASS,
    FORWARD,
    GRADIENTS,
    OPTIMIZER,
    REDUCTION,
    STEPPING,
    TEMPORARY,
    Assumptions,
    ModuleTraffic,
    PhasePeak,
    RankSize,
    SimulatedStep,
    Traffic,
)
from pytest_fsdp_meta.checks.simulation.observe.load import asks_for_a_value, checkpointed_modules
from pytest_fsdp_meta.checks.simulation.observe.phases import PhaseMeter, leaves
from pytest_fsdp_meta.loader.subject import Subject, SubjectError
from pytest_fsdp_meta.ranks.adapters.dtensor import local_part, mesh_facts
from pytest_fsdp_meta.ranks.batches import global_batch, has_rows, loss_of
from pytest_fsdp_meta.ranks.inventory import named_modules, named_tensors, unwrapped
from pytest_fsdp_meta.ranks.joined_optimizer import computing_optimizer, parts_of_optimizer
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
)
from pytest_fsdp_meta.ranks.watching import watching
from pytest_fsdp_meta.text import clean_name, first_line, grouped
from pytest_fsdp_meta.worlds import Rank, current, doing
from pytest_fsdp_meta.worlds.rank.tracebacks import user_line

BEGINNING, GATHERING, REDUCING = "pre_backward", "all_gather", "post_backward_reduce"
FSDP_SPAN = re.compile(rf"FSDP::(?P<what>{BEGINNING}|{GATHERING}|{REDUCING})(?: \((?P<module>.+)\))?$")
"""How FSDP2 names what it does for the profiler; the root's groups have no module's name."""
SENDING = GATHERING, REDUCING
FOREACH = "foreach"
"""The setting of an optimizer by which torch steps all parameters at a time; on GPUs that is the default."""
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
        with (
            FakeTensorMode(allow_non_fake_inputs=True),
            GroupedProductsOfAnyDtype(),
            torch.compiler.set_stance("force_eager"),  # with fullgraph=True, compiled code refuses modes
            rearranging_shapes_only(),
            _unlogged(),
        ):
            return _step(subject, rank, shares, rows)
    except SubjectError as error:
        undeclared = error.field == "loss" and subject.loss is None
        return SimulatedStep(problem=first_line(error), error=True, missing="loss" if undeclared else "")
    except Exception as error:  # of any type: it is the author's model that runs
        cause = error.__cause__ or error
        where = f"{_module_of(cause, subject.model)} ({user_line(cause)})"
        problem = f"{type(cause).__name__} in {where}: {first_line(cause)}"
        return SimulatedStep(problem=problem, error=not asks_for_a_value(cause))


@contextmanager
def _unlogged() -> Iterator[None]:
    """Let torch log no error of a fake tensor: the exception is reported instead."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


def _module_of(error: BaseException, model: Module) -> str:
    """Return the name of the innermost module whose code the error passed."""
    names = {id(module): name for name, module in named_modules(model)}
    holders = (frame.f_locals.get("self") for frame, _ in walk_tb(error.__traceback__))
    found = [name for holder in holders if (name := names.get(id(holder)))]
    return found[-1] if found else "the model"


def _step(subject: Subject, rank: Rank, shares: int, rows: Mapping[str, int]) -> SimulatedStep:
    model, built = subject.model, built_optimizer(subject)
    replaced = materialise(model)
    for group in [] if built is None else built.param_groups:
        group["params"] = [replaced.get(id(parameter), parameter) for parameter in group["params"]]
    # As many rows as a rank gets; which ones does not matter without values. A view would hold them all.
    batch = {
        key: value[: rows.get(key) or max(1, len(value) // shares)].clone() if has_rows(value) else value
        for key, value in global_batch(subject, 0).items()
    }
    recorder = _StepRecorder(rank, model)
    meter = PhaseMeter([local_part(t) for t in (*model.parameters(), *model.buffers())], recorder.where)
    model.train()
    with watching(meter, recorder), noting_resizes(meter), recorder.running.watching():
        loss = loss_of(subject, batch)
        meter.end_forward()
        loss.backward()
        del loss
    optimizer = built or make_optimizer(subject)
    state = _state_bytes(optimizer)
    gradients = [local_part(p.grad) for p in model.parameters() if p.grad is not None]
    meter.label(gradients, GRADIENTS)
    peaks, unstepped = [*meter.peaks(state)], ""
    if optimizer is not None:
        try:
            temporary = max(map(_temporary_bytes, parts_of_optimizer(optimizer)))
        except Exception as error:  # of any type: an optimizer may need DTensors, or values
            unstepped = f"{type(error).__name__}: {first_line(error)}"
        else:
            parts = Counter(meter.held_now()) + Counter({OPTIMIZER: state, TEMPORARY: temporary})
            peaks.append(PhasePeak(STEPPING, "", parts))
    return SimulatedStep(
        gradients=sum(gradient.nbytes for gradient in gradients),
        optimizer=state,
        gathered=recorder.gathered,
        peaks=tuple(peaks),
        traffic=tuple(recorder.traffic()),
        assumed=_assumptions(model, batch, optimizer, recorder.recomputes),
        groups=tuple(gathered_groups(model)),
        unstepped=unstepped,
    )


def _assumptions(model: Module, batch: Mapping[str, Any], optimizer: Optimizer | None, recomputes: bool) -> Assumptions:
    shapes = {key: tuple(value.shape) for key, value in batch.items() if has_rows(value)}
    meshes = [mesh_facts(parameter) for parameter in model.parameters() if isinstance(parameter, DTensor)]
    described = dict.fromkeys(map(str, meshes))
    checkpointed = any(True for _ in checkpointed_modules(model))
    return Assumptions(shapes, _describe_optimizer(optimizer), recomputes, checkpointed, tuple(described))


def _describe_optimizer(optimizer: Optimizer | None) -> str:
    """Return such as "AdamW (foreach) with state in float32"."""
    described = []
    for part in () if optimizer is None else map(computing_optimizer, parts_of_optimizer(optimizer)):
        how = [name for name in (FOREACH, "fused") if any(group.get(name) for group in part.param_groups)]
        if not how and any(group.get(FOREACH, True) is None for group in part.param_groups):
            how = [f"{FOREACH}, as on GPUs"]
        kept = {str(value.dtype) for own in part.state.values() for value in _tensors(own) if value.numel() > 1}
        dtypes = f" with state in {' and '.join(sorted(kept))}".replace("torch.", "") if kept else ""
        described.append(f"{type(part).__name__}{f' ({how[0]})' if how else ''}{dtypes}")
    return ", ".join(dict.fromkeys(described))


def _state_bytes(optimizer: Optimizer | None) -> int:
    """Return the bytes of the state after a step; of parameters alike in shape and dtype, one takes it for all."""
    if optimizer is None:
        return 0
    alike = grouped(
        ((number, parameter.shape, local_part(parameter).shape, parameter.dtype), parameter)
        for number, group in enumerate(optimizer.param_groups)
        for parameter in group["params"]
        if parameter.grad is not None
    )
    if not alike:
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
    count. As on a GPU, ``FOREACH`` is the default.
    """
    groups, state = optimizer.param_groups, optimizer.state
    optimizer.param_groups = [
        {**group, "params": [_local_parameter(p) for p in group["params"] if p.grad is not None]} for group in groups
    ]
    for group in optimizer.param_groups:
        if group.get(FOREACH, True) is None and not group.get("fused"):
            group[FOREACH] = True
    try:
        optimizer.state = defaultdict(dict)
        optimizer.step()  # which creates the state
        tensors = [t for group in optimizer.param_groups for p in group["params"] for t in (p, p.grad)]
        kept = [value for own in optimizer.state.values() for value in _tensors(own)]
        meter = PhaseMeter([*tensors, *kept], lambda: (STEPPING, ""))
        before = sum(meter.held_now().values())
        with watching(meter):
            optimizer.step()
        return max(peak.nbytes for peak in meter.peaks(0)) - before
    finally:
        optimizer.param_groups, optimizer.state = groups, state


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
    tied = grouped(
        (id(parameter), (module, name))
        for module in unwrapped(model).modules()
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False)
    )
    model.to_empty(device="cpu")
    for (first, name), *others in tied.values():
        for module, other in others:
            module.register_parameter(other, first.get_parameter(name))
    return {before: module.get_parameter(name) for before, ((module, name), *_) in tied.items()}


class _StepRecorder:
    """A watcher that knows the phase and the module that run, and adds up what this rank sends for each module.

    FSDP2 names the module of each group while it sends, in the backward and ahead of time too. Other collectives in the
    forward are of the module that runs, which for a hook on a module's output is the one around it; in the backward no
    module runs, unless it is computed again.
    """

    def __init__(self, rank: Rank, model: Module) -> None:
        self.gathered = 0
        self.recomputes = False
        self.running = RunningModule(model)
        self._names = dict(_dims_by_group(rank, model))
        self._spans: list[tuple[str, str]] = []
        """What FSDP2 does in the spans that are open now, with the module that it names; empty for other spans."""
        self._backward = False
        self._last = ""
        """The module whose backward FSDP2 has begun last."""
        self._sent: dict[tuple[str, tuple[str, ...], int], dict[str, Counter[str]]] = {}
        """What is added up for each module, by the collective, the mesh dimensions and the number of ranks."""

    def where(self) -> tuple[str, str]:
        """Return the phase and the module."""
        self._backward = self._backward or is_in_backward()
        if not self._backward:
            return FORWARD, self.running.name
        reduced = [module for what, module in self._spans if what == REDUCING]
        return (REDUCTION, reduced[-1]) if reduced else (BACKWARD_PASS, self.running.name or self._last)

    def before(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        if func.namespace == "profiler":
            self._follow_span(operator_name(func), args)
        self.recomputes = self.recomputes or (bool(self.running.name) and is_in_backward())
        op = OPS.get(operator_name(func)) if func.namespace in NAMESPACES else None
        if op is None or op == "barrier":
            return
        given = operator_arguments(func, args, kwargs)
        group = process_group(next(given[name] for name in GROUPS if name in given))
        inputs = leaves(next((given[name] for name in INPUTS if name in given), None))
        nbytes, ranks = sum(tensor.nbytes for tensor in inputs), group.size()
        if op.startswith("all_gather"):
            self.gathered = max(self.gathered, nbytes * ranks)
        modules = self._sent.setdefault((op, self._names.get(group.group_name, ()), ranks), {})
        named = [module for what, module in self._spans if what in SENDING]
        module = named[-1] if named else self.running.name or (BACKWARD if is_in_backward() else "")
        counted = modules.setdefault(NUMBER.sub("*", module), Counter())
        counted["count"] += 1
        leaving = nbytes * (ranks - 1)  # of an input, with a ring
        if not op.startswith("all_gather"):
            leaving = (2 if op == "all_reduce" else 1) * (leaving // ranks)
        counted["nbytes"] += leaving

    def after(self, func: Any, args: Sequence[Any], out: Any) -> None: ...

    def traffic(self) -> Iterator[Traffic]:
        for (op, dims, ranks), modules in self._sent.items():
            parts = tuple(ModuleTraffic(name, one["count"], one["nbytes"]) for name, one in modules.items())
            count, nbytes = sum(part.count for part in parts), sum(part.nbytes for part in parts)
            yield Traffic(op, dims, ranks, count, nbytes, parts)

    def _follow_span(self, operator: str, args: Sequence[Any]) -> None:
        if not operator.startswith("_record_function_enter"):
            self._spans[-1:] = []
            return
        found = FSDP_SPAN.match(str(args[0]))
        self._spans.append((found["what"], clean_name(found["module"] or "")) if found else ("", ""))
        if self._spans[-1][0] == BEGINNING:
            self._last = self._spans[-1][1]


def _dims_by_group(rank: Rank, model: Module) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield the name of each group with the dimensions of the mesh that it is for, the loader's own or the world's."""
    own = {parameter.device_mesh for parameter in model.parameters() if isinstance(parameter, DTensor)}
    worlds = [rank.mesh] if rank.has_mesh else [mesh for mesh in own if mesh.size() == rank.world_size][:1]
    yield dist.group.WORLD.group_name, (worlds[0].mesh_dim_names or ()) if worlds else ()
    for mesh in (*own, *worlds):
        for name in mesh.mesh_dim_names or ():
            yield mesh.get_group(name).group_name, (name,)


class GroupedProductsOfAnyDtype(TorchDispatchMode):  # type: ignore[misc]
    """Give grouped products of other dtypes their shape; what does not fit together is left to torch to refuse."""

    supports_higher_order_operators = True
    """Without it, flex attention and other higher-order operators refuse to run."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor runs first, and multiplies what this rank has
        if getattr(func, "namespace", "") == "aten" and operator_name(func) == "_grouped_mm":
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
