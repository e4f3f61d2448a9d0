"""Call observers on the ranks by name, with the types of the functions themselves.

Observers import torch and the pytest process must not, so at run time each module here is a stand-in whose attributes
are names ("pytest_fsdp_meta.observers.values:observe_values"). A type checker sees the real modules, and with them the
parameters and the result of every observer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from pytest_fsdp_meta.worlds import World

P = ParamSpec("P")
R = TypeVar("R")

OBSERVERS = "pytest_fsdp_meta.observers"
ON_RANKS = (
    *(f"{OBSERVERS}.checkpoint", f"{OBSERVERS}.saved_state", f"{OBSERVERS}.training", f"{OBSERVERS}.noise"),
    *(f"{OBSERVERS}.author_data", f"{OBSERVERS}.drawn_weights", f"{OBSERVERS}.export"),
    f"{OBSERVERS}.preload:warm_up",
)
"""What the fork server imports (modules) and calls (functions) before it forks the ranks of a trial."""

if TYPE_CHECKING:
    from pytest_fsdp_meta.observers import (
        author_data,
        checkpoint,
        drawn_weights,
        export,
        loading,
        noise,
        random_numbers,
        reference,
        saved_state,
        simulated_step,
        simulation,
        state_dict,
        step_collectives,
        traces,
        training,
        values,
    )
else:

    class ObserverModule:
        """Stand-in for a module of observers."""

        def __init__(self, module: str) -> None:
            self._module = module

        def __getattr__(self, function: str) -> str:
            return f"{self._module}:{function}"

    author_data = ObserverModule(f"{OBSERVERS}.author_data")
    checkpoint = ObserverModule(f"{OBSERVERS}.checkpoint")
    drawn_weights = ObserverModule(f"{OBSERVERS}.drawn_weights")
    export = ObserverModule(f"{OBSERVERS}.export")
    loading = ObserverModule(f"{OBSERVERS}.loading")
    noise = ObserverModule(f"{OBSERVERS}.noise")
    saved_state = ObserverModule(f"{OBSERVERS}.saved_state")
    random_numbers = ObserverModule(f"{OBSERVERS}.random_numbers")
    reference = ObserverModule(f"{OBSERVERS}.reference")
    simulated_step = ObserverModule(f"{OBSERVERS}.simulated_step")
    simulation = ObserverModule(f"{OBSERVERS}.simulation")
    state_dict = ObserverModule(f"{OBSERVERS}.state_dict")
    step_collectives = ObserverModule(f"{OBSERVERS}.step_collectives")
    traces = ObserverModule(f"{OBSERVERS}.traces")
    training = ObserverModule(f"{OBSERVERS}.training")
    values = ObserverModule(f"{OBSERVERS}.values")

__all__ = [
    "ON_RANKS",
    "author_data",
    "checkpoint",
    "drawn_weights",
    "export",
    "loading",
    "noise",
    "random_numbers",
    "reference",
    "run_on",
    "saved_state",
    "simulated_step",
    "simulation",
    "state_dict",
    "step_collectives",
    "traces",
    "training",
    "values",
]


def run_on(world: World, observer: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> list[R]:
    """Call an observer on every rank of the world; return the results in rank order. Raises WorldError."""
    results: list[R] = world.run(observer, *args, **kwargs)
    return results
