"""What Subject accepts, how it resolves names and patterns, and its errors for wrong fields."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.optim import SGD
from torch.optim.lr_scheduler import LambdaLR

from pytest_fsdp_meta.evidence import RankInventory, combine_subjects
from pytest_fsdp_meta.loader.subject import Subject, SubjectError
from pytest_fsdp_meta.loader.validation import SIGNATURES, parse_placements, short_placement
from pytest_fsdp_meta.worlds import Misuse

PARAMETERS = ["embed.weight", "layers.0.q.weight", "layers.0.norm.weight", "layers.1.q.weight", "layers.1.norm.weight"]
BUFFERS = ["rotary.inv_freq"]
OTHERS = "it has 5 parameters, such as 'layers.0.q.weight', 'layers.0.norm.weight', 'embed.weight'"


def subject(**fields) -> Subject:
    return Subject(nn.Linear(2, 2), **fields)


def resolve(**fields):
    return subject(**fields).resolve(PARAMETERS, BUFFERS)


def test_a_bare_model_declares_nothing():
    facts = resolve()
    assert facts.declared == frozenset()
    assert (facts.frozen, facts.tied, facts.unsharded, facts.offloaded, facts.placements) == ({}, (), (), (), {})
    assert facts.kept_attributes == ()


def test_declared_fields_are_recorded(tmp_path):
    (tmp_path / "model.safetensors").touch()
    facts = resolve(
        reference=lambda: nn.Linear(2, 2),
        verifier=tmp_path,
        batch=lambda step: {},
        frozen="embed.*",
        tied=[["embed.weight", "layers.0.q.weight"]],
        placements={"*": "R"},
        kept_attributes=["_fsdp_no_shard"],
    )
    assert facts.declared == {"reference", "verifier", "batch", "frozen", "tied", "placements"}
    assert facts.tied == (("embed.weight", "layers.0.q.weight"),)
    assert facts.kept_attributes == ("_fsdp_no_shard",)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"reference": 3},
            "reference=...): int 3 should be a callable that builds the model, or a checkpoint directory",
        ),
        (
            {"reference": nn.Linear(2, 2)},
            "reference=...): pass a function that builds the model, not the model: reference=lambda: build_the_model()",
        ),
        (
            {"reference": "/nowhere"},
            "reference=...): '/nowhere' does not exist; give a directory that holds *.safetensors files",
        ),
        (
            {"verifier": Path(__file__)},
            f"verifier=...): {__file__!r} is a file; give a directory that holds *.safetensors files",
        ),
        (
            {"batch": {"x": 1}},
            "batch=...): dict \"{'x': 1}\" is not callable; give a function batch(step) -> dict of tensors",
        ),
        (
            {"batch": {"x": torch.ones(4, 8), "y": 1}},
            "batch=...): dict of 'x' (Tensor of shape (4, 8)), 'y' is not callable; give a function batch(step) -> "
            "dict of tensors",
        ),
        (
            {"batch": [torch.ones(4, 8), torch.ones(4)]},
            "batch=...): list of Tensor of shape (4, 8), Tensor of shape (4,) is not callable; give a function "
            "batch(step) -> dict of tensors",
        ),
        (
            {"tied": [(torch.ones(2), torch.ones(2))]},
            "tied=...): Tensor of shape (2,) should be a name or a pattern such as 'layers.*.weight'",
        ),
        *(
            ({name: 3}, f"{name}=...): int 3 is not callable; give a function {call}")
            for name, call in SIGNATURES.items()
            if name != "data"
        ),
        (
            {"scheduler": 3},
            "scheduler=...): int 3 should be a function scheduler(optimizer), or a scheduler with step() and "
            "state_dict()",
        ),
        (
            {"scheduler": LambdaLR(SGD(nn.Linear(2, 2).parameters()), lambda step: 1.0)},
            "scheduler=...): the loader built it, so optimizer= has to be the optimizer that it belongs to; or give a "
            "function: scheduler(optimizer)",
        ),
        ({"beside": [1]}, "beside=...): list '[1]' should be a mapping such as {'ema': ema}"),
        *(
            (
                {"beside": {key: nn.Linear(2, 2)}},
                f"beside=...): the key {shown} should be a name such as 'ema', without dots, and not that of "
                "scheduler=",
            )
            for key, shown in ((1, "int 1"), ("scheduler", "str 'scheduler'"), ("a.b", "str 'a.b'"), ("", "str ''"))
        ),
        (
            {"beside": {"ema": 3}},
            "beside=...): 'ema' is int 3, but should be an object with state_dict() and load_state_dict(), or a "
            "function of the model that returns one",
        ),
        (
            {"save": print, "resume": print, "scheduler": lambda optimizer: None},
            "save=...): scheduler is built by a function, so save() has to take it: save(..., folder, scheduler)",
        ),
        *(
            (
                {"max_grad_norm": value},
                f"max_grad_norm=...): {shown} should be a positive number, the norm to which training clips",
            )
            for value, shown in ((0, "int 0"), (-1.0, "float -1.0"), ("1.0", "str '1.0'"), (True, "bool True"))
        ),
        (
            {"max_grad_norm": 1.0},
            "max_grad_norm=...): set without train_step, which clips; without it nothing is clipped",
        ),
        ({"save": print}, "save=...): set without resume; set both or neither"),
        ({"resume": print}, "resume=...): set without save; set both or neither"),
        (
            {"optimizer": "adam"},
            "optimizer=...): str 'adam' should be a function optimizer(parameters), or an Optimizer",
        ),
        *(
            ({"data_parallel": value}, f"data_parallel=...): {value!r} should be (index, size) with 0 <= index < size")
            for value in (1, (2, 2), (-1, 2), (False, True), (0, 1.0))
        ),
        ({"frozen": None}, "frozen=...): None should be a name, a pattern, or a list of them"),
        ({"frozen": [1]}, "frozen=...): 1 should be a name or a pattern such as 'layers.*.weight'"),
        ({"frozen": {"a": None}}, "frozen=...): None should be a name or a pattern such as 'layers.*.weight'"),
        *(
            (
                {"drawn": {"a": rows}},
                f"drawn=...): {shown} should be the slice of the rows that are drawn, without a step, such as "
                "slice(56, None)",
            )
            for rows, shown in (
                (56, "int 56"),
                (slice(0, 8, 2), "slice 'slice(0, 8, 2)'"),
                (slice(0.5, None), "slice 'slice(0.5, None, None)'"),
            )
        ),
        *(
            ({field: [""]}, f"{field}=...): '' should be a name or a pattern such as 'layers.*.weight'")
            for field in ("frozen", "drawn", "on_some_ranks", "unsharded", "offloaded")
        ),
        ({"loss_over_ranks": "max"}, "loss_over_ranks=...): invalid value 'max' (choose mean, sum or same)"),
        (
            {"unsharded": {"a": "b"}},
            "unsharded=...): dict \"{'a': 'b'}\" should be a name, a pattern, or a list of them",
        ),
        ({"kept_attributes": 5}, "kept_attributes=...): int 5 should be a name, or a list of them"),
        ({"kept_attributes": [5]}, "kept_attributes=...): 5 should be the name of an attribute"),
        (
            {"kept_attributes": ("_mine", "data")},
            "kept_attributes=...): every parameter has 'data'; give custom attributes, such as '_fsdp_no_shard'",
        ),
        ({"tied": ["a", "b"]}, "tied=...): 'a' should be a group of two or more names: tied=[('a', 'b')]"),
        ({"tied": [("a",)]}, "tied=...): ('a',) should be a group of two or more names: tied=[('a', 'b')]"),
        ({"tied": [("a", 1)]}, "tied=...): 1 should be a name or a pattern such as 'layers.*.weight'"),
        (
            {"tied": [("a", "a")]},
            "tied=...): ('a', 'a') has 'a' twice; the names of a group must differ",
        ),
        ({"tied": None}, "tied=...): None should be a group of two or more names: tied=[('a', 'b')]"),
        (
            {"placements": "S(0)"},
            "placements=...): str 'S(0)' should be a mapping of patterns to placements: {'*.weight': 'S(0)'}",
        ),
        ({"placements": {1: "R"}}, "placements=...): 1 should be a name or a pattern such as 'layers.*.weight'"),
        (
            {"placements": {"*": "S0"}},
            "placements=...): 'S0' is not a placement; write 'S(0)', 'R' or, on two mesh dimensions, 'R, S(0)'",
        ),
        (
            {"placements": {"*": []}},
            "placements=...): [] is not a placement; write 'S(0)' or use Shard(0), Replicate()",
        ),
    ],
)
def test_an_error_names_the_wrong_field(fields, message):
    with pytest.raises(SubjectError) as caught:
        subject(**fields)
    assert str(caught.value) == f"Subject({message}"
    assert isinstance(caught.value, ValueError)


def test_an_unknown_field_is_an_error():
    with pytest.raises(SubjectError, match=r"^Subject\(refrence=\.\.\.\): no such field; did you mean 'reference'\?$"):
        Subject(nn.Linear(1, 1), refrence=None)
    with pytest.raises(SubjectError, match=r"no such field; the fields are model, reference, frozen, "):
        Subject(nn.Linear(1, 1), xyzzy=None)


def test_the_model_is_required_and_every_other_field_is_named():
    with pytest.raises(SubjectError) as caught:
        Subject(reference=lambda: nn.Linear(1, 1))
    assert str(caught.value) == "Subject(model=...): missing; give the loaded model: Subject(model, reference=...)"
    with pytest.raises(Misuse) as caught:
        Subject(nn.Linear(1, 1), lambda: nn.Linear(1, 1))
    assert str(caught.value) == "Subject takes only the model by position; name the other fields: reference=..., ..."


def test_a_subject_can_be_copied():
    original = subject(frozen="weight")
    assert copy.copy(original).frozen == original.frozen


def test_a_model_must_be_a_module():
    with pytest.raises(SubjectError) as caught:
        Subject({"weight": 1})
    assert str(caught.value) == (
        "Subject(model=...): dict \"{'weight': 1}\" is not a torch.nn.Module; return the loaded model itself"
    )


def test_a_long_value_is_shortened():
    with pytest.raises(SubjectError) as caught:
        subject(batch={"input_ids": torch.arange(1000)})
    assert len(str(caught.value)) < 200
    assert "\n" not in str(caught.value)


def test_a_directory_without_safetensors_is_not_a_checkpoint(tmp_path):
    with pytest.raises(SubjectError, match="is not a directory that holds"):
        subject(reference=tmp_path)
    (tmp_path / "model-00001-of-00001.safetensors").touch()
    assert subject(reference=str(tmp_path)).reference == str(tmp_path)


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, lambda parameters: torch.optim.SGD(parameters, lr=1)])
def test_an_optimizer_may_be_a_factory_or_an_instance(optimizer):
    assert subject(optimizer=optimizer).optimizer is optimizer
    model = nn.Linear(2, 2)
    built = optimizer(model.parameters())
    assert Subject(model, optimizer=built).optimizer is built


@pytest.mark.parametrize(
    ("field", "pattern", "message"),
    [
        ("frozen", "embd.weight", "'embd.weight' matches no tensor of the model; the nearest is 'embed.weight'"),
        ("drawn", "embd.*", "'embd.*' matches no tensor of the model; the nearest is 'embed.weight'"),
        ("unsharded", "rotary.inv_freq", f"'rotary.inv_freq' matches no parameter of the model; {OTHERS}"),
        ("unsharded", "*.1.qq.*", "'*.1.qq.*' matches no parameter of the model; the nearest is 'layers.0.q.weight'"),
        (
            "frozen",
            "*.router.weight",
            "'*.router.weight' matches no tensor of the model; it has 6 tensors, such as 'embed.weight', "
            "'layers.0.q.weight', 'layers.0.norm.weight'",
        ),
        ("frozen", "q.weight", "'q.weight' matches no tensor of the model; the nearest is 'layers.0.q.weight'"),
        (
            "frozen",
            "model.embed.weight",
            "'model.embed.weight' matches no tensor of the model; the nearest is 'embed.weight'",
        ),
        ("placements", "embd.*", "'embd.*' matches no parameter of the model; the nearest is 'embed.weight'"),
        ("tied", "layers.0.k.weight", f"'layers.0.k.weight' is not a parameter of the model; {OTHERS}"),
    ],
)
def test_a_pattern_that_matches_nothing_is_an_error(field, pattern, message):
    given = {"placements": {pattern: "R"}, "tied": [("embed.weight", pattern)]}.get(field, ["embed.weight", pattern])
    assert list(filter(None, resolve(**{field: given}).patterns.values())) == [f"Subject({field}=...): {message}"]


def test_a_rank_that_does_not_exist_is_an_error():
    with pytest.raises(SubjectError) as caught:
        subject(whole_while_loading=(0, 7)).resolve(PARAMETERS, BUFFERS, world_size=2)
    assert str(caught.value) == "Subject(whole_while_loading=...): rank 7 does not exist in a world of 2"
    assert subject(whole_while_loading=(1,)).resolve([], [], world_size=2).whole_while_loading == (1,)


def test_patterns_match_dots_and_each_name_is_listed_once():
    facts = resolve(unsharded=["*.norm.weight", "layers.1.*"], offloaded="*")
    assert facts.unsharded == ("layers.0.norm.weight", "layers.1.norm.weight", "layers.1.q.weight")
    assert facts.offloaded == (*PARAMETERS, *BUFFERS)


@pytest.mark.parametrize(
    ("frozen", "resolved"),
    [
        ("embed.weight", {"embed.weight": "embed.weight"}),
        (["embed.*", "*.inv_freq"], {"embed.weight": "embed.weight", "rotary.inv_freq": "rotary.inv_freq"}),
        ({"embed.weight": "model.tokens"}, {"embed.weight": "model.tokens"}),
        (
            {"layers.*.norm.weight": "model.layers.*.input_norm.weight"},
            {
                "layers.0.norm.weight": "model.layers.0.input_norm.weight",
                "layers.1.norm.weight": "model.layers.1.input_norm.weight",
            },
        ),
        (
            {"layers.*.*.weight": "m.*.x.*"},
            {
                "layers.0.q.weight": "m.0.x.q",
                "layers.0.norm.weight": "m.0.x.norm",
                "layers.1.q.weight": "m.1.x.q",
                "layers.1.norm.weight": "m.1.x.norm",
            },
        ),
        ({"layers.?.q.weight": "q*"}, {"layers.0.q.weight": "q0", "layers.1.q.weight": "q1"}),
        ({"layers.0.*": "a.*", "layers.*.q.weight": "b.*"}, {
            "layers.0.q.weight": "a.q.weight", "layers.0.norm.weight": "a.norm.weight", "layers.1.q.weight": "b.1",
        }),
    ],
)  # fmt: skip
def test_frozen_names_map_to_names_in_the_verifier(frozen, resolved):
    assert resolve(frozen=frozen).frozen == resolved


@pytest.mark.parametrize(
    ("frozen", "resolved"),
    [
        ("*", PARAMETERS),
        (["embed.*", "rotary.*"], ["embed.weight"]),
        ({"*.weight": "m.*.w", "rotary.*": "m.rotary.*"}, PARAMETERS),
        ("rotary.inv_freq", BUFFERS),
        (["*", "rotary.inv_freq"], PARAMETERS + BUFFERS),
    ],
)
def test_a_frozen_pattern_skips_buffers_that_no_checkpoint_contains(tmp_path, frozen, resolved):
    (tmp_path / "model.safetensors").touch()
    callable_verifier = {"verifier": lambda: nn.Linear(2, 2)}
    everything = list(subject(frozen=frozen, **callable_verifier).resolve(PARAMETERS, BUFFERS).frozen)
    for sources in ({"verifier": tmp_path}, {"reference": str(tmp_path)}):
        declared = subject(frozen=frozen, **sources)
        assert list(declared.resolve(PARAMETERS, BUFFERS, transient=BUFFERS).frozen) == resolved
        assert list(declared.resolve(PARAMETERS, BUFFERS).frozen) == everything
    for sources in (callable_verifier, {"reference": tmp_path} | callable_verifier, {}):
        assert list(subject(frozen=frozen, **sources).resolve(PARAMETERS, BUFFERS, BUFFERS).frozen) == everything


@pytest.mark.parametrize(
    ("pattern", "template"),
    [("layers.*.q.weight", "q"), ("embed.weight", "model.*"), ("layers.*.*", "l.*"), ("layers.[0].q.weight", "l.*")],
)
def test_wildcards_of_a_frozen_mapping_must_pair_up(pattern, template):
    with pytest.raises(SubjectError) as caught:
        resolve(frozen={pattern: template})
    assert str(caught.value) == (
        f"Subject(frozen=...): {pattern!r}: {template!r} should have one * for each * or ? of the pattern, "
        "which may not contain [...]"
    )


def test_the_first_matching_placement_applies():
    facts = resolve(placements={"*.norm.*": "R", "layers.*": ["R", Shard(1)], "*": Shard(0)})
    assert facts.placements == {
        "layers.0.norm.weight": ("R",),
        "layers.1.norm.weight": ("R",),
        "layers.0.q.weight": ("R", "S(1)"),
        "layers.1.q.weight": ("R", "S(1)"),
        "embed.weight": ("S(0)",),
    }


@pytest.mark.parametrize(
    ("declared", "parsed"),
    [
        ("R", ("R",)),
        ("S(0)", ("S(0)",)),
        ("S(12)", ("S(12)",)),
        ("R, S(0)", ("R", "S(0)")),
        ("R,S(1)", ("R", "S(1)")),
        ("Replicate(), Shard(dim=1)", ("R", "S(1)")),
        ("Shard(2)", ("S(2)",)),
        ("_S(0, 2), S(0)", ("_S(0, 2)", "S(0)")),
        ("_StridedShard(dim=0, sf=2), Shard(dim=0)", ("_S(0, 2)", "S(0)")),
        ("_StridedShard(0, split_factor=4)", ("_S(0, 4)",)),
        (Shard(1), ("S(1)",)),
        (Replicate(), ("R",)),
        ([Replicate(), Shard(0)], ("R", "S(0)")),
        ((Replicate(), "S(0)"), ("R", "S(0)")),
        ((_StridedShard(0, split_factor=2), Shard(0)), ("_S(0, 2)", "S(0)")),
    ],
)
def test_placements_are_parsed_to_their_short_form(declared, parsed):
    assert parse_placements(declared) == parsed
    assert parse_placements(", ".join(parsed)) == parsed


@pytest.mark.parametrize(
    "declared",
    [
        *("", " ", "r", "P(sum)", "S(-1)", "S(0", "S(0) S(1)", "RS(0)", "S(0);R", "_S(0)"),
        *(0, None, (), ["R", 3], b"R", Partial()),
    ],
)
def test_other_values_are_not_placements(declared):
    with pytest.raises(SubjectError, match=r"^Subject\(placements=\.\.\.\): .* is not a placement; write 'S\(0\)'"):
        parse_placements(declared)


@pytest.mark.parametrize(
    ("placement", "short"),
    [
        (Shard(0), "S(0)"),
        (Shard(3), "S(3)"),
        (Replicate(), "R"),
        (Partial(), "P(sum)"),
        (Partial("avg"), "P(avg)"),
        (_StridedShard(1, split_factor=4), "_S(1, 4)"),
    ],
)
def test_the_short_form_of_placements(placement, short):
    assert short_placement(placement) == short


def test_drawn_and_summed_are_resolved():
    facts = resolve(drawn=["*.norm.weight", "rotary.*"], loss_over_ranks="sum")
    assert facts.drawn == ("layers.0.norm.weight", "layers.1.norm.weight", "rotary.inv_freq")
    assert facts.loss_over_ranks == "sum"


def test_of_drawn_rows_the_first_pattern_applies():
    facts = resolve(drawn={"layers.0.norm.weight": slice(-2, None), "*.norm.weight": slice(3)})
    assert facts.drawn == ("layers.0.norm.weight", "layers.1.norm.weight")
    assert facts.drawn_rows == {"layers.0.norm.weight": (-2, None), "layers.1.norm.weight": (None, 3)}


def test_where_names_are_on_some_ranks_a_pattern_may_match_on_another_rank():
    declared = subject(on_some_ranks="layers.*", frozen={"layers.1.*": "blocks.*"}, unsharded="layers.0.q.weight")
    first, second = (declared.resolve([f"layers.{rank}.q.weight"], []) for rank in range(2))
    assert [pattern for pattern, problem in first.patterns.items() if problem] == ["frozen layers.1.*"]
    assert [pattern for pattern, problem in second.patterns.items() if problem] == ["unsharded layers.0.q.weight"]
    both = combine_subjects([first, second], (), [RankInventory(rank, "cpu", ()) for rank in range(2)])
    assert both.on_some_ranks == ("layers.0.q.weight", "layers.1.q.weight")
    assert both.frozen == {"layers.1.q.weight": "blocks.q.weight"}
    assert (both.unsharded, both.patterns) == (("layers.0.q.weight",), {})


def test_a_parameter_that_cannot_be_passed_by_name_gets_nothing():
    def save(model, optimizer, folder, scheduler, /):
        """Positional only."""

    with pytest.raises(SubjectError, match=r"so save\(\) has to take it: save\(\.\.\., folder, scheduler\)"):
        subject(save=save, resume=save, scheduler=lambda optimizer: None)


def test_a_bound_that_no_float_holds():
    with pytest.raises(SubjectError, match=r"max_grad_norm=\.\.\.\): .* should be a positive number"):
        subject(max_grad_norm=10**400, train_step=print)
