"""Write checkpoints of shapes: files in the safetensors format with names, shapes and dtypes, and no values.

Their data is a hole, which takes no room on the disk and reads as zeros.
"""

from __future__ import annotations

import json
import resource
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_fsdp_meta.worlds.failures import Misuse

if TYPE_CHECKING:
    from torch.nn import Module

SUFFIX = ".safetensors"
DTYPES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2", "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8", "U8": "uint8",
    "BOOL": "bool",
}  # fmt: skip
"""The format's name of each dtype -> torch's."""
FILE = 4 * 2**30
"""Bytes; some systems refuse to map more than their memory."""
MAPPINGS = 4
"""How often a file may be open at a time."""
LARGEST_HEADER = 100_000_000
"""Bytes; the format allows no more."""


def write_folder(source: Path, folder: Path) -> None:
    """Make a checkpoint of the same shapes in ``folder``; every other file of ``source`` is linked to.

    Raises Misuse if ``source`` has no safetensors file, or one whose header cannot be read.
    """
    files = sorted(source.glob(f"*{SUFFIX}")) if source.is_dir() else []
    if not files:
        raise Misuse(f"checkpoint_of_shapes({str(source)!r}): the folder has no {SUFFIX} file")
    for file in source.iterdir():
        if file not in files:
            folder.joinpath(file.name).symlink_to(file.resolve())
    for file in files:
        _write(folder / file.name, _read_header(file))


def write_model(model: Module, folder: Path) -> None:
    """Make a checkpoint with the shapes of the model's state dict, and with its config if it has one to save.

    Larger ones are split into files of ``FILE`` bytes, with the index that transformers writes.
    """
    names = {name: kind for kind, name in DTYPES.items()}
    seen: set[int] = set()
    files: list[dict[str, Any]] = [{}]
    at = total = 0
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) in seen:
            continue  # tied: the format has each tensor once
        seen.add(id(tensor))
        nbytes = tensor.numel() * tensor.element_size()
        if at and at + nbytes > FILE:
            files.append({})
            at = 0
        dtype = names[str(tensor.dtype).removeprefix("torch.")]
        files[-1][name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [at, at + nbytes]}
        at, total = at + nbytes, total + nbytes
    middles = [f"-{number:05}-of-{len(files):05}" for number in range(1, len(files) + 1)] if len(files) > 1 else [""]
    for middle, header in zip(middles, files, strict=True):
        _write(folder / f"model{middle}{SUFFIX}", {"__metadata__": {"format": "pt"}, **header})
    if len(files) > 1:
        where = {
            name: f"model{middle}{SUFFIX}" for middle, header in zip(middles, files, strict=True) for name in header
        }
        index = {"metadata": {"total_size": total}, "weight_map": where}
        (folder / f"model{SUFFIX}.index.json").write_text(json.dumps(index))
    config: Any = getattr(model, "config", None)
    if hasattr(config, "save_pretrained"):
        config.save_pretrained(folder)


def _read_header(file: Path) -> dict[str, Any]:
    with file.open("rb") as stream:
        (length,) = struct.unpack("<Q", stream.read(8).ljust(8, b"\xff"))
        try:
            header = json.loads(stream.read(length)) if length <= LARGEST_HEADER else None
        except ValueError:
            header = None
    if not isinstance(header, dict):
        raise Misuse(f"checkpoint_of_shapes: {file}: not the header of a safetensors file")
    return header


def _write(file: Path, header: Mapping[str, Any]) -> None:
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as stream:
        stream.write(struct.pack("<Q", len(text)) + text)
        ends = (entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__")
        stream.truncate(size := 8 + len(text) + max(ends, default=0))
    # torch maps files so that they could be written to, which counts against the limit of this process's memory.
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    if soft != resource.RLIM_INFINITY:
        raised = soft + MAPPINGS * size
        resource.setrlimit(
            resource.RLIMIT_DATA, (raised if hard == resource.RLIM_INFINITY else min(raised, hard), hard)
        )
