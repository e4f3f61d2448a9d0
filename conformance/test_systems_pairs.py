"""Pull requests of the five systems, and reports: the repaired loader is clean, the defective one fails its checks.

Defective loaders that a single check catches are in ``DEFECTS``, and tested by test_defects.py.
"""

from __future__ import annotations

import pytest

from fixtures.reports import PAIRS
from pytest_fsdp_meta.reports.terminal import describe_failure

pytestmark = pytest.mark.nightly
SEVERAL = [name for name, pair in PAIRS.items() if len(pair.caught_by) > 1]
REPAIRED = {(pair.repaired.__name__, pair.architecture): pair for pair in PAIRS.values()}


@pytest.mark.parametrize("name", SEVERAL)
def test_defective_is_caught_by_its_checks_alone(name, checkpoint, judge_loader):
    pair = PAIRS[name]
    verdicts = judge_loader(pair.defective, pair.mesh, path=checkpoint(pair.architecture))
    failures = {id: describe_failure(v, "world", "command") for id, v in verdicts.items() if v.status == "failed"}
    errors = {id: verdict.reason for id, verdict in verdicts.items() if verdict.status == "error"}
    assert (set(failures), errors) == (set(pair.caught_by), {}), "\n\n".join(failures.values())
    for check, says in pair.caught_by.items():
        unwrapped = " ".join(failures[check].split())
        for line in says:
            assert line.strip() in unwrapped


@pytest.mark.parametrize("pair", REPAIRED.values(), ids=map("-".join, REPAIRED))
def test_repaired_is_clean(pair, checkpoint, judge_loader):
    verdicts = judge_loader(pair.repaired, pair.mesh, path=checkpoint(pair.architecture))
    problems = [describe_failure(v, "world", "command") for v in verdicts.values() if v.status in ("failed", "error")]
    assert not problems, "\n\n".join(problems)
    assert sum(verdict.status == "passed" for verdict in verdicts.values()) > 10
