"""The checks and their judges. Reads evidence and nothing else: no torch, no ranks."""

from pytest_fsdp_meta.catalogue.checks import (
    accumulation,
    checkpoint,
    communication,
    gradients,
    materialisation,
    memory,
    optimization,
    replicas,
    resuming,
    sharding,
    structure,
    tiling,
    training,
    tying,
    values,
)
from pytest_fsdp_meta.catalogue.engine import Verdict, describe_left_out, judge
from pytest_fsdp_meta.catalogue.findings import Finding
from pytest_fsdp_meta.catalogue.registry import Catalogue, Check, check
from pytest_fsdp_meta.catalogue.view import Blocked, NotDeclared, NotJudged, PartlyJudged, Unjudgeable, View

FAMILIES = (
    *(structure, materialisation, sharding, tiling, communication),
    *(replicas, values, tying, memory),
    *(gradients, optimization, training, accumulation),
    *(checkpoint, resuming),
)


def built_in() -> Catalogue:
    """The catalogue as it ships: every check of every family, the more basic ones first."""
    return Catalogue(one for family in FAMILIES for one in vars(family).values() if isinstance(one, Check))


__all__ = [
    "Blocked",
    "Catalogue",
    "Check",
    "Finding",
    "NotDeclared",
    "NotJudged",
    "PartlyJudged",
    "Unjudgeable",
    "Verdict",
    "View",
    "built_in",
    "check",
    "describe_left_out",
    "judge",
]
