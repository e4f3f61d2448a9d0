"""The verdicts of recorded evidence are those in ``verdicts.txt``, and what is said of each defect was graded."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from conformance import causes, recorded
from fixtures.defects import DEFECTS
from fixtures.forms import FORMS
from fixtures.needs import lacking
from pytest_fsdp_meta.catalogue import built_in, judge
from pytest_fsdp_meta.judging.registry import OBSERVATIONS
from pytest_fsdp_meta.judging.view import Selection


@pytest.fixture(scope="module")
def known() -> dict[str, str]:
    return recorded.known()


@pytest.mark.parametrize("name", recorded.names())
def test_verdicts_are_as_known(name, known):
    """``python -m conformance.recorded`` writes the file again: read its diff."""
    assert recorded.describe(name) == known[name]


@pytest.mark.parametrize("name", [name for name in recorded.names() if name in DEFECTS])
def test_what_is_said_of_a_defect_was_graded(name):
    """``python -m conformance.causes`` writes what is said into ``causes.json``, and how to grade it."""
    row = json.loads(causes.FILE.read_text())[name]
    assert row["said"] == causes.say(name)
    assert row["cause"]
    assert row["grade"] in causes.GRADES[:-1]


@pytest.mark.parametrize("name", [name for name in recorded.names() if name in DEFECTS])
def test_causes_do_not_depend_on_what_else_is_selected(name):
    evidence, catalogue = recorded.read(name), built_in()
    for check in (check for check in catalogue if judge(check, evidence, catalogue).findings):
        taken = catalogue.observations([check.id])
        others = {name: None for name in OBSERVATIONS if name not in taken | {"inventory", "traces"}}
        alone = judge(check, replace(evidence, **others), catalogue, Selection(frozenset({check.id})))
        causes = {(one.tensor, one.actual): one.cause for one in judge(check, evidence, catalogue).findings}
        assert [one for one in alone.findings if causes.get((one.tensor, one.actual), one.cause) != one.cause] == []


def test_every_loader_was_recorded():
    """``python -m conformance.matrix --record -k NAME`` records one."""
    possible = [name for name, defect in DEFECTS.items() if not lacking(defect.needs)]
    # Evidence comes from the CPU, where torch refuses some forms.
    possible += [name for name, form in FORMS.items() if not lacking(form.needs) and not form.needs_accelerator]
    assert {*possible} <= {*recorded.names()}
