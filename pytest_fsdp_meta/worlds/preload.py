"""Imported once by the fork server, so that ranks start with everything imported.

The parent says through the environment what to import. Nothing here may raise: an exception would end the fork
server; what went wrong is kept in ``STATE``, which every rank inherits and reports.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import spec_from_file_location

REQUEST = "PYTEST_FSDP_META_PRELOAD"
TORCH_MODULES = ("torch", "torch.distributed", "torch.distributed.tensor", "torch.distributed.fsdp", "cloudpickle")


@dataclass
class State:
    """What preloading did. ``unsafe`` is the reason why the process must not be forked, or empty."""

    forked: bool = False
    unsafe: str = ""
    failed: dict[str, str] = field(default_factory=dict)


STATE = State()


class LooseModules(MetaPathFinder):
    """Finds modules by file that no search path leads to: what pytest imported in ``importlib`` mode."""

    def __init__(self, files: Mapping[str, str]) -> None:
        self._files = dict(files)
        self._parents = {name.rpartition(".")[0] for name in files} - {""}
        for parent in list(self._parents):
            self._parents |= {parent.rsplit(".", depth)[0] for depth in range(parent.count(".") + 1)}

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if name in self._files:
            return spec_from_file_location(name, self._files[name])
        if name in self._parents and PathFinder.find_spec(name, path) is None:  # type: ignore[arg-type]
            return ModuleSpec(name, None, is_package=True)
        return None


def share(path: Sequence[str], files: Mapping[str, str]) -> None:
    """Lets this process import what the parent has imported."""
    sys.path[:] = path or sys.path
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, LooseModules)]
    sys.meta_path.insert(0, LooseModules(files))


def preload(modules: Sequence[str]) -> None:
    """Imports all of it and notes what failed; a rank meets the error again where it needs the module."""
    for name in modules:
        try:
            importlib.import_module(name)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # pytest.skip and SystemExit at module level are no Exceptions
            STATE.failed[name] = f"{type(error).__name__}: {error}"
    _warm_up()
    STATE.forked = True
    STATE.unsafe = _why_unsafe()


def _warm_up() -> None:
    """Makes torch import now what it imports on first use: deterministic mode alone brings in the inductor, 0.4 s."""
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.use_deterministic_algorithms(torch.are_deterministic_algorithms_enabled())


def _why_unsafe() -> str:
    others = [thread.name for thread in threading.enumerate() if thread is not threading.main_thread()]
    if others:
        return f"importing the test modules started threads ({', '.join(others)})"
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return "importing the test modules initialised CUDA"
    return ""


if REQUEST in os.environ:
    _request = json.loads(os.environ[REQUEST])
    # Thread pools do not survive a fork, so none may be opened while importing.
    for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ.setdefault(_name, "1")
    share(_request["path"], _request["files"])
    preload(_request["modules"])
