"""Locks between processes that the system frees when their holder ends, however it ends.

Not those of filelock: a lock of its releases up to 3 is freed for the parent when a forked child of the parent exits.
"""

from __future__ import annotations

import fcntl
import os
import weakref
from pathlib import Path


class FileLock:
    """A lock that is held until ``release``. What its process forks does not hold it, and cannot free it."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor: int | None = descriptor
        _HELD.add(self)

    @classmethod
    def attempt(cls, path: Path) -> FileLock | None:
        """The lock, or None where somebody holds it. Raises OSError where there can be no such file."""
        # Descriptors of Python are closed in programs that it starts: neither the fork server nor a rank has them.
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
        """Safe to call twice."""
        if self._descriptor is not None:
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)
            self._forget()

    def _forget(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


_HELD: weakref.WeakSet[FileLock] = weakref.WeakSet()


def _forget_all() -> None:
    for lock in list(_HELD):
        lock._forget()  # closed and not unlocked: what is locked is the file, as parent and child have it open


os.register_at_fork(after_in_child=_forget_all)
