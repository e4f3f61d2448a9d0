"""Call observers on the ranks by name, with the types of the functions themselves.

Observers import torch and the pytest process must not, so at run time each module here is a stand-in whose attributes
are names ("pytest_fsdp_meta.checks.values.observe:observe_values"). A type checker sees the real modules, and with
them the parameters and the result of every observer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from pytest_fsdp_meta.worlds import World

P = ParamSpec("P")
R = TypeVar("R")

CHECKS = "pytest_fsdp_meta.checks"
ON_RANKS = (
    *(f"{CHECKS}.checkpoint.observe.{name}" for name in ("round_trip", "saved_state", "state_dict")),
    *(f"{CHECKS}.training.observe.{name}" for name in ("training", "noise", "training_mode")),
    *(f"{CHECKS}.data.observe", f"{CHECKS}.drawn.observe"),
    "pytest_fsdp_meta.ranks.preload:warm_up",
)
"""What the fork server imports (modules) and calls (functions) before it forks the ranks of a trial."""

if TYPE_CHECKING:
    from pytest_fsdp_meta.checks.checkpoint.observe import author as author_saving
    from pytest_fsdp_meta.checks.checkpoint.observe import round_trip as checkpoint
    from pytest_fsdp_meta.checks.checkpoint.observe import saved_state, state_dict
    from pytest_fsdp_meta.checks.collectives import observe as step_collectives
    from pytest_fsdp_meta.checks.data import observe as author_data
    from pytest_fsdp_meta.checks.drawn import observe as drawn_weights
    from pytest_fsdp_meta.checks.materialisation import observe as loading
    from pytest_fsdp_meta.checks.simulation.observe import load as simulation
    from pytest_fsdp_meta.checks.simulation.observe import step as simulated_step
    from pytest_fsdp_meta.checks.tracing.observe import step as traces
    from pytest_fsdp_meta.checks.training.observe import (
        noise,
        not_finite,
        reference,
        reference_training,
        training,
        training_mode,
    )
    from pytest_fsdp_meta.checks.values import observe as values
else:

    class ObserverModule:
        """Stand-in for a module of observers."""

        def __init__(self, module: str) -> None:
            self._module = f"{CHECKS}.{module}"

        def __getattr__(self, function: str) -> str:
            return f"{self._module}:{function}"

    author_data = ObserverModule("data.observe")
    author_saving = ObserverModule("checkpoint.observe.author")
    checkpoint = ObserverModule("checkpoint.observe.round_trip")
    drawn_weights = ObserverModule("drawn.observe")
    loading = ObserverModule("materialisation.observe")
    noise = ObserverModule("training.observe.noise")
    not_finite = ObserverModule("training.observe.not_finite")
    reference = ObserverModule("training.observe.reference")
    reference_training = ObserverModule("training.observe.reference_training")
    saved_state = ObserverModule("checkpoint.observe.saved_state")
    simulated_step = ObserverModule("simulation.observe.step")
    simulation = ObserverModule("simulation.observe.load")
    state_dict = ObserverModule("checkpoint.observe.state_dict")
    step_collectives = ObserverModule("collectives.observe")
    traces = ObserverModule("tracing.observe.step")
    training = ObserverModule("training.observe.training")
    training_mode = ObserverModule("training.observe.training_mode")
    values = ObserverModule("values.observe")

__all__ = [
    "ON_RANKS",
    "author_data",
    "author_saving",
    "checkpoint",
    "drawn_weights",
    "loading",
    "noise",
    "not_finite",
    "reference",
    "reference_training",
    "run_on",
    "saved_state",
    "simulated_step",
    "simulation",
    "state_dict",
    "step_collectives",
    "traces",
    "training",
    "training_mode",
    "values",
]


def run_on(world: World, observer: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> list[R]:
    """Call an observer on every rank of the world; return the results in rank order. Raises WorldError."""
    results: list[R] = world.run(observer, *args, **kwargs)
    return results
