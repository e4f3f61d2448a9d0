"""Formatting of ranks, names and counts."""

from __future__ import annotations

import re
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_fsdp_meta.text import LINES, counted, first_line, first_of, fold_names, name_ranks, names_in, printable


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        ([0], "rank 0"),
        ([1, 1], "rank 1"),
        ([0, 1], "ranks 0, 1"),
        ([0, 1, 2], "ranks 0-2"),
        ([3, 1, 0, 2], "ranks 0-3"),
        ([0, 2], "ranks 0, 2"),
        ([0, 1, 2, 5, 7, 8, 9], "ranks 0-2, 5, 7-9"),
        ([0, 1, 4, 5], "ranks 0, 1, 4, 5"),
        (range(1024), "ranks 0-1023"),
    ],
)
def test_name_ranks(ranks, expected):
    assert name_ranks(ranks) == expected


def test_counts():
    assert [counted(number, "step") for number in (0, 1, 2)] == ["0 steps", "1 step", "2 steps"]


@pytest.mark.parametrize(
    ("names", "most", "expected"),
    [
        (["a"], 1, "a"),
        (["a", "b", "c"], 1, "a and 2 more"),
        (["a", "b"], 2, "a, b"),
        (list("abc"), 2, "a, b and 1 more"),
    ],
)
def test_the_first_of_many(names, most, expected):
    assert first_of(names, most) == expected


@pytest.mark.parametrize(
    ("names", "folded"),
    [
        ([], {}),
        (["a.weight"], {"a.weight": "a.weight"}),
        (["a.weight", "a.weight"], {"a.weight": "a.weight"}),
        (["a.0.w"], {"a.0.w": "a.0.w"}),
        (["a.0.w", "a.1.w"], {"a.{0..1}.w": "a.0.w"}),
        (["a.1.w", "a.0.w"], {"a.{0..1}.w": "a.1.w"}),
        (["a.0.w", "a.2.w"], {"a.{0,2}.w": "a.0.w"}),
        (["a.0.w", "a.1.w", "a.2.w", "a.9.w"], {"a.{0..2,9}.w": "a.0.w"}),
        (["a.9.w", "a.10.w"], {"a.{9..10}.w": "a.9.w"}),
        (["a.0.w", "b.0.w"], {"a.0.w": "a.0.w", "b.0.w": "b.0.w"}),
        (["0", "1"], {"{0..1}": "0"}),
        (["layer0.w", "layer1.w"], {"layer0.w": "layer0.w", "layer1.w": "layer1.w"}),
        (["w_0", "w_1"], {"w_0": "w_0", "w_1": "w_1"}),
        (["a-0", "a-1"], {"a-{0..1}": "a-0"}),
        (["", "a"], {"": "", "a": "a"}),
    ],
)
def test_names_that_differ_in_a_number_are_merged(names, folded):
    assert fold_names(names) == folded


@pytest.mark.parametrize(
    ("pairs", "folded"),
    [
        ([(0, 0), (0, 1), (1, 0), (1, 1)], ["l.{0..1}.e.{0..1}"]),
        ([(0, 0), (0, 1), (1, 0)], ["l.0.e.{0..1}", "l.1.e.0"]),
        ([(0, 0), (1, 1)], ["l.0.e.0", "l.1.e.1"]),
    ],
)
def test_only_complete_sets_are_merged(pairs, folded):
    assert list(fold_names(f"l.{layer}.e.{expert}" for layer, expert in pairs)) == folded


def test_an_incomplete_set_is_split_by_the_first_number_that_varies():
    names = ["m.0.l.0.e.0", "m.0.l.0.e.1", "m.0.l.1.e.0"]
    assert fold_names(names) == {"m.0.l.0.e.{0..1}": "m.0.l.0.e.0", "m.0.l.1.e.0": "m.0.l.1.e.0"}


def test_numbers_that_would_not_be_written_back_are_text():
    assert fold_names(["a.007.w", "a.7.w", "a.8.w"]) == {"a.007.w": "a.007.w", "a.{7..8}.w": "a.7.w"}
    assert fold_names(["a.00.w", "a.01.w"]) == {"a.00.w": "a.00.w", "a.01.w": "a.01.w"}
    assert fold_names(["a.٣.w"]) == {"a.٣.w": "a.٣.w"}


def test_merged_names_are_in_order_of_first_occurrence():
    names = [f"layers.{layer}.{kind}" for layer in range(3) for kind in ("norm", "attn")]
    assert list(fold_names(["embed", *names, "head"])) == ["embed", "layers.{0..2}.norm", "layers.{0..2}.attn", "head"]


def test_many_names_are_merged_quickly():
    names = [f"layers.{layer}.experts.{expert}.w" for layer in range(61) for expert in range(256)]
    assert list(fold_names(names)) == ["layers.{0..60}.experts.{0..255}.w"]
    assert len(fold_names(names[1:])) == 61


def test_names_with_many_numbers_are_not_multiplied_out():
    names = [".".join([str(number)] * 20) for number in range(20)]
    assert fold_names(names) == {name: name for name in names}
    assert fold_names(["9" * 5000]) == {"9" * 5000: "9" * 5000}


def unfold(folded: str) -> list[str]:
    """Return the names that a merged name stands for."""
    parts = re.split(r"\{([0-9.,]+)\}", folded)
    columns = []
    for braced in parts[1::2]:
        runs = (run.split("..") for run in braced.split(","))
        columns.append([number for run in runs for number in range(int(run[0]), int(run[-1]) + 1)])
    return [
        "".join(text + number for text, number in zip(parts[::2], (*map(str, row), ""), strict=True))
        for row in product(*columns)
    ]


component = st.one_of(st.integers(0, 4).map(str), st.sampled_from(["a", "b", "layer1", "00", "w_2"]))


@given(st.lists(st.lists(component, min_size=1, max_size=4).map(".".join), max_size=12))
def test_merged_names_stand_for_exactly_the_given_names(names):
    folded = fold_names(names)
    unfolded = [name for merged in folded for name in unfold(merged)]
    assert sorted(unfolded) == sorted(set(names))
    assert all(first in unfold(merged) for merged, first in folded.items())


@given(st.sets(st.integers(0, 40), min_size=1))
def test_name_ranks_stands_for_exactly_the_given_ranks(ranks):
    listed = name_ranks(ranks).split(" ", 1)[1].split(", ")
    runs = (run.split("-") for run in listed)
    assert {rank for run in runs for rank in range(int(run[0]), int(run[-1]) + 1)} == ranks


@pytest.mark.parametrize(
    ("text", "expected"),
    [("", ""), ("one\ntwo", "one"), ("a line that is too long", "a line that ..."), ("a  b\tc", "a b c")],
)
def test_the_first_line_is_shortened_at_a_word_boundary(text, expected):
    assert first_line(RuntimeError(text), 16) == expected


@pytest.mark.parametrize(
    ("text", "in_lines", "in_one_line"),
    [
        ("\x1b[2J\x00 a\tb\nc\r", "\\x1b[2J\\x00 a\tb\nc\\r", "\\x1b[2J\\x00 a\\tb\\nc\\r"),
        ("\x85 \u202egnp\u2028 \ud800", "\\x85 \\u202egnp\\u2028 \\ud800", "\\x85 \\u202egnp\\u2028 \\ud800"),
        (
            "\u00e9\u3000\xa0 \U0001f469\u200d\U0001f4bb",
            "\u00e9\u3000\xa0 \U0001f469\u200d\U0001f4bb",
            "\u00e9\u3000\xa0 \U0001f469\u200d\U0001f4bb",
        ),
    ],
    ids=["what terminals obey", "what reorders or cannot be encoded", "what people write"],
)
def test_unprintable_characters_are_escaped(text, in_lines, in_one_line):
    assert (printable(text, LINES), printable(text)) == (in_lines, in_one_line)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("Missing key: model.layers.0.norm.weight.", ["layers.0.norm.weight"]),
        ("Missing key: optimizer.state.norm.weight.exp_avg", ["norm.weight"]),
        ("'norm.weight' and layers.0.norm.weight", ["norm.weight", "layers.0.norm.weight"]),
        ("norm.weights, prenorm.weight and bias", []),
    ],
)
def test_names_of_tensors_in_a_text(text, found):
    assert names_in(text, ["norm.weight", "layers.0.norm.weight", "bias"]) == found
    assert names_in(text, []) == []
