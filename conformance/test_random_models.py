"""Random models, meshes and wrappings: without an injury no finding, with one the right finding and no other."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from fixtures.random_models import INJURIES, LayerPlan, Plan, injuries, load, save

MESHES = (
    (("dp_shard", 1),),
    (("dp_shard", 2),),
    (("dp_shard", 3),),
    (("dp_shard", 4),),
    (("dp_replicate", 2), ("dp_shard", 2)),
)
EXAMPLES = int(os.environ.get("FSDP_META_EXAMPLES", "12"))
"""Set it higher to search longer; then every run draws others."""
SEARCH = settings(
    max_examples=EXAMPLES,
    deadline=None,
    derandomize="FSDP_META_EXAMPLES" not in os.environ,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
    phases=[Phase.generate, Phase.shrink],
)
KINDS = st.tuples(st.sampled_from(["float", "int", "bool"]), st.booleans())


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    layer = st.builds(
        LayerPlan,
        width=st.integers(1, 9),
        bias=st.booleans(),
        scalar=st.booleans(),
        frozen=st.booleans(),
        buffers=st.lists(KINDS, max_size=3).map(tuple),
    )
    layers = draw(st.lists(layer, min_size=1, max_size=4))
    inputs = draw(st.integers(1, 9))
    before_last = layers[-2].width if len(layers) > 1 else 0
    tied = (layers[-1].width, before_last, layers[-1].frozen) == (layers[0].width, inputs, layers[0].frozen)
    apart = {0, len(layers) - 1} if tied else set()
    wrapped = draw(st.frozensets(st.sampled_from(range(len(layers))))) - apart
    return Plan(inputs, tuple(layers), wrapped, tied, draw(st.sampled_from(MESHES)))


def judged(judge_loader, plan, injury=""):
    with tempfile.TemporaryDirectory() as folder:
        path = save(plan, Path(folder, "model.safetensors"))
        verdicts = judge_loader(load, dict(plan.mesh), plan=plan, path=path, injury=injury)
    return (
        {id: [str(f) for f in v.findings] for id, v in verdicts.items() if v.status == "failed"},
        {id: v.reason for id, v in verdicts.items() if v.status == "error"},
    )


@SEARCH
@given(plan=plans())
def test_a_conforming_loader_stays_without_a_finding(judge_loader, plan):
    assert judged(judge_loader, plan) == ({}, {})


@SEARCH
@given(drawn=plans().flatmap(lambda plan: st.tuples(st.just(plan), st.sampled_from([*injuries(plan)]))))
def test_an_injury_is_told_by_its_check_and_by_no_other(judge_loader, drawn):
    plan, injury = drawn
    failed, errors = judged(judge_loader, plan, injury)
    assert failed, f"{injury} was not told"
    assert set(failed) <= set(INJURIES[injury]), failed
    assert errors == {}
