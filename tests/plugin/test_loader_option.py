"""``--fsdp-loader``: checks on a loader without a test file, and its usage errors."""

from __future__ import annotations

import json
import re
import struct
import sys
from pathlib import Path

import pytest

from pytest_fsdp_meta.plugin.named_loader import rows_for
from tests.conftest import Project, errors

PLAIN = """
def load(fsdp, checkpoint):
    raise NotImplementedError
"""
"""A loader that is collected and never called."""

LINEAR = """
import torch
from safetensors.torch import load_file
from torch import nn
from torch.distributed.fsdp import fully_shard
from pytest_fsdp_meta import Subject


def load(rank, path):
    print("loading", path.is_absolute(), path.name)
    model = nn.Linear(4, 4)
    model.load_state_dict(load_file(path / "model.safetensors"))
    fully_shard(model, mesh=rank.mesh)
    return model


class Broken:
    @staticmethod
    def load(checkpoint, fsdp):
        model = load(fsdp, checkpoint)
        with torch.no_grad():
            model.weight.mul_(2)
        return Subject(model, reference=checkpoint)
"""

NAMED = "--fsdp-loader=loading:load"


@pytest.fixture
def folder(project: Project) -> Path:
    """An empty checkpoint folder, for tests that load nothing."""
    path = project.path / "checkpoint"
    path.mkdir()
    return path


@pytest.fixture
def linear(folder: Path) -> Path:
    """A safetensors file written without torch, which an inner run in this process could not import a second time."""
    tensors = {"weight": ([4, 4], range(16)), "bias": ([4], range(4))}
    header, data = {}, b""
    for name, (shape, values) in tensors.items():
        packed = struct.pack(f"<{len(values)}f", *values)
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [len(data), len(data) + len(packed)]}
        data += packed
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data)
    return folder


def judge(*names: str, checkpoint: Path | str = "checkpoint") -> list[str]:
    return [f"--fsdp-loader={name}" for name in names] + [f"--fsdp-checkpoint={checkpoint}"]


def ids(project: Project, *args: str) -> list[str]:
    result = project.collect("-q", "--collect-only", *args)
    assert result.ret == 0, result.stdout.str() + result.stderr.str()
    return [line for line in result.outlines if "::" in line]


@pytest.mark.usefixtures("folder")
def test_one_item_for_each_check_and_world(project: Project) -> None:
    project.write("pkg/__init__.py", "")
    project.write("pkg/loading.py", PLAIN)
    found = ids(project, *judge("pkg.loading:load"))
    assert len(found) == len(set(found)) > 40
    assert found[0] == "pkg/loading.py::load[same_manifest_on_every_rank]"
    several = ids(project, *judge("pkg.loading:load"), "--fsdp-world-size=1,4", "-k", "no_meta_params")
    assert several == [f"pkg/loading.py::load[world{size}-no_meta_params]" for size in (1, 4)]
    assert ids(project, several[1], *judge("pkg.loading:load"), "--fsdp-world-size=1,4") == several[1:]
    assert ids(project, "pkg/loading.py::load", *judge("pkg.loading:load")) == found


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("mode", ["prepend", "append", "importlib"])
def test_import_modes(project: Project, mode: str) -> None:
    project.write("pkg/__init__.py", "from pkg.loading import load")
    project.write("pkg/loading.py", PLAIN)
    chosen = (f"--import-mode={mode}", "-k", "no_meta_params")
    assert ids(project, *judge("pkg:load"), *chosen) == ["pkg/__init__.py::load[no_meta_params]"]
    assert ids(project, *judge("pkg.loading:load"), *chosen) == ["pkg/loading.py::load[no_meta_params]"]


@pytest.mark.usefixtures("folder")
def test_nothing_else_is_collected_unless_paths_are_given(project: Project) -> None:
    project.write("loading.py", PLAIN)
    project.write("tests/test_other.py", "def test_other(): ...")
    project.write("test_here.py", "def test_here(): ...")
    chosen = (*judge("loading:load"), "-k", "no_meta_params or test_other or test_here")
    mine = "loading.py::load[no_meta_params]"
    assert ids(project, *chosen) == [mine]
    assert ids(project, "tests", *chosen) == ["tests/test_other.py::test_other", mine]
    assert sorted(ids(project, ".", *chosen)) == [
        mine,
        "test_here.py::test_here",
        "tests/test_other.py::test_other",
    ]


@pytest.mark.usefixtures("folder")
def test_a_loader_in_a_test_file(project: Project) -> None:
    project.write("test_it.py", f"{PLAIN}\ndef test_other(): ...")
    chosen = ("test_it.py", *judge("test_it:load"), "-k", "no_meta_params or test_other")
    assert ids(project, *chosen) == ["test_it.py::load[no_meta_params]", "test_it.py::test_other"]


@pytest.mark.usefixtures("folder")
def test_a_loader_in_a_file_that_python_files_matches_by_path(project: Project) -> None:
    project.write("pytest.ini", "[pytest]\npython_files = unit/check_*.py\npythonpath = unit")
    project.write("unit/check_it.py", f"{PLAIN}\ndef test_other(): ...")
    found = ids(project, "unit/check_it.py", *judge("check_it:load"), "-k", "no_meta_params or test_other")
    assert found == ["unit/check_it.py::load[no_meta_params]", "unit/check_it.py::test_other"]


def test_a_loader_outside_of_the_root_folder(project: Project, folder: Path, tmp_path: Path) -> None:
    installed = tmp_path / "site" / "installed.py"
    installed.parent.mkdir()
    installed.write_text(PLAIN)
    project.write("work/pytest.ini", f"[pytest]\npythonpath = {installed.parent}")
    root = ("--rootdir=work", "-c", "work/pytest.ini")
    found = ids(project, *root, *judge("installed:load", checkpoint=folder), "-k", "no_meta_params")
    assert found == [f"{installed}::load[no_meta_params]"]
    assert ids(project, *root, *judge("installed:load", checkpoint=folder), *found) == found


@pytest.mark.usefixtures("folder")
def test_settings_in_an_ini_file(project: Project) -> None:
    project.write("loading.py", PLAIN)
    project.write("pytest.ini", "[pytest]\nfsdp_loader = loading:load\nfsdp_checkpoint = checkpoint")
    assert ids(project, "-k", "no_meta_params") == ["loading.py::load[no_meta_params]"]


@pytest.mark.parametrize(
    ("signature", "fits"),
    [
        ("fsdp, checkpoint", True),
        ("rank, path", True),
        ("checkpoint", True),
        ("fsdp, checkpoint, seed=0", True),
        ("rank, path, /, seed=0", True),
        ("*, checkpoint, fsdp", True),
        ("*arguments", True),
        ("**arguments", True),
        ("", False),
        ("fsdp", False),
        ("path", False),
        ("fsdp, path=None", False),
        ("fsdp, checkpoint, *, seed", False),
    ],
)
@pytest.mark.usefixtures("folder")
def test_signatures_of_loaders(project: Project, signature: str, fits: bool) -> None:
    project.write("loading.py", f"def load({signature}): ...")
    if fits:
        assert ids(project, *judge("loading:load"))
        return
    (line,) = errors(project.collect("--collect-only", *judge("loading:load")))
    assert line.startswith(f"--fsdp-loader=loading:load: load({signature}) should take fsdp")
    assert line.endswith("load(fsdp, checkpoint); for one that takes something else, --fsdp-init writes a test file")


USAGE_PROBLEMS = {
    "no checkpoint": ([NAMED], "--fsdp-loader requires --fsdp-checkpoint=DIR"),
    "no loader": (["--fsdp-checkpoint=checkpoint"], "--fsdp-checkpoint requires --fsdp-loader=MODULE:FUNCTION"),
    "no folder": (
        [NAMED, "--fsdp-checkpoint=none"],
        "--fsdp-checkpoint: invalid value 'none' (expected an existing folder",
    ),
    "no function": (judge("loading"), "--fsdp-loader: invalid value 'loading' (expected MODULE:FUNCTION"),
    "a path": (judge("./loading.py:load"), "invalid value './loading.py:load' (expected MODULE:FUNCTION"),
    "no module": (judge("absent.loading:load"), "module 'absent.loading' not found (no module 'absent')"),
    "no submodule": (judge("loading.absent:load"), "module 'loading.absent' not found"),
    "no attribute": (judge("loading:laod"), "module 'loading' has no 'laod'; did you mean 'load'?"),
    "no owner": (judge("loading:Loader.load"), "module 'loading' has no 'Loader.load'"),
    "not callable": (judge("loading:PATH"), "loading:PATH is of type str, but should be a function"),
    "a coroutine": (judge("loading:later"), "a loader should be a plain function, not a coroutine"),
    "no file": (judge("sys:intern"), "intern(string, /) should take fsdp"),
    "raises": (judge("raising:load"), "'raising' cannot be imported, at raising.py:2: RuntimeError: no luck at all"),
    "exits": (judge("exiting:load"), "module 'exiting' cannot be imported, at exiting.py:1: SystemExit: 3"),
    "lacks": (judge("lacking:load"), "module 'lacking' cannot be imported, at lacking.py:1: ModuleNotFoundError"),
}


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("name", USAGE_PROBLEMS)
def test_a_usage_error_is_one_line(project: Project, name: str) -> None:
    project.write("loading.py", f"{PLAIN}\nPATH = 'here'\nasync def later(fsdp, checkpoint): ...")
    project.write("raising.py", "import os\nraise RuntimeError('no luck\\nat all')")
    project.write("exiting.py", "raise SystemExit(3)")
    project.write("lacking.py", "import absent_of_lacking")
    arguments, part = USAGE_PROBLEMS[name]
    (line,) = errors(project.collect("--collect-only", *arguments))
    assert part in line


@pytest.mark.usefixtures("folder")
def test_a_usage_error_after_ranks_began_to_start(project: Project) -> None:
    project.write("raising.py", "raise RuntimeError('no luck')")
    (line,) = errors(project.run(*judge("raising:load")))
    assert line.endswith("module 'raising' cannot be imported, at raising.py:1: RuntimeError: no luck")


@pytest.mark.usefixtures("folder")
def test_a_usage_error_is_reported_once_under_xdist(project: Project) -> None:
    (line,) = errors(project.run(*judge("absent:load"), "-n", "2"))
    assert line == ("--fsdp-loader=absent:load: module 'absent' not found; the search path is that of python -m pytest")


def test_a_checkpoint_without_reference_values(project: Project, folder: Path) -> None:
    (folder / "config.json").write_text("[" * 100_000)
    project.write(
        "bare.py",
        "from torch import nn\nfrom torch.distributed.fsdp import fully_shard\n\n\n"
        "def load(fsdp, checkpoint): return fully_shard(nn.Linear(4, 4), mesh=fsdp.mesh)\n",
    )
    result = project.run(*judge("bare:load"), "-k", "no_meta_params or params_equal_reference")
    result.assert_outcomes(passed=1, skipped=1, warnings=1)
    result.stdout.fnmatch_lines(["*--fsdp-checkpoint=*checkpoint has neither *.safetensors nor a config.json*"])


def test_a_checkpoint_with_custom_code(project: Project, linear: Path) -> None:
    project.write("loading.py", LINEAR)
    (linear / "config.json").write_text('{"model_type": "nobody_knows_it", "auto_map": {}}')
    result = project.run("-W", "error", *judge("loading:load"), "-k", "params_equal_reference or loss_parity")
    result.assert_outcomes(passed=1, skipped=1)


def test_transformers_is_not_installed(project: Project, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    project.write("loading.py", PLAIN)
    (folder / "config.json").write_text('{"model_type": "llama"}')
    output = project.collect("--collect-only", *judge("loading:load")).stdout.str()
    assert "checkpoint is a transformers checkpoint, but transformers is not installed, so only values are" in output
    (folder / "config.json").write_text('["model_type"]')
    assert "is a transformers checkpoint" not in project.collect("--collect-only", *judge("loading:load")).stdout.str()


@pytest.mark.parametrize(("size", "rows"), [(1, 8), (2, 8), (3, 12), (5, 10), (8, 16)])
def test_every_rank_gets_an_even_number_of_rows(size: int, rows: int) -> None:
    assert rows_for(size) == rows


def test_a_finding_and_its_rerun_command(project: Project, linear: Path) -> None:
    project.write("src/loading.py", LINEAR)
    project.write("pytest.ini", "[pytest]\npythonpath = src")
    result = project.run(*judge("loading:Broken.load"), "-k", "params_equal_reference or no_meta", "-n", "2")
    result.assert_outcomes(passed=2, failed=1)
    assert "loading True checkpoint" in result.stdout.str()
    (command,) = re.findall(r"rerun: (.*)", result.stdout.str())
    assert command == (
        "python -m pytest 'src/loading.py::Broken.load[params_equal_reference]' -p no:cacheprovider "
        "--fsdp-loader=loading:Broken.load --fsdp-checkpoint=checkpoint"
    )
    again = project.shell(command)
    again.assert_outcomes(failed=1)
    assert command in again.stdout.str()


def test_the_last_failed(project: Project, linear: Path) -> None:
    project.write("loading.py", LINEAR)
    arguments = (*judge("loading:Broken.load"), "-k", "params_equal_reference or no_meta")
    shell = f"python -m pytest {' '.join(map(repr, arguments))}"
    project.shell(shell).assert_outcomes(passed=2, failed=1)
    project.shell(f"{shell} --lf").assert_outcomes(failed=1, deselected=58)
