"""The full messages of failed checks and of errors."""

from __future__ import annotations

import textwrap

import pytest

from pytest_fsdp_meta.catalogue import Check, Finding, Verdict
from pytest_fsdp_meta.reports.terminal import describe_checks, describe_error, describe_failure, describe_finding
from tests.checks.evidence_factory import CATALOGUE

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


MODEL = {"parameter": frozenset("abcd"), "buffer": frozenset("xyz")}
RED = "red, but should be blue"
ON_BOTH = f"ranks 0, 1: {RED}"


@pytest.mark.parametrize(
    ("findings", "expected"),
    [
        pytest.param(
            [red(f"model.layers.{layer}.rotary.inv_freq", range(8)) for layer in range(32)],
            [f"model.layers.{{0..31}}.rotary.inv_freq, ranks 0-7: {RED}"],
            id="similar tensors share a line",
        ),
        pytest.param(
            [red(f"layers.{layer}.w", detail=f"{layer} of 9") for layer in range(3)],
            [f"layers.{{0..2}}.w, {ON_BOTH} (layers.0.w: 0 of 9)"],
            id="the detail of the first of several tensors",
        ),
        pytest.param([red("a", detail="3 of 9")], [f"a, {ON_BOTH} (3 of 9)"], id="the detail of one tensor"),
        pytest.param(
            [
                red("layers.0.w", [0]),
                red("layers.1.w", [1]),
                Finding("layers.2.w", (0,), "green", "blue"),
                red("layers.3.w", [0]),
            ],
            [
                f"layers.{{0,3}}.w, rank 0: {RED}",
                f"layers.1.w, rank 1: {RED}",
                "layers.2.w, rank 0: green, but should be blue",
            ],
            id="other ranks or texts",
        ),
        pytest.param(
            [Finding("a", (0,), "does not load", "", "KeyError")],
            ["a, rank 0: does not load (KeyError)"],
            id="nothing is expected",
        ),
        pytest.param(
            [
                Finding(f"{name}.w", (0,), f"off by {number}.5", "0", f"{number}%")
                for number, name in enumerate("abcdefg")
            ],
            [
                "a.w, b.w, c.w, d.w, e.w, f.w and 1 more, rank 0: off by 0.5, but should be 0 "
                "(the numbers are those of a.w; 0%)"
            ],
            id="many lines that differ in numbers",
        ),
        pytest.param(
            [Finding(f"{name}.w", (0,), f"off by {number}", "0") for number, name in enumerate("abcdef")],
            [f"{name}.w, rank 0: off by {number}, but should be 0" for number, name in enumerate("abcdef")],
            id="few lines that differ in numbers",
        ),
        pytest.param([red(None)], [f"the model, {ON_BOTH}"], id="the whole model"),
        pytest.param(
            [red(None, detail="one"), red("b.w"), red(None, detail="two")],
            [f"the model, {ON_BOTH} (one)", f"the model, {ON_BOTH} (two)", f"b.w, {ON_BOTH}"],
            id="the whole model has lines of its own",
        ),
        *(
            pytest.param([red(name)], [f"{name}, {ON_BOTH}"], id=name)
            for name in ("größe.weight", "a b", "{0..3}", "%s", "x.{", "[red]", "a\\nb")
        ),
    ],
)
def test_the_lines_of_findings(findings, expected):
    assert lines(failed(*findings)) == [f"  {line}" for line in expected]
    if len(findings) == 1:
        assert [describe_finding(findings[0])] == expected


@pytest.mark.parametrize(
    ("findings", "expected"),
    [
        *(
            pytest.param([red(name) for name in names], [f"{part}, {ON_BOTH}" for part in parts], id=names)
            for names, parts in {
                "abcd": ["all 4 parameters"],
                "dcba": ["all 4 parameters"],
                "abc": ["a", "b", "c"],
                "abcdx": ["all 4 parameters", "x"],
                "xyz": ["x", "y", "z"],
                "xyzabcd": ["all 4 parameters", "x", "y", "z"],
            }.items()
        ),
        pytest.param(
            [red(name, detail=f"{number} of 9") for number, name in enumerate("abcd")],
            [f"all 4 parameters, {ON_BOTH} (a: 0 of 9)"],
            id="the detail of the first",
        ),
        pytest.param(
            [*(red(name, [0]) for name in "abcd"), *(red(name, [1]) for name in "ab")],
            [f"all 4 parameters, rank 0: {RED}", f"a, rank 1: {RED}", f"b, rank 1: {RED}"],
            id="some on other ranks",
        ),
    ],
)
def test_all_tensors_of_a_kind_are_counted_instead_of_named(findings, expected):
    assert lines(failed(*findings, model=MODEL)) == [f"  {line}" for line in expected]


def test_the_names_of_a_tie_share_a_line_if_nothing_else_differs():
    ties = frozenset({frozenset({"head", "embed", "decoder"})})
    shown = failed(red("head"), red("embed"), red("norm"), red("decoder", detail="3 of 9"), ties=ties)
    assert lines(shown) == [
        f"  head (also embed, tied to it), {ON_BOTH}",
        f"  norm, {ON_BOTH}",
        f"  decoder, {ON_BOTH} (3 of 9)",
    ]


def test_all_tensors_of_both_kinds():
    model = {"parameter": frozenset("abcd"), "buffer": frozenset("vwxyz")}
    assert lines(failed(*map(red, "abcdvwxyz"), model=model)) == [
        f"  all 4 parameters, {ON_BOTH}",
        f"  all 5 buffers, {ON_BOTH}",
    ]


def test_where_it_starts_is_said_with_its_own_findings():
    one = red("a", origin="here", cause="the paint ran out", remedy="buy paint")
    shown = failed(one, red("b", origin="there", cause="it dried", remedy="paint faster")).splitlines()
    [here, there] = [shown.index(f"where it starts: {place}") for place in ("here", "there")]
    assert shown[here + 1] == "likely cause: the paint ran out"
    assert shown[there + 1] == "likely cause: it dried"


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


@pytest.mark.parametrize(
    ("reason", "detail", "shown"),
    [
        ("it broke", "Traceback ...", "it broke\n\nTraceback ..."),
        ("rank 1 was killed", "rank 1 was killed\nrank 0: ...", "rank 1 was killed\nrank 0: ..."),
        ("it broke", "", "it broke"),
        ("it broke", "it broke", "it broke"),
    ],
)
def test_the_reason_of_an_error_is_not_repeated(reason, detail, shown):
    assert describe_error("test_it", reason, detail, RERUN) == f"test_it: {shown}\n\nrerun: {RERUN}"


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
