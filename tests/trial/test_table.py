"""The tables of observations: a row for each that a check may need, each after those that it needs."""

from __future__ import annotations

from pytest_fsdp_meta.judging.registry import OBSERVATIONS
from pytest_fsdp_meta.trial.observations import ONE_LOAD
from pytest_fsdp_meta.trial.reloading import MORE_LOADS
from pytest_fsdp_meta.trial.table import with_needed

ROWS = (*ONE_LOAD, *MORE_LOADS)


def test_every_observation_has_a_row():
    """The inventory comes with the load, the simulation is another trial, and "kept" serves "resharded" only."""
    names = [row.name for row in ROWS]
    assert sorted([*names, "inventory", "simulation"]) == sorted([*OBSERVATIONS, "kept"])


def test_rows_follow_those_that_they_need_or_use():
    names = [row.name for row in ROWS]
    assert all(names.index(other) < index for index, row in enumerate(ROWS) for other in (*row.needs, *row.uses))


def test_what_an_observation_needs_is_taken_too():
    assert with_needed({"restored_again"}, ROWS) == {"restored_again", "saved_again", "continued", "state_dict"}
    assert with_needed({"resharded"}, ROWS) == {"resharded", "kept", "state_dict", "reference"}
    assert with_needed({"memory"}, ROWS) == {"memory"}
