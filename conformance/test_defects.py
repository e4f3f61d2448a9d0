"""The first defect of each check fails it, with the expected lines, and no other that reads the same observations.

``conformance.matrix`` judges all defects by the whole catalogue each night, but on CPUs only: on GPUs, the others are
judged here.
"""

from __future__ import annotations

import pytest

from conformance.judging import require
from fixtures.defects import DEFECTS
from pytest_fsdp_meta.catalogue import built_in
from pytest_fsdp_meta.reports.terminal import describe_failure

FIRST = {defect.caught_by: name for name, defect in reversed(DEFECTS.items())}
"""Check -> the first of its defects."""
OTHERS = [pytest.param(name, marks=pytest.mark.nightly) for name in DEFECTS if name not in FIRST.values()]


@pytest.mark.parametrize("name", [*FIRST.values(), *OTHERS])
def test_defect_is_caught_by_its_check_alone(name, checkpoint, loader_judge):
    defect = DEFECTS[name]
    if name != FIRST[defect.caught_by] and loader_judge.device == "cpu":
        pytest.skip("the matrix judges it")
    require(defect.needs)
    path = checkpoint(defect.architecture)
    # State that only a training step changes is lost only by what is saved after one.
    trained = ["loss_parity"] if built_in()[defect.caught_by].family == "checkpoint" else []
    checks = [defect.caught_by, *trained]
    verdicts = loader_judge.judge(defect.load, defect.mesh, checks=checks, simulated=defect.simulated, path=path)
    failures = {id: describe_failure(v, "world", "command") for id, v in verdicts.items() if v.status == "failed"}
    errors = {id: verdict.reason for id, verdict in verdicts.items() if verdict.status == "error"}
    assert (set(failures), errors) == ({defect.caught_by}, {}), "\n\n".join(failures.values())
    unwrapped = " ".join(failures[defect.caught_by].split())
    device = loader_judge.device if loader_judge.device == "cpu" else f"{loader_judge.device}:0"
    for line in defect.says:
        assert line.strip().replace("{device}", device) in unwrapped


def test_every_check_has_a_defect():
    assert {defect.caught_by for defect in DEFECTS.values()} == set(built_in().ids())
