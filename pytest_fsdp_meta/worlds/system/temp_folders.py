"""Temporary folders of this process, by whose names its fork server finds what is left when it has been killed."""

from __future__ import annotations

import glob
import os
import secrets
import shutil
import tempfile

_RUN = secrets.token_hex(4)
"""No other process has it, not even one of another machine or container that shares the disk."""


def _name_run() -> None:
    """A fork would otherwise share its parent's name, and remove the parent's folders when it is killed."""
    global _RUN
    _RUN = secrets.token_hex(4)


os.register_at_fork(after_in_child=_name_run)


def prefix(kind: str) -> str:
    """How the name of such a folder begins."""
    return f"fsdp-{kind}-{_RUN}-"


def pattern() -> str:
    """All that this process makes, for ``remove``."""
    return os.path.join(glob.escape(tempfile.gettempdir()), f"fsdp-*-{_RUN}-*")


def remove(pattern: str) -> None:
    for folder in glob.glob(pattern):
        shutil.rmtree(folder, ignore_errors=True)
