"""Where a difference starts, by hand-made traces: named if everything fits together, and else not."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest

from pytest_fsdp_meta.checks.tracing.facts import Departure, ModuleFacts, OtherSetting, RankTrace, TracedCall
from pytest_fsdp_meta.checks.tracing.judge import (
    Place,
    describe_origin,
    explain_numbers,
    explain_settings,
    find_place,
    follow_step,
)
from pytest_fsdp_meta.evidence import Evidence
from pytest_fsdp_meta.evidence.codec import from_plain, to_plain
from tests.checks.evidence_factory import healthy, on_runs, remeasured, verdict

NOISE = 1e-7
MODEL = ("", "embed", "block", "block.attn", "block.attn.q", "block.attn.o", "block.mlp", "head")
FORWARD = [
    *(("input", ""), ("input", "embed"), ("output", "embed"), ("input", "block"), ("input", "block.attn")),
    *(("input", "block.attn.q"), ("output", "block.attn.q"), ("input", "block.attn.o"), ("output", "block.attn.o")),
    *(("output", "block.attn"), ("input", "block.mlp"), ("output", "block.mlp"), ("output", "block")),
    *(("input", "head"), ("output", "head"), ("output", "")),
]
BACKWARD = [("gradient", name) for name in ("head", "block", "block.mlp", "block.attn", "block.attn.q", "embed")]
AGAIN = [("recomputed input", "block.mlp"), ("recomputed output", "block.mlp")]
FACTS = {name: ModuleFacts(f"Kind{number}", "models.py", 10 * number) for number, name in enumerate(MODEL)}

Call = tuple[str, str]


def calls(known: Iterable[Call], off: dict[Call, float], **facts: object) -> tuple[TracedCall, ...]:
    made = (
        TracedCall(
            *(stage, name),
            compared=1,
            distance=off.get((stage, name), 0.0),
            noise=NOISE,
            caller=name.rpartition(".")[0] if stage == "input" and name else None,
        )
        for stage, name in known
    )
    return tuple(replace(call, **facts) for call in made)  # type: ignore[arg-type]


def trace(off: dict[Call, float] | None = None, slice_: tuple[int, int] = (0, 1), again: bool = False) -> RankTrace:
    off = off or {}
    backward = [*BACKWARD[:2], *AGAIN, *BACKWARD[2:]] if again else BACKWARD
    return RankTrace(slice_, calls(FORWARD, off), calls(backward, off), FACTS)


def since(first: Call, by: float = 0.1, order: list[Call] | None = None) -> dict[Call, float]:
    """Let everything depart from this call on."""
    order = order or [*FORWARD, *BACKWARD]
    return dict.fromkeys(order[order.index(first) :], by)


def change(traced: RankTrace, stage: str, module: str, **facts: object) -> RankTrace:
    def changed(known: tuple[TracedCall, ...]) -> tuple[TracedCall, ...]:
        return tuple(
            replace(call, **facts) if (call.stage, call.module) == (stage, module) else call  # type: ignore[arg-type]
            for call in known
        )

    return replace(traced, forward=changed(traced.forward), backward=changed(traced.backward))


def both(off: dict[Call, float], **facts: object) -> list[RankTrace]:
    return [trace(off, (rank, 2), **facts) for rank in range(2)]  # type: ignore[arg-type]


def test_right_traces_have_no_place():
    assert find_place([trace()]) is None
    assert find_place(both({})) is None
    assert describe_origin(both({})) == describe_origin(None) == describe_origin(()) == ""


@pytest.mark.parametrize(
    ("first", "second", "said"),
    [
        (Departure(factor=2.0), Departure(factor=2.0), "; it is 2 times the reference's"),
        (Departure(factor=0.0), Departure(factor=0.0), "; it is zero"),
        (Departure(factor=2.0), Departure(factor=3.0), "; it is 2 times the reference's (on rank 0)"),
        (Departure(factor=2.0), None, "; it is 2 times the reference's (on rank 0)"),
        (None, Departure(factor=2.0), "; it is 2 times the reference's (on rank 1)"),
        (
            *(Departure(dtypes=("bfloat16", "float32")), Departure(dtypes=("bfloat16", "float32"))),
            "; its values are those of bfloat16, in the reference float32",
        ),
        (
            *(Departure(same_vector=True), Departure(same_vector=True)),
            "; all its rows along the last dim are off by the same vector, as by a missing or doubled bias",
        ),
        (
            *(Departure(rows=(3, 8)), Departure(rows=(3, 8))),
            "; 3 of its 8 rows along the last dim are off, and all others agree",
        ),
        (
            *(Departure(rows=(1, 8), zero=True), Departure(rows=(2, 8), zero=True)),
            "; 1 of its 8 rows along the last dim is zero, and all others agree (on rank 0)",
        ),
        (
            *(Departure(columns=(4, 8, 16)), Departure(columns=(4, 8, 16))),
            "; elements 4 to 7 of the 16 that a rank holds along the last dim are off, and all others agree",
        ),
        (
            *(Departure(columns=(4, 5, 16)), Departure(columns=(0, 4, 16))),
            "; element 4 of the 16 that a rank holds along the last dim is off, and all others agree (on rank 0)",
        ),
        (Departure(), Departure(), ""),
        (None, None, ""),
    ],
)
def test_in_which_way_it_departs(first, second, said):
    traces = both(since(("output", "block.mlp")))
    known = [
        change(traced, "output", "block.mlp", departure=how)
        for traced, how in zip(traces, (first, second), strict=True)
    ]
    assert describe_origin(known).endswith(f"the inputs agree, the output is off by 0.1 (noise 1e-07){said}")
    assert from_plain(Evidence, to_plain(replace(healthy(), traces=tuple(known)))).traces == tuple(known)


def test_random_numbers_that_are_drawn_inside():
    drawing = [replace(one, draws=("", "block", "block.mlp")) for one in both(since(("output", "block.mlp")))]
    assert describe_origin(drawing).endswith("; the module draws random numbers, the reference's does not")
    elsewhere = [replace(one, draws=("", "head")) for one in drawing]
    assert describe_origin(elsewhere).endswith("(noise 1e-07)")


def test_a_later_step_has_a_place_of_its_own():
    later = [replace(one, step=2) for one in both(since(("output", "block.mlp")))]
    assert describe_origin(later) == ""
    assert describe_origin(later, step=2).endswith(
        "(noise 1e-07); seen with the batch of step 2 and the loaded weights"
    )


def test_the_module_whose_inputs_agree_and_whose_output_departs():
    place = find_place(both(since(("output", "block.mlp"))))
    assert place == Place("block.mlp", "forward", (0, 1), 0.1, NOISE, how=(None, None))
    alone = find_place([trace(since(("output", "embed")))])
    assert alone == Place("embed", "forward", (0,), 0.1, NOISE, how=(None,))


@pytest.mark.parametrize(
    ("first", "module", "between"),
    [
        (("input", "block.attn.o"), "block.attn", "the output of block.attn.q agrees, the input of block.attn.o is"),
        (("input", "block"), "the model", "the output of embed agrees, the input of block is"),
    ],
    ids=["between two modules", "in the model's own forward"],
)
def test_where_it_starts_in_the_forward(first, module, between):
    said = describe_origin(both(since(first)))
    assert (said.partition(" (")[0], between in said) == (module, True)


def test_in_the_backward():
    off = since(("gradient", "block.attn.q"), 2.0, BACKWARD)
    said = describe_origin(both(off))
    assert said.startswith("block.attn (Kind3, models.py:30), backward, ranks 0, 1: ")
    assert "the gradient of the output of block.attn.q is off by 2" in said
    assert describe_origin(both(off), ("forward",)) == ""


def test_in_the_recomputation():
    order = [*BACKWARD[:2], *AGAIN, *BACKWARD[2:]]
    overwritten = both(since(AGAIN[0], 0.5, order), again=True)
    assert describe_origin(overwritten) == (
        "block.mlp (Kind6, models.py:60), recomputation, ranks 0, 1: the input is off by 0.5 (noise 1e-07), that of "
        "the forward agrees"
    )
    drawn = both(since(AGAIN[1], 0.5, order), again=True)
    assert describe_origin(drawn).startswith(
        "block.mlp (Kind6, models.py:60), recomputation, ranks 0, 1: the inputs agree"
    )


def test_the_class_of_the_reference_is_named_if_it_is_another():
    facts = {**FACTS, "block.mlp": ModuleFacts("GELU", "act.py", 7, "SiLU")}
    traces = [replace(one, modules=facts) for one in both(since(("output", "block.mlp")))]
    assert describe_origin(traces).startswith("block.mlp (GELU, act.py:7, SiLU in the reference), forward")
    unknown = [replace(one, modules={}) for one in traces]
    assert describe_origin(unknown).startswith("block.mlp, forward")
    built_in = [replace(one, modules={"block.mlp": ModuleFacts("Compiled")}) for one in traces]
    assert describe_origin(built_in).startswith("block.mlp (Compiled), forward")


DIFFERENT = (OtherSetting("eps", "0.1", "0.2", number=True), OtherSetting("scale", "3", "None"))


def with_other_settings(module, departing):
    facts = {**FACTS, module: replace(FACTS[module], otherwise=DIFFERENT)}
    return [replace(one, modules=facts) for one in both(departing)]


@pytest.mark.parametrize(
    ("module", "cause"),
    [
        (
            "block.mlp",
            "block.mlp is configured differently: eps is 0.1, in the reference 0.2; scale is 3, in the reference None",
        ),
        ("embed", None),
    ],
)
def test_a_setting_of_the_module_where_it_starts_explains_it(module, cause):
    assert explain_settings(with_other_settings(module, since(("output", "block.mlp")))).get("cause") == cause


@pytest.mark.parametrize(
    ("otherwise", "cause"),
    [
        (
            {"embed": DIFFERENT[:1], "head": DIFFERENT[:1]},
            f"embed and 1 more are configured differently: {DIFFERENT[0]}",
        ),
        ({"embed": DIFFERENT[:1]}, f"embed is configured differently: {DIFFERENT[0]}"),
        ({"embed": DIFFERENT[:1], "head": (OtherSetting("eps", "0.3", "0.2", number=True),)}, None),
        ({"embed": (OtherSetting("kind", "a", "b"),)}, None),
    ],
    ids=["alike", "one", "not alike", "no number"],
)
def test_where_nothing_departs_a_number_that_modules_have_otherwise_may_explain_it(otherwise, cause):
    facts = {**FACTS, **{name: replace(FACTS[name], otherwise=settings) for name, settings in otherwise.items()}}
    assert explain_numbers([replace(one, modules=facts) for one in both({})]).get("cause") == cause
    departing = [replace(one, modules=facts) for one in both(since(("output", "block.mlp")))]
    assert explain_numbers(departing) == {}, "there is a place"


def test_where_nothing_departs_the_one_module_whose_tensors_differ_is_asked():
    """An index of padding changes no activation."""
    traces = with_other_settings("embed", {})
    assert explain_settings(traces, ["embed.weight"])["cause"].startswith("embed is configured")
    assert explain_settings(traces, ["head.weight"]) == explain_settings(traces, ["embed.weight", "head.weight"]) == {}


def test_ranks_are_merged():
    """What only one rank can see counts, and the ranks are those where it starts."""
    off = since(("output", "block.mlp"))
    assert named([trace({}, (0, 2)), trace(off, (1, 2))]) == ("block.mlp", (1,))
    # Rank 1 departs earlier than rank 0 does.
    assert named([trace(off, (0, 2)), trace(since(("output", "embed")), (1, 2))]) == ("embed", (1,))


@pytest.mark.parametrize(
    ("why", "traces"),
    [
        (
            "no rank ran other modules",
            [trace(since(("output", "embed"))), replace(trace(), forward=trace().forward[:-1])],
        ),
        ("what departs agrees again at the end", [trace({("output", "block.mlp"): 0.1})]),
        ("a module around it agrees", [trace({**since(("output", "block.attn.q")), ("output", "block.attn"): 0.0})]),
        ("something before is neither", [trace({**since(("output", "block")), ("output", "block.attn.q"): 5 * NOISE})]),
        ("the difference is small", [trace(since(("output", "block"), 8 * NOISE))]),
        (
            "the difference may have started below its noise",
            [trace({**dict.fromkeys(FORWARD, 1.9 * NOISE), **since(("output", "block"), 15 * NOISE)})],
        ),
        ("no part of the backward agrees before", [trace(since(("gradient", "head"), 0.1, BACKWARD))]),
        ("the last gradient agrees", [trace({("gradient", "block.attn"): 0.1})]),
        (
            "the forward is neither right nor wrong",
            [trace({("output", "embed"): 5 * NOISE, **since(("gradient", "block.mlp"), 0.1, BACKWARD)})],
        ),
    ],
)
def test_nothing_is_said_where(why, traces):
    assert find_place(traces) is None, why


def test_a_module_with_an_unknown_input_is_not_named_alone():
    """The inputs of the module around it agree, so that much is sure."""
    off = since(("output", "block.attn.q"))
    traces = [change(one, "input", "block.attn.q", unmatched=1) for one in both(off)]
    assert "the input of block.attn agrees, the output of block.attn.q is off by 0.1" in describe_origin(traces)
    unsure = [change(one, "input", "block.attn", unmatched=1) for one in traces]
    assert find_place(unsure) is None


def test_an_argument_that_differs_is_told():
    """The module that gets it does as it is told."""
    off = since(("output", "block.attn.q"))
    passed: dict[str, Any] = {"unmatched": 1, "argument": ("scale", "0.5", "0.25")}
    first = trace(off)  # on the other ranks alone
    traces = [first, change(trace(off), "input", "block.attn.q", **passed)]
    assert describe_origin(traces).endswith("; block.attn.q gets 0.5 as argument scale, in the reference 0.25")


def test_an_argument_that_is_handed_on_starts_where_the_reference_does_not_get_it():
    off = since(("output", "block.attn.q"))
    passed: dict[str, Any] = {"unmatched": 1, "argument": ("scale", "0.5", "0.25")}
    traces = [
        change(change(one, "input", "block.attn.q", **passed), "input", "block.attn", **passed) for one in both(off)
    ]
    said = describe_origin(traces)
    assert said.startswith("block (Kind2, models.py:20), forward, ranks 0, 1: the input of block agrees")
    assert said.endswith("; block.attn gets 0.5 as argument scale, in the reference 0.25")
    everywhere = [change(change(one, "input", "block", **passed), "input", "", **passed) for one in traces]
    assert find_place(everywhere) is None  # nothing calls the model


def named(traces: list[RankTrace]) -> tuple[str, tuple[int, ...]]:
    """Return the module in which it starts, and its ranks."""
    place = find_place(traces)
    assert place is not None
    return place.module, place.ranks


def test_a_call_that_gets_no_tensor_agrees():
    off = since(("output", "embed"))
    assert named([change(one, "input", "embed", compared=0) for one in both(off)])[0] == "embed"
    assert named([trace(since(("output", "embed"), float("inf")))])[0] == "embed"


def in_parts(sketches: list[tuple[float, ...]], off: dict[Call, float], **facts: object) -> list[RankTrace]:
    """Let the ranks, which see the same rows, return what has these sketches from "block.attn.o"."""
    expected = {"sketch": (), "expected": (3.0, -1.0, 2.0), "distance": 0.7, **facts}
    return [change(trace(off), "output", "block.attn.o", **{**expected, "sketch": own}) for own in sketches]


def test_parts_of_a_sum_are_not_compared():
    """A row-parallel layer whose output is reduced later; the difference starts further down."""
    parts = [(1.0, -3.0, 1.5), (2.0, 2.0, 0.5)]
    assert find_place(in_parts(parts, {})) is None
    assert named(in_parts(parts, since(("output", "block.mlp"))))[0] == "block.mlp"
    # The same tensor on both ranks, and one that adds up to nothing, are no parts.
    wrong = [(1.0, -3.0, 1.5)] * 2
    assert named(in_parts(wrong, since(("output", "block.attn.o"), 0.7)))[0] == "block.attn.o"
    # A bias may be added after the reduction, so that not even the sum is the reference's output.
    lacking = in_parts([(1.0, -3.0, 1.5), (1.0, 2.0, 0.1)], since(("output", "block.mlp")))
    assert named([change(one, "input", "block.attn.o", split=True) for one in lacking])[0] == "block.mlp"


def handed(off: dict[Call, float], again: bool = False) -> list[RankTrace]:
    return [replace(traced, handed=True) for traced in both(off, again=again)]


def test_modules_that_are_handed_what_agrees_agree_again():
    off = {("output", "block.attn.q"): 0.1}
    assert find_place(both(off)) is None
    assert find_place(handed(off)) == Place("block.attn.q", "forward", (0, 1), 0.1, NOISE, how=(None, None))
    # What is too little for a place in the forward does not hide one in the backward.
    little = {("output", "block.attn.q"): 5 * NOISE, ("gradient", "block.mlp"): 0.1}
    assert find_place(both(little)) is None
    place = find_place(handed(little))
    assert place is not None
    assert (place.phase, place.before) == ("backward", ("gradient", "block.mlp"))


def test_a_guessed_part_is_the_right_one_where_another_tensor_of_the_call_agrees():
    """An output that is split as the input is, and a gradient as its output."""
    for stage, by in (("output", "input"), ("gradient", "output")):
        off = {(stage, "block.attn.q"): 0.1}
        split = [change(one, stage, "block.attn.q", split=True) for one in handed(off)]
        assert find_place(split) is None
        place = find_place([change(one, by, "block.attn.q", split=True) for one in split])
        assert place is not None
        assert place.before in (None, (stage, "block.attn.q"))
        column_parallel = {**FACTS, "block.attn.q": ModuleFacts("Linear", splits_output=True)}
        assert find_place([replace(one, modules=column_parallel) for one in split]) is not None
    off = {("input", "block.attn.o"): 0.1}
    assert find_place(handed(off)) is not None
    assert find_place([change(one, "input", "block.attn.o", split=True) for one in handed(off)]) is None


def test_a_step_that_could_not_be_traced():
    traces = [RankTrace((0, 1), problem="RuntimeError: no hooks, please"), trace(since(("output", "embed")))]
    assert find_place(traces) is None
    assert describe_origin(traces) == "not looked for in the modules: RuntimeError: no hooks, please"


def traced(evidence: Evidence, traces: list[RankTrace]) -> Evidence:
    return replace(evidence, traces=tuple(traces))


def test_the_checks_say_where_it_starts():
    place = both(since(("output", "block.mlp")))
    wrong_loss = traced(on_runs(healthy(), None, losses=(3.0, 1.5, 1.25)), place)
    assert {f.origin for f in verdict("loss_parity", wrong_loss).findings} == {describe_origin(place)}
    wrong_gradient = traced(remeasured(healthy(), "layers.0.weight", apart=1.0), place)
    assert {f.origin for f in verdict("grad_parity", wrong_gradient).findings} == {describe_origin(place)}


def test_a_loss_that_is_wrong_later_only_starts_in_no_traced_module():
    later = traced(on_runs(healthy(), None, losses=(2.0, 1.5, 2.25)), both(since(("output", "block.mlp"))))
    assert {f.origin for f in verdict("loss_parity", later).findings} == {""}


def test_why_a_step_was_not_traced_is_said():
    wrong = remeasured(healthy(), "layers.0.weight", apart=1.0)
    problem = [RankTrace((rank, 2), problem="it refuses") for rank in range(2)]
    for traces, said in (([], ""), (both({}), ""), (problem, "not looked for in the modules: it refuses")):
        assert {f.origin for f in verdict("grad_parity", traced(wrong, traces)).findings} == {said}


def test_a_step_is_followed_on_each_rank():
    """With the states that name a place: parts of a sum are not compared, though they are far from it."""
    wrong = since(("output", "block.mlp"), 3e-7)
    forward, backward = follow_step([trace({}, (0, 2)), trace(wrong, (1, 2))])
    assert [(one.call.stage, one.call.module) for one in forward] == FORWARD
    assert [(one.call.stage, one.call.module) for one in backward] == BACKWARD
    output = next(one for one in forward if (one.call.stage, one.call.module) == ("output", "block.mlp"))
    assert output.states == ("agree", "between")
    assert output.distances == (0.0, pytest.approx(3))
    parts = [
        change(trace(since(("output", "block.mlp"))), "output", "block.mlp", sketch=(own,), expected=(3.0,))
        for own in (1.0, 2.0)
    ]
    output = next(one for one in follow_step(parts)[0] if (one.call.stage, one.call.module) == ("output", "block.mlp"))
    assert (output.states, output.distances) == (("unknown", "unknown"), (None, None))


def test_ranks_whose_calls_differ_are_not_followed():
    first, second = both({})
    assert follow_step([first, replace(second, backward=second.backward[1:])])[1] == []
    assert follow_step([first, replace(second, forward=second.forward[1:])])[0] == []
