"""Worlds on the stand-in device: what is right on the CPU is right on it, and it shows what is on the wrong device."""

from __future__ import annotations

import pytest

from conformance.judging import require, unexpected
from fixtures.architectures import load_plain, save_plain
from fixtures.defects import DEFECTS
from fixtures.devices import MISPLACING
from fixtures.forms import FORMS
from fixtures.reports import PAIRS
from pytest_fsdp_meta import standin
from pytest_fsdp_meta.catalogue import built_in
from pytest_fsdp_meta.reports.terminal import describe_failure

pytestmark = pytest.mark.slow
FIRST = {defect.caught_by: name for name, defect in reversed(DEFECTS.items()) if not defect.simulated}
"""Check -> the first of its defects."""
FAST = ("hybrid", "offloaded_to_the_cpu", "uneven_and_empty_shards", "sharded_and_tensor_parallel")
"""Forms in make slow; make nightly has all."""
NAMED = ("NVIDIA-NeMo/Automodel#2146", "vllm-project/speculators#314")
REPORTED = {name: pair for name, pair in PAIRS.items() if pair.pull_request in NAMED}
FOR_CUDA = {"fsdp1_of_odd_sizes"}
"""Forms whose checkpoint torch loads into ShardedTensors, which ask for CUDA where there is more than the CPU."""
JUDGED_HERE = {"head_drawn_as_a_dtensor": {"drawn_weights_are_one_draw"}}
"""What is judged here and skipped on the CPU: DTensor makes one draw of all parts on accelerators only."""


@pytest.fixture(scope="session", autouse=True)
def _built():
    standin.prepare()


def problems_of(verdicts):
    """Return the text of each failure and error, on one line, by check."""
    found = {id: verdict for id, verdict in verdicts.items() if verdict.status in ("failed", "error")}
    return {id: " ".join(describe_failure(verdict, "world", "command").split()) for id, verdict in found.items()}


@pytest.mark.parametrize("name", MISPLACING)
def test_what_is_on_the_wrong_device_is_found(name, checkpoint, judge_loader):
    loader = MISPLACING[name]
    problems = problems_of(judge_loader(loader.load, {"dp_shard": 2}, device=standin.NAME, path=checkpoint("llama")))
    assert set(problems) == set(loader.caught_by), "\n\n".join(problems.values())
    for line in loader.says:
        assert line.strip() in " ".join(problems.values())


@pytest.mark.parametrize("name", MISPLACING)
def test_on_the_cpu_there_is_no_wrong_device(name, checkpoint, judge_loader):
    loader = MISPLACING[name]
    verdicts = judge_loader(loader.load, {"dp_shard": 2}, checks=loader.caught_by, path=checkpoint("llama"))
    assert {verdicts[id].status for id in loader.caught_by} == {"passed"}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in FAST else pytest.mark.nightly) for n in FORMS if n not in FOR_CUDA]
)
def test_a_form_conforms(name, checkpoint, judge_loader, usual_skips):
    form = FORMS[name]
    require(form.needs)
    path = checkpoint(form.architecture) if form.architecture else None
    verdicts = judge_loader(form.load, form.mesh, device=standin.NAME, path=path)
    skips = {id: reason for id, reason in form.skips.items() if id not in JUDGED_HERE.get(name, ())}
    assert unexpected(verdicts, skips, usual_skips) == {}


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "gemma3_text", "falcon_h1"])
def test_models_of_transformers_pass(name, judge_loader, tmp_path):
    path = save_plain(name, tmp_path)
    assert problems_of(judge_loader(load_plain, {"dp_shard": 2}, device=standin.NAME, path=path)) == {}


@pytest.mark.nightly
@pytest.mark.parametrize("name", FIRST.values())
def test_a_defect_is_caught(name, checkpoint, judge_loader):
    defect = DEFECTS[name]
    require(defect.needs)
    trained = ["loss_parity"] if built_in()[defect.caught_by].family == "checkpoint" else []
    problems = problems_of(
        judge_loader(
            defect.load,
            defect.mesh,
            checks=[defect.caught_by, *trained],
            device=standin.NAME,
            path=checkpoint(defect.architecture),
        )
    )
    assert set(problems) == {defect.caught_by}, "\n\n".join(problems.values())


@pytest.mark.parametrize("name", REPORTED)
def test_a_report_is_caught_and_its_repair_is_clean(name, checkpoint, judge_loader):
    pair = REPORTED[name]
    path = checkpoint(pair.architecture)
    problems = problems_of(judge_loader(pair.defective, pair.mesh, device=standin.NAME, path=path))
    assert set(problems) == set(pair.caught_by), "\n\n".join(problems.values())
    assert problems_of(judge_loader(pair.repaired, pair.mesh, device=standin.NAME, path=path)) == {}
