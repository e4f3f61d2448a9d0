"""The verdicts of recorded evidence are those in ``verdicts.txt``, and what is said of each defect was graded."""

from __future__ import annotations

import json

import pytest

from conformance import causes, recorded
from fixtures.defects import DEFECTS
from fixtures.forms import FORMS
from fixtures.needs import lacking


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


def test_every_loader_was_recorded():
    """``python -m conformance.matrix --record -k NAME`` records one."""
    possible = [name for name, defect in DEFECTS.items() if not lacking(defect.needs)]
    # Evidence comes from the CPU, where torch refuses some forms.
    possible += [name for name, form in FORMS.items() if not lacking(form.needs) and not form.needs_accelerator]
    assert {*possible} <= {*recorded.names()}
