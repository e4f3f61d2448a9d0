"""Which memory of this process is that of mapped files: the system may drop its pages, so it costs nothing."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from pathlib import Path

import torch

MAPS = Path("/proc/self/maps")
"""The system's own list. torch knows of files that it has mapped whole, and of no slice of them or of others."""
NO_FILES = ("/dev/", "/memfd:", "/SYSV")
"""What looks like a mapped file there and is memory: shared memory above all."""


class MappedFiles:
    """The mapped files as they were when last looked at; none where the system does not list them."""

    def __init__(self) -> None:
        self._ranges = sorted(_mapped())

    def hold(self, storage: torch.UntypedStorage) -> bool:
        """Whether the storage lies in a mapped file."""
        address = storage.data_ptr()
        index = bisect_right(self._ranges, (address, 2**64))
        return index > 0 and address < self._ranges[index - 1][1]

    def look_again(self) -> None:
        self._ranges = sorted(_mapped())


def _mapped() -> Iterator[tuple[int, int]]:
    for line in MAPS.read_text().splitlines() if MAPS.exists() else ():
        bounds, *_, path = line.split(maxsplit=5) if "/" in line else (line, "")
        if path.startswith("/") and not path.startswith(NO_FILES):
            first, _, last = bounds.partition("-")
            yield int(first, 16), int(last, 16)
