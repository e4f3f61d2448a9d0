"""``pytest --fsdp-init=MODULE:FUNCTION``: call a loader, write a test file for it, and print what is left to do."""

from __future__ import annotations

import ast
import inspect
import os
import re
import sys
from collections.abc import Callable
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest

from pytest_fsdp_meta.plugin.collection import require_plain_function
from pytest_fsdp_meta.plugin.init.pretrained import describe_class, is_model_class
from pytest_fsdp_meta.plugin.init.probe import Seen, fallback, parameters_of
from pytest_fsdp_meta.plugin.init.render import TestFile
from pytest_fsdp_meta.plugin.named_loader import find_function
from pytest_fsdp_meta.plugin.option_values import parse_loader
from pytest_fsdp_meta.plugin.settings import read_settings
from pytest_fsdp_meta.text import LINES, counted, printable
from pytest_fsdp_meta.worlds import ForkServerEngine, Sources, World, WorldError, WorldSpec

OPTION = "--fsdp-init"
OPTIONAL = "# Optional: "
FOLDERS = ("tests", "test")
"""Where the file goes if the ini file names no ``testpaths``: the first that exists, else the current folder."""
CI = "a CI job for pull requests: docs/nightly.md#for-each-pull-request-on-a-cpu"
MOST_SECONDS = 60.0
"""The time for all calls of the loader, unless --fsdp-timeout is shorter."""


def run(config: pytest.Config) -> int | None:
    """Write the test file and return the exit status where ``--fsdp-init`` asks for it, else None.

    Raises UsageError with one line where it cannot be written.
    """
    name = config.getoption(OPTION)
    if name is None:
        return None
    try:
        text = _write(config, parse_loader(name))
    except ValueError as error:
        expected = "expected MODULE:FUNCTION, such as mypkg.loading:load"
        message = f"{OPTION}={name}: {str(error) or f'invalid value ({expected})'}"
        raise pytest.UsageError(printable(message)) from None
    except KeyboardInterrupt:
        print(f"{OPTION}: interrupted; no file was written", file=sys.stderr)
        return pytest.ExitCode.INTERRUPTED
    print(printable(text, LINES))
    return 0


def _write(config: pytest.Config, name: str) -> str:
    """Write the file; return what to print. Raises ValueError."""
    if config.args_source is pytest.Config.ArgsSource.ARGS:
        raise ValueError(f"it runs no tests; remove {' '.join(map(repr, config.args))}")
    if config.getoption("numprocesses", None) or config.getoption("tx", None):
        raise ValueError("it runs no tests, so it needs no workers; add -n 0")
    here = config.invocation_params.dir
    if os.fspath(here) not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.fspath(here))
    function = find_function(name)[1]
    _require_loader(function, name)
    module, _, attribute = name.partition(":")
    test = f"test_{re.sub(r'[^0-9a-zA-Z_]', '_', attribute.rpartition('.')[2]).strip('_') or 'loader'}"
    path = _folder(config, here) / f"{test}.py"
    shown = (path.relative_to(here) if path.is_relative_to(here) else path).as_posix()
    if path.exists():
        raise ValueError(f"{shown} exists and is not overwritten; run or rename that file")
    seen = _observe(config, name, function)
    file = TestFile(module, attribute, seen, test, lambda module: _is_own(module, here))
    try:
        with path.open("x", encoding="utf-8") as written:
            written.write(file.text)
    except OSError as error:
        raise ValueError(f"{shown} cannot be written ({error.strerror}); set testpaths to another folder") from None
    return "\n".join([*_describe(seen, file, f"{name}{_signature(function)}"), "", *_describe_rest(file, shown), CI])


def _observe(config: pytest.Config, name: str, function: Any) -> Seen:
    """Call the loader in a world of its own; without one, return what its parameters say, and why."""
    parameters = parameters_of(function)
    kind = getattr(function, "__self__", None)
    if name.endswith(".from_pretrained") and is_model_class(kind):
        return Seen((), transformers=describe_class(kind))
    timeout = min(MOST_SECONDS, read_settings(config).timeout)
    spec = WorldSpec({"dp_shard": 2}, timeout=timeout, process_group="loader", simulated=(0,))
    engine = ForkServerEngine(Sources(tuple(sys.path)))
    try:
        with World(spec, engine, label="the loader") as world:
            seen: Seen = world.run("pytest_fsdp_meta.plugin.init.probe:observe", name)[0]
            return seen
    except WorldError as error:
        return fallback(parameters, error.summary)
    finally:
        engine.close()


def _require_loader(function: Any, name: str) -> None:
    """Raise ValueError for what cannot be called as a loader, with what to name instead."""
    owner, _, last = name.partition(":")[2].rpartition(".")
    if inspect.isclass(function):
        methods = [one for one, value in vars(function).items() if isinstance(value, (classmethod, staticmethod))]
        also = next((f", or name {name}.{one}" for one in methods if not one.startswith("_")), "")
        raise ValueError(f"it is a class; write a function that makes the {last} and loads the model{also}")
    if getattr(function, "__name__", "") == "<lambda>":
        raise ValueError(f"it is a lambda; write it as a function: def {last}(...)")
    first = next(iter(_parameter_names(function)), "")
    if owner and inspect.isfunction(function) and first == "self":
        raise ValueError(f"it is a method of an instance; write a function that makes the {owner} and calls {last}")
    require_plain_function(function, "a loader")


def _parameter_names(function: Callable[..., Any]) -> list[str]:
    try:
        return list(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return []


def _folder(config: pytest.Config, here: Path) -> Path:
    named = [config.rootpath / name for name in config.getini("testpaths")]
    return next((path for path in (*named, *(here / name for name in FOLDERS)) if path.is_dir()), here)


def _is_own(module: str, here: Path) -> bool:
    """Return whether ruff, too, sees a module of the project: in the current folder, or in its src."""
    top = module.partition(".")[0]
    folders = (here, here / "src")
    return any((folder / top).is_dir() or (folder / f"{top}.py").is_file() for folder in folders)


def _signature(function: Any) -> str:
    """Return the signature on one line, without the defaults that cannot be shown."""
    signature = inspect.signature(function)
    try:
        return " ".join(str(signature).split())
    except Exception:  # what the __repr__ of a default raises
        parameters = signature.parameters.values()
        bare = [one if one.default is one.empty else one.replace(default=...) for one in parameters]
        return str(signature.replace(parameters=bare)).replace("Ellipsis", "...")


def _describe(seen: Seen, file: TestFile, first: str) -> list[str]:
    """Return a line for each thing that was seen."""
    known = [f"{name} gets {value}" for name, value in file.given.items()]
    lines = [first, *([f"  {', '.join(known)}"] if known else [])]
    if seen.error:
        lines.append(f"  it could not be called to see more: {seen.error}")
    if seen.group:
        lines.append(f'  {seen.group} calls init_process_group: process_group="loader"')
    if seen.backend == "nccl":
        lines.append(f"  {seen.group} names the backend nccl, which needs GPUs: leave it out to run on a CPU, too")
    if seen.returned:
        lines.append(f"  it returns ({', '.join(seen.returned)})")
    if seen.transformers is not None:
        lines.append("  it loads a transformers model: the reference and the batches come from the checkpoint")
    elif seen.model is not None:
        lines.append(f"  it builds {seen.model.name}: the reference is an unsharded {seen.model.name} on one device")
    return lines


def _describe_rest(file: TestFile, shown: str) -> list[str]:
    """Return what is left to do, with lines of the file."""
    todos = sorted(
        (node.lineno, str(node.args[0].value))
        for node in ast.walk(ast.parse(file.text))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "todo" and isinstance(node.args[0], ast.Constant)
    )
    text = file.text.splitlines()
    lines = [f"  line {number}: {what}" for number, what in todos]
    optional = [number for number, line in enumerate(text, 1) if OPTIONAL in line]
    for number in optional:
        rest = takewhile(lambda line: line.strip().startswith("#") and OPTIONAL not in line, text[number:])
        lines.append(f"  line {number}: {' '.join(line.strip('# ') for line in (text[number - 1], *rest))}")
    if not todos:
        first = "it runs as it is, and judges more with:" if lines else "nothing is left to fill in"
        return [f"wrote {shown}; {first}", *lines, f"run it: python -m pytest {shown}"]
    first = f"wrote {shown}; fill in {counted(len(todos), 'TODO')}, as the test fails until then:"
    return [first, *lines, f"then run it: python -m pytest {shown}"]
