"""Checkpoints of shapes: what they contain, and that they take no room."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import nn

from pytest_fsdp_meta.worlds.rank import shapes


def tied() -> nn.Module:
    model = nn.Sequential(nn.Embedding(100, 8), nn.Linear(8, 100, bias=False)).to(torch.bfloat16)
    model[1].weight = model[0].weight
    model.register_buffer("steps", torch.zeros((), dtype=torch.int64))
    return model


def described(file: Path) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    with safe_open(file, framework="pt") as stored:
        names = stored.keys()
        return {name: (tuple(t.shape), t.dtype) for name in names for t in [stored.get_tensor(name)]}


def test_a_model_is_written_with_each_tensor_once(tmp_path: Path) -> None:
    with torch.device("meta"):
        model = tied()
    shapes.write_model(model, tmp_path)
    assert described(tmp_path / "model.safetensors") == {
        "steps": ((), torch.int64),
        "0.weight": ((100, 8), torch.bfloat16),
    }


def test_a_large_model_takes_no_room_and_is_split(tmp_path: Path) -> None:
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(30_000, 30_000, bias=False) for _ in range(3)))
    shapes.write_model(model, tmp_path)
    files = sorted(tmp_path.glob("*.safetensors"))
    assert [file.name for file in files] == [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]
    assert all(file.stat().st_size > 3_600_000_000 and file.stat().st_blocks * 512 < 100_000 for file in files)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["weight_map"] == {f"{number}.weight": files[number].name for number in range(3)}
    assert index["metadata"]["total_size"] == 3 * 3_600_000_000


def test_headers_without_data_are_enough(tmp_path: Path) -> None:
    source, copy = tmp_path / "source", tmp_path / "copy"
    source.mkdir()
    copy.mkdir()
    shapes.write_model(tied(), source)
    whole = (source / "model.safetensors").read_bytes()
    (source / "model.safetensors").write_bytes(whole[: 8 + int.from_bytes(whole[:8], "little")])
    shapes.write_folder(source, copy)
    assert (copy / "model.safetensors").read_bytes() == whole


@pytest.mark.parametrize("content", [b"", b"no header", b"\x02" + bytes(7) + b"[]", b"\xff" * 100])
def test_other_files_are_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ValueError, match="not the header of a safetensors file"):
        shapes.write_folder(tmp_path, tmp_path)
