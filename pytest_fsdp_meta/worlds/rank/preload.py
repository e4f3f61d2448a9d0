"""Import modules once in the fork server, so that ranks start with them, and find modules that only have a file."""

from __future__ import annotations

import ctypes
import importlib
import os
import re
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from glob import glob
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from pytest_fsdp_meta.worlds.spec import Sources

REQUEST = "PYTEST_FSDP_META_PRELOAD"
"""The environment variable with the folder in which the fork server finds its request."""
IMPORTING = "importing"
"""The file in that folder that says what is being imported."""
TORCH_MODULES = (
    "torch",
    "torch.distributed",
    "torch.distributed.tensor",
    "torch.distributed.fsdp",
    "pytest_fsdp_meta.worlds.system.pickling",
)
NVML_CHECK = "PYTORCH_NVML_BASED_CUDA_CHECK"
"""Set to 1, ``torch.cuda.is_available()`` asks the driver's library, and does not start CUDA in the process."""
DEVICE_FILES = ("/dev/nvidia*", "/dev/nvmap", "/dev/dxg", "/dev/kfd")
"""What CUDA and ROCm open when they start: the driver of a card, of a Jetson, of WSL, of AMD."""
TORCH_ON_FORK = "Cannot re-initialize CUDA in forked subprocess"
"""What torch says in a forked process instead of "Found no NVIDIA driver", if CUDA was asked before the fork."""
FORKABLE_THREADS = re.compile("jemalloc_bg_thd|cuda[0-9a-f]{11}")
"""Names of native threads that a fork may lose. jemalloc, which pyarrow brings, starts its own again. The other is
started by NVML, which counts GPUs for ``torch.cuda.is_available()``; CUDA still starts in a fork (driver 580)."""
CUDA_SUCCESS = 0
"""What the driver answers once cuInit has succeeded in this process."""


class LooseModules(MetaPathFinder):
    """Finds modules that are on no search path by their file: those that pytest imported in ``importlib`` mode."""

    def __init__(self, files: Mapping[str, str]) -> None:
        self._files = dict(files)

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if name not in self._files:
            return None
        file = self._files[name]
        # As pytest does: another finder, such as the one that rewrites asserts, may want to load it.
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(name, [os.path.dirname(file)])
            if spec is not None and spec.origin == file:
                return spec
        return spec_from_file_location(name, file)


class LooseParents(MetaPathFinder):
    """Makes empty packages for the dotted names of loose modules; comes last, so that real packages win."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = {name[:end] for name in names for end, letter in enumerate(name) if letter == "."}

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        return ModuleSpec(name, None, is_package=True) if name in self._names else None


def use_sources(sources: Sources) -> None:
    """Let this process import what the parent has imported."""
    sys.path[:] = sources.path or sys.path
    if sources.before is not None:
        resolve_name(sources.before[0])(*sources.before[1])
    others = [finder for finder in sys.meta_path if not isinstance(finder, (LooseModules, LooseParents))]
    sys.meta_path[:] = [LooseModules(sources.modules), *others, LooseParents(list(sources.modules))]


class ImportWatch(MetaPathFinder):
    """Finds nothing; writes to a file what is being imported: "test_it (transformers)".

    The name in parentheses is the package outside the standard library whose modules are looked for at the moment.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._module = self._package = ""

    def begin(self, module: str) -> None:
        self._module, self._package = module, ""
        self._write()

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        package = name.partition(".")[0]
        if package != self._package and package not in sys.stdlib_module_names:
            self._package = package
            self._write()
        return None

    def _write(self) -> None:
        own = self._module.partition(".")[0]
        inside = f" ({self._package})" if self._package not in ("", own) else ""
        with suppress(OSError):  # the parent has ended, and with it the folder
            self._file.write_text(f"{self._module}{inside}", "utf-8")


def preload(modules: Sequence[str], watch: ImportWatch | None = None) -> dict[str, str]:
    """Import the modules; return the errors by name, which ranks get again if they need those modules.

    For "module:function", call the function after all imports.
    """
    failed = {}
    if watch is not None:
        sys.meta_path.insert(0, watch)
    for name in sorted(modules, key=lambda one: ":" in one):
        module, _, function = name.partition(":")
        if watch is not None:
            watch.begin(module)
        try:
            imported = importlib.import_module(module)
            if function:
                getattr(imported, function)()
        except BaseException as error:  # pytest.skip and SystemExit at module level are not Exceptions
            failed[name] = f"{type(error).__name__}: {error}"
    if watch in sys.meta_path:
        sys.meta_path.remove(watch)
    with suppress(Exception):
        _warm_up()
    return failed


def preload_early(modules: Mapping[str, Sequence[str]], watch: ImportWatch) -> None:
    """Import modules that test modules will import, and look up names in them: lazy packages import more for these.

    Errors count only when the test modules are imported.
    """
    sys.meta_path.insert(0, watch)
    for name, attributes in modules.items():
        watch.begin(name)
        with suppress(Exception):
            module = importlib.import_module(name)
            for attribute in attributes:
                getattr(module, attribute, None)
    sys.meta_path.remove(watch)
    with suppress(Exception):
        _warm_up()


def _warm_up() -> None:
    """Make torch import what it imports on first use: the inductor for deterministic mode alone takes 0.4 s."""
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.use_deterministic_algorithms(torch.are_deterministic_algorithms_enabled())


def has_gpu_files() -> bool:
    """Return whether this machine has a GPU's device file; without one, no process can start CUDA."""
    return any(glob(pattern) for pattern in DEVICE_FILES)


def hint(text: str) -> str:
    """Return the line to show for an error in which torch advises to spawn ranks, if that does not help; else ""."""
    if TORCH_ON_FORK not in text or has_gpu_files():
        return ""
    return "this machine has no GPU, so spawned ranks cannot use cuda either"


def why_unsafe() -> str:
    """Return the reason why this process must not be forked, or ""."""
    torch = sys.modules.get("torch")
    if _cuda_has_started() or (torch is not None and torch.cuda.is_initialized()):
        return "importing the test modules initialised CUDA"
    others = [thread.name for thread in threading.enumerate() if thread is not threading.main_thread()]
    if others := others or _native_threads():
        return f"importing the test modules started threads ({', '.join(others)})"
    if torch is not None and torch.backends.cuda.is_built() and has_gpu_files() and _forks_without_cuda(torch):
        return "importing the test modules asked CUDA for its devices"
    return ""


def _native_threads() -> list[str]:
    """Return the names of threads that Python does not know, such as those of a backward on a GPU."""
    names = []
    for task in Path("/proc/self/task").glob("*"):
        with suppress(OSError):  # a thread that has just ended
            name = (task / "comm").read_text("utf-8", "replace").strip()
            names += [name] if int(task.name) != os.getpid() and not FORKABLE_THREADS.fullmatch(name) else []
    return sorted(names)


def _cuda_has_started() -> bool:
    """Return whether CUDA runs in this process, whoever started it: torch knows only of what it started itself.

    Open files cannot show it: NVML, which only counts GPUs, opens the same ones.
    """
    try:
        driver = ctypes.CDLL("libcuda.so.1", mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
    except OSError:  # it is not loaded
        return False
    return bool(driver.cuDeviceGetCount(ctypes.byref(ctypes.c_int())) == CUDA_SUCCESS)


def _forks_without_cuda(torch: Any) -> bool:
    """Return whether CUDA refuses to start in a process forked from this one, which only such a process can find out.

    Without NVML, ``torch.cuda.is_available()`` is enough to cause this. Private: ``_is_in_bad_fork``, which torch
    itself checks before it starts CUDA; public functions only raise, or start CUDA.
    """
    pid = os.fork()
    if not pid:
        os._exit(bool(torch.cuda._is_in_bad_fork()))
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) != 0
