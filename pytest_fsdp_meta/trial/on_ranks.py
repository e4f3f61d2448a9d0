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
        author_step,
        noise,
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
    author_step = ObserverModule("training.observe.author_step")
    checkpoint = ObserverModule("checkpoint.observe.round_trip")
    drawn_weights = ObserverModule("drawn.observe")
    loading = ObserverModule("materialisation.observe")
    noise = ObserverModule("training.observe.noise")
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


_OBSERVERS = {
    "loading": "load load_simulated",
    "building the reference": "record_reference observe_reference",
    "giving the reference what the ranks have": "adopt_values adopt_requires_grad give depends_on",
    "building the verifier": "record_verifier",
    "reading the verifier": "missing_from_verifier",
    "building export_reference": "record_export_reference",
    "reading the reference's checkpoint": "checkpoint_facts",
    "recording what the reference lacks": "record_own_values record_buffers record_optimizer_state",
    "comparing values": "observe_values",
    "comparing drawn weights": "observe_draws",
    "training": "observe_training",
    "training the reference": "train_reference train_reference_again",
    "training the reference to measure rounding": "train_nudged",
    "measuring rounding": "record_noise read_noise",
    "reading the collectives of a step": "observe_step",
    "training in the loader's modes": "observe_training_mode",
    "training with NaN in the model's output": "observe_not_finite",
    "tracing the reference": "trace_reference",
    "tracing the modules": "trace_rank",
    "running Subject(loss=...) on rows of the first step": "observe_objective",
    "simulating a step": "observe_size",
    "stepping the optimizer before saving": "first_step",
    "saving the model": "save_model",
    "saving model and optimizer": "save_all save_all_over",
    "waiting for what save() left running": "finish_saving",
    "loading the saved model": "load_model load_over_other_values",
    "resuming model and optimizer": "load_all",
    "resuming in a world of another size": "load_all_in_other_size",
    "training after saving or resuming": "train_on",
    "recording what is saved": "record_model record_state",
    "comparing what was resumed": "compare_model compare_state compare_loaded",
    "calling state_dict": "observe_state_dict fingerprint_state_dict",
    "exporting": "export export_trained",
    "comparing the export": "compare_export losses_of_exported",
    "reading data": "pack_data read_epoch save_at_end read_later_epoch count_third_epoch read_alone",
    "resuming within an epoch": "resume_epoch",
}
"""What the ranks do in the words of an error message -> the observers that do it."""
DOING = {observer: doing for doing, observers in _OBSERVERS.items() for observer in observers.split()}


def doing_in(observer: object) -> str:
    """Return what the ranks do while they run this observer, such as "training the reference"."""
    return DOING.get(str(observer).rpartition(":")[2], "")


def run_on(world: World, observer: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> list[R]:
    """Call an observer on every rank of the world; return the results in rank order. Raises WorldError."""
    results: list[R] = world.call(observer, args, kwargs, doing=doing_in(observer))
    return results
