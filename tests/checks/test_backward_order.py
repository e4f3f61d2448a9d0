"""grad_parity lists what departs in the order of the backward, and says what still agrees: on hand-made evidence."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

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


def origins(evidence: Evidence) -> set[str]:
    return {finding.origin for finding in verdict(PARITY, evidence).findings}


def names(evidence: Evidence) -> list[str | None]:
    return [finding.tensor for finding in verdict(PARITY, evidence).findings]


def test_findings_are_in_the_order_of_the_backward():
    wrong = ("embed.weight", "layers.0.mlp.weight", "layers.1.attn.k.weight", "layers.1.attn.v.weight")
    assert names(evidence_of(*wrong)) == list(reversed(wrong))


def test_without_the_order_of_use_that_of_registration_is_reversed():
    evidence = evidence_of("embed.weight", "head.weight", "layers.0.mlp.weight", used=())
    assert names(evidence) == ["layers.0.mlp.weight", "head.weight", "embed.weight"]  # registered by name


def test_what_still_agrees_is_named_beside_what_departs():
    wrong = ("layers.1.attn.k.weight", "layers.1.attn.v.weight", "layers.0.mlp.weight", *ATTENTION[:4], "embed.weight")
    assert origins(evidence_of(*wrong)) == {
        "the backward reaches layers.1.attn.v.weight first, layers.1.attn.o.weight agrees"
    }
    assert origins(evidence_of("head.weight")) == {"the backward reaches head.weight first, layers.1.mlp.weight agrees"}


K = "layers.0.attn.k.weight"
ODD = f"the backward reaches {K} first, layers.0.attn.q.weight agrees"
ALONE = healthy(1, parameters=dict.fromkeys(FORWARD, (4, 4)))
ZERO = dict.fromkeys(FORWARD, 1.0) | {"layers.0.attn.o.weight": 0.0}


@pytest.mark.parametrize(
    ("evidence", "origin"),
    [
        (evidence_of(*FORWARD), ""),
        (with_reference(evidence_of(K), gradients=ZERO), ODD),
        (remeasured(evidence_of(), K, apart=math.inf, ranks=[1]), ODD),
        (with_reference(remeasured(ALONE, K, apart=1.0), used=FORWARD), ODD),
    ],
    ids=["every gradient departs", "zeros agree with nothing", "one odd rank", "a world of one"],
)
def test_the_boundary_of_gradients_that_depart(evidence, origin):
    assert origins(evidence) == {origin}


def test_right_gradients_have_no_boundary():
    assert verdict(PARITY, evidence_of()).status == "passed"


def test_the_order_is_that_of_the_reference_and_not_of_the_ranks():
    evidence = evidence_of("layers.0.attn.q.weight", "layers.0.attn.o.weight")
    turned = tuple(replace(rank, tensors=rank.tensors[::-1]) for rank in evidence.inventory)
    expected = ["layers.0.attn.o.weight", "layers.0.attn.q.weight"]
    assert names(evidence) == names(replace(evidence, inventory=turned)) == expected
