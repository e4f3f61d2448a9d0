"""Test that everything that ranks import on first use is imported before they are forked."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from pytest_fsdp_meta.worlds import World, WorldSpec
from pytest_fsdp_meta.worlds.rank.preload import preload
from tests.world_help import trial_preload


def save_and_load(folder: str) -> list[str]:
    """Return the modules that a first step and a first checkpoint import on a rank."""
    import torch
    import torch.distributed.checkpoint as dcp
    from safetensors.torch import load_file, save_file

    before = set(sys.modules)
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    dcp.save({"model": model.state_dict()}, checkpoint_id=folder)
    dcp.load({"model": model.state_dict()}, checkpoint_id=folder)
    save_file(model.state_dict(), f"{folder}/model.safetensors")
    load_file(f"{folder}/model.safetensors")
    return sorted(set(sys.modules) - before)


def test_a_rank_imports_nothing_on_first_use(tmp_path: Path) -> None:
    with World(WorldSpec({"dp_shard": 1}), trial_preload()) as world:
        assert world.run(save_and_load, str(tmp_path)) == [[]]


def test_functions_are_called_after_all_imports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "early_warmer.py").write_text(
        "import sys\nseen = []\n"
        "def warm_up(): seen.append('late_module' in sys.modules)\n"
        "def fail(): raise RuntimeError('no luck')\n"
    )
    (tmp_path / "late_module.py").write_text("")
    failed = preload(["early_warmer:warm_up", "early_warmer:fail", "late_module"])
    assert sys.modules["early_warmer"].seen == [True]  # type: ignore[attr-defined]
    assert failed == {"early_warmer:fail": "RuntimeError: no luck"}
    for name in ("early_warmer", "late_module"):
        del sys.modules[name]
