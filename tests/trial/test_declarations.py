"""What the ranks declare differently is an error; what differs between right ranks is not."""

from __future__ import annotations

import functools
import re
from types import SimpleNamespace

import pytest
from torch import nn
from torch.optim import SGD, AdamW

from pytest_fsdp_meta import Subject
from pytest_fsdp_meta.checks.materialisation.observe import describe_declarations
from pytest_fsdp_meta.evidence import RankInventory, SubjectFacts, TensorFacts, combine_subjects
from pytest_fsdp_meta.trial import LoaderFailed
from pytest_fsdp_meta.trial.obstacles import declared_otherwise
from pytest_fsdp_meta.worlds import Rank
from tests.trial_help import build, loss, observe

HELD = ("a.weight", "b.weight")
LINEAR = nn.Linear(2, 2)


def inventory(rank, held):
    tensors = (TensorFacts(name, "parameter", (2,), (), (), "float32", "cpu", identity=hash(name)) for name in held)
    return RankInventory(rank, "cpu", tuple(tensors))


def loaded(rank, fields, held=HELD):
    """What a rank sends that returns a Subject with these fields; the model has the tensors that are ``held``."""
    subject = Subject(LINEAR, **fields)
    facts = subject.resolve(held, [], world_size=2)
    return SimpleNamespace(
        inventory=inventory(rank, held), subject=facts, declared=describe_declarations(subject, facts)
    )


def problem_of(*ranks):
    return declared_otherwise([loaded(rank, fields) for rank, fields in enumerate(ranks)])


def other(*anything):
    return None


def mean(model, batch):
    return model(**batch).mean()


def total(model, batch):
    return model(**batch).sum()


def scaled(model, batch):
    return 2.0 * model(**batch).mean()


def loss_by(function):
    def own_loss(model, batch):
        return function(model, batch)

    return own_loss


def logged(function):
    @functools.wraps(function)
    def call(*given):
        return function(*given)

    return call


def average(model):
    return nn.Linear(2, 2)


ONE, TWO = (lambda model, batch: model.one), (lambda model, batch: model.two)


def place(function):
    """How messages show a function: its name, its line and a digest of its code."""
    (shown,) = describe_declarations(Subject(LINEAR, loss=function), SubjectFacts()).values()
    assert re.fullmatch(
        rf"{function.__name__} \(test_declarations.py:{function.__code__.co_firstlineno}, code [0-9a-f]{{8}}\)", shown
    )
    return shown


STEP = {"train_step": other}
BARE, WITHOUT = "a bare model", "not declared"
DIFFERENT = {
    "patterns": ({"frozen": "a.*"}, {"frozen": "b.*"}, "frozen", "a.weight", "declared", WITHOUT),
    "frozen on one rank": ({}, {"frozen": "*"}, "frozen", "a.weight", BARE, "declared"),
    "another name in the verifier": (
        *({"frozen": {"a.*": "x.*"}}, {"frozen": {"a.*": "y.*"}}),
        *("frozen", "a.weight", "x.weight", "y.weight"),
    ),
    "tied": (STEP, {**STEP, "tied": [HELD]}, "tied", "a.weight and b.weight", WITHOUT, "declared"),
    "offloaded": (STEP, {**STEP, "offloaded": "b.*"}, "offloaded", "b.weight", WITHOUT, "declared"),
    "unsharded": ({}, {"unsharded": "a.*"}, "unsharded", "a.weight", BARE, "declared"),
    "on_some_ranks": ({"on_some_ranks": "a.*"}, {}, "on_some_ranks", "a.weight", "declared", BARE),
    "drawn": ({"drawn": "*"}, {"drawn": "b.*"}, "drawn", "a.weight", "declared", WITHOUT),
    "drawn rows": (
        *({"drawn": {"a.*": slice(1, None)}}, {"drawn": {"a.*": slice(0, 1)}}),
        *("drawn", "a.weight", "(1, None)", "(0, 1)"),
    ),
    "placements": (
        *({"placements": {"a.*": "R, S(0)"}}, {"placements": {"*": "R"}}),
        *("placements", "a.weight", "R, S(0)", "R"),
    ),
    "attributes": ({"kept_attributes": ["_a", "_b"]}, {"kept_attributes": "_a"}, "kept_attributes", "", "_a, _b", "_a"),
    "loss_over_ranks": ({**STEP, "loss_over_ranks": "sum"}, STEP, "loss_over_ranks", "", "sum", WITHOUT),
    "max_grad_norm": (
        *({**STEP, "max_grad_norm": 1}, {**STEP, "max_grad_norm": 2}),
        *("max_grad_norm", "", "1.0", "2.0"),
    ),
    "slices": (
        *({"data_parallel": (0, 2)}, {"data_parallel": (0, 1)}),
        *("data_parallel", "", "a slice of 2", "a slice of 1"),
    ),
    "train_step on one rank": (STEP, {"batch": other}, "train_step", "", "declared", WITHOUT),
    "batch on one rank": (STEP, {**STEP, "batch": other}, "batch", "", WITHOUT, place(other)),
    "names in a function": ({"loss": mean}, {"loss": total}, "loss", "", place(mean), place(total)),
    "constants": ({"loss": mean}, {"loss": scaled}, "loss", "", place(mean), place(scaled)),
    "lambdas on one line": ({"loss": ONE}, {"loss": TWO}, "loss", "", place(ONE), place(TWO)),
    "decorated": ({"loss": logged(mean)}, {"loss": logged(total)}, "loss", "", place(mean), place(total)),
    "classes": ({"reference": nn.Linear}, {"reference": nn.Bilinear}, "reference", "", "Linear", "Bilinear"),
    "a built optimizer": (
        *({"optimizer": SGD(LINEAR.parameters())}, {"optimizer": functools.partial(AdamW, lr=0.1)}),
        *("optimizer", "", "SGD", "AdamW"),
    ),
    "beside": (
        *({"beside": {"ema": average}}, {"beside": {"scaler": LINEAR, "ema": average}}),
        *("beside", "", f"ema: {place(average)}", f"ema: {place(average)}, scaler"),
    ),
}


@pytest.mark.parametrize("case", DIFFERENT)
def test_what_ranks_declare_differently_is_an_error(case):
    *subjects, field, of, first, second = DIFFERENT[case]
    assert problem_of(*subjects) == (
        f"Subject({field}=...) differs between ranks{of and f' for {of}'}: {first} on rank 0, {second} on rank 1; "
        "declare the same on every rank"
    )


THE_SAME = {
    "a pattern or names": ({"frozen": "*"}, {"frozen": list(HELD)}),
    "the order of names": (
        {"tied": [HELD], "kept_attributes": ["_a", "_b"]},
        {"tied": [HELD[::-1]], "kept_attributes": ["_b", "_a"]},
    ),
    "1 and 1.0": ({**STEP, "max_grad_norm": 1}, {**STEP, "max_grad_norm": 1.0}),
    "the index of the slice": ({"data_parallel": (0, 2)}, {"data_parallel": (1, 2)}),
    "what a function holds": ({"loss": loss_by(mean)}, {"loss": loss_by(total)}),
    "what is bound to a function": ({"batch": functools.partial(other, 0)}, {"batch": functools.partial(other, 1)}),
    "a wrapper on one rank": ({"loss": logged(mean)}, {"loss": mean}),
    "the settings of an optimizer": (
        {"optimizer": SGD(LINEAR.parameters(), lr=0.1)},
        {"optimizer": SGD([LINEAR.weight], lr=0.2)},
    ),
    "the class of what is kept": ({"beside": {"ema": LINEAR}}, {"beside": {"ema": nn.Embedding(2, 2)}}),
    "steps": (
        {"train_step": other, "save": other, "resume": mean},
        {"train_step": mean, "save": mean, "resume": other},
    ),
    "data that one rank reads for others": ({}, {"data": other}),
    "an adapter": ({}, {"adapter": other}),
    "ranks that load the whole model": ({"whole_while_loading": True}, {}),
}


@pytest.mark.parametrize("case", THE_SAME)
def test_what_may_differ_between_ranks(case):
    assert problem_of(*THE_SAME[case]) == ""


def test_checkpoints_that_ranks_write_for_themselves(tmp_path):
    folders = [tmp_path / name for name in ("first", "second", "third")]
    for folder in folders:
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(b"the same")
    (folders[2] / "model.safetensors").write_bytes(b"THE SAME")
    first, second, third = ({"reference": folder} for folder in folders)
    assert problem_of(first, second) == ""
    assert problem_of(first, first, third) == (
        f"Subject(reference=...) differs between ranks: {folders[0]} on ranks 0, 1, {folders[2]} on rank 2; "
        "declare the same on every rank"
    )
    (folders[1] / "more.safetensors").touch()
    assert "differs between ranks" in problem_of(second, first)
    assert "Linear on rank 1" in problem_of(first, {"reference": nn.Linear})


STAGES = [
    loaded(0, {"frozen": "embed.*", "tied": [("embed.weight", "in.weight")]}, ("embed.weight", "in.weight")),
    loaded(1, {"unsharded": "norm.*", "whole_while_loading": (0, 1)}, ("norm.weight", "head.weight")),
]


def test_stages_declare_their_own_tensors():
    assert declared_otherwise(STAGES) == ""
    both = combine_subjects([rank.subject for rank in STAGES], {"pp": 2}.items(), [rank.inventory for rank in STAGES])
    assert (both.frozen, both.unsharded) == ({"embed.weight": "embed.weight"}, ("norm.weight",))
    assert (both.tied, both.declared) == ((("embed.weight", "in.weight"),), {"frozen", "tied"})
    assert both.whole_while_loading == (1,)


def test_a_pattern_of_one_rank_that_matches_nowhere():
    wrong = loaded(1, {"frozen": "embeds.*"}, ("norm.weight", "head.weight"))
    assert declared_otherwise([STAGES[0], wrong]).startswith("Subject(frozen=...): 'embeds.*' matches no tensor")
    right = loaded(1, {"frozen": "embed.*"}, ("norm.weight", "head.weight"))
    assert declared_otherwise([STAGES[0], right]) == ""


@pytest.mark.parametrize("bare", [0, 1])
def test_a_bare_model_on_one_rank(bare):
    def load(fsdp: Rank) -> object:
        return build() if fsdp.rank == bare else Subject(build(), reference=build, loss=loss)

    with pytest.raises(LoaderFailed) as caught:
        observe(load, wanted=["inventory"])
    shown = re.sub(r"\d+, code \w+", "", caught.value.summary)
    kinds = sorted([f"{BARE} on rank {bare}", f"build (trial_help.py:) on rank {1 - bare}"], key=lambda one: one[-1])
    assert shown == f"Subject(reference=...) differs between ranks: {', '.join(kinds)}; declare the same on every rank"
