"""Record the collectives and the FSDP2 groups of one training step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

from torch.nn import Module

from pytest_fsdp_meta.checks.collectives.facts import Collective, FsdpGroup
from pytest_fsdp_meta.checks.collectives.observe.recorder import Recorder
from pytest_fsdp_meta.ranks.inventory import named_tensors
from pytest_fsdp_meta.ranks.torch_private import ManagedGroup, fsdp_groups
from pytest_fsdp_meta.ranks.watching import watching
from pytest_fsdp_meta.worlds import Rank, current

StepTraffic = tuple[tuple[Collective, ...], tuple[FsdpGroup, ...], tuple[str, ...]]
"""The collectives of one step, the FSDP2 groups that it gathered, and the operators that the recorder does not know."""


def observe_step() -> StepTraffic | None:
    """Return what was recorded of this rank's step; None where no step was recorded to its end."""
    step: StepTraffic | None = current().state.get("step")
    return step


def watching_step(rank: Rank, model: Module, steps: int, step: int) -> AbstractContextManager[None]:
    """Record the collectives of the block if it is the second of ``steps`` steps and a check asked for them.

    The first step is not typical: FSDP2 initialises itself and DDP orders its buckets.
    """
    recorded = "collectives" in rank.state["watch"] and step == min(1, steps - 1)
    return _recording(rank, model) if recorded else nullcontext()


@contextmanager
def _recording(rank: Rank, model: Module) -> Iterator[None]:
    groups = list(fsdp_groups(model))
    forwards: Counter[int] = Counter()
    parameters = {name: tensor for name, kind, tensor in named_tensors(model) if kind == "parameter"}
    recorder = Recorder(known=parameters)

    def count_forward(index: int, *_: Any) -> None:
        forwards[index] += 1

    with ExitStack() as hooks:
        for index, group in enumerate(groups):
            # Where fully_shard got a list of modules, only the first of them gathers, in whichever order they run.
            hooks.callback(group.modules[0].register_forward_pre_hook(partial(count_forward, index)).remove)
        with recorder.noting_optimizers(), watching(recorder):
            yield
    names: dict[int, list[str]] = {}
    for name, _, tensor in named_tensors(model):
        names.setdefault(id(tensor), []).append(name)
    facts = tuple(_group_facts(group, names, forwards[index]) for index, group in enumerate(groups))
    rank.state["step"] = recorder.collectives(model), facts, tuple(sorted(recorder.unknown))


def _group_facts(group: ManagedGroup, names: Mapping[int, Sequence[str]], forwards: int) -> FsdpGroup:
    """Return the facts of a group; ``names`` maps the identity of each tensor of the model to its names."""
    return FsdpGroup(
        parameters=tuple(name for parameter in group.parameters for name in names.get(id(parameter), ())),
        forwards=forwards,
        reshards=group.reshards,
        trainable=any(parameter.requires_grad for parameter in group.parameters),
        replicates=group.replicates,
        ranks=group.ranks,
    )
