"""Some of the architectures that ``make field`` judges, each with a feature that the others lack."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from conformance import field_results
from conformance.field import LOADERS, ResultsFile, Sweep
from conformance.field_page import Run, render_overview, render_page
from conformance.field_results import FINDINGS, RAISING, UNTRAINABLE, WITHOUT_CHECKPOINT, ArchitectureResult
from fixtures.architectures import load_plain, load_transformers, names_of, names_with_tp_plan, save_plain
from fixtures.releases import needs_fsdp_size
from pytest_fsdp_meta import fsdp_conformance
from pytest_fsdp_meta.catalogue import built_in
from pytest_fsdp_meta.transformers import CAUSAL_LMS

pytestmark = pytest.mark.nightly
REPRESENTATIVE = {
    "deepseek_v3": "latent attention, experts",
    "minimax": "linear attention, with decay tables that are larger than all weights",
    "mamba2": "a state space model",
    "gemma4_text": "tied weights, scale buffers, gradients that amplify a small drift of the parameters 300 times",
}


@pytest.fixture(scope="session")
def architecture(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_plain(request.param, tmp_path_factory.mktemp("architecture") / request.param)


@needs_fsdp_size
@pytest.mark.parametrize("architecture", REPRESENTATIVE, indirect=True)
@fsdp_conformance(world_size=2)
def test_loaded_by_transformers(fsdp, architecture):
    return load_transformers(fsdp, architecture)


@pytest.mark.parametrize("architecture", REPRESENTATIVE, indirect=True)
@fsdp_conformance(world_size=2)
def test_loaded_plainly(fsdp, architecture):
    return load_plain(fsdp, architecture)


def test_unexpected_results():
    mup = {"no_uninitialized_memory": ["mup_vector"]}
    assert list(ArchitectureResult("falcon_h1", findings=mup).unexpected("transformers")) == []
    assert list(ArchitectureResult("falcon_h1", findings=mup).unexpected("plain")) == [
        "falcon_h1: no_uninitialized_memory: mup_vector"
    ]
    assert list(ArchitectureResult("falcon_h1").unexpected("transformers")) == [
        "falcon_h1: no_uninitialized_memory has no finding any more"
    ]
    assert list(ArchitectureResult("llama", errors={"loss_parity": "why"}).unexpected("plain")) == [
        "llama: loss_parity: error: why"
    ]
    assert list(ArchitectureResult("xlstm", errors={"loss_parity": "why"}).unexpected("plain")) == []
    assert list(ArchitectureResult("llama", checkpoint_error="why").unexpected("plain")) == [
        "llama: no checkpoint: why"
    ]
    assert list(ArchitectureResult("gemma3n", checkpoint_error="why").unexpected("plain")) == []
    assert list(ArchitectureResult("gemma3n").unexpected("plain")) == ["gemma3n: can be judged now"]
    raised = ArchitectureResult("musicgen", loader_error="why")
    assert list(raised.unexpected("transformers")) == []
    assert list(raised.unexpected("plain")) == ["musicgen: the loader failed: why"]
    for other in (
        ArchitectureResult("musicgen", checkpoint_error="why"),
        ArchitectureResult("gemma3n", loader_error="why"),
    ):
        assert list(other.unexpected("transformers")) == [f"{other.name}: {other.not_judged}"]
    killed = ArchitectureResult("xlstm", errors={"loss_parity": "why", "dtensor_placements": "rank 1 was killed"})
    assert list(killed.unexpected("plain")) == ["xlstm: dtensor_placements: error: rank 1 was killed"]
    unsaved = ArchitectureResult("mixtral", errors={"dcp_reshards": "key: a.b has overlapping chunks: ..."})
    assert list(unsaved.unexpected("transformers-tp")) == []
    assert list(unsaved.unexpected("transformers")) == [
        f"mixtral: dcp_reshards: error: {unsaved.errors['dcp_reshards']}"
    ]
    assert list(ArchitectureResult("llama4", errors={"loss_parity": "why"}).unexpected("transformers-tp")) == []
    assert list(ArchitectureResult("xlstm").unexpected("plain")) == ["xlstm: can be trained now"]


def test_what_was_accepted_of_other_classes(monkeypatch, tmp_path):
    monkeypatch.setattr(field_results, "ACCEPTED", tmp_path / "accepted.json")
    field_results.ACCEPTED.write_text('{"transformers-masked-lm": {}}')
    found = ArchitectureResult("t5", findings={"grad_parity": ["w: 2"]}, errors={"loss_parity": "why"})
    stopped = ArchitectureResult("marian", loader_error="why")
    killed = ArchitectureResult("umt5", errors={"loss_parity": "why", "dcp_reshards": "killed"})
    both = [found, stopped, ArchitectureResult("bart"), killed]
    assert [line for row in both for line in row.unexpected("transformers-seq2seq")] == [
        "t5: grad_parity: new finding: w: 2",
        "t5: training: new error: why",
        "marian: the loader failed: why",
        "umt5: dcp_reshards: new error: killed",
        "umt5: loss_parity: new error: why",
    ]
    field_results.accept("transformers-seq2seq", both)
    assert json.loads(field_results.ACCEPTED.read_text()) == {
        "transformers-masked-lm": {},
        "transformers-seq2seq": {
            "t5": {"findings": ["grad_parity"], "errors": ["training"]},
            "marian": {"stopped": "the loader failed"},
            "umt5": {"errors": ["dcp_reshards", "loss_parity"]},
        },
    }
    assert [line for row in both for line in row.unexpected("transformers-seq2seq")] == []
    clean = [ArchitectureResult("t5"), ArchitectureResult("marian")]
    assert [line for row in clean for line in row.unexpected("transformers-seq2seq")] == [
        "t5: grad_parity has no finding any more",
        "t5: training has no error any more",
        "marian: can be judged now",
    ]


def test_what_was_accepted_names_existing_classes_and_architectures():
    known = json.loads(field_results.ACCEPTED.read_text())
    assert {*known} == {f"transformers-{task}" for task in field_results.TASKS} == {*LOADERS} - {*FINDINGS}
    for task in field_results.TASKS:
        assert {*known[f"transformers-{task}"]} <= {*names_of(task)}


def test_the_overview_has_a_row_for_each_way_to_load():
    rows = [
        ArchitectureResult("llama"),
        ArchitectureResult("t5", findings={"grad_parity": ["w: 2"]}, errors={"loss_parity": "why"}),
        ArchitectureResult("gemma3n", checkpoint_error="timm"),
        ArchitectureResult("marian", loader_error="why"),
    ]
    runs = [Run(loader, {"torch": "2.13.0"}, 12.3, 20, 0, 2, rows) for loader in ("plain", "transformers-masked-lm")]
    page = render_overview(runs).splitlines()
    assert (
        "| `plain` | with a conforming loader, `load_plain` of fixtures/architectures.py | 4 | 1 | 1 | 1 | 1 | 3 | 12 |"
        in page
    )
    for line in (
        "* `grad_parity`: `t5`",
        "* checks that could not run: `t5`",
        "* no checkpoint: `gemma3n`",
        "* the loader fails: `marian`",
    ):
        assert page.count(line) == 2


def test_known_results_name_existing_architectures():
    found = {name for known in (*FINDINGS.values(), *RAISING.values()) for name in known}
    assert {*WITHOUT_CHECKPOINT, *UNTRAINABLE, *found} <= set(CAUSAL_LMS)


def test_model_types_with_a_plan_for_tensor_parallelism():
    planned = names_with_tp_plan()
    assert {"llama", "qwen3", "mixtral"} <= set(planned) <= set(CAUSAL_LMS)
    assert "gpt2" not in planned
    assert {*FINDINGS["transformers-tp"]} <= set(planned)


@needs_fsdp_size
def test_a_tensor_parallel_sweep(tmp_path):
    sweep = Sweep("transformers-tp", tmp_path)
    try:
        rows = {row.name: row for row in sweep.judge(["llama", "qwen3"], jobs=1)}
    finally:
        sweep.close()
    assert [*rows["llama"].unexpected("transformers-tp"), *rows["qwen3"].unexpected("transformers-tp")] == []
    assert [*rows["qwen3"].findings] == ["grad_accumulation_parity"]


@needs_fsdp_size
def test_a_sweep_of_another_class(tmp_path):
    loader = "transformers-seq2seq"
    sweep = Sweep(loader, tmp_path)
    try:
        assert sweep.names()[:1] == names_of("seq2seq")[:1]
        rows = {row.name: row for row in sweep.judge(["bart", "umt5"], jobs=1)}
    finally:
        sweep.close()
    assert [*rows["bart"].unexpected(loader), *rows["umt5"].unexpected(loader)] == []
    assert [*rows["umt5"].findings] == ["step_memory_bounded"]


@needs_fsdp_size
def test_a_sweep_of_several_at_a_time(tmp_path):
    sweep = Sweep("transformers", tmp_path)
    try:
        rows = {row.name: row for row in sweep.judge(["falcon_h1", "gpt2", "no_such_model"], jobs=2)}
    finally:
        sweep.close()
    assert list(rows["gpt2"].unexpected("transformers")) == []
    assert list(rows["falcon_h1"].unexpected("transformers")) == []
    assert rows["no_such_model"].checkpoint_error.startswith("'no_such_model' has no causal language model")
    accounted = [*rows["falcon_h1"].passed, *rows["falcon_h1"].findings, *rows["falcon_h1"].skipped]
    assert sorted(accounted) == sorted(built_in().ids())


def test_an_interrupted_run_continues(tmp_path):
    source = tmp_path / "source.py"
    source.write_text("1")

    def results(loader: str = "plain", torch: str = "2.13.0") -> ResultsFile:
        return ResultsFile(tmp_path / "out", loader, {"torch": torch}, [source])

    row = ArchitectureResult("llama", passed=["loss_parity"], skipped={"tied_weights_stay_tied": "nothing is tied"})
    results().add(row)
    with results().path.open("a") as file:
        file.write('{"name": "gpt2", "stop')
    results().add(ArchitectureResult("bloom"))
    assert results().read_results() == {"llama": row, "bloom": ArchitectureResult("bloom")}
    assert results("transformers").read_results() == results(torch="2.14.0").read_results() == {}
    source.write_text("2")
    assert results().read_results() == {}


def test_the_page_accounts_for_every_check():
    ids = built_in().ids()
    rows = [
        ArchitectureResult("llama", passed=ids[1:], skipped={ids[0]: "nothing | is"}, seconds=1.5),
        ArchitectureResult(
            "falcon_h1", passed=ids[1:], findings={"no_uninitialized_memory": [f"a.{n}: <bad>" for n in range(5)]}
        ),
        ArchitectureResult("xlstm", passed=ids[2:], errors={ids[0]: "why", ids[1]: "why"}),
        ArchitectureResult("gpt2", errors={ids[0]: "why not"}),
        ArchitectureResult("musicgen", loader_error="why"),
        ArchitectureResult("gemma3n", checkpoint_error="timm"),
        *(ArchitectureResult(f"tiny{number}", skipped={ids[1]: "nothing of the kind"}) for number in range(6)),
    ]
    page = render_page(Run("transformers", {"torch": "2.13.0"}, seconds=12.3, cpu=20, reused=1, jobs=2, rows=rows))
    total = len(ids)
    for line in (
        f"| `llama` | clean | {total - 1} | 0 | 1 | 0 | 1.5 |",
        f"| `xlstm` | clean | {total - 2} | 0 | 0 | 2 | 0.0 |",
        f"| `musicgen` | **the loader failed** | 0 | 0 | 0 | {total} | 0.0 |",
        f"| `gemma3n` | no checkpoint | 0 | 0 | 0 | {total} | 0.0 |",
        "* `falcon_h1`, `no_uninitialized_memory`, and 2 more:",
        "  * `a.2: <bad>`",
        "* `musicgen`: the loader failed: why",
        f"* `gemma3n`: {WITHOUT_CHECKPOINT['gemma3n']}",
        "* `xlstm`, 2 checks (one device cannot train it either): why",
        "* `llama`",
        f"  * `{ids[0]}`: nothing &#124; is",
        f"| `{ids[1]}` | nothing of the kind | 6 |",
        f"  * gpt2: {ids[0]}: error: why not",
    ):
        assert line in page.splitlines()
    assert "a.3" not in page
    assert "12 s, 20 s of CPU, 2 at a time; 1 of them" in page
