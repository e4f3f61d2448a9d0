"""Declarations that take part in a trial: patterns that match on other ranks, and weights that the loader draws."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pytest_fsdp_meta import Subject
from pytest_fsdp_meta.worlds import Rank
from tests.trial_help import observe


def test_what_is_declared_of_one_name_of_a_tie_holds_for_the_other():
    def load(fsdp: Rank) -> Subject:
        model = nn.ModuleDict({"embed": nn.Embedding(4, 2), "head": nn.Linear(2, 4, bias=False)})
        model["head"].weight = model["embed"].weight
        return Subject(model, drawn={"head.weight": slice(2, None)}, unsharded="embed.weight")

    facts = observe(load, wanted=["inventory"]).subject
    both = {"embed.weight", "head.weight"}
    assert (set(facts.drawn), set(facts.unsharded)) == (both, both)
    assert facts.drawn_rows == dict.fromkeys(both, (2, None))


@pytest.mark.parametrize("drawn", [True, False])
def test_the_reference_trains_from_what_the_loader_drew(drawn):
    def build() -> nn.Linear:
        torch.manual_seed(3)
        return nn.Linear(2, 2)

    def load(fsdp: Rank) -> Subject:
        model = build()
        nn.init.constant_(model.bias, 5.0)
        return Subject(
            model,
            reference=build,
            drawn="bias" if drawn else (),
            batch=lambda step: {"x": torch.ones(4, 2)},
            loss=lambda model, batch: model(batch["x"]).square().mean(),
        )

    # No check of the values is selected, so a wrong value is not adopted.
    evidence = observe(load, wanted=["values", "training"], steps=2, selection={"loss_parity"})
    same = evidence.reference.losses[0] == pytest.approx(evidence.training[0].losses[0])
    assert (same, evidence.reference.adopted) == (drawn, ())


ROWS = torch.ones(4, 2)


def loses(loss, batch=ROWS):
    def build() -> nn.Linear:
        return nn.Linear(2, 2)

    def load(fsdp: Rank) -> Subject:
        return Subject(build(), reference=build, drawn="*", batch=lambda step: {"x": batch}, loss=loss)

    return observe(load, wanted=["training"]).unavailable["training"].summary


REAL = "but should return a real number of a floating dtype"
SCALAR = "but should return a scalar tensor"
BAD_LOSSES = {
    "complex": (lambda m, b: m(b["x"]).mean() * 1j, f"it returned a tensor of complex64, {REAL}"),
    "meta": (lambda m, b: m(b["x"]).mean().to("meta"), f"it returned a tensor on the meta device, {REAL}"),
    "several": (
        lambda m, b: m(b["x"]),
        f"it returned Tensor of shape (4, 2), {SCALAR}; reduce it with .mean() or .sum()",
    ),
    "a number": (lambda m, b: -0.5, f"it returned float -0.5, {SCALAR}"),
}


@pytest.mark.parametrize("name", BAD_LOSSES)
def test_a_loss_that_is_no_real_number_is_one_line(name):
    loss, message = BAD_LOSSES[name]
    assert loses(loss) == f"Subject(loss=...): {message}"


def test_a_reference_that_takes_an_argument_is_one_line():
    def load(fsdp: Rank) -> Subject:
        return Subject(nn.Linear(2, 2), reference=lambda config: nn.Linear(2, 2))

    found = observe(load, wanted=["reference"]).unavailable["reference"].summary
    assert found.startswith("Subject(reference=...): give a function that can be called as reference(); ")
    assert found.endswith("<lambda>() missing 1 required positional argument: 'config'")


def test_an_array_is_no_tensor_of_a_batch():
    """Only tensors are divided among the ranks; every rank would get all rows of an array."""
    message = "Subject(batch=...): batch(0)['x'] is a numpy array; give a tensor: torch.from_numpy(...)"
    assert loses(lambda m, b: m(torch.from_numpy(b["x"])).mean(), ROWS.numpy()) == message
