"""The page of a report, parsed without a browser."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from pytest_fsdp_meta.evidence import MeshFacts
from pytest_fsdp_meta.evidence.codec import from_plain, to_plain
from pytest_fsdp_meta.reports.compare import compare
from pytest_fsdp_meta.reports.page import render, write_page
from pytest_fsdp_meta.reports.page.__main__ import main
from pytest_fsdp_meta.reports.page.checks import CheckView
from pytest_fsdp_meta.reports.page.layouts import Layout, drawn_mesh, group_layouts, own_meshes
from pytest_fsdp_meta.reports.page.rendering import describe_duration, describe_time
from pytest_fsdp_meta.reports.page.view import GLYPHS, build_view
from pytest_fsdp_meta.reports.schema import (
    SKIPS,
    STATUSES,
    UNKNOWN,
    CheckRecord,
    Curves,
    LoaderRecord,
    Piece,
    Report,
    TensorRecord,
)
from pytest_fsdp_meta.text import fold_names, printable
from tests.conftest import Project
from tests.reports import report_factory as factory
from tests.reports.report_factory import EMBEDDING, ROTARY, check, finding, header, loader, report, tensor, with_history

FETCHING = {"src", "srcset", "href", "xlink:href", "data", "poster", "action", "formaction", "background", "ping"}


class Reader(HTMLParser):
    """Parse a page into its elements with attributes, its text, and the text of scripts and styles."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.raw: list[tuple[str, str]] = []
        self.words: list[str] = []
        self._inside = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self._inside = tag if tag in ("script", "style") else ""
        if self._inside:
            self.raw.append((tag, ""))

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside:
            self.raw[-1] = (self._inside, self.raw[-1][1] + data)
        else:
            self.words.append(data)

    @property
    def text(self) -> str:
        return re.sub(r"\s+", " ", "".join(self.words))


EVERY: dict[str, Callable[[], Report]] = {
    "usual": report,
    "hostile": factory.hostile,
    "hostile list": lambda: hostile_list(),
    "empty": lambda: replace(report(), loaders=()),
    "cut off": lambda: report(complete=False, exit_status=None),
}


@pytest.fixture(params=EVERY)
def page(request) -> Reader:
    return Reader(render(EVERY[request.param]()))


def test_nothing_is_fetched(page):
    targets = [value or "" for _, attributes in page.elements for name, value in attributes.items() if name in FETCHING]
    assert targets
    assert [target for target in targets if not target.startswith(("#", "data:"))] == []
    assert not any("@import" in text or re.search(r"url\((?!#)", text) for tag, text in page.raw if tag == "style")


def test_the_policy_allows_only_the_scripts_of_the_page(page):
    (policy,) = [a["content"] for tag, a in page.elements if a.get("http-equiv") == "Content-Security-Policy"]
    assert policy.startswith("default-src 'none'; ")
    assert "unsafe" not in policy
    (data,) = [a["id"] for tag, a in page.elements if tag == "script" and a.get("type") == "application/json"]
    assert data == "data"
    hashes = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for _, text in page.raw]
    allowed = [one in policy for one in hashes]
    assert allowed == [True, True, False, True]  # style, early script, data, late script
    assert not any(name.startswith("on") or name == "style" for _, attributes in page.elements for name in attributes)


def hostile_list() -> Report:
    """Return the report with as many loaders as are a list, and not a table."""
    return replace(factory.hostile(), loaders=factory.hostile().loaders[:2])


def test_no_name_is_an_element(page):
    assert {tag for tag, _ in page.elements} & {"img", "iframe", "object", "base", "embed"} == set()
    assert not any("onload" in attributes for _, attributes in page.elements)
    assert "\u202e" not in page.text


def test_hostile_names_are_shown_as_text():
    page = Reader(render(factory.hostile()))
    for name in factory.HOSTILE:
        assert printable(name.replace("\n", " ")) in page.text
    assert json.loads(page.raw[2][1])["names"][0] == factory.HOSTILE[0]


def test_the_comparison_with_an_earlier_run_comes_first():
    now, before = factory.hostile(), factory.passing(factory.hostile())
    page = Reader(render(now, compare(before, now)))
    assert "Since 2026-11-19 21:04:00 UTC, commit " in page.text
    assert "3 new failures" in page.text
    assert page.text.index("What broke") < page.text.index("new failures: 3") < page.text.index("Loaders and checks")
    assert {tag for tag, _ in page.elements} & {"img", "iframe", "object", "base", "embed"} == set()
    without = Reader(render(now, None, f"no comparison: {factory.HOSTILE[0]}"))
    assert f"no comparison: {factory.HOSTILE[0]}" in without.text
    assert "Since" not in Reader(render(now)).text


def test_each_cell_shows_its_history():
    view = build_view(factory.nights())
    first = view.loaders[0]
    broken, flaky, steady = (first.checks[id] for id in ("loss_parity", "params_equal_reference", "no_meta_params"))
    assert (broken.mark, flaky.mark, steady.mark) == (" h-old", " h-flaky", "")
    assert broken.note == ", broken since 2026-11-10 02:17:00 (aaaaaaaaa), last passed 2026-11-09 02:17:00 (999999999)"
    assert flaky.note == ", flaky: 10 passed and 4 failed, in turn, of the last 14 runs"
    assert broken.history.words == "9 passed, 5 failed"
    assert flaky.history.words == "10 passed, 4 failed", "how many of each, as there are many stretches"
    assert steady.history.words == "14 passed"
    page = render(factory.nights())
    assert "The last 14 runs, oldest first: 2 passed, 2 failed, 3 passed, 1 failed, 5 passed, 1 failed" in page
    assert f"loss_parity: failed{broken.note}" in page
    text = Reader(page).text
    assert "last 14 runs: 9 passed, 5 failed broken since 2026-11-10" in text
    assert "last 14 runs: 10 passed, 4 failed flaky" not in text, "the numbers of a flaky check are in its note"
    assert page.count('class="strip"') == 4, "in the article and the table of the two that changed"
    plain = render(report())
    assert 'id="history"' not in plain
    assert 'class="strip"' not in plain


def test_a_history_costs_little_room_on_a_large_page():
    loaders = [loader(f"t.py::test_{number}", tensors=[]) for number in range(130)]
    small = report(*loaders)
    now = with_history(small, [report(*loaders, header=header(started=f"2026-11-{day:02}")) for day in range(1, 14)])
    assert len(now.earlier) == 13
    assert len(render(now)) - len(render(small)) < 300_000


def test_ids_are_unique_and_links_have_targets(page):
    ids = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    links = [a["href"][1:] for tag, a in page.elements if tag == "a" and (a["href"] or "").startswith("#")]
    assert set(links) <= set(ids)


def headline(*loaders: LoaderRecord, **facts: object) -> tuple[str, str, str]:
    return build_view(report(*loaders, **facts)).verdict


def loader_with(**kinds: str) -> LoaderRecord:
    return loader(checks={name: check(name, kind) for name, kind in kinds.items()})


def loader_with_all(kind: str) -> LoaderRecord:
    return loader_with(**{one.check: kind for one in factory.CATALOGUE})


def test_the_verdict_accounts_for_every_check():
    total = len(factory.CATALOGUE)
    account = f"{total} of {total} checks accounted for"
    assert headline(loader()) == ("passed", "All judged checks passed", f"1 loader · {account}")
    assert headline(loader_with(no_meta_params="failed", loss_parity="error"))[:2] == (
        "failed",
        "1 check failed, 1 error: tests/test_llama.py::test_llama",
    )
    assert headline(loader_with(no_meta_params="not run", loss_parity="not selected")) == (
        "failed",
        "1 not run: no_meta_params in tests/test_llama.py::test_llama",
        f"in 1 of 1 loader · {total - 2} of {total} checks accounted for",
    )
    assert headline(factory.raised())[1] == "1 loader crashed: tests/test_llama.py::test_llama"
    assert headline(loader_with(no_meta_params="failed"), loader_with(loss_parity="failed"))[1] == "2 checks failed"
    assert headline(loader_with_all("not selected"))[:2] == ("empty", "Nothing was judged")
    assert headline(replace(loader_with_all("not declared"), error="it raised"))[0] == "failed"
    assert build_view(replace(report(), loaders=())).verdict == ("empty", "Nothing was judged", "no loader was judged")
    assert headline(loader(), complete=False)[:2] == ("incomplete", "Incomplete report")
    assert headline(loader_with_all("failed"), complete=False)[::2] == (
        "incomplete",
        f"{account} · {total} checks failed so far",
    )


def test_every_kind_has_a_glyph_of_its_own():
    assert set(GLYPHS) == set(STATUSES) - {"skipped"} | set(SKIPS)
    assert len(set(GLYPHS.values())) == len(GLYPHS)


def test_failing_loaders_come_first_and_own_checks_have_a_column():
    own = CheckRecord("ours", "failed", findings=(finding(None),))
    last = replace(loader("b.py::b"), checks=(own,))
    page = build_view(report(loader("a.py::a"), last))
    assert [one.record.loader for one in page.loaders] == ["b.py::b", "a.py::a"]
    assert page.families[-1][0] == "others"
    assert [column.check for column in page.families[-1][1]] == ["ours"]


def test_the_titles_of_a_loader_in_two_worlds_differ():
    titles = [one.title for one in build_view(report(loader(), loader(mesh={"dp_shard": 2}))).loaders]
    assert titles == [f"{factory.LLAMA}, world of 4 (gloo on cpu)", f"{factory.LLAMA}, world of 2 (gloo on cpu)"]


def test_checks_with_the_same_error_share_an_article():
    error = {one: check(one, "error", reason="rank 1 raised OSError") for one in ("no_meta_params", "no_meta_buffers")}
    other = {
        "loss_parity": check("loss_parity", "error", reason="rank 0 hangs"),
        "grad_parity": check("grad_parity", "failed"),
    }
    (one,) = build_view(report(loader(checks=error | other))).loaders
    assert [[check.record.check for check in bundle] for bundle in one.bundles] == [
        ["no_meta_params", "no_meta_buffers"],
        ["grad_parity"],
        ["loss_parity"],
    ]
    assert "rank 1 raised OSError" in Reader(render(report(loader(checks=error)))).text


def test_findings_by_cause():
    found = [
        finding("layers.0.weight", 0, 1, cause="a", detail="here"),
        finding("other", 0, cause="b", remedy="do"),
        finding("layers.1.weight", 0, 1, cause="a"),
        finding("layers.0.weight", 2, cause="a"),
        finding(None, cause="a"),
    ]
    first, second = CheckView("", check("grad_parity", "failed", found), "").causes
    assert (first[0], *second[:2]) == ("a", "b", "do")
    assert [(tuple(fold_names(line.names)), line.ranks) for line in first[2]] == [
        (("layers.{0..1}.weight",), (0, 1)),
        (("layers.0.weight",), (2,)),
        ((), (0, 1, 2, 3)),
    ]
    assert first[2][0].details == (("layers.0.weight", "here"),)


def test_where_it_starts_is_said_once_for_a_check():
    found = [finding(name, origin="attn.q agrees, attn.k does not") for name in ("a", "b")]
    text = Reader(render(report(loader(checks={"grad_parity": check("grad_parity", "failed", found)})))).text
    assert text.count("where it starts: attn.q agrees, attn.k does not") == 2, "once on the card of its cause"


def drawn(*tensors: TensorRecord, mesh=None, **checks: CheckRecord) -> dict[str, Layout]:
    return {one.names[0]: one for one in layouts(loader(mesh=mesh, checks=checks, tensors=tensors))}


def layouts(record: LoaderRecord) -> tuple[Layout, ...]:
    return group_layouts(record, drawn_mesh(record.world, own_meshes(record)))


def held(layout: Layout) -> list[tuple[tuple[int, ...], str, str]]:
    return [(one.ranks, one.state, one.text) for one in layout.held]


def test_tensors_with_the_same_layout_share_a_drawing():
    mesh = {"dp_shard": 2}
    layers = [tensor(f"layers.{layer}.weight", (8, 4), mesh, ("S(0)",)) for layer in range(3)]
    marked = {"params_equal_reference": check("params_equal_reference", "failed", [finding("layers.1.weight", 1)])}
    assert "layers.{0..2}.weight" in Reader(render(report(loader(mesh=mesh, tensors=layers)))).text
    separated = drawn(*layers, mesh=mesh, **marked)
    assert [one.names for one in separated.values()] == [("layers.1.weight",), ("layers.0.weight", "layers.2.weight")]
    assert held(separated["layers.1.weight"]) == [
        ((0,), "shard", "dim 0: 0-3 of 8"),
        ((1,), "wrong", "dim 0: 4-7 of 8"),
    ]


@pytest.mark.parametrize(
    ("shape", "mesh", "placements", "expected"),
    [
        ((5, 2), {"dp_shard": 2}, ("S(0)",), [((0,), "dim 0: 0-2 of 5"), ((1,), "dim 0: 3-4 of 5")]),
        ((1,), {"dp_shard": 2}, ("S(0)",), [((0,), "whole tensor"), ((1,), "empty shard")]),
        (
            (4, 2),
            {"dp_replicate": 2, "dp_shard": 2},
            ("R", "S(0)"),
            [((0, 2), "dim 0: 0-1 of 4"), ((1, 3), "dim 0: 2-3 of 4")],
        ),
        (
            (8, 4),
            {"dp_shard": 2, "tp": 2},
            ("_S(0,2)", "S(0)"),
            [
                ((0,), "dim 0: 0-1 of 8"),
                ((1,), "dim 0: 4-5 of 8"),
                ((2,), "dim 0: 2-3 of 8"),
                ((3,), "dim 0: 6-7 of 8"),
            ],
        ),
        (
            (4, 4),
            {"dp_shard": 2, "tp": 2},
            ("S(0)", "S(1)"),
            [
                ((0,), "dim 0: 0-1 of 4, dim 1: 0-1 of 4"),
                ((1,), "dim 0: 0-1 of 4, dim 1: 2-3 of 4"),
                ((2,), "dim 0: 2-3 of 4, dim 1: 0-1 of 4"),
                ((3,), "dim 0: 2-3 of 4, dim 1: 2-3 of 4"),
            ],
        ),
        ((), {"dp_shard": 2}, None, [((0, 1), "whole tensor")]),
        ((0, 4), {"dp_shard": 2}, None, [((0, 1), "whole tensor, which has no elements")]),
    ],
)
def test_the_text_of_a_layout(shape, mesh, placements, expected):
    layout = drawn(tensor("a", shape, mesh, placements), mesh=mesh)["a"]
    assert [(ranks, text) for ranks, _, text in held(layout)] == expected
    assert layout.description.count("rank") == len(expected)


def test_runs_of_a_flat_tensor_and_of_separate_rows():
    flat = TensorRecord(
        "a", "parameter", (4, 4), (16,), (Piece((0,), (((3, 9),),), dtype="float32", device="cpu"),), flat=True
    )
    many = Piece((0, 1), (tuple((start, start + 1) for start in range(0, 12, 2)),), dtype="float32", device="cpu")
    separate = TensorRecord("b", "parameter", (12,), (12,), (many,))
    found = drawn(flat, separate, mesh={"dp_shard": 2})
    assert held(found["a"]) == [((0,), "shard", "elements 3-8 of 16"), ((1,), "nothing", "does not have it")]
    assert held(found["b"]) == [((0, 1), "shard", "dim 0: 0, 2, 4, 6 and 2 more runs of 12")]
    ((state, path),) = found["b"].picture.fills
    assert (state, path.count("M")) == ("shard", 12)


def test_states_of_tensors_with_problems():
    mesh = {"dp_shard": 2}
    whole = tensor("whole", (4, 4), mesh)
    never = factory.poisoned(tensor("never", (4, 4), mesh, ("S(0)",)))
    meta = tensor("meta", (4, 4), mesh)
    meta = replace(meta, pieces=tuple(replace(piece, device="meta") for piece in meta.pieces))
    named = {"nothing_left_unsharded": check("nothing_left_unsharded", "failed", [finding("whole", 0, 1)])}
    states = {name: one.states for name, one in drawn(whole, never, meta, mesh=mesh, **named).items()}
    assert states == {"whole": ("unsharded",), "never": ("uninitialised",), "meta": ("meta",)}
    assert drawn(whole, mesh=mesh)["whole"].states == ("whole",)
    assert not drawn(whole, mesh=mesh)["whole"].has_problem


def test_an_unknown_part_is_not_drawn():
    one = replace(tensor("a", (4, 4), {"dp_shard": 2}), pieces=(Piece((0, 7), (), "float32"),))
    found = drawn(one, mesh={"dp_shard": 2})["a"]
    assert held(found) == [((0, 7), "nothing", "unknown part"), ((1,), "nothing", "does not have it")]
    assert found.picture.fills == ()


def test_boxes_are_arranged_as_the_mesh():
    def places(mesh: dict[str, int]) -> tuple[int, int]:
        picture = drawn(tensor("a", (4, 4), mesh), mesh=mesh)["a"].picture
        return len({x for x, _, _ in picture.labels}), len({y for _, y, _ in picture.labels})

    assert places({"dp_shard": 4}) == (4, 1)
    assert places({"dp_replicate": 2, "dp_shard": 3}) == (3, 2)
    assert places({"dp_shard": 12}) == (8, 2)
    assert places({"pp": 2, "dp_shard": 2, "tp": 2}) == (2, 4)
    assert places({"dp_replicate": 1, "dp_shard": 32}) == (8, 4)


def test_the_mesh_that_the_loader_made_is_named_and_drawn():
    def made(mesh: dict[str, int], on: MeshFacts) -> LoaderRecord:
        return loader(mesh=mesh, tensors=[replace(tensor("a", (4, 4), mesh, ("S(0)",)), mesh=on)])

    own = made({"dp_shard": 4}, MeshFacts(("replicas", None), (2, 2), (0, 0)))
    assert "mesh dp_shard=4; the loader made replicas=2" in Reader(render(report(own))).text
    assert "as the mesh: unnamed to the right, replicas down" in Reader(render(report(own))).text
    assert len({y for _, y, _ in layouts(own)[0].picture.labels}) == 2
    pairs = made({"dp_shard": 4}, MeshFacts(("pairs",), (2,), (0,)))
    assert "the loader made pairs=2" in Reader(render(report(pairs))).text
    assert len({y for _, y, _ in layouts(pairs)[0].picture.labels}) == 1
    part = made({"dp_replicate": 2, "dp_shard": 2}, MeshFacts(("dp_shard",), (2,), (0,)))
    assert "the loader made" not in Reader(render(report(part))).text


def test_what_could_be_checked_in_addition_is_said_once_for_each_reason():
    def passing(name: str, **reasons: str) -> LoaderRecord:
        skipped = {one: check(one, "not declared", reason=reason) for one, reason in reasons.items()}
        return loader(name, checks=skipped | {"loss_parity": check("loss_parity", "partly checked", reason="part")})

    data = {"batches_follow_the_mesh": "no data", "batches_resume": "no data"}
    page = build_view(report(passing("a.py::a", **data), passing("a.py::b", drawn_weights_are_one_draw="no draw")))
    assert [(one.reason, [each.record.check for each in one.checks], one.loaders) for one in page.unchecked] == [
        ("part", ["loss_parity"], ("a", "b")),
        ("no data", ["batches_follow_the_mesh", "batches_resume"], ("a",)),
        ("no draw", ["drawn_weights_are_one_draw"], ("b",)),
    ]
    text = Reader(render(page.report)).text
    assert "no data in a batches_follow_the_mesh" in text
    assert text.index("What could be checked in addition") < text.index("Loaders and checks"), "as none failed"
    failing = Reader(render(report(passing("a.py::a", batches_resume="no data"), factory.broken_loader()))).text
    titles = ("What broke", "All checks", "What could be checked in addition")
    assert sorted(titles, key=failing.index) == list(titles)
    assert "What could be checked in addition" not in Reader(render(report(loader()))).text, "all was checked"


def test_what_differs_comes_first_among_what_did_not_fail():
    differs = {"loss_parity": check("loss_parity", "differs", reason="0.5 apart")}
    page = build_view(report(loader("a.py::a"), loader("b.py::b", checks=differs)))
    assert page.verdict[:2] == ("differs", "loss_parity differs, no check failed")
    assert build_view(replace(page.report, exit_status=1)).verdict[0] == "otherwise", "another test failed"
    assert [one.title for one in page.loaders] == ["b.py::b", "a.py::a"]
    assert page.unchecked == []
    text = Reader(render(page.report)).text
    assert "0.5 apart in b.py::b loss_parity" in text
    assert "All judged checks passed" not in text
    failing = Reader(render(report(loader(checks=differs), factory.broken_loader()))).text
    titles = ("What broke", "What differs", "Loaders and checks")
    assert sorted(titles, key=failing.index) == list(titles)


def test_the_key_of_the_layouts_has_what_is_drawn():
    passing, broken = build_view(report()).clean[0], build_view(report()).failing[0]
    assert passing.states == ("shard", "whole")
    assert broken.states == ("shard", "wrong", "unsharded", "uninitialised")


def test_losses_that_are_nan_or_infinite():
    record = loader()
    nan = Curves((4.5, float("nan")), ((4.5, float("inf")),), (4.5, 4.5))
    page = render(report(replace(record, summary=replace(record.summary, losses=nan))))
    assert re.findall(r'<td class="n difference">(.*?)</td>', page) == ["0", "inf"]
    nothing = Curves((float("nan"),) * 2, ((float("nan"),) * 2,), ())
    page = render(report(replace(record, summary=replace(record.summary, losses=nothing))))
    assert Reader(page).text.count("nan") == 4


def test_a_loader_that_crashed_before_any_check():
    bare = LoaderRecord("a.py::a", UNKNOWN, (), error="rank 1 raised OSError")
    page = Reader(render(report(bare)))
    assert "This loader crashed: rank 1 raised OSError" in page.text
    assert "1 crashed (none of its checks was judged)" in page.text
    assert "1 loader crashed" in page.text
    assert "world unknown: none of its items ran" in page.text


@pytest.mark.parametrize(
    ("causes", "since", "mark"),
    [
        ({"a": "one"}, "broken since {moment}", "h-old"),
        ({"b": "two"}, "new cause; it failed for another one since {moment}", ""),
        ({"a": "one", "b": "two"}, "broken since {moment}; new: b", "h-old"),
    ],
)
def test_a_check_that_failed_before_for_another_cause_is_not_marked_as_old(causes, since, mark):
    def run(found: dict[str, str], **facts: object) -> Report:
        findings = [finding(name, cause=cause) for name, cause in found.items()]
        return report(loader(checks={"loss_parity": check("loss_parity", "failed", findings)}), **facts)

    before = run({"a": "one"}, header=header(started="2026-11-19T21:04:00Z"))
    now = with_history(run(causes), [before])
    view = build_view(now).loaders[0].checks["loss_parity"]
    assert (view.history.since, view.mark.strip()) == (since.format(moment="2026-11-19 21:04:00 (0123abc+)"), mark)


def test_numbers_are_abbreviated():
    assert [describe_time(time) for time in ("2026-11-20T22:30:00Z", "2026-11-20T22:30:05+00:00", "<b>")] == [
        "2026-11-20 22:30:00 UTC",
        "2026-11-20 22:30:05 UTC",
        "<b>",
    ]
    assert [describe_duration(seconds) for seconds in (0.0123, 3.44, 320)] == ["12 ms", "3.4 s", "5 min 20 s"]
    # Values that round up to the next unit are written in it.
    assert [describe_duration(seconds) for seconds in (0.9996, 59.97, 119.7)] == ["1.0 s", "1 min 0 s", "2 min 0 s"]


def test_a_usual_page_is_small(tmp_path):
    write_page(report(), tmp_path / "index.html")
    assert (tmp_path / "index.html").stat().st_size < 500_000


def test_the_pictures_in_the_docs_are_small():
    pictures = Path(__file__).parents[2] / "docs" / "images"
    sizes = {one.name: one.stat().st_size for one in pictures.glob("report*.png")}
    many = {"report-130.png", "report-130-matrix.png", "report-1000.png"}
    assert set(sizes) == {"report.png", "report-tensors.png", *many}
    assert max(sizes.values()) < 300_000


def written(folder: Path, given: Report) -> Path:
    path = folder / "report.json"
    path.write_text(json.dumps(to_plain(given), allow_nan=False))
    return path


@pytest.mark.parametrize("name", EVERY)
def test_the_page_is_rendered_again_from_the_report(tmp_path, capsys, name):
    given = EVERY[name]()
    assert main([str(written(tmp_path, given))]) is None
    assert capsys.readouterr().out == f"{tmp_path / 'index.html'}\n"
    write_page(from_plain(Report, to_plain(given)), tmp_path / "at-once.html")  # whose texts are printable
    assert (tmp_path / "index.html").read_bytes() == (tmp_path / "at-once.html").read_bytes()


def test_a_file_that_is_not_a_report_is_refused_in_one_line(tmp_path):
    path = written(tmp_path, report())
    whole = path.read_text()

    def message(text: str | bytes) -> str:
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        error = main([str(path)])
        assert error is not None
        assert error.startswith(f"{path}: ")
        assert "\n" not in error
        return error.removeprefix(f"{path}: ")

    for end in (0, 1, len(whole) // 3, len(whole) // 2, len(whole.rstrip()) - 1):
        assert message(whole[:end]).startswith("not JSON, or truncated: ")
    for text in ("<html>", b"\xff\x00\x80", "[" * 100_000):
        assert message(text).startswith("not JSON, or truncated: ")
    remedy = "pass a report.json that --fsdp-report has written"
    assert message("{").endswith(f" (char 1); {remedy}")
    other = f"not a report of pytest-fsdp-meta; {remedy}"
    assert message("[1]") == message('{"schema": "2"}') == other
    again = "write the report again with --fsdp-report"
    assert message('{"schema": 99}') == (
        f"a report of schema 99, but this version reads schema 2; upgrade pytest-fsdp-meta, or {again}"
    )
    assert message('{"schema": 0}') == f"a report of schema 0, but this version reads schema 2; {again}"
    assert message('{"schema": 2}') == f"Report: 'header' is missing; {remedy}"
    assert "loaders[0].checks" in message(whole.replace('"status": "passed"', '"status": 7', 1))
    sizes = {
        "a world of 10000000, but at most 1024 ranks run, or 131072 are simulated": {"size": 10**7, "mesh": []},
        "a world of 1025, but at most 1024 ranks run": {"size": 1025, "mesh": [["dp_shard", 1025]]},
        "a world of -1, but": {"size": -1},
        "the mesh dp_shard=4 does not make a world of 2": {"mesh": [["dp_shard", 4]]},
        "the mesh a=-1 x b=-2 does not make a world of 2": {"mesh": [["a", -1], ["b", -2]]},
        "ranks 0, 2 cannot be of a world of 2": {"simulated": [0, 2]},
    }
    for problem, world in sizes.items():
        data = json.loads(whole)
        data["loaders"][0]["world"] |= {"size": 2, "mesh": [["dp_shard", 2]]} | world
        assert message(json.dumps(data)).startswith(f"Report.loaders[0].world: {problem}")
    assert message(json.dumps(json.loads(whole) | {"exit_status": 10**30})).startswith(
        "Report.exit_status: the number is too large"
    )
    assert not (tmp_path / "index.html").exists()
    assert main([str(tmp_path / "none.json")]) == f"{tmp_path / 'none.json'}: No such file or directory"
    assert str(main([])).startswith("usage:")
    assert str(main(["--help"])).startswith("usage:")


def test_from_the_command_line_without_torch(tmp_path):
    path = written(tmp_path, report())
    code = (
        "import runpy, sys; sys.argv[1:] = [sys.argv[1]]\n"
        "try: runpy.run_module('pytest_fsdp_meta.reports.page', run_name='__main__')\n"
        "except SystemExit as end: assert not end.code, end.code\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, str(path)], check=True, capture_output=True, timeout=120)
    assert EMBEDDING in (tmp_path / "index.html").read_text()
    assert ROTARY in (tmp_path / "index.html").read_text()


def test_a_run_leaves_its_page(project: Project):
    project.loaders(
        """
        @fsdp_conformance(only=["no_meta_params", "nothing_left_unsharded"])
        def test_whole(fsdp):
            note("incomplete" if "Incomplete report" in open("out/index.html").read() else "stale")
            return build()
        """
    )
    path = project.write("out/index.html", render(report()))
    result = project.run("--fsdp-report=out")
    assert set(project.notes) == {"incomplete"}
    page = path.read_bytes()
    parsed = Reader(page.decode())
    assert "in 1 of 1 loader" in parsed.text
    assert "pytest exited with 1" in parsed.text
    assert [a["aria-label"] for tag, a in parsed.elements if a.get("class") == "mesh"] == [
        "ranks 0, 1: whole tensor"
    ] * 2
    assert [a["class"] for tag, a in parsed.elements if tag == "path" and a.get("class") == "f-unsharded"]
    assert main([str(path.with_name("report.json"))]) is None
    assert path.read_bytes() == page
    assert [one.name for one in path.parent.glob(".*")] == [".lock"], "no temporary file"
    assert result.ret == 1


def test_tied_tensors_in_one_drawing_are_named_once():
    [tied] = [one for one in build_view(report(loader())).loaders[0].layouts if one.tensor.tied]
    assert (tied.names, tied.tied) == ((factory.EMBEDDING, "lm_head.weight"), ())
    apart = replace(tied, names=(factory.EMBEDDING,))
    assert apart.tied == ("lm_head.weight",)


def test_a_layout_that_a_finding_names_is_not_called_wrong():
    found = [factory.finding(factory.EMBEDDING, 0, 1)]
    page = Reader(render(report(loader(checks={"grad_parity": check("grad_parity", "failed", found)}))))
    tags = [a["class"] for tag, a in page.elements if "f-wrong" in a.get("class", "") and tag == "span"]
    assert tags == ["tag f-wrong"]
    assert "named by a finding grad_parity" in page.text
