"""A few of the architectures that ``make architectures`` judges, each for what the others have not."""

from __future__ import annotations

from pathlib import Path

import pytest

from conformance.architectures import (
    FINDINGS,
    UNTRAINABLE,
    WITHOUT_CHECKPOINT,
    Judged,
    load_plain,
    load_transformers,
)
from fixtures.architectures import NAMES, save_architecture
from pytest_fsdp_meta import fsdp_conformance

REPRESENTATIVE = {
    "deepseek_v3": "latent attention, experts",
    "minimax": "linear attention whose tables of decay are larger than all weights",
    "mamba2": "a state space",
    "gemma4_text": "tied, buffers that scale, gradients that show a small drift of the parameters 300 times over",
}


@pytest.fixture(scope="session")
def architecture(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_architecture(request.param, tmp_path_factory.mktemp("architecture") / request.param)


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
    assert list(Judged("llama", "no checkpoint: why").problems("plain")) == ["llama: no checkpoint: why"]
    assert list(Judged("gemma3n", "no checkpoint: why").problems("plain")) == []
    assert list(Judged("gemma3n").problems("plain")) == ["gemma3n: can be judged now"]


def test_what_is_known_has_names():
    known = {*WITHOUT_CHECKPOINT, *UNTRAINABLE, *(name for found in FINDINGS.values() for name in found)}
    assert known <= set(NAMES)
