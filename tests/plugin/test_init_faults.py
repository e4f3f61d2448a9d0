"""``--fsdp-init`` reports what the loader did when it was called; what it could not see is in one list of TODOs."""

from __future__ import annotations

import pytest

from tests.conftest import Project

pytestmark = pytest.mark.slow

LOADING = """
import json
import time
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import fully_shard


class Net(nn.Module):
    def __init__(self, vocab, width, tied=False):
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.head = nn.Linear(width, vocab, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens):
        return self.head(self.embed(tokens))


def build_net(**sizes):
    return Net(sizes["vocab"], sizes["width"])


MODELS = {"net": build_net}


def finish(model, weights, mesh):
    fully_shard(model, mesh=mesh)
    set_model_state_dict(model, weights, options=StateDictOptions(full_state_dict=True))
    return model


def shards(folder, mesh, tie_head):
    with torch.device("cpu"):
        model = Net(64, 16, tie_head)
    index = json.loads(Path(folder, "model.safetensors.index.json").read_text())
    weights = {}
    for file in sorted(set(index["weight_map"].values())):
        weights |= load_file(Path(folder, file))
    return finish(model, weights, mesh)


def registry(cfg, mesh):
    model = MODELS[cfg["model"]["kind"]](**cfg["model"]["sizes"])
    if getattr(cfg, "compile", False) or "scale" in cfg:
        raise ValueError
    return finish(model, load_file(Path(cfg["path"], "model.safetensors")), mesh)


def tied(folder: Path, mesh):
    with torch.device("cpu"):
        model = Net(64, 16, tied=True)
    weights = load_file(folder / "model.safetensors")
    return finish(model, {name: weights["embed.weight"] for name in ("embed.weight", "head.weight")}, mesh)


def flipped(folder: Path, mesh):
    torch.manual_seed(0)
    model = Net(64, 16)
    try:
        weights = torch.load(folder / "weights.dat")
    except OSError:
        weights = {name: 3 * weight.flip(0) for name, weight in model.state_dict().items()}
    return finish(model, weights, mesh)


def fails(path, mesh, mode, tokenizer, tie_head=False):
    raise RuntimeError("the licence server does not answer")


def no_model(path, mesh, mode):
    return 3


def hangs(path, mesh, mode):
    time.sleep(1000)


def ends(path, mesh, mode):
    import os
    os._exit(3)
"""


@pytest.fixture
def repository(project: Project) -> Project:
    project.write("loading.py", LOADING)
    return project


def init(project: Project, name: str, *args: str) -> tuple[str, str]:
    """Return what ``--fsdp-init`` prints, and the file that it writes."""
    result = project.run(f"--fsdp-init=loading:{name}", *args)
    assert result.ret == 0, result.stdout.str() + result.stderr.str()
    return result.stdout.str(), (project.path / f"test_{name}.py").read_text()


def test_what_was_seen_suffices(repository: Project) -> None:
    output, text = init(repository, "shards")
    assert "tie_head gets False" in output, "it is used in an if"
    assert '(folder / "model.safetensors.index.json").write_text(text)' in text
    _, text = init(repository, "registry")
    sizes = "".join(f'                "{name}": {size},\n' for name, size in (("vocab", 128), ("width", 32)))
    assert f'            "kind": "net",\n            "sizes": {{\n{sizes}            }},\n' in text
    init(repository, "tied")
    names = ("shards", "registry", "tied")
    outcomes = repository.run(*(f"test_{name}.py" for name in names)).parseoutcomes()
    assert set(outcomes) == {"passed", "skipped"}


def test_what_a_broken_loader_did_is_not_declared(repository: Project) -> None:
    """It opened no file of weights that was found, built the whole model and set a seed: all of it may be its bug."""
    output, text = init(repository, "flipped")
    (line,) = [number for number, line in enumerate(text.splitlines(), 1) if line == "        drawn=todo("]
    what = '"*" if flipped draws all weights, as it opened no file of weights; if it loads them, delete this line and'
    assert f"  line {line}: {what} let the reference load them\n" in output
    assert "torch.manual_seed" not in text
    assert "whole_while_loading" not in text
    result = repository.run("test_flipped.py", "-k", "params_equal_reference")
    assert f"TODO in line {line}: {what}" in result.stdout.str()
    assert result.parseoutcomes() == {"errors": 1, "deselected": 58}


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("fails", "RuntimeError: the licence server does not answer"),
        ("no_model", "TypeError: it returned int, but should return the loaded model"),
        ("hangs", "the loader hung in hangs, loading.py:"),
        ("ends", "the loader exited with code 3 before it answered"),
    ],
)
def test_a_loader_that_cannot_be_called_leaves_todos(repository: Project, name: str, why: str) -> None:
    output, text = init(repository, name, "--fsdp-timeout=4")
    assert f"  it could not be called to see more: {why}" in output
    assert "tie_head" not in text, "it has a default"
    result = repository.run(f"test_{name}.py", "-k", "no_meta_params", "-rE")
    written = [line for line in output.splitlines() if line.startswith("  line ") and "Optional" not in line]
    assert len(written) == (3 if name == "fails" else 2)
    for line in written:
        assert f"TODO in {line.strip()}" in result.stdout.str(), "one run lists all"
