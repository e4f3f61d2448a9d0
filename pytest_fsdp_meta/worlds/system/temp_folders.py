"""Temporary folders of this process, named so that its fork server can remove them when this process was killed."""

from __future__ import annotations

import glob
import os
import secrets
import shutil
import tempfile

_RUN = secrets.token_hex(4)
"""Unique among all processes, also those of other machines and containers that share the disk."""


def _name_run() -> None:
    """A fork would otherwise share its parent's name, and remove the parent's folders when it is killed."""
    global _RUN
    _RUN = secrets.token_hex(4)


os.register_at_fork(after_in_child=_name_run)


def prefix(kind: str) -> str:
    """Return the prefix for the name of a temporary folder of this kind."""
    return f"fsdp-{kind}-{_RUN}-"


def pattern() -> str:
    """Return the glob pattern that matches all temporary folders of this process."""
    return os.path.join(glob.escape(tempfile.gettempdir()), f"fsdp-*-{_RUN}-*")


def remove(pattern: str) -> None:
    """Remove the folders that match the pattern."""
    for folder in glob.glob(pattern):
        shutil.rmtree(folder, ignore_errors=True)
