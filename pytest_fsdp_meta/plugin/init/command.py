"""``pytest --fsdp-init=MODULE:FUNCTION``: write a test file for a loader, and print what is left and a CI job."""

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
from pytest_fsdp_meta.plugin.init.facts import Facts, find_facts
from pytest_fsdp_meta.plugin.init.render import TestFile
from pytest_fsdp_meta.plugin.named_loader import find_function
from pytest_fsdp_meta.plugin.option_values import parse_loader
from pytest_fsdp_meta.text import counted, escape_controls

OPTION = "--fsdp-init"
OPTIONAL = "# Optional: "
FOLDERS = ("tests", "test")
"""Where the file goes if the ini file names no ``testpaths``: the first that exists, else the current folder."""
WORKFLOW = """\
# .github/workflows/loaders.yml
name: Loaders
on: pull_request
permissions:
  contents: read
jobs:
  loaders:
    runs-on: ubuntu-latest
    timeout-minutes: 20
    steps:
      - uses: actions/checkout@8e8c483db84b4bee98b60c0593521ed34d9990e8  # v6.0.1
        with:
          persist-credentials: false
      - uses: actions/setup-python@e797f83bcb11b83ae66e0230d6156d7c80228e7c  # v6.0.0
        with:
          python-version: "{python}"
      - run: pip install torch --index-url https://download.pytorch.org/whl/cpu
      # not on PyPI yet: until the first release, put the path of a checkout in place of pytest-fsdp-meta
      - run: pip install {install}
      - run: python -m pytest {file}
"""


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
        raise pytest.UsageError(escape_controls(message)) from None
    except KeyboardInterrupt:
        print(f"{OPTION}: interrupted; no file was written", file=sys.stderr)
        return pytest.ExitCode.INTERRUPTED
    print(escape_controls(text))
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
    facts = find_facts(name, function, here)
    test = f"test_{re.sub(r'[^0-9a-zA-Z_]', '_', facts.attribute.rpartition('.')[2]).strip('_') or 'loader'}"
    path = _folder(config, here) / f"{test}.py"
    shown = (path.relative_to(here) if path.is_relative_to(here) else path).as_posix()
    file = TestFile(facts, test, lambda module: _is_own(module, here))
    try:
        with path.open("x", encoding="utf-8") as written:
            written.write(file.text)
    except FileExistsError:
        raise ValueError(f"{shown} exists and is not overwritten; run or rename that file") from None
    except OSError as error:
        raise ValueError(f"{shown} cannot be written ({error.strerror}); set testpaths to another folder") from None
    return "\n".join(
        [*_describe(facts, file, name), "", *_describe_rest(file, shown), "", _workflow(shown, facts, here)]
    )


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


def _describe(facts: Facts, file: TestFile, name: str) -> list[str]:
    """Return a line for each thing that was found out."""
    lines = [f"{name}{facts.signature}"]
    known = [f"{name} gets {value}" for name, value in file.given.items()]
    lines += [f"  {', '.join(known)}"] if known else []
    if facts.own_group:
        lines.append(f'  {facts.own_group} calls init_process_group: process_group="loader"')
    if facts.backend == "nccl":
        lines.append(f"  {facts.own_group} names the backend nccl, which needs GPUs: leave it out to run on a CPU, too")
    if facts.returned:
        lines.append(f"  it returns ({', '.join(facts.returned)})")
    if facts.transformers is not None:
        lines.append("  it loads a transformers model: the reference and the batches come from the checkpoint")
    elif facts.model is not None:
        kind = facts.model.kind.__name__
        lines.append(f"  it builds {kind}: the reference is an unsharded {kind} on one device")
    elif not facts.has_source:
        lines.append("  its source cannot be read, so only its signature is known")
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


def _workflow(shown: str, facts: Facts, here: Path) -> str:
    extra = "[transformers]" if facts.transformers is not None else ""
    project = "-e . " if any((here / name).is_file() for name in ("pyproject.toml", "setup.py")) else ""
    needs = "-r requirements.txt " if (here / "requirements.txt").is_file() else ""
    text = WORKFLOW.format(
        python=f"{sys.version_info[0]}.{sys.version_info[1]}",
        install=f"{project}{needs}'pytest-fsdp-meta{extra}'",
        file=shown,
    )
    return f"a CI job for pull requests; save it as .github/workflows/loaders.yml:\n\n{text}"
