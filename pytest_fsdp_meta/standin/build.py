"""Compile the stand-in device for the torch that is installed, once, into the user's cache."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

NAME = "standin"
MODULE = "_standin"
TORCH = ("2.13", "2.14", "2.15")
"""The releases of torch with which the stand-in was tested. It overrides operators and hooks that torch may change."""
SOURCES = ("memory.cpp", "kernels.cpp")
HEADERS = ("standin.h",)
COMPILERS = ("c++", "g++", "clang++")
FLAGS = ("-std=c++20", "-O1", "-fPIC", "-fvisibility=hidden", f"-DTORCH_EXTENSION_NAME={MODULE}")
TIME_LIMIT = 600.0
"""Seconds after which the compiler is stopped."""


class Unavailable(ValueError):
    """The stand-in cannot be used here; the message is one line that says why, and what would be right."""


def prepare(tell: Callable[[str], object] = lambda line: None) -> Path:
    """Return the compiled module. If it is not in the cache, compile it: ``tell`` gets one line before that.

    Raises Unavailable with another torch, without a compiler, and if it does not compile.
    """
    path = library()
    if not path.exists():
        _compile(_compiler(), path, tell)
    return path


def library() -> Path:
    """Return the path of the compiled module, which may not exist yet. Raises Unavailable with another torch."""
    torch = _torch_version()
    digest = hashlib.sha256()
    for part in (torch, sys.version, sysconfig.get_platform(), *FLAGS):
        digest.update(part.encode())
    for name in (*SOURCES, *HEADERS):
        digest.update(Path(__file__).with_name(name).read_bytes())
    name = f"{MODULE}-torch{torch.partition('+')[0]}-{digest.hexdigest()[:16]}{sysconfig.get_config_var('EXT_SUFFIX')}"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser(), "pytest-fsdp-meta", name)


def _torch_version() -> str:
    try:
        found = version("torch")
    except PackageNotFoundError:
        raise Unavailable("the stand-in device needs torch") from None
    if not any(found == tested or found.startswith(f"{tested}.") for tested in TORCH):
        raise Unavailable(f"the stand-in device was tested with torch {', '.join(TORCH)}, here is {found}; use cpu")
    return found


def _compiler() -> str:
    given = os.environ.get("CXX", "").split(" ")[0]
    for name in (given, *COMPILERS):
        if name and (found := shutil.which(name)):
            return found
    raise Unavailable("the stand-in device needs a C++ compiler to be built once; install g++, or set CXX")


def _compile(compiler: str, path: Path, tell: Callable[[str], object]) -> None:
    """Compile into a folder beside the target and rename, because another process may do the same at this moment."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent, prefix="build-") as folder:
            tell(f"compiling the stand-in device with {compiler}, once for this torch, into {path.parent}")
            objects = [str(Path(folder, name).with_suffix(".o")) for name in SOURCES]
            commands = [
                [compiler, *FLAGS, *_includes(), "-c", str(Path(__file__).with_name(source)), "-o", target]
                for source, target in zip(SOURCES, objects, strict=True)
            ]
            with ThreadPoolExecutor() as pool:
                for done in [pool.submit(_run, command) for command in commands]:
                    done.result()
            made = Path(folder, path.name)
            _run([compiler, "-shared", *objects, *_libraries(), "-o", str(made)])
            made.replace(path)
    except OSError as error:
        raise Unavailable(f"the stand-in device cannot be built in {path.parent}: {error.strerror}") from None


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=TIME_LIMIT)
    except subprocess.TimeoutExpired:
        raise Unavailable(f"the stand-in device did not compile within {TIME_LIMIT:g} s: {command[0]}") from None
    if done.returncode:
        problem = next((line for line in done.stderr.splitlines() if "error" in line), f"exit {done.returncode}")
        raise Unavailable(f"the stand-in device does not compile with {command[0]}: {problem.strip()}")


def _includes() -> list[str]:
    """Return options for the headers of torch and Python; found without importing torch, which takes a second."""
    root = _torch_folder() / "include"
    folders = (root, root / "torch" / "csrc" / "api" / "include", sysconfig.get_paths()["include"])
    return [part for folder in folders for part in ("-isystem", str(folder))]


def _libraries() -> list[str]:
    found = [f"-L{_torch_folder() / 'lib'}", *(f"-l{name}" for name in ("c10", "torch_cpu", "torch", "torch_python"))]
    return [*found, "-undefined", "dynamic_lookup"] if sys.platform == "darwin" else found


def _torch_folder() -> Path:
    found = find_spec("torch")
    assert found is not None
    assert found.origin is not None
    return Path(found.origin).parent
