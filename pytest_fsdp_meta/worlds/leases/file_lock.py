"""A lock between processes that the operating system releases when its holder ends, for whatever reason.

filelock is not used: up to its release 3, a lock that a process holds is released when a forked child of it exits.
"""

from __future__ import annotations

import fcntl
import os
import weakref
from pathlib import Path


class FileLock:
    """A lock on a file, held until ``release``. Forked children do not hold it and cannot release it."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor: int | None = descriptor
        _HELD.add(self)

    @classmethod
    def attempt(cls, path: Path) -> FileLock | None:
        """Return the lock, or None if another holder has it. Raises OSError if the file cannot be opened."""
        # Python closes its descriptors in the programs that it starts, so neither the fork server nor a rank has them.
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return None
        except BaseException:
            os.close(descriptor)
            raise
        return cls(descriptor)

    def release(self) -> None:
        """Release the lock; safe to call twice."""
        if self._descriptor is not None:
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)
            self._close()

    def _close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


_HELD: weakref.WeakSet[FileLock] = weakref.WeakSet()


def _close_in_child() -> None:
    for lock in list(_HELD):
        lock._close()  # not unlocked: that would release the parent's lock, which is on the same open file


os.register_at_fork(after_in_child=_close_in_child)
