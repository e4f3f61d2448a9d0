"""The catalogue of checks, and the engine that judges evidence by them without torch and without ranks."""

from pytest_fsdp_meta.checks.checkpoint.judge import exports, resuming, second_save
from pytest_fsdp_meta.checks.checkpoint.judge import round_trip as checkpoint
from pytest_fsdp_meta.checks.collectives import judge as communication
from pytest_fsdp_meta.checks.data.judge import epoch as batches
from pytest_fsdp_meta.checks.data.judge import resumed as batches_resumed
from pytest_fsdp_meta.checks.drawn import judge as draws
from pytest_fsdp_meta.checks.materialisation import judge as materialisation
from pytest_fsdp_meta.checks.memory import judge as memory
from pytest_fsdp_meta.checks.random_numbers import judge as random_numbers
from pytest_fsdp_meta.checks.sharding import judge as sharding
from pytest_fsdp_meta.checks.simulation.judge import sharing as simulated_sizes
from pytest_fsdp_meta.checks.simulation.judge import step as simulated_steps
from pytest_fsdp_meta.checks.structure import judge as structure
from pytest_fsdp_meta.checks.training.judge import (
    accumulation,
    beside,
    buffers,
    clipping,
    forward,
    gradients,
    losses,
    not_finite,
    optimization,
    second_step,
)
from pytest_fsdp_meta.checks.tying import judge as tying
from pytest_fsdp_meta.checks.values import judge as values
from pytest_fsdp_meta.judging.engine import Verdict, describe_left_out, judge
from pytest_fsdp_meta.judging.findings import Finding
from pytest_fsdp_meta.judging.registry import Catalogue, Check, check
from pytest_fsdp_meta.judging.view import (
    Blocked,
    Differs,
    NotDeclared,
    NotJudged,
    PartlyJudged,
    Selection,
    Unjudgeable,
    View,
)

FAMILIES = (
    *(structure, materialisation, sharding, communication),
    *(values, draws, tying, memory),
    *(forward, gradients, clipping, optimization, buffers, second_step, losses, accumulation, beside, not_finite),
    *(checkpoint, exports, resuming, second_save, random_numbers),
    *(batches, batches_resumed, simulated_sizes, simulated_steps),
)


def built_in() -> Catalogue:
    """Return a catalogue of all checks that ship with the package, the more basic ones first."""
    return Catalogue(value for family in FAMILIES for value in vars(family).values() if isinstance(value, Check))


__all__ = [
    "Blocked",
    "Catalogue",
    "Check",
    "Differs",
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
