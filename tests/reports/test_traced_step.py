"""The traced step in a report and on its page: what agrees, what departs, and where that begins."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from itertools import chain

import pytest

from pytest_fsdp_meta.checks.tracing.facts import ModuleFacts, RankTrace, TracedCall
from pytest_fsdp_meta.evidence.codec import from_plain, to_plain
from pytest_fsdp_meta.reports.io import read_report
from pytest_fsdp_meta.reports.page import render
from pytest_fsdp_meta.reports.page.traced import PhaseView, cells_of, describe_multiple, step_view
from pytest_fsdp_meta.reports.schema import TracedPhase, TracedRow, TracedStep
from pytest_fsdp_meta.reports.summary import MOST_COLUMNS, NEAR, record_step, summarise
from tests.checks.evidence_factory import healthy
from tests.conftest import Project
from tests.reports.report_factory import loader, report, traced_step
from tests.world_help import ROOT

NOISE = 1e-7
LEAVES = {"attn": ("q", "k", "v", "o"), "mlp": ("gate", "act", "up", "down")}
Call = tuple[str, str]


def decoder(blocks: int) -> list[Call]:
    """Return the calls of a forward, with ten modules in each block, besides itself."""
    found: list[Call] = [("input", ""), ("input", "embed"), ("output", "embed")]
    for block in (f"layers.{number}" for number in range(blocks)):
        found.append(("input", block))
        for part, leaves in LEAVES.items():
            found.append(("input", f"{block}.{part}"))
            found += chain.from_iterable(
                (("input", f"{block}.{part}.{leaf}"), ("output", f"{block}.{part}.{leaf}")) for leaf in leaves
            )
            found.append(("output", f"{block}.{part}"))
        found.append(("output", block))
    return [*found, ("input", "head"), ("output", "head"), ("output", "")]


def traces(
    first: Mapping[int, Call], ranks: int = 2, blocks: int = 4, off: float = 0.1, **also: Mapping[Call, float]
) -> list[RankTrace]:
    """Return traces of ranks that depart from a call on; ``also`` has other distances, for "rank0" and so on."""
    forward = decoder(blocks)
    backward = [("gradient", name) for stage, name in reversed(forward) if stage == "output"]

    def trace(rank: int) -> RankTrace:
        calls, start = [*forward, *backward], first.get(rank)
        begin = calls.index(start) if start else len(calls)
        made = [
            TracedCall(
                *one,
                compared=1,
                noise=NOISE,
                distance=0.0 if index < begin else off,
                caller=one[1].rpartition(".")[0] if one[0] == "input" and one[1] else None,
            )
            for index, one in enumerate(calls)
        ]
        others = also.get(f"rank{rank}", {})
        made = [replace(one, distance=others.get((one.stage, one.module), one.distance)) for one in made]
        kinds = {name: ModuleFacts(name.rpartition(".")[2].title()) for _, name in forward}
        return RankTrace((rank, ranks), tuple(made[: len(forward)]), tuple(made[len(forward) :]), kinds)

    return [trace(rank) for rank in range(ranks)]


def recorded(made: list[RankTrace]) -> TracedStep:
    step = record_step(made)
    assert step is not None
    assert from_plain(TracedStep, to_plain(step)) == step
    return step


def briefly(phase: TracedPhase) -> list[tuple[str, int, tuple[str, ...]]]:
    return [(row.module, row.calls, row.states) for row in phase.rows]


ACT = ("output", "layers.2.mlp.act")


def test_calls_around_the_first_that_departs_have_rows_of_their_own():
    step = recorded(traces({0: ACT, 1: ACT}))
    assert (step.module, step.phase, step.ranks) == ("layers.2.mlp.act", "forward", ((0, 1),))
    assert step.origin.startswith("layers.2.mlp.act (Act), forward, ranks 0, 1: the inputs agree, the output is off by")
    before, *alone, after = step.forward.rows
    assert (before.module, before.until, before.states, before.times) == (
        "embed",
        "layers.1.mlp.down",
        ("agrees",),
        (21,),
    )
    assert (before.calls, before.kind) == (21, "")
    assert step.forward.first == TracedRow("output", "layers.2.mlp.act", ("departs",), (1e6,), "Act")
    assert alone.index(step.forward.first) == len(alone) - NEAR - 1
    assert all(row.states == ("agrees",) and row.calls == 1 for row in alone[: -NEAR - 1])
    assert all(row.states == ("departs",) and row.calls == 1 for row in alone[-NEAR:])
    assert (after.until, after.states, after.times) == ("", ("departs",), (after.calls,))
    # The backward is off as a whole because the forward is.
    assert briefly(step.backward)[:3] == [(name, 1, ("departs",)) for name in ("", "head", "layers.3")]
    assert [row.calls for row in step.backward.rows[3:]] == [44]


def test_a_later_step_says_which():
    later = [replace(one, step=2, backward=()) for one in traces({0: ACT, 1: ACT})]
    step = recorded(later)
    assert step.step == 2
    assert "batch of step 2" in step.origin
    assert step_view(step).place == "layers.2.mlp.act, forward; batch of step 2"
    assert [phase.name for phase in step_view(step).phases] == ["forward"]


def test_what_agrees_is_one_row():
    step = recorded(traces({}))
    assert (step.module, step.phase, step.origin) == (None, "", "")
    assert briefly(step.forward) == [("embed", 47, ("agrees",))]
    assert briefly(step.backward) == [("", 47, ("agrees",))]
    assert (step_view(step).place, step_view(step).problem.split(",")[0]) == ("nowhere", "No call departs")
    assert step_view(step).agrees


def test_inputs_have_rows_only_where_they_say_more_than_outputs():
    """The input at which a place is named, and one that departs although the output agrees."""
    step = recorded(traces({0: ("input", "layers.1.mlp.up")}, ranks=1))
    assert step.module == "layers.1.mlp"
    assert [row.module for row in step.forward.rows if row.stage == "input"] == ["layers.1.mlp.up"]
    odd = {("input", "layers.3.mlp"): 0.1}
    step = recorded(traces({0: ("gradient", "layers.1.mlp.up")}, ranks=1, rank0=odd))
    assert [(row.stage, row.module) for row in step.forward.rows if row.states == ("departs",)] == [
        ("input", "layers.3.mlp")
    ]


def test_a_place_in_the_backward():
    step = recorded(traces(dict.fromkeys((0, 1), ("gradient", "layers.1.mlp.up"))))
    assert (step.module, step.phase) == ("layers.1.mlp", "backward")
    assert briefly(step.forward) == [("embed", 47, ("agrees",))]
    first = step.backward.first
    assert first is not None
    assert (first.stage, first.module) == ("gradient", "layers.1.mlp.up")
    [forward, backward] = step_view(step).phases
    assert forward.result == "nothing departs"
    assert backward.result == "the first that departs is the gradient of the output of layers.1.mlp.up"
    assert marks(backward) == {"layers.1.mlp.up": "starts here, inside layers.1.mlp"}


def test_ranks_with_the_same_states_share_a_column():
    later = ("output", "layers.3.mlp.act")
    step = recorded(traces({3: ACT, 4: later, 5: later}, ranks=6))
    assert step.ranks == ((0, 1, 2), (3,), (4, 5))
    rows = {(row.module, row.calls): row.states for row in step.forward.rows}
    assert rows["layers.2.mlp.act", 1] == ("agrees", "departs", "agrees")
    assert rows["layers.3.mlp.act", 1] == ("agrees", "departs", "departs")
    assert rows["layers.3.mlp.gate", 1] == ("agrees", "departs", "agrees")


def test_many_ranks_with_different_states_share_columns_if_they_begin_to_depart_at_the_same_calls():
    names = [name for stage, name in decoder(4) if stage == "output" and name.startswith("layers.0")]
    little = {f"rank{rank}": {("output", names[rank]): 5 * NOISE} for rank in range(10)}
    assert len(recorded(traces({}, ranks=MOST_COLUMNS, **little)).ranks) == MOST_COLUMNS
    step = recorded(traces({4: ACT}, ranks=10, **little))
    assert step.ranks == ((0, 1, 2, 3, 5, 6, 7, 8, 9), (4,))
    row = next(row for row in step.forward.rows if row.module == names[0])
    assert (row.states, row.distances) == (("in between", "agrees"), (5.0, 0.0))
    every = recorded(traces({rank: ("output", names[rank]) for rank in range(9)}, ranks=12))
    assert every.ranks == (tuple(range(9)), (9, 10, 11))


@pytest.mark.parametrize("scattered", [False, True])
def test_a_large_model_on_many_ranks_takes_little_of_the_report(scattered):
    """500 modules on 8 ranks, each rank departs elsewhere, and some calls are in between."""
    outputs = [one for one in decoder(45) if one[0] == "output"]
    assert len(outputs) >= 495
    little = {f"rank{rank}": dict.fromkeys(outputs[rank :: 7 + rank], 5 * NOISE) for rank in range(8) if scattered}
    step = recorded(traces({rank: outputs[50 * rank + 7] for rank in range(8)}, ranks=8, blocks=45, **little))
    assert len(step.ranks) == 8
    assert len(json.dumps(to_plain(step), indent=1)) < 50_000
    assert sum(row.calls for row in step.forward.rows) >= len(outputs)


def test_steps_that_were_not_traced_or_not_alike_have_no_record():
    right = traces({})
    assert record_step(()) is None
    assert record_step([replace(right[0], problem="it refuses"), right[1]]) is None
    assert record_step([right[0], replace(right[1], forward=right[1].forward[1:])]) is None
    alone = record_step([right[0], replace(right[1], backward=right[1].backward[1:])])
    assert alone is not None
    assert alone.backward.rows == ()


def test_the_summary_of_a_loader_has_the_step():
    evidence = healthy()
    assert summarise(evidence).traced is None
    made = tuple(traces({0: ACT, 1: ACT}))
    assert summarise(replace(evidence, traces=made)).traced == record_step(made)
    assert "traces" not in summarise(replace(evidence, traces=made)).unavailable


def test_why_a_step_was_not_traced_is_told():
    made, evidence = traces({}), healthy()
    refused = [made[0], replace(made[1], problem="it refuses")]
    assert summarise(replace(evidence, traces=tuple(refused))).unavailable["traces"] == "it refuses"
    others = [made[0], replace(made[1], forward=made[1].forward[1:])]
    assert summarise(replace(evidence, traces=tuple(others))).unavailable["traces"] == "the ranks run different modules"


def marks(phase: PhaseView) -> dict[str, str]:
    return {phase.first.module: phase.here} if phase.first is not None and phase.here else {}


def cells(phase: PhaseView, step: TracedStep) -> list[list[str]]:
    return [[f"{cell.state}: {cell.text} {cell.verb}" for cell in cells_of(row, step)] for row in phase.rows]


def test_the_page_marks_the_place_and_counts_calls():
    view = step_view(traced_step())
    assert view.place == "model.layers.2.mlp.act_fn, forward"
    forward, backward = view.phases
    assert marks(forward) == {"model.layers.2.mlp.act_fn": "starts here"}
    assert marks(backward) == {}
    assert cells(forward, view.record)[:4] == [
        ["agrees: all agree", "agrees: all agree"],
        ["not compared:  not compared", "in between: 5 in between"],
        ["agrees:  agrees", "agrees:  agrees"],
        ["agrees:  agrees", "departs: 540k departs"],
    ]
    assert cells(backward, view.record)[1] == ["agrees: all agree", "departs: 60 of 97 depart"]
    page = render(report())
    assert re.findall(r'"place depth-(\d)"', page)[:6] == ["4", "5", "5", "5", "4", "0"]
    assert page.count('<span class="tag">input</span>') == 1


def test_calls_that_were_not_compared_do_not_hide_those_that_agree():
    folded = TracedRow("output", "embed", ("not compared",), (0.3,), calls=9, until="head", times=(2,))
    again = TracedRow("output", "head", ("departs",), (None,), turn=2)
    step = TracedStep(((0,),), TracedPhase((folded, again)), TracedPhase())
    view = step_view(step)
    assert cells(view.phases[0], step) == [["agrees: 7 of 9 agree"], ["departs:  departs"]]
    assert (view.place, marks(view.phases[0])) == ("no module is named", {"head": "first to depart"})
    assert "beyond doubt" in view.problem


def test_multiples_are_short():
    multiples = (0.52, 5.13, 12.4, 99.6, 999, 54321, 1.21e6, float("inf"))
    assert [describe_multiple(one) for one in multiples] == ["0.52", "5.1", "12", "100", "1k", "54k", "1.2M", "∞"]


def test_a_page_without_a_traced_step_has_no_such_part():
    assert "Where the step departs" in render(report())
    assert "Where the step departs" not in render(report(loader()))


def test_a_loader_with_a_defect_in_one_module_gets_its_picture(project: Project, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    project.loaders(
        """
        from functools import partial
        from fixtures import localised

        @fsdp_conformance(world_size=2, only=["loss_parity"])
        def test_decoder(fsdp):
            return localised.load(fsdp, localised.MISPLACED["other_activation"].break_it)
        """
    )
    result = project.run("--fsdp-report=out")
    assert result.ret == 1
    assert "where it starts: layers.1.mlp.act (GELU, torch/nn/modules/activation.py:" in result.stdout.str()
    [record] = read_report(project.path / "out" / "report.json").loaders
    assert record.summary is not None
    step = record.summary.traced
    assert step is not None
    assert (step.module, step.phase, step.ranks) == ("layers.1.mlp.act", "forward", ((0, 1),))
    check = next(check for check in record.checks if check.status == "failed")
    assert {finding.origin for finding in check.findings} == {f"{step.origin}; a world of one rank fails as well"}
    first = step.forward.first
    assert first is not None
    assert (first.stage, first.module, first.kind) == ("output", "layers.1.mlp.act", "GELU")
    page = (project.path / "out" / "index.html").read_text()
    [row] = re.findall(r'<tr class="call starts">.*?</tr>', page, re.DOTALL)
    text = re.sub(r"\s+", " ", re.sub(r"<[^>]*>", "", row))
    assert re.fullmatch(r"▶ starts here layers.1.mlp.act GELU✕ \d+k\S departs", text.strip())
