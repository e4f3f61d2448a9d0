"""The messages of failed and unjudgeable checks, whole."""

from __future__ import annotations

import textwrap
from dataclasses import replace

import pytest

from pytest_fsdp_meta.catalogue import Check, Finding, Verdict
from pytest_fsdp_meta.reports.terminal import describe_checks, describe_error, describe_failure
from tests.catalogue.evidence_factory import (
    CATALOGUE,
    MIDDLE,
    ROTARY,
    change,
    differ,
    healthy,
    on_ranks,
    rename,
    verdict,
    with_reference,
)

WORLD, AGAIN = "world of 2 (gloo on cpu)", "pytest 'test_a.py::test_llama[no_meta_buffers]'"


def make(**words) -> Check:
    facts = {
        "id": "weights_are_blue",
        "promise": "every weight is blue",
        "family": "colour",
        "needs": ("inventory",),
        "uses": (),
        "after": (),
        "why": "",
        "cause": "the paint ran out",
        "remedy": "buy paint",
        "references": (),
        "since": "0.1",
        "fields": (),
        "judge": lambda view: [],
    }
    return Check(**{**facts, **words})


def failed(*findings: Finding, **words) -> str:
    told = [
        f if f.cause else Finding(f.tensor, f.ranks, f.actual, f.expected, f.detail, "the paint ran out", "buy paint")
        for f in findings
    ]
    return describe_failure(Verdict(make(), "failed", tuple(told), **words), WORLD, AGAIN)


def red(tensor: str | None, ranks=(0, 1), detail: str = "", **words) -> Finding:
    return Finding(tensor, tuple(ranks), "red", "blue", detail, **words)


def lines(message: str) -> list[str]:
    """The lines that tell of findings."""
    return [line for line in message.splitlines() if line.startswith("  ")]


def message(text: str) -> str:
    return textwrap.dedent(text).strip("\n")


def test_one_finding():
    assert failed(red("embed.weight")) == message(
        """
        weights_are_blue: every weight is blue
        broken in a world of 2 (gloo on cpu):

          embed.weight, ranks 0, 1: red, but should be blue

        likely cause: the paint ran out
        remedy: buy paint

        run it again: pytest 'test_a.py::test_llama[no_meta_buffers]'
        """
    )


def test_like_tensors_are_told_as_one():
    findings = [red(f"model.layers.{layer}.rotary.inv_freq", range(8)) for layer in range(32)]
    assert lines(failed(*findings)) == ["  model.layers.{0..31}.rotary.inv_freq, ranks 0-7: red, but should be blue"]


def test_a_detail_of_many_is_that_of_the_first():
    findings = [red(f"layers.{layer}.w", detail=f"{layer} of 9") for layer in range(3)]
    assert lines(failed(*findings)) == ["  layers.{0..2}.w, ranks 0, 1: red, but should be blue (layers.0.w: 0 of 9)"]


def test_a_detail_of_one_needs_no_name():
    assert lines(failed(red("a", detail="3 of 9"))) == ["  a, ranks 0, 1: red, but should be blue (3 of 9)"]


def test_what_differs_in_ranks_or_words_is_told_apart():
    findings = [
        red("layers.0.w", [0]),
        red("layers.1.w", [1]),
        Finding("layers.2.w", (0,), "green", "blue"),
        red("layers.3.w", [0]),
    ]
    assert lines(failed(*findings)) == [
        "  layers.{0,3}.w, rank 0: red, but should be blue",
        "  layers.1.w, rank 1: red, but should be blue",
        "  layers.2.w, rank 0: green, but should be blue",
    ]


@pytest.mark.parametrize(("detail", "tail"), [("", ""), ("step 0", " (step 0)")])
def test_the_whole_model(detail, tail):
    assert lines(failed(red(None, detail=detail))) == [f"  the model, ranks 0, 1: red, but should be blue{tail}"]


def test_each_thing_that_is_true_of_the_whole_model_is_told_and_of_no_tensor():
    broken = failed(red(None, detail="one"), red("b.w"), red(None, detail="two"))
    assert lines(broken) == [
        "  the model, ranks 0, 1: red, but should be blue (one)",
        "  the model, ranks 0, 1: red, but should be blue (two)",
        "  b.w, ranks 0, 1: red, but should be blue",
    ]


def test_several_causes_follow_one_another():
    dry = {"cause": "it dried", "remedy": "paint faster"}
    assert failed(red("a"), red("b", **dry), red("c")) == message(
        """
        weights_are_blue: every weight is blue
        broken in a world of 2 (gloo on cpu):

          a, ranks 0, 1: red, but should be blue
          c, ranks 0, 1: red, but should be blue

        likely cause: the paint ran out
        remedy: buy paint

          b, ranks 0, 1: red, but should be blue

        likely cause: it dried
        remedy: paint faster

        run it again: pytest 'test_a.py::test_llama[no_meta_buffers]'
        """
    )


@pytest.mark.parametrize(
    ("count", "last"),
    [
        (20, "  tensor_t, ranks 0, 1: red, but should be blue"),
        (21, "  ... and 1 line more"),
        (25, "  ... and 5 lines more"),
    ],
)
def test_many_lines_are_cut(count, last):
    told = lines(failed(*(red(f"tensor_{chr(ord('a') + number)}") for number in range(count))))
    assert (len(told), told[-1]) == (min(count, 21), last)


@pytest.mark.parametrize("name", ["größe.weight", "a b", "{0..3}", "%s", "x.{", "[red]", "a\\nb"])
def test_odd_names_are_written_as_they_are(name):
    assert lines(failed(red(name))) == [f"  {name}, ranks 0, 1: red, but should be blue"]


def test_long_causes_are_wrapped_under_their_label():
    cause = "the paint ran out " * 10 + "see https://example.org/a-very-long-address-that-must-not-be-broken-anywhere"
    told = failed(red("a", cause=cause.strip(), remedy="buy paint"))
    start = told.index("likely cause: ")
    paragraph = told[start : told.index("remedy: ")].rstrip("\n").splitlines()
    assert len(paragraph) == 3
    assert all(len(line) <= 118 for line in paragraph)
    assert all(line.startswith(" " * 14) for line in paragraph[1:])
    assert " ".join(line[14:] for line in paragraph) == cause


def test_what_was_left_out_and_what_could_not_be_judged_is_said():
    left_out = {"no_meta_params": ("a", "b"), "no_meta_buffers": ("c",)}
    told = failed(red("d"), unjudged=left_out, reason="the reference does not reproduce itself")
    assert told.splitlines()[-6:] == [
        "",
        "not checked: 2 tensors that already failed no_meta_params (first: a), 1 tensor that already failed "
        "no_meta_buffers (first: c)",
        "",
        "and not judged: the reference does not reproduce itself",
        "",
        f"run it again: {AGAIN}",
    ]


def test_a_real_verdict():
    found = verdict("no_meta_buffers", change(healthy(), ROTARY, [1], device="meta"))
    assert describe_failure(found, str(healthy().world), AGAIN) == message(
        """
        no_meta_buffers: no buffer is on the meta device
        broken in a world of 2 (gloo on cpu):

          rotary.inv_freq, rank 1: on meta, but should be materialised

        likely cause: the loader materialises parameters only; FSDP does not manage buffers
        remedy: materialise buffers too (to_empty() on the root) and recompute those that the checkpoint lacks

        run it again: pytest 'test_a.py::test_llama[no_meta_buffers]'
        """
    )


def test_a_real_verdict_with_numbers_and_an_unstable_reference():
    evidence = with_reference(differ(healthy(), MIDDLE, [1], differing=12), unstable=("embed.weight",))
    assert describe_failure(verdict("params_equal_reference", evidence), str(evidence.world), AGAIN) == message(
        """
        params_equal_reference: every parameter shard is bit-identical to the reference's slice (within rounding if the loader casts)
        broken in a world of 2 (gloo on cpu):

          layers.0.weight, rank 1: values that differ from the reference's slice (all elements of rank 1's shard differ, first at [0, 0]: 2.5, but should be 2; largest difference 0.5)

        likely cause: these ranks read the slice of another rank, or only the others received the weight
        remedy: take the offset from the DTensor's own mesh coordinate, and load on every rank

        and not judged: the reference is not reproducible: it has other bits each time it is built (embed.weight); make it build the same model every time

        run it again: pytest 'test_a.py::test_llama[no_meta_buffers]'
        """  # noqa: E501
    )


def test_a_real_curve_of_losses():
    evidence = healthy(1, losses=(2.0, 1.0))
    drifting = with_reference(evidence, losses=(2.0, 1.5), losses_again=(2.0, 1.5))
    assert lines(describe_failure(verdict("loss_parity", drifting), str(evidence.world), AGAIN)) == [
        "  the model, rank 0: loss 1 at step 1, but should be 1.5 within 1e-05 (losses 2.000000, 1.000000; the "
        "reference's 2.000000, 1.500000)",
        "              such as a buffer or a cache that the forward updates on each rank for itself",
    ]


MODEL = {"parameter": frozenset("abcd"), "buffer": frozenset("xyz")}


@pytest.mark.parametrize(
    ("names", "told"),
    [
        ("abcd", ["all 4 parameters"]),
        ("dcba", ["all 4 parameters"]),
        ("abc", ["a", "b", "c"]),
        ("abcdx", ["all 4 parameters", "x"]),
        ("xyz", ["x", "y", "z"]),
        ("xyzabcd", ["all 4 parameters", "x", "y", "z"]),
    ],
)
def test_all_of_a_kind_are_told_by_their_number(names, told):
    assert lines(failed(*map(red, names), model=MODEL)) == [
        f"  {name}, ranks 0, 1: red, but should be blue" for name in told
    ]


def test_all_of_both_kinds():
    model = {"parameter": frozenset("abcd"), "buffer": frozenset("vwxyz")}
    assert lines(failed(*map(red, "abcdvwxyz"), model=model)) == [
        "  all 4 parameters, ranks 0, 1: red, but should be blue",
        "  all 5 buffers, ranks 0, 1: red, but should be blue",
    ]


def test_all_of_a_kind_show_the_detail_of_the_first():
    findings = [red(name, detail=f"{number} of 9") for number, name in enumerate("abcd")]
    assert lines(failed(*findings, model=MODEL)) == [
        "  all 4 parameters, ranks 0, 1: red, but should be blue (a: 0 of 9)"
    ]


def test_all_on_some_ranks_and_some_on_all_are_told_apart():
    findings = [*(red(name, [0]) for name in "abcd"), *(red(name, [1]) for name in "ab")]
    assert lines(failed(*findings, model=MODEL)) == [
        "  all 4 parameters, rank 0: red, but should be blue",
        "  a, rank 1: red, but should be blue",
        "  b, rank 1: red, but should be blue",
    ]


def test_a_real_model_that_is_all_on_meta():
    evidence = on_ranks(healthy(), None, lambda rank: tuple(replace(t, device="meta") for t in rank.tensors))
    assert lines(describe_failure(verdict("no_meta_params", evidence), WORLD, AGAIN)) == [
        "  all 4 parameters, ranks 0, 1: on meta, but should be materialised"
    ]
    assert lines(describe_failure(verdict("no_meta_buffers", evidence), WORLD, AGAIN)) == [
        "  rotary.inv_freq, ranks 0, 1: on meta, but should be materialised",
        "  counter, ranks 0, 1: on meta, but should be materialised",
    ]


def test_a_real_prefix_is_one_line():
    found = verdict("names_match_reference", rename(healthy(), "module."))
    assert describe_failure(found, str(healthy().world), AGAIN) == message(
        """
        names_match_reference: no parameters or buffers are missing or extra
        broken in a world of 2 (gloo on cpu):

          the model, ranks 0, 1: names have the prefix 'module.' (module.embed.weight), but should be named as in the reference (embed.weight)

        likely cause: the loader returns a wrapper instead of the model inside it
        remedy: return the wrapped model itself, or strip the prefix from its names

        run it again: pytest 'test_a.py::test_llama[no_meta_buffers]'
        """  # noqa: E501
    )


def test_a_real_shape_beside_the_one_that_it_should_be():
    wrong = {"problem": "shape (4, 6)", "should_be": "(6, 4), as in the reference"}
    found = verdict("params_equal_reference", differ(healthy(), MIDDLE, **wrong))
    assert lines(describe_failure(found, WORLD, AGAIN))[0] == (
        "  layers.0.weight, ranks 0, 1: shape (4, 6), but should be (6, 4), as in the reference"
    )


def test_an_error_and_a_story_of_its_own():
    told = describe_error(make(), "it broke", "Traceback ...", AGAIN)
    assert told == f"weights_are_blue could not be judged: it broke\n\nTraceback ...\n\nrun it again: {AGAIN}"


def test_an_error_tells_its_story():
    told = describe_error(make(), "rank 1 was killed by SIGKILL", "rank 1 was killed by SIGKILL\nrank 0: ...", AGAIN)
    assert told == message(
        """
        weights_are_blue could not be judged: rank 1 was killed by SIGKILL
        rank 0: ...

        run it again: pytest 'test_a.py::test_llama[no_meta_buffers]'
        """
    )


@pytest.mark.parametrize("detail", ["", "it broke"])
def test_an_error_is_not_told_twice(detail):
    assert describe_error(make(), "it broke", detail, AGAIN) == (
        f"weights_are_blue could not be judged: it broke\n\nrun it again: {AGAIN}"
    )


def test_the_list_of_checks():
    checks = [
        make(),
        make(id="weights_are_warm", needs=("inventory", "reference", "values")),
        make(id="weights_are_dry", needs=("inventory", "training"), fields=("paint",)),
        make(id="rims_are_round", family="shape", promise="every rim " + "is round " * 15),
    ]
    assert describe_checks(checks) == message(
        """
        colour
          weights_are_blue: every weight is blue
          weights_are_warm: every weight is blue
              needs of Subject: reference
          weights_are_dry: every weight is blue
              needs of Subject: batch, paint

        shape
          rims_are_round: every rim is round is round is round is round is round is round is round is round is round is round
              is round is round is round is round is round
        """  # noqa: E501
    )


def test_the_list_of_the_real_catalogue_names_every_check_once():
    told = describe_checks(CATALOGUE)
    assert [line.split(":")[0].strip() for line in told.splitlines() if line[2:3].isalpha() and line[:2] == "  "] == (
        CATALOGUE.ids()
    )
    assert len(CATALOGUE.ids()) == len(set(CATALOGUE.ids())) >= 15
