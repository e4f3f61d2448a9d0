"""Imported by the fork server and by nobody else: does what the parent asks for through the environment.

A module of its own, so that our package is complete when the test modules import it. The parent reads from a file when
all is imported, and whether the server may be forked.
"""

from __future__ import annotations

import json
import os
import signal
from typing import Any

from pytest_fsdp_meta.worlds.preload import REQUEST, preload, share, why_unsafe


def _serve(request: dict[str, Any]) -> None:
    # Thread pools do not survive a fork, so none may be opened while importing.
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ.setdefault(name, "1")
    # Ctrl-C is for the parent, whose end ends the server too.
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    share(request["path"], request["files"])
    preload(request["modules"])
    signal.signal(signal.SIGINT, before)
    unfinished = request["report"] + ".part"
    with open(unfinished, "w", encoding="utf-8") as file:
        file.write(why_unsafe())
    os.replace(unfinished, request["report"])


if REQUEST in os.environ:
    _serve(json.loads(os.environ.pop(REQUEST)))
