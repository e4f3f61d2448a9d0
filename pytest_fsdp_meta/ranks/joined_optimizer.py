"""Several optimizers of one model as one: those in a container, such as Muon for matrices and AdamW for the rest."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest import mock

from torch import Tensor
from torch.optim import Optimizer

from pytest_fsdp_meta.loader.validation import is_zero3_optimizer
from pytest_fsdp_meta.ranks.adapters.zero3 import Zero3Optimizer, optimizer_of
from pytest_fsdp_meta.ranks.torch_private import before_other_step_hooks


class JoinedOptimizer(Optimizer):  # type: ignore[misc]
    """Optimizers that step together. Groups and state are those of the parts, not copies.

    ``container`` is what the author's function has returned, if these are in it.
    """

    def __init__(self, parts: Sequence[Optimizer], container: Optimizer | None = None) -> None:
        self.parts = tuple(parts)
        self.container = container

    @property
    def optimizers(self) -> list[Optimizer]:
        """The parts, under the name that torchtitan's container has for them."""
        return list(self.parts)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [group for part in self.parts for group in part.param_groups]

    @property
    def state(self) -> Any:
        return _JoinedState(*(part.state for part in self.parts))

    @property
    def defaults(self) -> dict[str, Any]:
        return dict(self.parts[0].defaults)

    def step(self, closure: Any = None) -> None:
        for part in self.parts:
            part.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        for part in self.parts:
            part.zero_grad(set_to_none)


class _JoinedState(ChainMap[Any, Any]):
    """The states of the parts. A parameter is stepped by one of them."""

    def __missing__(self, key: object) -> Any:
        raise KeyError(key)

    def __getitem__(self, key: Any) -> Any:
        for state in self.maps:  # a part's state is a defaultdict, which a plain look-up would extend
            if key in state:
                return state[key]
        return self.__missing__(key)

    def __delitem__(self, key: Any) -> None:
        for state in self.maps:
            state.pop(key, None)


def parts_of_optimizer(optimizer: Optimizer) -> tuple[Optimizer, ...]:
    """Return the optimizers that step: the parts of a joined one, or the optimizer itself."""
    return optimizer.parts if isinstance(optimizer, JoinedOptimizer) else (optimizer,)


def stepped_tensors(optimizer: Optimizer) -> Iterator[Tensor]:
    """Yield what the optimizer steps: parameters of the model, or float32 copies of them, of ZeRO-3 flat ones."""
    for part in parts_of_optimizer(optimizer):
        if isinstance(part, Zero3Optimizer):
            yield from part.zero.fp32_partitioned_groups_flat
        else:
            yield from (parameter for group in part.param_groups for parameter in group["params"])


def train_optimizer(optimizer: Optimizer) -> None:
    """Call ``train()`` of the optimizers that have modes (schedule-free ones), as a trainer does before it steps.

    They look up the state of each parameter, and so leave empty entries, which torch takes for a state.
    """
    for part in map(computing_optimizer, parts_of_optimizer(optimizer)):
        if callable(getattr(part, "train", None)):
            part.train()
            for parameter in [parameter for parameter, own in part.state.items() if not own]:
                del part.state[parameter]


@contextmanager
def watching_eval(optimizer: Optimizer) -> Iterator[dict[int, str]]:
    """Yield the classes of optimizers that are in ``train()``, by identity, without those whose ``eval()`` is called.

    Whether one is in ``train()`` is in its parameter groups: "train_mode" of facebookresearch/schedule_free.
    """
    parts = [part for part in map(computing_optimizer, parts_of_optimizer(optimizer)) if _trains(part)]
    training = {id(part): type(part).__name__ for part in parts}

    def leave(part: Optimizer, evaluate: Callable[[], object]) -> object:
        training.pop(id(part), None)
        return evaluate()

    for part in parts:
        part.eval = partial(leave, part, part.eval)
    try:
        yield training
    finally:
        for part in parts:
            del part.eval


def _trains(part: Optimizer) -> bool:
    modes = callable(getattr(part, "train", None)) and callable(getattr(part, "eval", None))
    return modes and any(group.get("train_mode") is True for group in part.param_groups)


def computing_optimizer(optimizer: Optimizer) -> Optimizer:
    """Return the torch optimizer that computes the steps of one of the parts: itself, or what ZeRO-3 steps with."""
    return optimizer.inner if isinstance(optimizer, Zero3Optimizer) else optimizer


@contextmanager
def before_steps(part: Optimizer, hook: Callable[[Optimizer], object]) -> Iterator[None]:
    """Call the hook before each step of one of the parts, with its gradients as they are then, and before its hooks.

    A closure, which computes the gradients within the step, comes first.
    """
    if isinstance(part, Zero3Optimizer):
        watched = part.before_steps(hook)
    else:

        def with_optimizer(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            """Return the arguments of the step, (optimizer, closure), with a closure that calls the hook."""
            closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
            if not callable(closure):
                return hook(optimizer)
            both = partial(_then_call, closure, partial(hook, optimizer))
            return ((args[0], both, *args[2:]), kwargs) if len(args) > 1 else (args, {**kwargs, "closure": both})

        watched = before_other_step_hooks(part, with_optimizer)
    with watched:
        yield


@contextmanager
def steps_after(optimizer: Optimizer, drop: bool = False) -> Iterator[None]:
    """Put off ``step`` and ``zero_grad`` to the end of the block, a backward; with ``drop``, leave them out.

    Where hooks on accumulated gradients call them, tensor by tensor, no gradient would be left to look at.
    """
    late: list[Callable[[], object]] = []

    def put_off(call: Callable[..., object], *args: Any, **kwargs: Any) -> None:
        late.append(partial(call, *args, **kwargs))

    with ExitStack() as patched:
        for part in parts_of_optimizer(optimizer):
            for name in ("step", "zero_grad"):
                patched.enter_context(mock.patch.object(part, name, partial(put_off, getattr(part, name))))
        yield
    for call in () if drop else late:
        call()


def _then_call(closure: Callable[[], Any], hook: Callable[[], object]) -> Any:
    loss = closure()
    hook()
    return loss


def unwrapped_optimizer(optimizer: object) -> Optimizer | None:
    """Return what steps inside the wrapper or container of a framework; None if the object is not an optimizer.

    A wrapper, such as accelerate's or lightning's, is an Optimizer with the one that steps as its ``.optimizer``. A
    container, such as torchtitan's, is an Optimizer with a list of them as its ``.optimizers``. That of DeepSpeed's
    ZeRO-3 steps parts of several parameters as one tensor, and appears as an optimizer over the parameters.
    """
    if is_zero3_optimizer(optimizer):
        return optimizer_of(optimizer)
    if not isinstance(optimizer, Optimizer):
        return None
    if isinstance(inner := getattr(optimizer, "optimizer", None), Optimizer):
        return unwrapped_optimizer(inner)
    contained = getattr(optimizer, "optimizers", None)
    if not isinstance(contained, (list, tuple)) or not contained:
        return optimizer
    parts = [part for own in contained if (part := unwrapped_optimizer(own)) is not None]
    if len(parts) < len(contained):
        return optimizer
    flat = [single for part in parts for single in parts_of_optimizer(part)]
    return flat[0] if len(flat) == 1 else JoinedOptimizer(flat)
