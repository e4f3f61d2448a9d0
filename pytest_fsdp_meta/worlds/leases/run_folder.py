"""The folder that the worker processes of one run share on one machine.

It lies in the system's folder for temporary files and belongs to one user. Each process of the run holds a lock in it,
so that a later run recognises and removes the folder of a run that was killed.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from pytest_fsdp_meta.worlds.leases.device_leases import REMEDY, LeaseError
from pytest_fsdp_meta.worlds.leases.file_lock import FileLock

PREFIX = "fsdp-run-"
STALE = 60.0
"""Seconds without a change after which the folder of an ended run is removed."""


def run_folder_of(run: str) -> Path:
    """Return the folder of a run; ``run`` may be any text."""
    name = hashlib.sha256(run.encode()).hexdigest()[:16]
    return Path(tempfile.gettempdir(), f"{PREFIX}{os.getuid()}-{name}")


class Presence:
    """The lock that one process holds in the folder of its run, which it creates if needed.

    Raises LeaseError if the folder cannot be used.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            self._lock = self._enter()
        except OSError as error:
            raise sharing_error(folder, error) from error

    def _enter(self) -> FileLock:
        with suppress(FileExistsError):
            self.folder.mkdir(mode=0o700)
            _remove_stale_folders(self.folder.parent)
        if self.folder.is_symlink() or self.folder.stat().st_uid != os.getuid():
            raise LeaseError(
                f"cannot share devices between workers: {self.folder} is a link or belongs to another user; remove it"
            )
        path = self.folder / f"{secrets.token_hex(8)}.present"
        while (lock := FileLock.attempt(path)) is None:
            time.sleep(0.01)  # a later run is testing the lock
        return lock

    def leave(self) -> None:
        self._lock.release()

    def remove(self) -> None:
        """Remove the folder at the end of the run, when all other processes have left it."""
        self.leave()
        shutil.rmtree(self.folder, ignore_errors=True)


def is_occupied(folder: Path) -> bool:
    """Return whether a process holds a lock in the folder."""
    locks = [FileLock.attempt(path) for path in folder.glob("*.present")]
    for lock in locks:
        if lock is not None:
            lock.release()
    return None in locks


def lock_in_run(path: Path) -> FileLock | None:
    """Return the lock on a file of the run's folder, or None if another process holds it. Raises LeaseError."""
    try:
        return FileLock.attempt(path)
    except OSError as error:
        raise sharing_error(path, error) from error


def sharing_error(path: Path, error: OSError) -> LeaseError:
    return LeaseError(f"cannot share devices between workers: {path}: {error.strerror}; {REMEDY}")


def _remove_stale_folders(parent: Path) -> None:
    """Remove the folders of this user's killed runs."""
    for folder in parent.glob(f"{PREFIX}{os.getuid()}-*"):
        with suppress(OSError):
            if time.time() - folder.stat().st_mtime > STALE and not is_occupied(folder):
                shutil.rmtree(folder)
