"""Keep the files of earlier checkpoints, which an author's save() may delete."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def restored_if_deleted(folder: Path, kept: Path) -> Iterator[None]:
    """Put files back at the end that are gone by then: an author's save() may delete earlier checkpoints.

    What cannot be kept, because a background writer moves files, is then missing as the author left it.
    """
    with suppress(OSError):
        shutil.copytree(folder, kept, symlinks=True, copy_function=_link)
    try:
        yield
    finally:
        with suppress(OSError):
            shutil.copytree(kept, folder, symlinks=True, copy_function=_link, dirs_exist_ok=True)


def _link(source: str, target: str) -> None:
    """Link a file of a checkpoint, which may be large, if it is missing; copy it where no links are possible."""
    if not os.path.exists(target):
        try:
            os.link(source, target)
        except OSError:
            shutil.copy2(source, target)
