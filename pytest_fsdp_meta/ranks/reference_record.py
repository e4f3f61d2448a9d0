"""Write the reference to safetensors files, and read from them only the slices that a rank holds.

A checkpoint directory is read the same way, so either can be the reference. No rank reads more of a tensor than it
holds itself.
"""

from __future__ import annotations

import itertools
import json
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_fsdp_meta.checks.structure.facts import Region, boxes
from pytest_fsdp_meta.worlds.rank import shapes

if TYPE_CHECKING:
    from torch import Tensor

RECORDS = (
    *("values", "gradients", "clipped", "first_updates", "second", "late", "updates", "accumulated", "short"),
    *("first_buffers", "buffers", "beside", "updated_beside"),
)
"""Records of the reference, in this order: its weights; the gradients of the first step; the same gradients as the
author's function has clipped them; the weights after the first step; the gradients of the second step; the weights
before the last step; the weights after it; the mean gradients of micro-batches; the gradients of half of each rank's
rows; the buffers that the first step has changed; those that have changed by the end; what the author keeps beside the
model, before training; the same after it.
"""
ALIASES = "aliases"
AS_BYTES = "as_bytes"
"""Keys in the metadata of a record: names that are another name's tensor, and dtypes of tensors stored as bytes."""
DTYPES = {**shapes.DTYPES, "U16": "uint16", "U32": "uint32", "U64": "uint64", "C64": "complex64"}
BUFFERS = 2
"""Records that are copied and not written yet: a step takes about as long as to write what it changed."""
RECENT = frozenset({"uint16", "uint32", "uint64", "complex64"})
"""Dtypes that the oldest supported version of safetensors does not have."""


def record_at(folder: str | Path, name: str) -> Path:
    """Return the path of a record: one of ``RECORDS``, the verifier's, or a rank's own values."""
    return Path(folder, f"{name}.safetensors")


def noise_of(name: str) -> str:
    """Return the name of the record that has the noise of another one."""
    return f"{name}_noise"


def write_record(path: Path, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Write the tensors to one safetensors file; tied names are written once and stored as aliases.

    Tensors that are not plain arrays, such as sparse or quantized ones, are left out.
    """
    from safetensors.torch import save_file

    stored, metadata = _for_file(tensors)
    # safetensors refuses views that share a storage; a copy of a tensor that has its own would be a waste.
    storages: set[int] = set()
    for name, data in stored.items():
        whole = data.untyped_storage().nbytes() == data.nbytes and data.untyped_storage().data_ptr() not in storages
        storages.add(data.untyped_storage().data_ptr())
        stored[name] = data if whole else data.clone()
    save_file(stored, path, metadata=metadata)


class RecordWriter:
    """Writes records beside what follows: tensors are copied at once, and written by a thread.

    All records are complete when the block ends. Errors of writing are raised then, or by a later ``write``. The memory
    of the copies is used again: to get new pages from the system takes longer than to copy.
    """

    def __init__(self) -> None:
        self._buffers: deque[dict[tuple[Any, ...], Tensor]] = deque({} for _ in range(BUFFERS))
        self._writing: deque[Future[None]] = deque()
        self._thread = ThreadPoolExecutor(max_workers=1)

    def __enter__(self) -> RecordWriter:
        return self

    def __exit__(self, *_: object) -> None:
        with self._thread:
            self._buffers.clear()
            self._finish(0)

    def write(self, path: Path, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Begin to write what ``write_record`` would."""
        from safetensors.torch import save_file

        self._finish(BUFFERS - 1)
        stored, metadata = _for_file(tensors)
        copies: dict[str, Tensor] = {}
        buffer = self._buffers[0]
        for name, data in stored.items():
            key = name, data.shape, data.dtype
            copies[name] = buffer[key] = buffer[key].copy_(data) if key in buffer else data.clone()
        self._writing.append(self._thread.submit(save_file, copies, path, metadata))
        self._buffers.rotate()

    def _finish(self, most: int) -> None:
        while len(self._writing) > most:
            self._writing.popleft().result()


def _for_file(tensors: Iterable[tuple[str, Tensor]]) -> tuple[dict[str, Tensor], dict[str, str] | None]:
    """Return (the arrays to write, which may be views, and the metadata of the file).

    There is none without arrays: safetensors 0.4.3 cannot read the file that it writes then.
    """
    import torch

    from pytest_fsdp_meta.ranks.adapters.dtensor import plain

    stored: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    as_bytes: dict[str, str] = {}
    first: dict[tuple[Any, ...], str] = {}
    for name, tensor in tensors:
        if not is_array(tensor):
            continue
        data = plain(tensor.detach())
        # Another view of the same memory, such as a transposed weight, is another tensor.
        key = (data.data_ptr(), tuple(data.shape), data.stride(), data.dtype, data.is_conj(), data.is_neg())
        if data.numel() and key in first:
            aliases[name] = first[key]
        else:
            first[key] = name
            stored[name] = data.resolve_conj().resolve_neg().cpu().contiguous()
            dtype = str(data.dtype).removeprefix("torch.")
            if dtype in RECENT or dtype not in DTYPES.values():
                # The bytes of each element are one more dim, so that all other dims are sliced as before.
                as_bytes[name], stored[name] = dtype, stored[name].unsqueeze(-1).view(torch.uint8)
    return stored, {ALIASES: json.dumps(aliases), AS_BYTES: json.dumps(as_bytes)} if stored else None


def is_array(tensor: Tensor) -> bool:
    """Whether the tensor is a plain array of elements: not sparse, quantized or nested."""
    import torch

    return tensor.layout == torch.strided and not tensor.is_quantized and not tensor.is_nested


class Record:
    """Tensors on disk by name: a file of ``write_record``, or a checkpoint directory.

    ``label`` names the record in messages.
    """

    def __init__(self, path: str | Path, label: str = "the reference") -> None:
        self.label = label
        files = _files(Path(path)) if Path(path).is_dir() else [Path(path)]
        self._handles: dict[str, Any] = {}
        self._aliases: dict[str, str] = {}
        self._as_bytes: dict[str, str] = {}
        self._file_of: dict[str, Path] = {}
        for file in files:
            handle = self._open(file)
            self._file_of.update(dict.fromkeys(handle.keys(), file))
            metadata = handle.metadata() or {}
            self._aliases.update(json.loads(metadata.get(ALIASES, "{}")))
            self._as_bytes.update(json.loads(metadata.get(AS_BYTES, "{}")))

    def __contains__(self, name: str) -> bool:
        return self._aliases.get(name, name) in self._file_of

    def names(self) -> list[str]:
        return [*self._file_of, *self._aliases]

    def stored_as(self, name: str) -> str:
        """Return the name under which the tensor is stored: of several that are one memory, the first."""
        return self._aliases.get(name, name)

    def shape(self, name: str) -> tuple[int, ...]:
        stored = tuple(self._slice(name).get_shape())
        return stored[:-1] if self._dtype_of_bytes(name) else stored

    def dtype(self, name: str) -> str:
        stored = self._slice(name).get_dtype()
        return self._dtype_of_bytes(name) or str(DTYPES.get(stored, stored))

    def read(self, name: str, regions: Sequence[Region]) -> Tensor:
        """Return the elements of the global tensor in these runs of each dim, as one CPU tensor."""
        import torch

        if not regions:
            stored = self._aliases.get(name, name)
            read = self._open(self._file_of[stored]).get_tensor(stored)
        else:
            read = select(self._slice(name), regions)
        dtype = self._dtype_of_bytes(name)
        return read.view(getattr(torch, dtype)).squeeze(-1) if dtype else read

    def read_whole(self, name: str) -> Tensor:
        """Return the whole tensor."""
        return self.read(name, [((0, size),) for size in self.shape(name)])

    def read_run(self, name: str, runs: Region) -> Tensor:
        """Return the elements in ``runs`` of the tensor laid out as one row, reading no other elements."""
        import torch

        shape = self.shape(name)
        blocks = [[(span,) for span in box] for first, last in runs for box in boxes(shape, first, last)]
        if not blocks:
            return self.read(name, [() for _ in shape]).reshape(-1)[:0]
        return torch.cat([self.read(name, list(block)).reshape(-1) for block in blocks])

    def _dtype_of_bytes(self, name: str) -> str | None:
        return self._as_bytes.get(self._aliases.get(name, name))

    def _slice(self, name: str) -> Any:
        stored = self._aliases.get(name, name)
        return self._open(self._file_of[stored]).get_slice(stored)

    def _open(self, file: Path) -> Any:
        from safetensors import safe_open

        key = str(file)
        if key not in self._handles:
            handle: Any = safe_open(key, framework="pt", device="cpu")
            self._handles[key] = handle.__enter__()
        return self._handles[key]


def without_repetition(tensor: Tensor, like: Tensor | None = None) -> Tensor:
    """Return one repetition of a tensor that ``expand`` repeated as in ``like`` (default: itself).

    torch refuses to write to the repetitions together.
    """
    for dim, stride in enumerate((tensor if like is None else like).stride()):
        if not stride and tensor.shape[dim]:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def _files(folder: Path) -> list[Path]:
    """Return the files of a checkpoint: those of its index, since a folder may have a copy under other names."""
    usual = folder / "model.safetensors.index.json"
    indexes = [usual] if usual.exists() else sorted(folder.glob("*.safetensors.index.json"))
    if not indexes:
        return sorted(folder.glob("*.safetensors"))
    return sorted({folder / file for index in indexes for file in json.loads(index.read_text())["weight_map"].values()})


def select(source: Any, regions: Sequence[Region], chosen: Sequence[tuple[int, int]] = ()) -> Tensor:
    """Return these runs of each dim of a tensor, or of a slice of safetensors, which nearly always is one read."""
    import torch

    dim = len(chosen)
    if dim == len(regions):
        return source[tuple(slice(start, stop) for start, stop in chosen)]
    parts = [select(source, regions, [*chosen, run]) for run in regions[dim] or ((0, 0),)]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def global_index(held: Sequence[Region], local: Sequence[int]) -> tuple[int, ...]:
    """Return the global index of a local one."""
    indices = [itertools.chain.from_iterable(range(start, stop) for start, stop in runs) for runs in held]
    pairs = zip(indices, local, strict=True)
    return tuple(next(itertools.islice(own, position, None)) for own, position in pairs)


def checkpoint_entries(path: str | Path) -> Mapping[str, tuple[tuple[int, ...], str]]:
    """Return (shape, dtype) of every tensor of a checkpoint directory, from the file headers alone."""
    record = Record(path)
    return {name: (record.shape(name), record.dtype(name)) for name in record.names()}
