"""What the ranks declare differently is an error; what differs between right ranks is not."""

from __future__ import annotations

import functools
from types import SimpleNamespace

import pytest
from torch import nn
from torch.optim import SGD, AdamW

from pytest_fsdp_meta import Subject
from pytest_fsdp_meta.evidence import RankInventory, TensorFacts, combine_subjects
from pytest_fsdp_meta.loader.declared import describe_fields
from pytest_fsdp_meta.trial import LoaderFailed
from pytest_fsdp_meta.trial.declarations import describe_problem
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
    facts = subject.resolve(held, [], world_size=2, stages=held != HELD)
    return SimpleNamespace(
        inventory=inventory(rank, held), returned="Subject", subject=facts, fields=describe_fields(subject)
    )


def problem_of(*ranks):
    return describe_problem([loaded(rank, fields) for rank, fields in enumerate(ranks)])


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


def place(function):
    return f"{function.__name__} (test_declarations.py:{function.__code__.co_firstlineno})"


STEP = {"train_step": other}
DIFFERENT = {
    "patterns": ({"frozen": "a.*"}, {"frozen": "b.*"}, "(frozen=...) for a.weight: declared, not declared"),
    "frozen on one rank": ({}, {"frozen": "*"}, "(frozen=...) for a.weight: not declared, declared"),
    "another name in the verifier": (
        {"frozen": {"a.*": "x.*"}},
        {"frozen": {"a.*": "y.*"}},
        "(frozen=...) for a.weight: x.weight, y.weight",
    ),
    "tied": ({}, {"tied": [HELD]}, "(tied=...) for a.weight and b.weight: not declared, declared"),
    "offloaded": ({}, {"offloaded": "b.*"}, "(offloaded=...) for b.weight: not declared, declared"),
    "unsharded": ({}, {"unsharded": "a.*"}, "(unsharded=...) for a.weight: not declared, declared"),
    "on_some_ranks": ({"on_some_ranks": "a.*"}, {}, "(on_some_ranks=...) for a.weight: declared, not declared"),
    "drawn": ({"drawn": "a.*"}, {}, "(drawn=...) for a.weight: declared, not declared"),
    "drawn rows": (
        {"drawn": {"a.*": slice(1, None)}},
        {"drawn": {"a.*": slice(0, 1)}},
        "(drawn=...) for a.weight: (1, None), (0, 1)",
    ),
    "placements": (
        {"placements": {"a.*": "R, S(0)"}},
        {"placements": {"*": "R"}},
        "(placements=...) for a.weight: R, S(0), R",
    ),
    "kept_attributes": (
        {"kept_attributes": ["_one", "_two"]},
        {"kept_attributes": "_one"},
        "(kept_attributes=...): _one, _two, _one",
    ),
    "loss_over_ranks": ({"loss_over_ranks": "sum"}, {}, "(loss_over_ranks=...): sum, mean"),
    "max_grad_norm": (
        {**STEP, "max_grad_norm": 1},
        {**STEP, "max_grad_norm": 2},
        "(max_grad_norm=...): 1.0, 2.0",
    ),
    "slices": ({"data_parallel": (0, 2)}, {"data_parallel": (0, 1)}, "(data_parallel=...): a slice of 2, a slice of 1"),
    "train_step on one rank": (STEP, {}, f"(train_step=...): {place(other)}, not declared"),
    "batch on one rank": ({}, {"batch": other}, f"(batch=...): not declared, {place(other)}"),
    "names in a function": ({"loss": mean}, {"loss": total}, f"(loss=...): {place(mean)}, {place(total)}"),
    "constants": ({"loss": mean}, {"loss": scaled}, f"(loss=...): {place(mean)}, {place(scaled)}"),
    "decorated": ({"loss": logged(mean)}, {"loss": mean and total}, f"(loss=...): {place(mean)}, {place(total)}"),
    "methods": ({"reference": LINEAR.float}, {"reference": LINEAR.half}, "(reference=...): float (module.py:"),
    "classes": ({"reference": nn.Linear}, {"reference": nn.Bilinear}, "(reference=...): Linear, Bilinear"),
    "a built optimizer": (
        {"optimizer": SGD(LINEAR.parameters())},
        {"optimizer": functools.partial(AdamW, lr=0.1)},
        "(optimizer=...): SGD, AdamW",
    ),
    "beside": (
        {"beside": {"ema": average}},
        {"beside": {"ema": average, "scaler": LINEAR}},
        f"(beside=...): ema: {place(average)}, ema: {place(average)}, scaler: Linear",
    ),
}


@pytest.mark.parametrize("case", DIFFERENT)
def test_what_ranks_declare_differently_is_an_error(case):
    first, second, expected = DIFFERENT[case]
    field, _, texts = expected.partition(":")
    found = problem_of(first, second)
    assert found.startswith(f"Subject{field.replace(')', ') differs between ranks', 1)}: ")
    assert found.replace(" on rank 0", "").replace(" on rank 1", "").partition(":")[2].startswith(texts)
    assert " on rank 0, " in found
    assert found.endswith(" on rank 1; declare the same on every rank")


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
    expected = f"Subject(reference=...) differs between ranks: '{folders[0]}' on ranks 0, 1, '{folders[2]}' on rank 2"
    assert problem_of(first, first, third) == f"{expected}; declare the same on every rank"
    assert "build (trial_help.py:" in problem_of(first, {"reference": build})


STAGES = [
    loaded(0, {"frozen": "embed.*", "tied": [("embed.weight", "in.weight")]}, ("embed.weight", "in.weight")),
    loaded(1, {"unsharded": "norm.*", "whole_while_loading": (0, 1)}, ("norm.weight", "head.weight")),
]


def test_stages_declare_their_own_tensors():
    assert describe_problem(STAGES) == ""
    both = combine_subjects([rank.subject for rank in STAGES], {"pp": 2}.items(), [rank.inventory for rank in STAGES])
    assert (both.frozen, both.unsharded) == ({"embed.weight": "embed.weight"}, ("norm.weight",))
    assert (both.tied, both.declared) == ((("embed.weight", "in.weight"),), {"frozen", "tied"})
    assert both.whole_while_loading == (1,)


def test_a_pattern_of_one_rank_that_matches_nowhere():
    wrong = loaded(1, {"frozen": "embeds.*"}, ("norm.weight", "head.weight"))
    assert describe_problem([STAGES[0], wrong]).startswith("Subject(frozen=...): 'embeds.*' matches no tensor")
    right = loaded(1, {"frozen": "embed.*"}, ("norm.weight", "head.weight"))
    assert describe_problem([STAGES[0], right]) == ""


class Own(Subject):
    """A subclass of the author's."""


RETURNED = {
    "Subject on rank 0, a bare model on rank 1": (Subject, lambda model, **fields: model),
    "a bare model on rank 0, Subject on rank 1": (lambda model, **fields: model, Subject),
    "Subject on rank 0, Own on rank 1": (Subject, Own),
}


@pytest.mark.parametrize("kinds", RETURNED)
def test_ranks_that_return_different_kinds(kinds):
    def load(fsdp: Rank) -> object:
        return RETURNED[kinds][fsdp.rank](build(), reference=build, loss=loss)

    with pytest.raises(LoaderFailed) as caught:
        observe(load, wanted=["inventory"])
    advice = "return a Subject that declares the same on every rank"
    assert caught.value.summary == f"the loader returned {kinds}; {advice}"


def test_what_one_of_four_ranks_declares():
    def load(fsdp: Rank) -> Subject:
        return Subject(build(), reference=build, loss=loss, offloaded="0.*" if fsdp.rank == 1 else ())

    with pytest.raises(LoaderFailed) as caught:
        observe(load, wanted=["inventory"], mesh={"dp_shard": 4})
    assert caught.value.summary == (
        "Subject(offloaded=...) differs between ranks for 0.weight: not declared on ranks 0, 2, 3, declared on rank 1; "
        "declare the same on every rank"
    )
