"""grad_parity lists what departs in the order of the backward: on hand-made evidence."""

from __future__ import annotations

from dataclasses import replace

from pytest_fsdp_meta.evidence import Evidence
from tests.checks.evidence_factory import healthy, remeasured, verdict, with_reference

PARITY = "grad_parity"
ATTENTION = tuple(f"layers.{block}.attn.{name}.weight" for block in (0, 1) for name in "qkvo")
FORWARD = ("embed.weight", *ATTENTION[:4], "layers.0.mlp.weight", *ATTENTION[4:], "layers.1.mlp.weight", "head.weight")
"""Parameters in the order of their first use."""


def evidence_of(*departing: str, used: tuple[str, ...] = FORWARD) -> Evidence:
    evidence = healthy(2, parameters=dict.fromkeys(sorted(FORWARD), (4, 4)))
    for name in departing:
        evidence = remeasured(evidence, name, apart=1.0)
    return with_reference(evidence, used=used)


def names(evidence: Evidence) -> list[str | None]:
    return [finding.tensor for finding in verdict(PARITY, evidence).findings]


def test_findings_are_in_the_order_of_the_backward():
    wrong = ("embed.weight", "layers.0.mlp.weight", "layers.1.attn.k.weight", "layers.1.attn.v.weight")
    assert names(evidence_of(*wrong)) == list(reversed(wrong))


def test_without_the_order_of_use_that_of_registration_is_reversed():
    evidence = evidence_of("embed.weight", "head.weight", "layers.0.mlp.weight", used=())
    assert names(evidence) == ["layers.0.mlp.weight", "head.weight", "embed.weight"]  # registered by name


def test_the_order_is_that_of_the_reference_and_not_of_the_ranks():
    evidence = evidence_of("layers.0.attn.q.weight", "layers.0.attn.o.weight")
    turned = tuple(replace(rank, tensors=rank.tensors[::-1]) for rank in evidence.inventory)
    expected = ["layers.0.attn.o.weight", "layers.0.attn.q.weight"]
    assert names(evidence) == names(replace(evidence, inventory=turned)) == expected
