"""Imported by the fork server and by nobody else: imports what the parent asks for.

A module of its own, so that our package is complete when the test modules import it. Parent and server share a folder:
the parent leaves its request there, and finds a report when all is imported: whether the server may be forked.
"""

from __future__ import annotations

import atexit
import json
import os
import shutil
import signal
from pathlib import Path

from pytest_fsdp_meta.worlds.preload import REQUEST, preload, share, why_unsafe


def _serve(folder: Path) -> None:
    # The parent removes the folder when it has read the report, unless it was killed before.
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    request = json.loads((folder / "request").read_text("utf-8"))
    # Thread pools do not survive a fork, so none may be opened while importing.
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ.setdefault(name, "1")
    # Ctrl-C is for the parent, whose end ends the server too.
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    # What modules print while they are imported is not for the terminal: the parent imports them too, and shows it.
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    share(request["path"], request["files"])
    failed = preload(request["modules"])
    signal.signal(signal.SIGINT, before)
    unfinished = folder / "report.part"
    unfinished.write_text(json.dumps({"objection": why_unsafe(), "failed": failed}), "utf-8")
    unfinished.rename(folder / "report")


if REQUEST in os.environ:
    _serve(Path(os.environ.pop(REQUEST)))
