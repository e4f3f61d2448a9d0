"""The full messages of failed checks and of errors."""

from __future__ import annotations

import textwrap
from dataclasses import replace

import pytest

from pytest_fsdp_meta.catalogue import Check, Finding, Verdict
from pytest_fsdp_meta.reports.terminal import describe_checks, describe_error, describe_failure, describe_finding
from tests.checks.evidence_factory import (
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

WORLD, RERUN = "world of 2 (gloo on cpu)", "pytest 'test_a.py::test_llama[no_meta_buffers]'"


def make(**changes) -> Check:
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
    return Check(**{**facts, **changes})


def failed(*findings: Finding, **facts) -> str:
    explained = [
        f if f.cause else Finding(f.tensor, f.ranks, f.actual, f.expected, f.detail, "the paint ran out", "buy paint")
        for f in findings
    ]
    return describe_failure(Verdict(make(), "failed", tuple(explained), **facts), WORLD, RERUN)


def red(tensor: str | None, ranks=(0, 1), detail: str = "", **texts) -> Finding:
    return Finding(tensor, tuple(ranks), "red", "blue", detail, **texts)


def lines(message: str) -> list[str]:
    """Return the lines with findings."""
    return [line for line in message.splitlines() if line.startswith("  ")]


def message(text: str) -> str:
    return textwrap.dedent(text).strip("\n")


def test_one_finding():
    assert failed(red("embed.weight")) == message(
        """
        weights_are_blue: every weight is blue
        failed in a world of 2 (gloo on cpu):

          embed.weight, ranks 0, 1: red, but should be blue

        likely cause: the paint ran out
        remedy: buy paint

        rerun: pytest 'test_a.py::test_llama[no_meta_buffers]'
        """
    )


def test_similar_tensors_share_a_line():
    findings = [red(f"model.layers.{layer}.rotary.inv_freq", range(8)) for layer in range(32)]
    assert lines(failed(*findings)) == ["  model.layers.{0..31}.rotary.inv_freq, ranks 0-7: red, but should be blue"]


def test_a_line_of_several_tensors_shows_the_detail_of_the_first():
    findings = [red(f"layers.{layer}.w", detail=f"{layer} of 9") for layer in range(3)]
    assert lines(failed(*findings)) == ["  layers.{0..2}.w, ranks 0, 1: red, but should be blue (layers.0.w: 0 of 9)"]


def test_the_detail_of_one_tensor_is_not_prefixed_by_its_name():
    assert lines(failed(red("a", detail="3 of 9"))) == ["  a, ranks 0, 1: red, but should be blue (3 of 9)"]


def test_findings_with_other_ranks_or_texts_have_other_lines():
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


def test_a_finding_that_expects_nothing_shows_the_actual_state_alone():
    alone = Finding("a", (0,), "does not load", "", "KeyError")
    assert describe_finding(alone) == "a, rank 0: does not load (KeyError)"
    assert lines(failed(alone)) == ["  a, rank 0: does not load (KeyError)"]


@pytest.mark.parametrize(("detail", "tail"), [("", ""), ("step 0", " (step 0)")])
def test_the_whole_model(detail, tail):
    assert lines(failed(red(None, detail=detail))) == [f"  the model, ranks 0, 1: red, but should be blue{tail}"]


def test_findings_about_the_whole_model_have_lines_of_their_own():
    text = failed(red(None, detail="one"), red("b.w"), red(None, detail="two"))
    assert lines(text) == [
        "  the model, ranks 0, 1: red, but should be blue (one)",
        "  the model, ranks 0, 1: red, but should be blue (two)",
        "  b.w, ranks 0, 1: red, but should be blue",
    ]


def test_where_it_starts_is_said_once_above_all_findings():
    dry = {"cause": "it dried", "remedy": "paint faster"}
    found = red("a", origin="attn.q agrees, attn.k does not", cause="the paint ran out", remedy="buy paint")
    shown = failed(found, red("b", origin=found.origin, **dry)).splitlines()
    assert shown[1:6] == [
        "failed in a world of 2 (gloo on cpu):",
        "",
        "where it starts: attn.q agrees, attn.k does not",
        "",
        "  a, ranks 0, 1: red, but should be blue",
    ]
    assert sum("where it starts" in line for line in shown) == 1


def test_several_causes_follow_one_another():
    dry = {"cause": "it dried", "remedy": "paint faster"}
    assert failed(red("a"), red("b", **dry), red("c")) == message(
        """
        weights_are_blue: every weight is blue
        failed in a world of 2 (gloo on cpu):

          a, ranks 0, 1: red, but should be blue
          c, ranks 0, 1: red, but should be blue

        likely cause: the paint ran out
        remedy: buy paint

          b, ranks 0, 1: red, but should be blue

        likely cause: it dried
        remedy: paint faster

        rerun: pytest 'test_a.py::test_llama[no_meta_buffers]'
        """
    )


@pytest.mark.parametrize(
    ("count", "last"),
    [
        (20, "  tensor_t, ranks 0, 1: red, but should be blue"),
        (21, "  ... and 1 more line"),
        (25, "  ... and 5 more lines"),
    ],
)
def test_many_lines_are_cut(count, last):
    shown = lines(failed(*(red(f"tensor_{chr(ord('a') + number)}") for number in range(count))))
    assert (len(shown), shown[-1]) == (min(count, 21), last)


@pytest.mark.parametrize("name", ["größe.weight", "a b", "{0..3}", "%s", "x.{", "[red]", "a\\nb"])
def test_unusual_names_are_written_unchanged(name):
    assert lines(failed(red(name))) == [f"  {name}, ranks 0, 1: red, but should be blue"]


def test_long_causes_are_wrapped_under_their_label():
    cause = "the paint ran out " * 10 + "see https://example.org/a-very-long-address-that-must-not-be-broken-anywhere"
    text = failed(red("a", cause=cause.strip(), remedy="buy paint"))
    start = text.index("likely cause: ")
    paragraph = text[start : text.index("remedy: ")].rstrip("\n").splitlines()
    assert len(paragraph) == 3
    assert all(len(line) <= 118 for line in paragraph)
    assert all(line.startswith(" " * 14) for line in paragraph[1:])
    assert " ".join(line[14:] for line in paragraph) == cause


def test_tensors_left_out_and_the_reason_of_an_incomplete_judgement_are_shown():
    left_out = {"no_meta_params": ("a", "b"), "no_meta_buffers": ("c",)}
    text = failed(red("d"), unjudged=left_out, reason="the reference does not reproduce itself")
    assert text.splitlines()[-6:] == [
        "",
        "not checked: 2 tensors that already failed no_meta_params (first: a), 1 tensor that already failed "
        "no_meta_buffers (first: c)",
        "",
        "and not judged: the reference does not reproduce itself",
        "",
        f"rerun: {RERUN}",
    ]


def test_a_real_verdict():
    found = verdict("no_meta_buffers", change(healthy(), ROTARY, [1], device="meta"))
    assert describe_failure(found, str(healthy().world), RERUN) == message(
        """
        no_meta_buffers: no buffer is on the meta device
        failed in a world of 2 (gloo on cpu):

          rotary.inv_freq, rank 1: on meta, but should be materialised

        likely cause: the loader materialises parameters only; FSDP does not manage buffers
        remedy: materialise buffers too (to_empty() on the root) and recompute those that the checkpoint lacks

        rerun: pytest 'test_a.py::test_llama[no_meta_buffers]'
        """
    )


def test_a_real_verdict_with_numbers_and_an_unstable_reference():
    evidence = with_reference(differ(healthy(), MIDDLE, [1], differing=12), unstable=("embed.weight",))
    assert describe_failure(verdict("params_equal_reference", evidence), str(evidence.world), RERUN) == message(
        """
        params_equal_reference: every parameter shard is bit-identical to the reference's slice (within rounding if the loader casts)
        failed in a world of 2 (gloo on cpu):

          layers.0.weight, rank 1: values that differ from the reference's slice (all elements of rank 1's shard differ, first at [0, 0]: 2.5, but should be 2; largest difference 0.5)

        likely cause: these ranks read the slice of another rank, or only the others received the weight
        remedy: take the offset from the DTensor's own mesh coordinate, and load on every rank

        and not judged: the reference is not reproducible: it has other bits each time it is built (embed.weight); make it build the same model every time

        rerun: pytest 'test_a.py::test_llama[no_meta_buffers]'
        """  # noqa: E501
    )


def test_a_real_curve_of_losses():
    evidence = healthy(1, losses=(2.0, 1.0))
    drifting = with_reference(evidence, losses=(2.0, 1.5), losses_again=(2.0, 1.5))
    assert lines(describe_failure(verdict("loss_parity", drifting), str(evidence.world), RERUN)) == [
        "  the model, rank 0: loss 1 at step 1, but should be 1.5 within 1e-05 (losses 2.000000, 1.000000; "
        "reference 2.000000, 1.500000)",
        "              steps, such as a buffer or a cache that the forward updates on each rank separately",
    ]


MODEL = {"parameter": frozenset("abcd"), "buffer": frozenset("xyz")}


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ("abcd", ["all 4 parameters"]),
        ("dcba", ["all 4 parameters"]),
        ("abc", ["a", "b", "c"]),
        ("abcdx", ["all 4 parameters", "x"]),
        ("xyz", ["x", "y", "z"]),
        ("xyzabcd", ["all 4 parameters", "x", "y", "z"]),
    ],
)
def test_all_tensors_of_a_kind_are_counted_instead_of_named(names, expected):
    assert lines(failed(*map(red, names), model=MODEL)) == [
        f"  {name}, ranks 0, 1: red, but should be blue" for name in expected
    ]


def test_all_tensors_of_both_kinds():
    model = {"parameter": frozenset("abcd"), "buffer": frozenset("vwxyz")}
    assert lines(failed(*map(red, "abcdvwxyz"), model=model)) == [
        "  all 4 parameters, ranks 0, 1: red, but should be blue",
        "  all 5 buffers, ranks 0, 1: red, but should be blue",
    ]


def test_all_tensors_of_a_kind_show_the_detail_of_the_first():
    findings = [red(name, detail=f"{number} of 9") for number, name in enumerate("abcd")]
    assert lines(failed(*findings, model=MODEL)) == [
        "  all 4 parameters, ranks 0, 1: red, but should be blue (a: 0 of 9)"
    ]


def test_all_tensors_on_some_ranks_and_some_on_all_have_other_lines():
    findings = [*(red(name, [0]) for name in "abcd"), *(red(name, [1]) for name in "ab")]
    assert lines(failed(*findings, model=MODEL)) == [
        "  all 4 parameters, rank 0: red, but should be blue",
        "  a, rank 1: red, but should be blue",
        "  b, rank 1: red, but should be blue",
    ]


def test_a_real_model_entirely_on_meta():
    evidence = on_ranks(healthy(), None, lambda rank: tuple(replace(t, device="meta") for t in rank.tensors))
    assert lines(describe_failure(verdict("no_meta_params", evidence), WORLD, RERUN)) == [
        "  all 4 parameters, ranks 0, 1: on meta, but should be materialised"
    ]
    assert lines(describe_failure(verdict("no_meta_buffers", evidence), WORLD, RERUN)) == [
        "  rotary.inv_freq, ranks 0, 1: on meta, but should be materialised",
        "  counter, ranks 0, 1: on meta, but should be materialised",
    ]


def test_a_real_prefix_is_one_line():
    found = verdict("names_match_reference", rename(healthy(), "module."))
    assert describe_failure(found, str(healthy().world), RERUN) == message(
        """
        names_match_reference: no parameters or buffers are missing or extra
        failed in a world of 2 (gloo on cpu):

          the model, ranks 0, 1: names have the prefix 'module.' (module.embed.weight), but should be named as in the reference (embed.weight)

        likely cause: the loader returns a wrapper instead of the model inside it
        remedy: return the inner module, which is .module of the returned one

        rerun: pytest 'test_a.py::test_llama[no_meta_buffers]'
        """  # noqa: E501
    )


def test_a_real_shape_and_the_expected_one():
    wrong = {"problem": "shape (4, 6)", "should_be": "(6, 4), as in the reference"}
    found = verdict("params_equal_reference", differ(healthy(), MIDDLE, **wrong))
    assert lines(describe_failure(found, WORLD, RERUN))[0] == (
        "  layers.0.weight, ranks 0, 1: shape (4, 6), but should be (6, 4), as in the reference"
    )


def test_an_error_with_a_separate_detail():
    text = describe_error("test_it", "it broke", "Traceback ...", RERUN)
    assert text == f"test_it: it broke\n\nTraceback ...\n\nrerun: {RERUN}"


def test_an_error_whose_detail_begins_with_the_reason():
    text = describe_error("test_it", "rank 1 was killed by SIGKILL", "rank 1 was killed by SIGKILL\nrank 0: ...", RERUN)
    assert text == message(
        """
        test_it: rank 1 was killed by SIGKILL
        rank 0: ...

        rerun: pytest 'test_a.py::test_llama[no_meta_buffers]'
        """
    )


@pytest.mark.parametrize("detail", ["", "it broke"])
def test_the_reason_of_an_error_is_not_repeated(detail):
    assert describe_error("test_it", "it broke", detail, RERUN) == f"test_it: it broke\n\nrerun: {RERUN}"


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
    text = describe_checks(CATALOGUE)
    assert [line.split(":")[0].strip() for line in text.splitlines() if line[2:3].isalpha() and line[:2] == "  "] == (
        CATALOGUE.ids()
    )
    assert len(CATALOGUE.ids()) == len(set(CATALOGUE.ids())) >= 15
