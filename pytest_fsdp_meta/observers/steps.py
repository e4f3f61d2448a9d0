"""The collectives of one training step, and the FSDP groups that explain most of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

from torch.nn import Module

from pytest_fsdp_meta.observers.collectives import Recorder
from pytest_fsdp_meta.observers.inventory import named_tensors
from pytest_fsdp_meta.observers.torch_private import ManagedGroup, fsdp_groups
from pytest_fsdp_meta.observers.watching import watching
from pytest_fsdp_meta.traffic import Collective, FsdpGroup
from pytest_fsdp_meta.worlds import Rank, current


def watching_step(me: Rank, model: Module, steps: int, step: int) -> AbstractContextManager[None]:
    """Around one of ``steps`` training steps: notes the collectives of the second, if anybody asked for them.

    FSDP2 sets itself up in the first, and DDP orders its buckets.
    """
    asked = "collectives" in me.state["watch"] and step == min(1, steps - 1)
    return _watching(me, model) if asked else nullcontext()


@contextmanager
def _watching(me: Rank, model: Module) -> Iterator[None]:
    groups = list(fsdp_groups(model))
    forwards: Counter[int] = Counter()
    parameters = {name: tensor for name, kind, tensor in named_tensors(model) if kind == "parameter"}
    recorder = Recorder(known=parameters)

    def ran(index: int, *_: Any) -> None:
        forwards[index] += 1

    with ExitStack() as hooks:
        for index, group in enumerate(groups):
            # Only the first of modules that fully_shard took together gathers them, in whichever order they run.
            hooks.callback(group.modules[0].register_forward_pre_hook(partial(ran, index)).remove)
        with recorder.noting_optimizers(), watching(recorder):
            yield
    names: dict[int, list[str]] = {}
    for name, _, tensor in named_tensors(model):
        names.setdefault(id(tensor), []).append(name)
    facts = tuple(_facts(group, names, forwards[index]) for index, group in enumerate(groups))
    me.state["step"] = recorder.told(model), facts


def observe_step() -> tuple[tuple[Collective, ...], tuple[FsdpGroup, ...]] | None:
    """What was noted of this rank's step; None where none was watched to its end."""
    step: tuple[tuple[Collective, ...], tuple[FsdpGroup, ...]] | None = current().state.get("step")
    return step


def _facts(group: ManagedGroup, names: Mapping[int, Sequence[str]], forwards: int) -> FsdpGroup:
    """``names`` are those of each tensor of the model, by identity."""
    return FsdpGroup(
        parameters=tuple(name for parameter in group.parameters for name in names.get(id(parameter), ())),
        forwards=forwards,
        reshards=group.reshards,
        trainable=any(parameter.requires_grad for parameter in group.parameters),
        replicates=group.replicates,
    )
