"""The record of the truth on disk: safetensors, of which every rank reads only its own slices.

A checkpoint directory is read the same way, so a reference may be either. No rank reads more of a tensor than it
holds itself.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_fsdp_meta.evidence import Region

if TYPE_CHECKING:
    from torch import Tensor

ALIASES = "aliases"
DTYPES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2", "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8", "U8": "uint8",
    "U16": "uint16", "U32": "uint32", "U64": "uint64", "BOOL": "bool", "C64": "complex64",
}  # fmt: skip


def write_record(path: Path, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Writes the tensors to one safetensors file. Tied names are written once and remembered as aliases."""
    from safetensors.torch import save_file

    kept: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    first: dict[tuple[Any, ...], str] = {}
    for name, tensor in tensors:
        data = tensor.detach()
        # The same memory seen in another way, as a transposed weight is, is another tensor.
        key = (data.data_ptr(), tuple(data.shape), data.stride(), data.dtype)
        if data.numel() and key in first:
            aliases[name] = first[key]
        else:
            first[key] = name
            # A copy: safetensors refuses views that share a storage, and the model goes on to be trained.
            kept[name] = data.cpu().contiguous().clone()
    save_file(kept, path, metadata={ALIASES: json.dumps(aliases)})


class Record:
    """Tensors on disk, by name: one file of ours, or a checkpoint directory. Files are opened when first read."""

    def __init__(self, path: str | Path, label: str = "the reference") -> None:
        self.label = label
        files = _files(Path(path)) if Path(path).is_dir() else [Path(path)]
        self._files: dict[str, Any] = {}
        self._aliases: dict[str, str] = {}
        self._where: dict[str, Path] = {}
        for file in files:
            handle = self._open(file)
            self._where.update(dict.fromkeys(handle.keys(), file))
            self._aliases.update(json.loads((handle.metadata() or {}).get(ALIASES, "{}")))

    def __contains__(self, name: str) -> bool:
        return self._aliases.get(name, name) in self._where

    def names(self) -> list[str]:
        return [*self._where, *self._aliases]

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._slice(name).get_shape())

    def dtype(self, name: str) -> str:
        stored = self._slice(name).get_dtype()
        return str(DTYPES.get(stored, stored))

    def read(self, name: str, held: Sequence[Region]) -> Tensor:
        """The elements of the global tensor ``name`` in the runs ``held`` of each dimension, as one CPU tensor."""
        if not held:
            return self._open(self._where[self._aliases.get(name, name)]).get_tensor(self._aliases.get(name, name))
        source = self._slice(name)
        return _assemble(source, list(held), [])

    def _slice(self, name: str) -> Any:
        stored = self._aliases.get(name, name)
        return self._open(self._where[stored]).get_slice(stored)

    def _open(self, file: Path) -> Any:
        from safetensors import safe_open

        key = str(file)
        if key not in self._files:
            self._files[key] = safe_open(key, framework="pt", device="cpu").__enter__()  # type: ignore[no-untyped-call]
        return self._files[key]


def _files(folder: Path) -> list[Path]:
    """The files of a checkpoint. An index names them: beside it there may be a copy under other names."""
    usual = folder / "model.safetensors.index.json"
    indexes = [usual] if usual.exists() else sorted(folder.glob("*.safetensors.index.json"))
    if not indexes:
        return sorted(folder.glob("*.safetensors"))
    return sorted({folder / file for index in indexes for file in json.loads(index.read_text())["weight_map"].values()})


def _assemble(source: Any, held: list[Region], chosen: list[tuple[int, int]]) -> Tensor:
    """One read per combination of runs, put together dimension by dimension; nearly always a single read."""
    import torch

    dim = len(chosen)
    if dim == len(held):
        return source[tuple(slice(start, stop) for start, stop in chosen)]
    parts = [_assemble(source, held, [*chosen, run]) for run in held[dim] or ((0, 0),)]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def global_index(held: Sequence[Region], local: Sequence[int]) -> tuple[int, ...]:
    """The global index of a local one."""
    pairs = zip(held, local, strict=True)
    return tuple(next(itertools.islice(_indices(runs), position, None)) for runs, position in pairs)


def _indices(runs: Region) -> Iterable[int]:
    return itertools.chain.from_iterable(range(start, stop) for start, stop in runs)


def checkpoint_entries(path: str | Path) -> Mapping[str, tuple[tuple[int, ...], str]]:
    """(shape, dtype) of every tensor of a checkpoint directory, from the headers alone."""
    record = Record(path)
    return {name: (record.shape(name), record.dtype(name)) for name in record.names()}
