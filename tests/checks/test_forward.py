"""forward_sees_current_weights on hand-made evidence."""

from __future__ import annotations

from dataclasses import replace

from pytest_fsdp_meta.checks.training.facts import ForwardWeights, StaleWeight
from tests.checks.evidence_factory import (
    EMBEDDING,
    HEAD,
    LOSSES,
    MIDDLE,
    change,
    findings_of,
    healthy,
    on_ranks,
    on_runs,
    verdict,
)

SEES = "forward_sees_current_weights"
FROM_1 = ("outdated in the forward from step 1 on", "the values after each optimizer step")


def stale(evidence, *weights: StaleWeight, ranks=None):
    return on_runs(evidence, ranks, forward=ForwardWeights(len(LOSSES), weights))


def test_an_outdated_tie_is_reported_once_with_its_cause():
    evidence = stale(healthy(), StaleWeight(HEAD, "head", 1, "padded apart"), ranks=[1])
    found = verdict(SEES, evidence)
    assert findings_of(found) == [(HEAD, (1,), *FROM_1, "module head")]
    [finding] = found.findings
    assert finding.failed_tensors == (EMBEDDING, HEAD)


def test_a_parameter_that_is_gathered_from_other_memory():
    [finding] = verdict(SEES, stale(healthy(), StaleWeight(MIDDLE, "layers.0", 2, "padded apart"))).findings
    assert (finding.tensor, finding.actual) == (MIDDLE, "outdated in the forward from step 2 on")
    assert finding.cause.startswith("the FSDP group gathers from other memory than the registered parameter's")


def test_a_parameter_of_the_model_itself():
    [finding] = verdict(SEES, stale(healthy(1), StaleWeight(MIDDLE, "", 1, "gathered"))).findings
    assert (finding.ranks, finding.detail) == ((0,), "the model's own forward")


def test_a_tie_that_came_apart_explains_it():
    evidence = stale(healthy(), StaleWeight(EMBEDDING, "embed", 1, "padded apart"))
    found = verdict(SEES, change(evidence, HEAD, storage="memory of its own", identity=-1))
    assert found.status == "skipped"
    assert "tied_weights_share_storage" in found.reason


def test_what_cannot_be_judged():
    one = verdict(SEES, on_runs(healthy(), None, forward=ForwardWeights(1)))
    reason = "no forward follows an optimizer step; train for two steps or more"
    assert (one.status, one.reason) == ("skipped", reason)
    frozen = on_ranks(healthy(), None, lambda rank: tuple(replace(t, requires_grad=False) for t in rank.tensors))
    assert (verdict(SEES, frozen).status, verdict(SEES, frozen).reason) == ("skipped", "nothing is trainable")
