"""``--fsdp-init`` calls no loader, and writes a clean test that fails until it is filled in; it overwrites no file."""

from __future__ import annotations

import ast
import subprocess
import sys

import pytest

from pytest_fsdp_meta.text import printable
from tests.conftest import Project, errors

pytestmark = pytest.mark.slow

RULES = "E,F,W,I,B,UP,SIM,RUF,PT,TID,C4,PIE,RET"

LOADING = """
from pathlib import Path
from typing import Literal, Optional

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

class Decoder(nn.Sequential):
    def __init__(self, width): ...

def called():
    (Path(__file__).parent / "was-called").touch()

def build(path: Path, cfg, device_mesh, device="cuda", scale=1):
    called()

class Loader:
    @classmethod
    def from_checkpoint(cls, checkpoint_dir: "str | Path", *, mesh: Optional[DeviceMesh] = None, **options): ...
    def load(self, path): ...
    def __call__(self, path): ...

class Trainer:
    def __init__(self, config, mesh: DeviceMesh):
        self.net = self.optim = None
    def training_step(self, batch): ...
    def save(self, folder, step=0): ...
    def load(self, optimizer, path): ...

class Uncertain(Trainer):
    def train_step(self, images, *, labels, scale=1): ...
    def save(self, folder, epoch): ...
    def load(self, *, path): ...

def from_rank(rank: int, world_size, local_rank, fsdp, dp: DeviceMesh, dev: torch.device | None): ...
def positional(mesh, path, /, seed=0, *names): ...
def doubtful(mesh: tuple, rank: str, device: list[torch.device], tp: DeviceMesh, pp: DeviceMesh): ...
def known(mesh, tp: DeviceMesh, device: "str", world_size: "int" = 8, tp_mesh: "DeviceMesh" = None): ...
def quoted(path: Literal['a"', "it's", "b\\\\"], text: "two\\nlines \\x1b"): ...
def long_names(checkpoint_of_the_base_model_with_adapters, number_of_layers_to_keep=1, names_of_others_to_keep=()): ...
def test_it(path): ...
def Subject(config): ...

PATH = "here"
instance = Loader()
"""

ARGUMENTS = {
    "build": {"path": "", "cfg": "", "device_mesh": "fsdp.mesh", "device": "fsdp.device"},
    "Loader.from_checkpoint": {"checkpoint_dir": "", "mesh": "fsdp.mesh"},
    "from_rank": {"rank": "fsdp.rank", "world_size": "fsdp.world_size", "local_rank": "fsdp.local_rank"}
    | {"fsdp": "fsdp", "dp": "fsdp.mesh", "dev": "fsdp.device"},
    "positional": {"0": "fsdp.mesh", "1": ""},
    "doubtful": dict.fromkeys(("mesh", "rank", "device", "tp", "pp"), ""),
    "known": {"mesh": "fsdp.mesh", "tp": "", "device": "str(fsdp.device)", "world_size": "fsdp.world_size"},
    "quoted": {"path": "", "text": ""},
    "long_names": {"checkpoint_of_the_base_model_with_adapters": ""},
    "test_it": {"path": ""},
    "Subject": {"config": ""},
    "called": {},
    "instance": {"path": ""},
}
"""Loader -> the arguments with which the test calls it; a todo is empty."""


@pytest.fixture
def repository(project: Project) -> Project:
    project.write("mypkg/__init__.py", "")
    project.write("mypkg/loading.py", LOADING)
    (project.path / "tests").mkdir()
    return project


def init(project: Project, name: str, module: str = "mypkg.loading") -> tuple[str, str]:
    """Run the command as a user does; return what it prints, and the file that it writes."""
    result = project.run(f"--fsdp-init={module}:{name}")
    assert result.ret == 0, result.stdout.str() + result.stderr.str()
    return result.stdout.str(), (project.path / f"tests/test_{name.rpartition('.')[2]}.py").read_text()


def require_clean(project: Project) -> None:
    for command in (["check", "--line-length=88", f"--select={RULES}"], ["format", "--check"]):
        command = [sys.executable, "-m", "ruff", *command, "--isolated", "tests"]
        done = subprocess.run(command, cwd=project.path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


def calls(text: str, name: str) -> list[ast.Call]:
    found = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call))
    return [call for call in found if ast.unparse(call.func) == name]


def test_each_parameter_is_known_or_a_todo_and_the_file_is_clean(repository: Project) -> None:
    for name, expected in ARGUMENTS.items():
        _, text = init(repository, name)
        (*_, subject) = calls(text, "Subject")
        assert [field.arg for field in subject.keywords] == ["reference", "batch", "loss", "model"]
        call = subject.keywords[-1].value
        given = {str(place): value for place, value in enumerate(call.args)}
        given |= {str(one.arg): one.value for one in call.keywords}
        shown = {one: "" if "todo(" in ast.unparse(value) else ast.unparse(value) for one, value in given.items()}
        assert (name, shown) == (name, expected)
    text = (repository.path / "tests/test_positional.py").read_text()
    assert "            # defaults kept: seed, *names\n" in text
    assert "# The unsharded model that the loaded one should equal.\n        reference=todo(" in text
    assert "# Optional: optimizer=..., the optimizer of the training:" in text
    assert '# Write @fsdp_conformance(process_group="loader") if positional calls' in text
    require_clean(repository)
    result = repository.run("--collect-only", "-q", "-k", "no_meta_params")
    found = [line for line in result.outlines if "::" in line]
    assert len(found) == len(ARGUMENTS), result.stdout.str()
    assert "tests/test_from_checkpoint.py::test_from_checkpoint[no_meta_params]" in found
    result = repository.run("tests/test_called.py", "-k", "no_meta_params")
    assert "TODO in line" in result.stdout.str(), "although the call of the loader has no todo"
    assert not (repository.path / "mypkg/was-called").exists()


def test_every_todo_is_printed_and_fails_with_its_line(repository: Project) -> None:
    output, text = init(repository, "build")
    first, *todos, last, _ = output.splitlines()
    assert first == "wrote tests/test_build.py; fill in 5 TODOs, as the test fails until then:"
    assert last == "then run it: python -m pytest tests/test_build.py"
    what = "path: what build expects (pathlib.Path), for a small model"
    (line,) = (number for number, line in enumerate(text.splitlines(), 1) if what in line)
    assert todos[3] == f"  line {line}: {what}"
    result = repository.run("tests", "-k", "no_meta_params")
    assert [todo for todo in todos if f"TODO in {todo.strip()}" not in result.stdout.str()] == []
    assert result.parseoutcomes() == {"errors": 1, "deselected": 58}


def test_a_trainer_is_declared_by_what_it_has(repository: Project) -> None:
    output, text = init(repository, "Trainer")
    assert "fill in 4 TODOs, as" in output
    require_clean(repository)
    (made,), (subject,) = calls(text, "Trainer"), calls(text, "Subject")
    shown = {one.arg: ast.unparse(one.value)[:9] for one in made.keywords}
    assert shown == {"config": "todo('con", "mesh": "fsdp.mesh"}
    assert {one.arg: ast.unparse(one.value) for one in subject.keywords} == {
        "model": "trainer.net",
        "optimizer": "trainer.optim",
        "train_step": "lambda model, optimizer, batch: trainer.training_step(batch)",
        "save": "lambda model, optimizer, folder: trainer.save(folder)",
        "resume": "lambda model, optimizer, folder: trainer.load(optimizer, folder)",
        None: "declared",
    }
    output, text = init(repository, "Uncertain")
    step = "train_step: a function of model, optimizer, batch that calls trainer.train_step(images=..., labels=...)"
    save = "save: a function of model, optimizer, folder that calls trainer.save(folder=folder, epoch=...)"
    assert [text for text in (step, save) if f": {text}\n" not in output] == []
    assert "        resume=lambda model, optimizer, folder: trainer.load(path=folder),\n" in text
    _, text = init(repository, "Decoder")
    assert "        model=trainer,  # or its attribute that has the model\n" in text
    require_clean(repository)


def test_the_file_goes_where_tests_are(repository: Project) -> None:
    named = "--fsdp-init=mypkg.loading:build"
    (repository.path / "unit").mkdir()
    assert "wrote unit/test_build.py" in repository.run(named, "-o", "testpaths=unit").stdout.str()
    (repository.path / "tests").rmdir()
    assert "wrote test_build.py" in repository.run(named).stdout.str()


NAMED = "mypkg.loading"
INSTANCE = "it is a method of an instance; write a function that makes the Loader and calls load"
USAGE_PROBLEMS = {
    "no attribute": (f"{NAMED}:biuld", [], "module 'mypkg.loading' has no 'biuld'; did you mean 'build'?"),
    "not callable": (f"{NAMED}:PATH", [], "is of type str, but should be a function that loads the model"),
    "built in": ("math:hypot", [], "it has no signature, as it is written in C; name a Python function that calls it"),
    "a method": (f"{NAMED}:Loader.load", [], INSTANCE),
    "a quote": (f"{NAMED}:it's", [], "invalid value (expected MODULE:FUNCTION"),
    "an escape": ("\x1b[31m", [], "invalid value (expected MODULE:FUNCTION"),
    "no folder": (f"{NAMED}:build", ["-o", "testpaths=/proc"], "/proc/test_build.py cannot be written (No such file"),
    "workers": (f"{NAMED}:build", ["-n", "2"], "it runs no tests, so it needs no workers; add -n 0"),
    "paths": (f"{NAMED}:build", ["tests"], "it runs no tests; remove 'tests'"),
}


@pytest.mark.parametrize("name", USAGE_PROBLEMS)
def test_a_usage_error_is_one_line(repository: Project, name: str) -> None:
    loader, args, part = USAGE_PROBLEMS[name]
    (line,) = errors(repository.run(f"--fsdp-init={loader}", *args))
    assert line.startswith(f"--fsdp-init={printable(loader)}: ")
    assert line.endswith(part) if part.startswith("it is a ") else part in line
    assert not list(repository.path.glob("tests/*"))


def test_an_interrupted_import_writes_nothing(repository: Project) -> None:
    repository.write("slow_import.py", "raise KeyboardInterrupt")
    result = repository.run("--fsdp-init=slow_import:load")
    assert result.ret == pytest.ExitCode.INTERRUPTED
    assert result.errlines == ["--fsdp-init: interrupted; no file was written"]


def test_a_file_is_never_overwritten(repository: Project) -> None:
    file = repository.write("tests/test_build.py", "def test_mine(): ...")
    (line,) = errors(repository.run("--fsdp-init=mypkg.loading:build"))
    assert line.endswith("tests/test_build.py exists and is not overwritten; run or rename that file")
    assert file.read_text() == "def test_mine(): ..."
