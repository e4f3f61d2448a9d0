"""Tell the memory of mapped files from other memory: the system may drop its pages, so it costs nothing."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from pathlib import Path

import torch

MAPS = Path("/proc/self/maps")
"""The kernel's list of mappings. torch knows only files that it mapped itself, and no slices of them."""
NO_FILES = ("/dev/", "/memfd:", "/SYSV")
"""Path prefixes of mappings that are memory, such as shared memory."""


class MappedFiles:
    """The mapped files at the time of the last ``refresh``, all or those in ``folder``.

    None where the system does not list mappings.
    """

    def __init__(self, folder: str = "/") -> None:
        self._folder = folder
        self._ranges = sorted(_mapped_ranges(folder))

    def hold(self, storage: torch.UntypedStorage) -> bool:
        """Whether the storage lies in a mapped file."""
        address = storage.data_ptr()
        index = bisect_right(self._ranges, (address, 2**64))
        return index > 0 and address < self._ranges[index - 1][1]

    def refresh(self) -> None:
        self._ranges = sorted(_mapped_ranges(self._folder))


def _mapped_ranges(folder: str) -> Iterator[tuple[int, int]]:
    for line in MAPS.read_text().splitlines() if MAPS.exists() else ():
        bounds, *_, path = line.split(maxsplit=5) if "/" in line else (line, "")
        if path.startswith(folder) and not path.startswith(NO_FILES):
            first, _, last = bounds.partition("-")
            yield int(first, 16), int(last, 16)
