"""Compiling the stand-in: once, into the user's cache, and a line that says why where that cannot be."""

from __future__ import annotations

import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from pytest_fsdp_meta import standin
from pytest_fsdp_meta.standin import Unavailable, build, prepare
from pytest_fsdp_meta.worlds import choose
from tests.conftest import Project


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, in a folder whose name has a space and a quote."""
    folder = tmp_path / "a user's cache"
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    monkeypatch.delenv("CXX", raising=False)
    return folder


def compiler(tmp_path: Path, script: str) -> Path:
    path = tmp_path / "c++"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


WRITES = 'while [ "$1" != -o ]; do shift; done; echo made > "$2"'
"""A compiler that writes its output file, and nothing else."""


def test_it_is_compiled_once(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", str(compiler(tmp_path, WRITES)))
    told: list[str] = []
    first = prepare(told.append)
    assert first.read_text() == "made\n"
    assert first.parent == cache / "pytest-fsdp-meta"
    assert told == [f"compiling the stand-in device with {tmp_path}/c++, once for this torch, into {first.parent}"]
    assert prepare(told.append) == first
    assert len(told) == 1
    assert [path.name for path in first.parent.iterdir()] == [first.name]


def test_several_processes_may_compile_at_once(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", str(compiler(tmp_path, f"sleep 0.2; {WRITES}")))
    with ThreadPoolExecutor(4) as pool:
        made = list(pool.map(lambda _: prepare(), range(4)))
    assert len(set(made)) == 1
    assert made[0].read_text() == "made\n"


@pytest.mark.parametrize("changed", ["another torch", "another source"])
def test_another_version_is_compiled_anew(changed: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    before = build.library()
    if changed == "another torch":
        monkeypatch.setattr(build, "version", lambda name: "2.13.1")
    else:
        for name in (*build.SOURCES, *build.HEADERS):
            (tmp_path / name).write_text("")
        monkeypatch.setattr(build, "__file__", str(tmp_path / "build.py"))
    assert build.library() != before


def test_another_torch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "version", lambda name: "2.130.0")
    with pytest.raises(
        Unavailable,
        match=r"^the stand-in device was tested with torch 2\.13, 2\.14, 2\.15, here is 2\.130\.0; use cpu$",
    ):
        prepare()


def test_no_compiler(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(cache))
    with pytest.raises(Unavailable, match=r"needs a C[+][+] compiler to be built once; install g[+][+], or set CXX$"):
        prepare()


def test_a_compiler_that_fails(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", str(compiler(tmp_path, "echo 'x.cpp:1: error: no such header' >&2; exit 3")))
    with pytest.raises(Unavailable, match=r"does not compile with .*c[+][+]: x.cpp:1: error: no such header$"):
        prepare()
    assert list((cache / "pytest-fsdp-meta").iterdir()) == []


def test_a_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    said: list[str] = []
    with pytest.raises(Unavailable, match=r"cannot be built in .*: Not a directory$"):
        prepare(said.append)
    assert said == []


def test_choice() -> None:
    for gpus in (0, 8):
        assert choose(4, standin.NAME, "auto", gpus) == (standin.NAME, "gloo")
        assert choose(4, standin.NAME, "gloo", gpus) == (standin.NAME, "gloo")
        with pytest.raises(
            ValueError, match=r"^--fsdp-backend=nccl: --fsdp-device=standin needs no GPU, and uses gloo"
        ):
            choose(4, standin.NAME, "nccl", gpus)
        with pytest.raises(ValueError, match=r"^--fsdp-require-gpu: --fsdp-device=standin needs no GPU"):
            choose(4, standin.NAME, "auto", gpus, require_gpu=True)


LEFT_BEHIND = """
@fsdp_conformance(world_size=2, only=["buffers_on_rank_device"])
def test_x(fsdp):
    assert fsdp.device == torch.device("standin", fsdp.rank)
    model = load(fsdp).model
    model.register_buffer("table", torch.ones(3))
    return Subject(model)
"""


def test_without_a_compiler_the_run_does_not_start(
    project: Project, monkeypatch: pytest.MonkeyPatch, cache: Path
) -> None:
    project.loaders(LEFT_BEHIND)
    monkeypatch.setenv("PATH", str(cache))
    result = project.run("--fsdp-device=standin")
    result.stderr.fnmatch_lines(["ERROR: --fsdp-device=standin: the stand-in device needs a C++ compiler*"])
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert project.run("--fsdp-device=standin", "--collect-only", "-q").ret == 0
