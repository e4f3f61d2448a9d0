"""``--fsdp-init``: the test files that it writes are correct Python, run at once, and no file is overwritten."""

from __future__ import annotations

import subprocess
import sys

import pytest

from fixtures.releases import NO_FSDP_SIZE
from tests.conftest import Project, errors

pytestmark = pytest.mark.slow

RULES = "E,F,W,I,B,UP,SIM,RUF,PT,TID,C4,PIE,RET"

MODEL = """
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.linear = nn.Linear(width, width)

    def forward(self, hidden):
        return hidden + torch.relu(self.linear(self.norm(hidden)))


class Decoder(nn.Module):
    def __init__(self, vocab=64, width=16):
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(2))
        self.head = nn.Linear(width, vocab, bias=False)
        self.register_buffer("scale", torch.full((1,), width**-0.5), persistent=False)

    def forward(self, tokens):
        hidden = self.embed(tokens) * self.scale
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden)
"""

SHARD = """
from safetensors.torch import load_file
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import fully_shard


def shard_and_load(model, path, mesh, device):
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.to_empty(device=device)
    set_model_state_dict(model, load_file(path), options=StateDictOptions(full_state_dict=True))
    model.scale.fill_(model.embed.embedding_dim**-0.5)
    return model
"""

LOADING = """
import os
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from mypkg.model import Decoder
from mypkg.shard import shard_and_load


def load_model(cfg):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    with torch.device("meta"):
        model = Decoder(cfg.model.vocab_size, width=cfg.model.hidden_size)
    return shard_and_load(model, Path(cfg.checkpoint_dir) / "model.safetensors", mesh, "cpu")


def build(path, mesh, device):
    with torch.device("meta"):
        model = Decoder()
    return shard_and_load(model, path / "weights.safetensors", mesh, device)


def set_up():
    dist.init_process_group("gloo")
    return init_device_mesh("cpu", (dist.get_world_size(),))


def like_a_script(checkpoint_dir: str, seed: int):
    mesh = set_up()
    with torch.device("meta"):
        model = Decoder()
    return shard_and_load(model, os.path.join(checkpoint_dir, "model.safetensors"), mesh, "cpu")


class Loader:
    @classmethod
    def from_checkpoint(cls, path: Path, device_mesh, device="cuda"):
        with torch.device("meta"):
            model = Decoder(vocab=32)
        return shard_and_load(model, path / "model.safetensors", device_mesh, device)

    def load(self, path): ...

    def __call__(self, path): ...


def set_up_training():
    torch.manual_seed(0)
    model = Decoder()
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


@dataclass
class Config:
    vocab: int
    file: str
    width: int = 16


def typed(config: Config, fsdp):
    with torch.device("meta"):
        model = Decoder(config.vocab, config.width)
    model = shard_and_load(model, config.file, fsdp.mesh, fsdp.device)
    return model


def items(cfg, device_mesh, device, weights_file):
    with torch.device("meta"):
        model = Decoder(**cfg["model"])
    return shard_and_load(model, weights_file, device_mesh, device)


def guarded(path, rank, world_size):
    if not dist.is_initialized():
        dist.init_process_group("nccl")
    return build(path, init_device_mesh("cpu", (world_size,)), "cpu")


def unknown(path, tokenizer, *args, **kwargs): ...


def test_it(path): ...


def model(config): ...


PATH = "here"
short = lambda path: path
instance = Loader()
async def later(path): ...
"""

OTHERS = ("typed", "unknown", "test_it", "model", "instance")


@pytest.fixture
def repository(project: Project) -> Project:
    project.write("mypkg/__init__.py", "")
    project.write("mypkg/model.py", MODEL)
    project.write("mypkg/shard.py", SHARD)
    project.write("mypkg/loading.py", LOADING)
    (project.path / "tests").mkdir()
    return project


def init(project: Project, name: str, *args: str) -> str:
    """Run the command as a user does; return what it prints."""
    result = project.run(f"--fsdp-init=mypkg.loading:{name}", *args)
    assert result.ret == 0, result.stdout.str() + result.stderr.str()
    return result.stdout.str()


def ruff(project: Project, *args: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "ruff", *args], cwd=project.path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_what_is_written_is_clean_and_collected(repository: Project) -> None:
    names = ("like_a_script", "Loader.from_checkpoint", *OTHERS)
    for name in names:
        init(repository, name)
    assert len(list(repository.path.glob("tests/*.py"))) == len(names)
    ruff(repository, "check", "--isolated", "--line-length=88", f"--select={RULES}", "tests")
    ruff(repository, "format", "--isolated", "--check", "tests")
    result = repository.run("--collect-only", "-q", "-k", "no_meta_params")
    assert result.ret == 0, result.stdout.str()
    found = [line for line in result.outlines if "::" in line]
    assert len(found) == len(names)
    assert "tests/test_from_checkpoint.py::test_from_checkpoint[no_meta_params]" in found


@pytest.mark.parametrize(
    "name",
    [
        *("load_model", "like_a_script"),
        *(
            pytest.param(name, marks=pytest.mark.nightly)
            for name in ("build", "Loader.from_checkpoint", "items", "guarded", "typed")
        ),
    ],
)
def test_what_is_written_passes_at_once(repository: Project, name: str) -> None:
    assert "nothing is left to fill in" in init(repository, name)
    result = repository.run("tests")
    outcomes = result.parseoutcomes()
    assert set(outcomes) == {"passed", "skipped"}, result.stdout.str()
    assert outcomes["passed"] == 39, "values, training and checkpoints are compared"


def test_a_transformers_class(repository: Project) -> None:
    result = repository.run("--fsdp-init=transformers:AutoModelForCausalLM.from_pretrained")
    assert "the reference and the batches come from the checkpoint" in result.stdout.str()
    written = (repository.path / "tests/test_from_pretrained.py").read_text()
    assert "distributed_config=DistributedConfig(fsdp_size=fsdp.world_size)" in written
    ruff(repository, "check", "--isolated", f"--select={RULES}", "tests")
    result = repository.run("tests", "-k", "params_equal_reference or loss_parity")
    if NO_FSDP_SIZE:
        assert "DistributedConfig has fsdp_size from transformers 5.13 on" in result.stdout.str()
    else:
        result.assert_outcomes(passed=2)


def test_what_was_found_is_said(repository: Project) -> None:
    output = init(repository, "like_a_script")
    assert "mypkg.loading:like_a_script(checkpoint_dir: str, seed: int)\n" in output
    assert "  checkpoint_dir gets str(checkpoint), seed gets 0\n" in output
    line = LOADING.splitlines().index('    dist.init_process_group("gloo")') + 1
    assert f'  loading.py:{line} calls init_process_group: process_group="loader"\n' in output
    assert "run it: python -m pytest tests/test_like_a_script.py\n" in output
    assert output.endswith("a CI job for pull requests: docs/nightly.md#for-each-pull-request-on-a-cpu")
    assert "it returns (model, optimizer)" in init(repository, "set_up_training")
    text = (repository.path / "tests/test_set_up_training.py").read_text()
    assert "    model, optimizer = set_up_training()\n" in text
    assert "        optimizer=optimizer,\n" in text
    assert "init_process_group" not in init(repository, "guarded")


def test_the_config_is_written_as_it_is_read(repository: Project) -> None:
    init(repository, "typed")
    written = (repository.path / "tests/test_typed.py").read_text()
    fields = '        vocab=128,\n        file=str(folder / "model.safetensors"),\n        width=32,\n'
    assert f"    return Config(\n{fields}    )\n" in written
    init(repository, "load_model")
    written = (repository.path / "tests/test_load_model.py").read_text()
    assert "        checkpoint_dir=str(folder),\n" in written
    assert "            hidden_size=32,\n" in written


def test_what_is_left_is_named_with_its_line(repository: Project) -> None:
    output = init(repository, "unknown")
    lines = (repository.path / "tests/test_unknown.py").read_text().splitlines()
    todos = [
        number for number, line in enumerate(lines, 1) if line.strip().startswith(("return todo(", "tokenizer = todo("))
    ]
    assert len(todos) == 2
    assert "wrote tests/test_unknown.py; fill in 2 TODOs, as the test fails until then:\n" in output
    assert f"  line {todos[1]}: what unknown gets as tokenizer\n" in output
    optional = [number for number, line in enumerate(lines, 1) if "# Optional: " in line]
    assert len(optional) == 2
    assert f"  line {optional[0]}: Optional: reference=lambda: ..., a function that builds" in output
    assert "gradients, losses and resuming are not compared\n" in output


def test_the_file_goes_where_tests_are(repository: Project) -> None:
    (repository.path / "tests").rmdir()
    assert "wrote test_build.py" in init(repository, "build")
    (repository.path / "unit").mkdir()
    assert "wrote unit/test_build.py" in init(repository, "build", "-o", "testpaths=unit")


NAMED = "mypkg.loading"
USAGE_PROBLEMS = {
    "no module": ("absent.loading:load", [], "module 'absent.loading' not found"),
    "no attribute": (f"{NAMED}:biuld", [], "module 'mypkg.loading' has no 'biuld'; did you mean 'build'?"),
    "not callable": (f"{NAMED}:PATH", [], "is of type str, but should be a function that loads the model"),
    "a class": (
        f"{NAMED}:Loader",
        [],
        "it is a class; write a function that makes the Loader and loads the model, or name "
        "mypkg.loading:Loader.from_checkpoint",
    ),
    "a class without a constructor": (
        f"{NAMED}:Config",
        [],
        "it is a class; write a function that makes the Config and loads the model",
    ),
    "a lambda": (f"{NAMED}:short", [], "it is a lambda; write it as a function: def short(...)"),
    "built in": ("math:hypot", [], "it has no signature, as it is written in C; name a Python function that calls it"),
    "a method": (
        f"{NAMED}:Loader.load",
        [],
        "it is a method of an instance; write a function that makes the Loader and calls load",
    ),
    "a coroutine": (f"{NAMED}:later", [], "a loader should be a plain function, not a coroutine"),
    "a quote": (f"{NAMED}:it's", [], "invalid value (expected MODULE:FUNCTION"),
    "quotes": (f'{NAMED}:"build"', [], "invalid value (expected MODULE:FUNCTION"),
    "no function": (NAMED, [], "invalid value (expected MODULE:FUNCTION"),
    "no folder": (f"{NAMED}:build", ["-o", "testpaths=/proc"], "/proc/test_build.py cannot be written (No such file"),
    "workers": (f"{NAMED}:build", ["-n", "2"], "it runs no tests, so it needs no workers; add -n 0"),
    "paths": (f"{NAMED}:build", ["tests"], "it runs no tests; remove 'tests'"),
}


@pytest.mark.parametrize("name", USAGE_PROBLEMS)
def test_a_usage_error_is_one_line(repository: Project, name: str) -> None:
    loader, args, part = USAGE_PROBLEMS[name]
    (line,) = errors(repository.run(f"--fsdp-init={loader}", *args))
    assert line.startswith(f"--fsdp-init={loader}: ")
    assert line.endswith(part) if part.startswith("it is a ") else part in line
    assert not list(repository.path.glob("tests/*"))


def test_what_a_terminal_would_obey_is_escaped(repository: Project) -> None:
    (line,) = errors(repository.run("--fsdp-init=\x1b[31m"))
    assert line.startswith("--fsdp-init=\\x1b[31m: invalid value")


def test_defaults_that_cannot_be_shown_on_one_line(repository: Project) -> None:
    repository.write(
        "odd.py",
        """
        class Odd:
            def __init__(self, shown): self.shown = shown
            def __repr__(self): return self.shown or 1 / 0

        def load(path, one=Odd("two\\nlines")): ...
        def load_other(path, one=Odd("")): ...
        """,
    )
    for name, shown in (("load", "(path, one=two lines)"), ("load_other", "(path, one=...)")):
        result = repository.run(f"--fsdp-init=odd:{name}")
        assert (result.ret, result.outlines[0]) == (0, f"odd:{name}{shown}")


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


@pytest.mark.nightly
def test_a_new_user_in_a_new_interpreter(repository: Project) -> None:
    result = repository.run_cold("--fsdp-init=mypkg.loading:build")
    result.stdout.fnmatch_lines(["wrote tests/test_build.py; nothing is left to fill in"])
