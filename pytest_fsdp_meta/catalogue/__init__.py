"""The catalogue of checks, and the engine that judges evidence by them without torch and without ranks."""

from pytest_fsdp_meta.catalogue.checks import (
    accumulation,
    batches,
    batches_resumed,
    beside,
    buffers,
    checkpoint,
    clipping,
    communication,
    draws,
    drift,
    exports,
    forward,
    gradients,
    losses,
    materialisation,
    memory,
    optimization,
    random_numbers,
    replicas,
    resuming,
    second_save,
    second_step,
    sharding,
    simulated_sizes,
    step_memory,
    structure,
    tiling,
    tying,
    updates,
    values,
)
from pytest_fsdp_meta.catalogue.engine import Verdict, describe_left_out, judge
from pytest_fsdp_meta.catalogue.findings import Finding
from pytest_fsdp_meta.catalogue.registry import Catalogue, Check, check
from pytest_fsdp_meta.catalogue.view import Blocked, NotDeclared, NotJudged, PartlyJudged, Selection, Unjudgeable, View

FAMILIES = (
    *(structure, materialisation, sharding, tiling, communication),
    *(replicas, values, draws, tying, memory, step_memory),
    *(forward, gradients, clipping, optimization, drift, buffers, second_step, updates, losses, accumulation, beside),
    *(checkpoint, exports, resuming, second_save, random_numbers),
    *(batches, batches_resumed, simulated_sizes),
)


def built_in() -> Catalogue:
    """Return a catalogue of all checks that ship with the package, the more basic ones first."""
    return Catalogue(value for family in FAMILIES for value in vars(family).values() if isinstance(value, Check))


__all__ = [
    "Blocked",
    "Catalogue",
    "Check",
    "Finding",
    "NotDeclared",
    "NotJudged",
    "PartlyJudged",
    "Selection",
    "Unjudgeable",
    "Verdict",
    "View",
    "built_in",
    "check",
    "describe_left_out",
    "judge",
]
