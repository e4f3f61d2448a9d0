import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).parent))  # this repository's import mode, importlib, does not
from moe_model import Decoder


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """Write a small checkpoint in which no norm is all ones, and no bias all zeros."""
    path = tmp_path_factory.mktemp("moe") / "model.safetensors"
    torch.manual_seed(0)
    save_file({name: value + 0.1 * torch.randn_like(value) for name, value in Decoder().state_dict().items()}, path)
    return path
