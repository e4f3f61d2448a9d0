"""``pytest --fsdp-init=MODULE:NAME``: write a test file for a loader, a function or a class, from its signature alone.

The loader is imported but never called: what its signature does not say is a ``todo()`` in the file.
"""

from __future__ import annotations

import ast
import inspect
import os
import re
import sys
import textwrap
from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from pytest_fsdp_meta.loader.subject import Subject
from pytest_fsdp_meta.loader.validation import SIGNATURES
from pytest_fsdp_meta.plugin.collection import require_plain_function
from pytest_fsdp_meta.plugin.named_loader import find_function
from pytest_fsdp_meta.plugin.option_values import parse_loader
from pytest_fsdp_meta.text import LINES, counted, printable

OPTION = "--fsdp-init"
FOLDERS = ("tests", "test")
"""Where the file goes if the ini file names no ``testpaths``: the first that exists, else the current folder."""
CI = "a CI job for pull requests: docs/nightly.md#for-each-pull-request-on-a-cpu"
WIDTH = 88
"""Columns of a line, as ruff and black format by default."""

BY_NAME = {
    "fsdp": ("fsdp", "Rank"),
    "mesh": ("fsdp.mesh", "DeviceMesh"),
    "device_mesh": ("fsdp.mesh", "DeviceMesh"),
    "device": ("fsdp.device", "device"),
    "rank": ("fsdp.rank", "int"),
    "local_rank": ("fsdp.local_rank", "int"),
    "world_size": ("fsdp.world_size", "int"),
}
"""What the test passes for a parameter of this name, if its annotation allows this type."""
BY_TYPE = {"DeviceMesh": "fsdp.mesh", "device": "fsdp.device"}
"""What the test passes for a parameter that alone has this annotation, and no default."""
NO_TYPES = {"", "Any", "None", "NoneType", "Optional", "Union"}
"""Words of an annotation that rule nothing out."""
REQUIRED = {
    "reference": "a function that builds the model with the weights that {loader} loads, or a folder with "
    "*.safetensors",
    "batch": "a function of the step; or delete batch and loss, and the training is not checked",
    "loss": "a function of model and batch; or delete this, if the model returns its loss",
}
"""Fields of Subject that a first test needs, and what to write for them."""
OPTIONAL = ("optimizer", "train_step", "save", "resume")
"""Fields that are worth knowing for a first test. None of them makes a check pass."""
TAKEN = {"ast", "Path", "pytest", "todo", "fsdp", "Subject", "fsdp_conformance", "trainer", "declared", "model"}
"""Names that the file uses itself; a loader with such a name is imported under another one."""

TODO = '''
def todo(what):
    """Fail with all that is left to do, before the loader is called."""
    nodes = ast.walk(ast.parse(Path(__file__).read_text()))
    calls = [node for node in nodes if isinstance(node, ast.Call)]
    todos = [call for call in calls if ast.unparse(call.func) == "todo"]
    todos.sort(key=lambda call: call.lineno)
    lines = [f"TODO in line {one.lineno}: {one.args[0].value}" for one in todos]
    pytest.fail("\\n".join(lines), pytrace=False)
'''
TEST = """
{group}
@fsdp_conformance
def {test}(fsdp):  # runs on every rank
    return Subject(
{fields}
    )
"""
TRAINER = """
{group}
@fsdp_conformance
def {test}(fsdp):  # runs on every rank
    declared = {{
{required}
    }}
    # Last, so that {loader} is called only when no todo is left.
    trainer = {call}
    return Subject(
{fields}
        **declared,
    )
"""
PARTS = {
    "model": ("model", "net", "module"),
    "optimizer": ("optimizer", "optim", "opt"),
    "scheduler": ("scheduler", "lr_scheduler", "sched"),
    "train_step": ("train_step", "training_step"),
    "save": ("save", "save_checkpoint"),
    "resume": ("resume", "load", "load_checkpoint"),
    "data": ("dataloader", "train_dataloader", "train_loader"),
}
"""Field of Subject -> what a trainer may call it: a method, or what it assigns to self."""


def run(config: pytest.Config) -> int:
    """Write the test file and return the exit status. Raises UsageError with one line where it cannot be written."""
    name = config.getoption(OPTION)
    try:
        lines = _write(config, parse_loader(name))
    except ValueError as error:
        expected = "expected MODULE:FUNCTION, such as mypkg.loading:load"
        message = f"{OPTION}={name}: {str(error) or f'invalid value ({expected})'}"
        raise pytest.UsageError(printable(message)) from None
    except KeyboardInterrupt:
        print(f"{OPTION}: interrupted; no file was written", file=sys.stderr)
        return pytest.ExitCode.INTERRUPTED
    print(printable("\n".join(lines), LINES))
    return 0


def _write(config: pytest.Config, name: str) -> list[str]:
    if config.args_source is pytest.Config.ArgsSource.ARGS:
        raise ValueError(f"it runs no tests; remove {' '.join(map(repr, config.args))}")
    if config.getoption("numprocesses", None) or config.getoption("tx", None):
        raise ValueError("it runs no tests, so it needs no workers; add -n 0")
    here = config.invocation_params.dir
    if os.fspath(here) not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.fspath(here))
    function = find_function(name)[1]
    parameters = _require_loader(function, name)
    last = re.sub(r"[^0-9a-zA-Z_]", "_", re.split(r"[:.]", name)[-1]).strip("_")
    folders = (*(config.rootpath / one for one in config.getini("testpaths")), *(here / one for one in FOLDERS))
    path = next(filter(Path.is_dir, folders), here) / f"test_{last or 'loader'}.py"
    shown = (path.relative_to(here) if path.is_relative_to(here) else path).as_posix()
    if path.exists():
        raise ValueError(f"{shown} exists and is not overwritten; run or rename that file")
    text = _test_file(name, function, parameters, path.stem, here)
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise ValueError(f"{shown} cannot be written ({error.strerror}); set testpaths to another folder") from None
    return _describe(text, shown)


def _require_loader(function: Any, name: str) -> list[inspect.Parameter]:
    """Return the parameters. Raises ValueError for what cannot be called as a loader, with what to name instead."""
    owner, _, last = name.partition(":")[2].rpartition(".")
    if not inspect.isclass(function):
        require_plain_function(function, "a loader")
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        raise ValueError("it has no signature, as it is written in C; name a Python function that calls it") from None
    if owner and inspect.isfunction(function) and [one.name for one in parameters[:1]] == ["self"]:
        raise ValueError(f"it is a method of an instance; write a function that makes the {owner} and calls {last}")
    return parameters


def _describe(text: str, shown: str) -> list[str]:
    """Return the lines that say what is left to do, with lines of the file."""
    calls = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
    todos = [(call.lineno, ast.literal_eval(call.args[0])) for call in calls if ast.unparse(call.func) == "todo"]
    lines = [f"  line {number}: {what}" for number, what in sorted(todos)]
    first = f"wrote {shown}; fill in {counted(len(lines), 'TODO')}, as the test fails until then:"
    return [first, *lines, f"then run it: python -m pytest {shown}", CI]


def _test_file(name: str, function: Any, parameters: list[inspect.Parameter], test: str, here: Path) -> str:
    module, _, attribute = name.partition(":")
    first, dot, rest = attribute.partition(".")
    collected = first.lower().startswith("test")  # pytest would take it for a test
    alias = f"loader_{first}" if collected or first in TAKEN else first
    loader, imported = f"{alias}{dot}{rest}", first if alias == first else f"{first} as {alias}"
    imports = [f"from {module} import {imported}", "import pytest"]
    if len(imports[0]) > WIDTH:
        imports[0] = f"from {module} import (\n    {imported},\n)"
    group = f'Write @fsdp_conformance(process_group="loader") if {attribute} calls init_process_group itself; '
    group = "\n".join(_comment(f"{group}fsdp.mesh does not exist then.", 0))
    docs = _documented_fields()
    if inspect.isclass(function):
        lines = _call(attribute, parameters, 8)
        call = "\n".join([f"{loader}(", *lines, "    )"]) if lines else f"{loader}()"
        own, todos = _trainer_fields(function)
        required, fields = "\n".join([*_required(attribute, '"{}": ', docs), *todos]), "\n".join(own)
        body = TRAINER.format(group=group, test=test, loader=loader, required=required, call=call, fields=fields)
    else:
        fields = "\n".join([*_required(attribute, "{}=", docs), *_fields(attribute, loader, parameters, docs)])
        body = TEST.format(group=group, test=test, fields=fields)
    imports += ["from pytest_fsdp_meta import Subject, fsdp_conformance", "import ast", "from pathlib import Path"]
    doc = f"Check what {name} loads.\n\nReplace each todo(...) by what it says; the test fails until then.\n"
    return f'"""{doc}"""\n\n{_sort_imports(imports, here)}\n\n{TODO}\n{body}'


def _required(attribute: str, start: str, docs: Mapping[str, str]) -> Iterator[str]:
    for field, text in REQUIRED.items():
        yield from _comment(docs[field], 8)
        yield from _todo(start.format(field), f"{field}: {text.format(loader=attribute)}", 8)


def _fields(attribute: str, loader: str, parameters: list[inspect.Parameter], docs: Mapping[str, str]) -> list[str]:
    """Return the last arguments of Subject: the call of the loader, and in comments what else it takes."""
    lines = _comment(
        f"Last, so that {attribute} is called only when no todo is left. If it returns a tuple, unpack it before.", 8
    )
    call = _call(attribute, parameters, 12)
    lines += [f"        model={loader}(", *call, "        ),"] if call else [f"        model={loader}(),"]
    for field in OPTIONAL:
        lines += _comment(f"Optional: {field}=..., {docs[field][0].lower()}{docs[field][1:]}", 8)
    return lines


def _trainer_fields(kind: type) -> tuple[list[str], list[str]]:
    """Return the arguments of Subject that instances have under usual names, and a todo for each uncertain call."""
    own = set(dir(kind))
    with suppress(OSError, TypeError):  # without its source, only its methods are known
        nodes = ast.walk(ast.parse(textwrap.dedent(inspect.getsource(kind))))
        stored = [node for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)]
        own |= {node.attr for node in stored if ast.unparse(node.value) == "self"}
    found = {field: name for field, names in PARTS.items() for name in reversed(names) if name in own}
    if not {"save", "resume"} <= found.keys():  # Subject needs both or neither
        found = {field: name for field, name in found.items() if field not in ("save", "resume")}
    fields = [] if "model" in found else ["        model=trainer,  # or its attribute that has the model"]
    todos = list[str]()
    for field, name in found.items():
        method = getattr(kind, name, None)
        if field not in ("train_step", "save", "resume") or not inspect.isfunction(method):
            fields.append(f"        {field}=trainer.{name},")
            continue
        handed = re.findall(r"\w+", SIGNATURES[field])[1:4]  # without what it returns
        slots = [p for p in inspect.signature(method).parameters.values() if p.name != "self"]
        needed = [p for p in slots if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
        known = {p.name: p.name for p in needed if p.name in handed}
        others = [p.name for p in needed if p.name not in handed]
        if len(others) == 1 and handed[-1] not in known:  # the batch or the folder under another name
            known[others.pop()] = handed[-1]
        sure = not others and handed[-1] in known.values()
        given = [f"{p.name}=" * (not sure or p.kind is p.KEYWORD_ONLY) + known.get(p.name, "...") for p in needed]
        call, names = f"trainer.{name}({', '.join(given)})", ", ".join(handed)
        if sure:
            fields.append(f"        {field}=lambda {names}: {call},")
        else:
            todos += _todo(f'"{field}": ', f"{field}: a function of {names} that calls {call}", 8)
    return fields, todos


def _documented_fields() -> dict[str, str]:
    (kind,) = ast.parse(inspect.getsource(Subject)).body
    assert isinstance(kind, ast.ClassDef)
    return {
        ast.unparse(field.target): str(ast.literal_eval(doc.value)).partition("\n\n")[0].replace("``", "`")
        for field, doc in pairwise(kind.body)
        if isinstance(field, ast.AnnAssign) and isinstance(doc, ast.Expr)
    }


def _call(attribute: str, parameters: list[inspect.Parameter], indent: int) -> list[str]:
    """Return the arguments of the loader: what the test surely knows, and a todo for what has no default."""
    known = _known(parameters)
    lines, kept = [], []
    for one in parameters:
        start = "" if one.kind is one.POSITIONAL_ONLY else f"{one.name}="
        if one.kind in (one.VAR_POSITIONAL, one.VAR_KEYWORD):
            kept.append(f"{'*' if one.kind is one.VAR_POSITIONAL else '**'}{one.name}")
        elif one.default is not one.empty and not (start and one.name in known):
            kept.append(one.name)
        elif one.name in known:
            lines.append(f"{' ' * indent}{start}{known[one.name]},")
        else:
            kind = textwrap.shorten(_annotation(one), 80, placeholder=" ...")
            what = f"{one.name}: what {attribute} expects{f' ({kind})' * bool(kind)}, for a small model"
            lines += _todo(start, what, indent)
    return lines + (_comment(f"defaults kept: {', '.join(kept)}", indent) if kept else [])


def _known(parameters: list[inspect.Parameter]) -> dict[str, str]:
    """Return what the test passes for the parameters that their name or annotation makes certain."""
    known, by_type = {}, {}
    for one in parameters:
        words = re.split(r"[][|,]", _annotation(one))
        types = {word.strip().rpartition(".")[2] for word in words} - NO_TYPES
        value, kind = BY_NAME.get(one.name, ("", ""))
        if value and (not types or kind in types <= {kind, "int", "str"}):
            known[one.name] = value
        elif one.name == "device" and types == {"str"}:
            known[one.name] = "str(fsdp.device)"
        elif len(types) == 1 and one.default is one.empty:
            by_type[one.name] = BY_TYPE.get(types.pop(), "")
    values = [*known.values(), *by_type.values()]
    return known | {name: value for name, value in by_type.items() if value and values.count(value) == 1}


def _annotation(parameter: inspect.Parameter) -> str:
    kind = parameter.annotation
    if kind is parameter.empty:
        return ""
    return printable(kind if isinstance(kind, str) else inspect.formatannotation(kind))


def _comment(text: str, indent: int) -> list[str]:
    return [f"{' ' * indent}# {line}" for line in _wrap(text, WIDTH - indent - 2)]


def _todo(start: str, what: str, indent: int) -> list[str]:
    """Return the lines of an argument that calls ``todo``, as ruff formats a long text."""
    text, space = what.replace("\\", "\\\\").replace('"', "'"), " " * indent
    line = f'{space}{start}todo("{text}"),'
    if len(line) <= WIDTH:
        return [line]
    *parts, last = _wrap(text, WIDTH - indent - 7)
    texts = [*(f'{space}    "{part} "' for part in parts), f'{space}    "{last}"']
    return [f"{space}{start}todo(", *texts, f"{space}),"]


def _wrap(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False)


def _sort_imports(statements: list[str], here: Path) -> str:
    """Return the statements in ruff's order: standard library, other packages, the project's, in this folder or src."""
    sections: list[list[str]] = [[], [], []]
    for statement in sorted(statements, key=lambda line: (line.startswith("from"), line.split()[1])):
        top = statement.split()[1].partition(".")[0]
        own = any((here / path).exists() for path in (top, f"{top}.py", f"src/{top}", f"src/{top}.py"))
        sections[0 if top in sys.stdlib_module_names else 2 if own else 1].append(statement)
    return "\n\n".join("\n".join(section) for section in sections if section)
