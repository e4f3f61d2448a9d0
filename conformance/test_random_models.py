"""Random models, meshes and wrappings: a conforming loader has no finding, an injured one only the right finding."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from fixtures.random_models import INJURIES, injuries, load
from pytest_fsdp_meta.strategies import meshes, plans
from pytest_fsdp_meta.strategies.build import save

pytestmark = pytest.mark.nightly
MESHES = st.integers(1, 4).flatmap(meshes)
EXAMPLES = int(os.environ.get("FSDP_META_EXAMPLES", "12"))
"""Examples per test. Set FSDP_META_EXAMPLES to search longer; each run then draws other examples."""
SEARCH = settings(
    max_examples=EXAMPLES,
    deadline=None,
    derandomize="FSDP_META_EXAMPLES" not in os.environ,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
    phases=[Phase.generate, Phase.shrink],
)


def failures_and_errors(judge_loader, plan, injury=""):
    with tempfile.TemporaryDirectory() as folder:
        path = save(plan.model, Path(folder, "model.safetensors"))
        verdicts = judge_loader(load, dict(plan.mesh), plan=plan, path=path, injury=injury)
    del verdicts["step_memory_bounded"]  # random wrappings may rightly be found to leave equal blocks to the root
    return (
        {id: [str(f) for f in v.findings] for id, v in verdicts.items() if v.status == "failed"},
        {id: v.reason for id, v in verdicts.items() if v.status == "error"},
    )


@SEARCH
@given(plan=plans(MESHES))
def test_a_conforming_loader_has_no_finding(judge_loader, plan):
    assert failures_and_errors(judge_loader, plan) == ({}, {})


@SEARCH
@given(drawn=plans(MESHES).flatmap(lambda plan: st.tuples(st.just(plan), st.sampled_from([*injuries(plan)]))))
def test_an_injury_fails_its_own_check_only(judge_loader, drawn):
    plan, injury = drawn
    failed, errors = failures_and_errors(judge_loader, plan, injury)
    assert failed, f"no check reports {injury!r}"
    assert set(failed) <= set(INJURIES[injury]), failed
    assert errors == {}
