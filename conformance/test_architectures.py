"""A few of the architectures that ``make architectures`` judges, each for what the others have not."""

from __future__ import annotations

from pathlib import Path

import pytest

from conformance.architectures import load_plain, load_transformers
from fixtures.architectures import save_architecture
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
