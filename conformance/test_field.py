"""A few of the architectures that ``make field`` judges, each for what the others have not."""

from __future__ import annotations

from pathlib import Path

import pytest

from conformance.field import FINDINGS, RAISING, UNTRAINABLE, WITHOUT_CHECKPOINT, Judged, Notebook, Sweep
from conformance.field_page import Run, page
from fixtures.architectures import load_plain, load_transformers, save_plain
from pytest_fsdp_meta import fsdp_conformance
from pytest_fsdp_meta.catalogue import built_in
from pytest_fsdp_meta.transformers import CAUSAL_LMS

REPRESENTATIVE = {
    "deepseek_v3": "latent attention, experts",
    "minimax": "linear attention whose tables of decay are larger than all weights",
    "mamba2": "a state space",
    "gemma4_text": "tied, buffers that scale, gradients that show a small drift of the parameters 300 times over",
}


@pytest.fixture(scope="session")
def architecture(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_plain(request.param, tmp_path_factory.mktemp("architecture") / request.param)


@pytest.mark.parametrize("architecture", REPRESENTATIVE, indirect=True)
@fsdp_conformance(world_size=2)
def test_loaded_by_transformers(fsdp, architecture):
    return load_transformers(fsdp, architecture)


@pytest.mark.parametrize("architecture", REPRESENTATIVE, indirect=True)
@fsdp_conformance(world_size=2)
def test_loaded_plainly(fsdp, architecture):
    return load_plain(fsdp, architecture)


def test_what_differs_from_what_is_known():
    mup = {"no_uninitialized_memory": ["mup_vector"]}
    assert list(Judged("falcon_h1", findings=mup).problems("transformers")) == []
    assert list(Judged("falcon_h1", findings=mup).problems("plain")) == [
        "falcon_h1: no_uninitialized_memory: mup_vector"
    ]
    assert list(Judged("falcon_h1").problems("transformers")) == [
        "falcon_h1: no_uninitialized_memory has no finding any more"
    ]
    assert list(Judged("llama", errors={"loss_parity": "why"}).problems("plain")) == [
        "llama: loss_parity could not be judged: why"
    ]
    assert list(Judged("rwkv", errors={"loss_parity": "why"}).problems("plain")) == []
    assert list(Judged("llama", unmade="why").problems("plain")) == ["llama: no checkpoint: why"]
    assert list(Judged("gemma3n", unmade="why").problems("plain")) == []
    assert list(Judged("gemma3n").problems("plain")) == ["gemma3n: can be judged now"]
    raised = Judged("musicgen", raised="why")
    assert list(raised.problems("transformers")) == []
    assert list(raised.problems("plain")) == ["musicgen: the loader failed: why"]
    for other in (Judged("musicgen", unmade="why"), Judged("gemma3n", raised="why")):
        assert list(other.problems("transformers")) == [f"{other.name}: {other.stopped}"]
    killed = Judged("rwkv", errors={"loss_parity": "why", "dtensor_placements": "rank 1 was killed"})
    assert list(killed.problems("plain")) == ["rwkv: dtensor_placements could not be judged: rank 1 was killed"]
    assert list(Judged("rwkv").problems("plain")) == ["rwkv: can be trained now"]


def test_what_is_known_has_names():
    found = {name for known in (*FINDINGS.values(), *RAISING.values()) for name in known}
    assert {*WITHOUT_CHECKPOINT, *UNTRAINABLE, *found} <= set(CAUSAL_LMS)


def test_a_sweep_side_by_side(tmp_path):
    sweep = Sweep("transformers", tmp_path)
    try:
        rows = {row.name: row for row in sweep.judge(["falcon_h1", "gpt2", "no_such_model"], jobs=2)}
    finally:
        sweep.close()
    assert list(rows["gpt2"].problems("transformers")) == []
    assert list(rows["falcon_h1"].problems("transformers")) == []
    assert rows["no_such_model"].unmade.startswith("'no_such_model' has no causal language model")
    accounted = [*rows["falcon_h1"].passed, *rows["falcon_h1"].findings, *rows["falcon_h1"].skipped]
    assert sorted(accounted) == sorted(built_in().ids())


def test_a_run_that_was_broken_off_goes_on(tmp_path):
    source = tmp_path / "source.py"
    source.write_text("1")

    def notebook(loader: str = "plain", torch: str = "2.13.0") -> Notebook:
        return Notebook(tmp_path / "out", loader, {"torch": torch}, [source])

    row = Judged("llama", passed=["loss_parity"], skipped={"tied_weights_stay_tied": "nothing is tied"})
    notebook().add(row)
    with notebook().path.open("a") as file:
        file.write('{"name": "gpt2", "stop')
    notebook().add(Judged("bloom"))
    assert notebook().read() == {"llama": row, "bloom": Judged("bloom")}
    assert notebook("transformers").read() == notebook(torch="2.14.0").read() == {}
    source.write_text("2")
    assert notebook().read() == {}


def test_the_page_accounts_for_every_check():
    ids = built_in().ids()
    rows = [
        Judged("llama", passed=ids[1:], skipped={ids[0]: "nothing | is"}, seconds=1.5),
        Judged("falcon_h1", passed=ids[1:], findings={"no_uninitialized_memory": [f"a.{n}: <bad>" for n in range(5)]}),
        Judged("rwkv", passed=ids[2:], errors={ids[0]: "why", ids[1]: "why"}),
        Judged("gpt2", errors={ids[0]: "why not"}),
        Judged("musicgen", raised="why"),
        Judged("gemma3n", unmade="timm"),
        *(Judged(f"tiny{number}", skipped={ids[1]: "nothing of the kind"}) for number in range(6)),
    ]
    told = page(rows, Run("transformers", {"torch": "2.13.0"}, seconds=12.3, cpu=20, taken=1, jobs=2))
    total = len(ids)
    for line in (
        f"| `llama` | clean | {total - 1} | 0 | 1 | 0 | 1.5 |",
        f"| `rwkv` | clean | {total - 2} | 0 | 0 | 2 | 0.0 |",
        f"| `musicgen` | **the loader failed** | 0 | 0 | 0 | {total} | 0.0 |",
        f"| `gemma3n` | no checkpoint | 0 | 0 | 0 | {total} | 0.0 |",
        "* `falcon_h1`, `no_uninitialized_memory`, and 2 more:",
        "  * `a.2: <bad>`",
        "* `musicgen`: the loader failed: why",
        f"* `gemma3n`: {WITHOUT_CHECKPOINT['gemma3n']}",
        "* `rwkv`, 2 checks (one device cannot train it either): why",
        "* `llama`",
        f"  * `{ids[0]}`: nothing &#124; is",
        f"| `{ids[1]}` | nothing of the kind | 6 |",
        f"  * gpt2: {ids[0]} could not be judged: why not",
    ):
        assert line in told.splitlines()
    assert "a.3" not in told
    assert "12 s, 20 s of CPU, 2 at a time; 1 of them" in told
