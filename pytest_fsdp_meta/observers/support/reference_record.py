"""The record of the truth on disk: safetensors, of which every rank reads only its own slices.

A checkpoint directory is read the same way, so a reference may be either. No rank reads more of a tensor than it
holds itself.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_fsdp_meta.evidence import Region

if TYPE_CHECKING:
    from torch import Tensor

RECORDS = ("values", "gradients", "updated", "accumulated")
"""What the reference and its training leave: weights, first gradients, trained weights, gradients of micro-batches."""
ALIASES = "aliases"
AS_BYTES = "as_bytes"
"""Notes in the metadata of a record: which names are another's tensor, and the dtypes of those kept as bytes."""
DTYPES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2", "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8", "U8": "uint8",
    "U16": "uint16", "U32": "uint32", "U64": "uint64", "BOOL": "bool", "C64": "complex64",
}  # fmt: skip
YOUNG = frozenset({"uint16", "uint32", "uint64", "complex64"})
"""What safetensors learnt too late for the oldest version that will do."""


def record_at(folder: str | Path, name: str) -> Path:
    """Where the record of this name is: one of ``RECORDS``, or what else is the truth of something."""
    return Path(folder, f"{name}.safetensors")


def write_record(path: Path, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Writes the tensors to one safetensors file. Tied names are written once and remembered as aliases.

    Left out is what is no plain array of elements, such as a sparse or a quantized tensor.
    """
    from safetensors.torch import save_file

    kept: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    as_bytes: dict[str, str] = {}
    first: dict[tuple[Any, ...], str] = {}
    for name, tensor in tensors:
        if not is_array(tensor):
            continue
        data = tensor.detach()
        # The same memory seen in another way, as a transposed weight is, is another tensor.
        key = (data.data_ptr(), tuple(data.shape), data.stride(), data.dtype, data.is_conj(), data.is_neg())
        if data.numel() and key in first:
            aliases[name] = first[key]
        else:
            first[key] = name
            data = data.resolve_conj().resolve_neg().cpu().contiguous()
            dtype = str(data.dtype).removeprefix("torch.")
            if dtype in YOUNG or dtype not in DTYPES.values():
                as_bytes[name], data = dtype, _bytes(data)
            # A copy: safetensors refuses views that share a storage, and the model goes on to be trained.
            kept[name] = data.clone()
    save_file(kept, path, metadata={ALIASES: json.dumps(aliases), AS_BYTES: json.dumps(as_bytes)})


def is_array(tensor: Tensor) -> bool:
    """Whether torch reads its elements like those of any other."""
    import torch

    return tensor.layout == torch.strided and not tensor.is_quantized and not tensor.is_nested


def _bytes(data: Tensor) -> Tensor:
    """The bytes of each element in one more dimension, so that all others are sliced as ever."""
    import torch

    return data.unsqueeze(-1).view(torch.uint8)


def _elements(data: Tensor, dtype: str) -> Tensor:
    import torch

    return data.view(getattr(torch, dtype)).squeeze(-1)


class Record:
    """Tensors on disk, by name: one file of ours, or a checkpoint directory. Files are opened when first read."""

    def __init__(self, path: str | Path, label: str = "the reference") -> None:
        self.label = label
        files = _files(Path(path)) if Path(path).is_dir() else [Path(path)]
        self._files: dict[str, Any] = {}
        self._aliases: dict[str, str] = {}
        self._as_bytes: dict[str, str] = {}
        self._where: dict[str, Path] = {}
        for file in files:
            handle = self._open(file)
            self._where.update(dict.fromkeys(handle.keys(), file))
            notes = handle.metadata() or {}
            self._aliases.update(json.loads(notes.get(ALIASES, "{}")))
            self._as_bytes.update(json.loads(notes.get(AS_BYTES, "{}")))

    def __contains__(self, name: str) -> bool:
        return self._aliases.get(name, name) in self._where

    def names(self) -> list[str]:
        return [*self._where, *self._aliases]

    def shape(self, name: str) -> tuple[int, ...]:
        stored = tuple(self._slice(name).get_shape())
        return stored[:-1] if self._kept_as_bytes(name) else stored

    def dtype(self, name: str) -> str:
        stored = self._slice(name).get_dtype()
        return self._kept_as_bytes(name) or str(DTYPES.get(stored, stored))

    def read(self, name: str, held: Sequence[Region]) -> Tensor:
        """The elements of the global tensor ``name`` in the runs ``held`` of each dimension, as one CPU tensor."""
        if not held:
            stored = self._aliases.get(name, name)
            read = self._open(self._where[stored]).get_tensor(stored)
        else:
            read = _assemble(self._slice(name), list(held), [])
        dtype = self._kept_as_bytes(name)
        return _elements(read, dtype) if dtype else read

    def read_run(self, name: str, runs: Region) -> Tensor:
        """The elements in ``runs`` of the tensor laid out as one row; read as blocks of it, and no more than those."""
        import torch

        shape = self.shape(name)
        held = [[(span,) for span in box] for first, last in runs for box in boxes(shape, first, last)]
        if not held:
            return self.read(name, [() for _ in shape]).reshape(-1)[:0]
        return torch.cat([self.read(name, list(box)).reshape(-1) for box in held])

    def _kept_as_bytes(self, name: str) -> str | None:
        """The true dtype of a tensor that is kept as bytes."""
        return self._as_bytes.get(self._aliases.get(name, name))

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


def boxes(shape: Sequence[int], first: int, last: int) -> list[Region]:
    """The run of elements ``first`` to ``last`` of a tensor laid out as one row, as blocks of it, in their order.

    Each block is one run of indices per dimension: at most two for every dimension but the last.
    """
    if first >= last:
        return []
    if len(shape) < 2:
        return [((first, last),) if shape else ()]
    row = prod(shape[1:])
    top, bottom = -(-first // row), last // row
    if top > bottom:  # within one row
        return [((bottom, bottom + 1), *box) for box in boxes(shape[1:], first - bottom * row, last - bottom * row)]
    head = [((top - 1, top), *box) for box in boxes(shape[1:], first - (top - 1) * row, row)] if first % row else []
    body = [((top, bottom), *((0, size) for size in shape[1:]))] if top < bottom else []
    tail = [((bottom, bottom + 1), *box) for box in boxes(shape[1:], 0, last - bottom * row)]
    return [*head, *body, *tail]


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
