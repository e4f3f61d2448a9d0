"""Observe the random numbers that a step draws, and the generators around saving and loading."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Module

from pytest_fsdp_meta.checks.materialisation.observe import LEFT_BY_LOADER
from pytest_fsdp_meta.checks.random_numbers.facts import OWN_GENERATOR, Draw, RandomState
from pytest_fsdp_meta.loader.subject import Subject
from pytest_fsdp_meta.ranks.batches import batch_slice
from pytest_fsdp_meta.ranks.bits import digest
from pytest_fsdp_meta.ranks.generators import (
    States,
    changed_generators,
    describe_state,
    draw_from_all,
    read_states,
    seed_of,
    set_states,
)
from pytest_fsdp_meta.ranks.inventory import unwrapped
from pytest_fsdp_meta.ranks.module_watch import RunningModule
from pytest_fsdp_meta.ranks.torch_private import (
    TorchDispatchMode,
    is_in_backward,
    is_operator,
    operator_arguments,
    operator_name,
)
from pytest_fsdp_meta.ranks.watching import tensors_in
from pytest_fsdp_meta.worlds import SEED, Rank


class DrawWatch(TorchDispatchMode):  # type: ignore[misc]
    """Record the operators that draw random numbers. Compiled modules run eagerly, where their operators are seen.

    With ``only_training``, no draws of an evaluation are recorded, nor those of a generator of its own outside of all
    modules, whose noise may be meant to be fixed.
    """

    # Without this attribute, flex attention and other higher-order operators refuse to run.
    supports_higher_order_operators = True

    def __init__(self, model: Module, device: torch.device, only_training: bool = False) -> None:
        super().__init__()
        self._only_training = only_training
        self.draws: list[Draw] = []
        self._device = device
        self._model = unwrapped(model)
        self._evaluated: set[str] = set()
        """Kinds of generators from which an evaluation has drawn."""
        self.running = RunningModule(model)
        self._calls: Counter[str] = Counter()
        self._unapplied: dict[int, tuple[int, Tensor]] = {}
        """Address of a storage with random numbers -> the draw, and the tensor, which keeps the address taken."""
        self._dtensor_operator: Any = None
        self._first = read_states(device)

    @property
    def hidden(self) -> bool:
        """Whether a generator has advanced although no operator was seen to draw from it."""
        seen = {*self._evaluated, *(draw.generator for draw in self.draws)}
        return any(kind not in seen for kind in changed_generators(self._first, read_states(self._device)))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not is_operator(func):
            return func(*args, **kwargs)
        if any(issubclass(kind, DTensor) for kind in types):
            self._dtensor_operator = func
            return NotImplemented  # DTensor runs the same operator on its shard, which this mode sees
        if torch.Tag.nondeterministic_seeded in func.tags:
            return self._draw(func, args, kwargs)
        if not self._unapplied:
            return func(*args, **kwargs)
        taken = list(tensors_in((args, tuple(kwargs.values()))))
        drawn = {self._unapplied[key][0]: t.shape for t in taken if (key := _address(t)) in self._unapplied}
        held = self._held(taken) if drawn else []
        operand = " ".join(map(digest, held))  # before the call, which may overwrite it
        shapes = [tensor.shape for tensor in held]
        out = func(*args, **kwargs)
        for number, shape in drawn.items():
            self._apply(number, operand, out)
            # It repeats over the rows of an operand.
            if any(s and s[0] > 1 and (len(shape) < len(s) or shape[0] == 1) for s in shapes):
                self.draws[number] = replace(self.draws[number], for_all_rows=True)
        return out

    def _draw(self, func: Any, args: Any, kwargs: Any) -> Any:
        own = operator_arguments(func, args, kwargs).get("generator")
        taken = list(tensors_in((args, tuple(kwargs.values()))))
        before = self._states(own)
        out = func(*args, **kwargs)
        made = list(tensors_in(out))
        if not made:
            return out  # DTensor tries a new operator on fake tensors first, which draws nothing
        drawn = changed_generators(before, self._states(own))
        recorded = self._records(own is not None)
        self._evaluated.update(() if recorded else drawn)
        for kind in drawn if recorded else ():
            module = self.running.name
            self.draws.append(
                Draw(
                    module=module,
                    call=self._calls[module],
                    operator=operator_name(func),
                    shape=tuple(made[0].shape),
                    generator=kind,
                    state=describe_state(before[kind]),
                    seed=(seed := seed_of(kind) if own is None else own.initial_seed()),
                    seeded=own is not None or seed != SEED,
                    by_dtensor=self._dtensor_operator is func,
                    # A backward that draws for itself runs outside of modules, without gradients.
                    again=is_in_backward() and (torch.is_grad_enabled() or bool(module)),
                )
            )
            self._calls[module] += 1
            # What is overwritten with random numbers, as by bernoulli_(), is nothing that they are applied to.
            written = set(map(_address, made))
            held = self._held(t for t in taken if _address(t) not in written)
            self._apply(len(self.draws) - 1, " ".join(map(digest, held)), out)
        self._dtensor_operator = None
        return out

    def _records(self, by_own_generator: bool) -> bool:
        if not self._only_training:
            return True
        if self.running.is_inside:
            return self.running.is_learning
        evaluates = not self._model.training and not torch.is_grad_enabled() and not is_in_backward()
        return not by_own_generator and not evaluates

    def _states(self, own: Any) -> States:
        return read_states(self._device) if own is None else {OWN_GENERATOR: own.get_state()}

    def _held(self, taken: Iterable[Tensor]) -> list[Tensor]:
        """Return the tensors that tell ranks apart.

        Constants, such as the probability of each element or the ones that a mask is made of, do not.
        """
        return [t for t in taken if t.is_floating_point() and _address(t) not in self._unapplied and _varies(t)]

    def _apply(self, number: int, operand: str, out: Any) -> None:
        """Note what the numbers of a draw are applied to; without an operand, that follows with what ``out`` is for."""
        if operand:
            self.draws[number] = replace(self.draws[number], operand=operand)
            self._unapplied = {key: held for key, held in self._unapplied.items() if held[0] != number}
        else:
            self._unapplied |= {_address(t): (number, t) for t in tensors_in(out) if t.numel()}


@contextmanager
def watching_draws(model: Module, device: torch.device, only_training: bool = False) -> Iterator[DrawWatch]:
    """Watch the draws of the block, with the modules of the model that they run in."""
    watch = DrawWatch(model, device, only_training)
    # With fullgraph=True, compiled code refuses modes, instead of running eagerly by itself.
    with watch.running.watching(), torch.compiler.set_stance("force_eager"), watch:
        yield watch


class DrawsWithoutDropout:
    """Find the modules that draw random numbers although dropout is off; steps are numbered from 0.

    The second step is watched only if a generator has advanced in the first: to see that costs next to nothing.
    """

    def __init__(self, model: Module, device: torch.device) -> None:
        self.modules: tuple[str, ...] = ()
        self._model, self._device = model, device
        self._drew = False

    @contextmanager
    def around(self, step: int) -> Iterator[None]:
        """Look at the step of the block. Each rank decides for itself, because watching does not communicate."""
        if step == 1 and self._drew:
            with watching_draws(self._model, self._device) as watch:
                yield
            self.modules = tuple(dict.fromkeys(draw.module or "the model itself" for draw in watch.draws))
            return
        before = read_states(self._device) if step == 0 else {}
        yield
        if before:
            self._drew = bool(changed_generators(before, read_states(self._device)))


def _address(tensor: Tensor) -> int:
    return int(tensor.untyped_storage().data_ptr())


def _varies(tensor: Tensor) -> bool:
    values = tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor  # torch does not compare float8
    return bool(values.numel() > 1 and (values != values.flatten()[0]).any())


@contextmanager
def observing_generators(
    subject: Subject, rank: Rank, found: dict[str, RandomState], saving: bool = False
) -> Iterator[None]:
    """Enter into ``found`` the generators before and after the author's save() or resume().

    resume() finds them as loaded. When ``saving``, they have the state of a training: that of the loader, advanced by
    another amount on each slice of the batch, since rows of other lengths draw other amounts. Ranks of one slice stay
    as alike as the loader left them.
    """
    if subject.save is None:  # torch.distributed.checkpoint keeps no random state
        yield
        return
    set_states(rank.state[LEFT_BY_LOADER].torch, rank.device)
    draw_from_all(1 + batch_slice(subject, rank)[0] if saving else 0, rank.device)
    before = read_states(rank.device)
    yield
    for kind, state in read_states(rank.device).items():
        found[kind] = RandomState(describe_state(before[kind]), describe_state(state), seed_of(kind))
