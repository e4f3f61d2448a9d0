"""What the fork server imports once, so that ranks start with everything imported; and how modules are found there."""

from __future__ import annotations

import importlib
import os
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from typing import Any

from pytest_fsdp_meta.worlds.spec import Sources

REQUEST = "PYTEST_FSDP_META_PRELOAD"
"""The environment variable that tells the fork server in which folder it finds what to import."""
TORCH_MODULES = ("torch", "torch.distributed", "torch.distributed.tensor", "torch.distributed.fsdp", "cloudpickle")


class LooseModules(MetaPathFinder):
    """Finds modules by file that no search path leads to: what pytest imported in ``importlib`` mode."""

    def __init__(self, files: Mapping[str, str]) -> None:
        self._files = dict(files)

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if name not in self._files:
            return None
        file = self._files[name]
        # As pytest finds them: another finder, such as the one that rewrites asserts, may want to load it.
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(name, [os.path.dirname(file)])
            if spec is not None and spec.origin == file:
                return spec
        return spec_from_file_location(name, file)


class LooseParents(MetaPathFinder):
    """Makes up empty packages for the dotted names of loose modules; asked last, so that real packages come first."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = {name[:end] for name in names for end, letter in enumerate(name) if letter == "."}

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        return ModuleSpec(name, None, is_package=True) if name in self._names else None


def share(sources: Sources) -> None:
    """Lets this process import what the parent has imported."""
    sys.path[:] = sources.path or sys.path
    if sources.before is not None:
        (module, _, name), arguments = sources.before[0].partition(":"), sources.before[1]
        getattr(importlib.import_module(module), name)(*arguments)
    others = [finder for finder in sys.meta_path if not isinstance(finder, (LooseModules, LooseParents))]
    sys.meta_path[:] = [LooseModules(sources.modules), *others, LooseParents(list(sources.modules))]


def preload(modules: Sequence[str]) -> dict[str, str]:
    """Imports what can be imported, and says why others cannot; a rank meets the error again where it needs them.

    Of "module:function" the function is called, when all is imported.
    """
    failed = {}
    for name in sorted(modules, key=lambda one: ":" in one):
        module, _, function = name.partition(":")
        try:
            imported = importlib.import_module(module)
            if function:
                getattr(imported, function)()
        except BaseException as error:  # pytest.skip and SystemExit at module level are no Exceptions
            failed[name] = f"{type(error).__name__}: {error}"
    with suppress(Exception):
        _warm_up()
    return failed


def _warm_up() -> None:
    """Makes torch import now what it imports on first use: deterministic mode alone brings in the inductor, 0.4 s."""
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.use_deterministic_algorithms(torch.are_deterministic_algorithms_enabled())


def why_unsafe() -> str:
    """The reason why this process must not be forked, or empty."""
    others = [thread.name for thread in threading.enumerate() if thread is not threading.main_thread()]
    if others:
        return f"importing the test modules started threads ({', '.join(others)})"
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return "importing the test modules initialised CUDA"
    if torch is not None and torch.backends.cuda.is_built() and _forks_without_cuda(torch):
        return "importing the test modules asked CUDA for its devices"
    return ""


def _forks_without_cuda(torch: Any) -> bool:
    """Whether CUDA refuses to start in what is forked from here. Nobody but a forked process is told.

    ``torch.cuda.is_available()`` is enough for it, where it cannot ask NVML. Private: ``_is_in_bad_fork``, which torch
    itself asks before it starts CUDA; in public it only raises, and starts CUDA where it may.
    """
    pid = os.fork()
    if not pid:
        os._exit(bool(torch.cuda._is_in_bad_fork()))
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) != 0
