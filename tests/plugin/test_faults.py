"""Faults inside loaders: the item's message, pytest's exit, what is left behind, and the tests that follow."""

from __future__ import annotations

import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.conftest import Project
from tests.plugin.test_outcomes import outcomes, story
from tests.world_help import SOON, assert_gone, ended_at_last, processes_with

WORD = "FSDP_FAULTS"
"""An environment variable of an inner run, inherited by every process that it starts."""
FAULTS = """
import os
import signal
import threading
import time

import torch.distributed as dist

only = fsdp_conformance(only=["no_meta_params"], timeout=60)


@fsdp_conformance(only=["no_meta_params"], timeout=3)
def test_deadlock(fsdp):
    if fsdp.rank == 0:
        dist.all_reduce(torch.ones(2))
    fsdp.barrier()
    return load(fsdp)


@only
def test_leaves_things_behind(fsdp):
    threading.Thread(target=time.sleep, args=(1000,), daemon=False).start()
    dist.new_group([0, 1], group_desc="left")
    os.environ["LEFT"] = "behind"
    os.chdir("/")
    torch.set_default_dtype(torch.float64)
    torch.use_deterministic_algorithms(True)
    torch.set_default_device("meta")
    torch.manual_seed(7)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    build.left = True
    torch.set_default_device("cpu")
    torch.set_default_dtype(torch.float32)
    result = load(fsdp)
    torch.set_default_dtype(torch.float64)
    torch.set_default_device("meta")
    return result


@only
def test_finds_nothing_of_it(fsdp):
    assert [thread.name for thread in threading.enumerate() if "sleep" in str(thread)] == []
    assert threading.active_count() < 6
    assert len(dist.distributed_c10d._world.pg_map) == 1
    assert "LEFT" not in os.environ
    assert os.getcwd() != "/"
    assert torch.get_default_dtype() == torch.float32
    assert torch.get_default_device() == torch.device("cpu")
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    assert not hasattr(build, "left")
    return load(fsdp)
"""


EXPECTING = """
import os
import signal
import time

CHECKS = [
    "names_match_reference", "dtypes_match_reference", "requires_grad_matches_reference", "loss_parity",
    "dcp_round_trip",
]


def batch(step): return {"input": torch.ones(8, 4) + step}
def loss(model, batch): return model(**batch).square().mean()


def on_rank_1(act):
    if torch.distributed.get_rank() == 1:
        act()
    torch.distributed.barrier()


def odd():
    # A finding of each of the three checks, which are expected to fail.
    model = build()
    model.bias.requires_grad_(False)
    model.register_buffer("more", torch.ones(1))
    model.register_buffer("other", torch.ones(1, dtype=torch.float64))
    return model


def reference():
    model = build()
    model.register_buffer("other", torch.ones(1))
    return model


def stepping(fsdp, act, model=None):
    def train_step(model, optimizer, batch):
        act()
        return plain(model, optimizer, batch)
    return saving(fsdp, model, train_step=train_step)


def plain(model, optimizer, batch):
    optimizer.zero_grad()
    value = loss(model, batch)
    value.backward()
    optimizer.step()
    return value


def saving(fsdp, model=None, **declared):
    model = model or odd()
    fully_shard(model, mesh=fsdp.mesh)
    return Subject(model, reference=reference, batch=batch, loss=loss, **declared)


def fail(error): raise error
"""
CRASHES = {
    "hang": ("stepping(fsdp, lambda: on_rank_1(lambda: time.sleep(1000)))", "rank 1 hung in "),
    "kill": ("stepping(fsdp, lambda: on_rank_1(lambda: os.kill(os.getpid(), 9)))", "rank 1 was killed by SIGKILL"),
    "exit": ("stepping(fsdp, lambda: os._exit(0))", "ranks 0, 1 exited with code 0"),
    "attribute": ("stepping(fsdp, lambda: build().wieght)", "ranks 0, 1 raised AttributeError in Subject(train_step"),
    "gradient": (
        "stepping(fsdp, lambda: fail(RuntimeError('disk quota, upgrade required: no gradient')))",
        "ranks 0, 1 raised RuntimeError in Subject(train_step",
    ),
    "save": (
        "saving(fsdp, save=lambda *given: fail(KeyError('dtype')), resume=lambda *given: None)",
        "ranks 0, 1 raised KeyError in Subject(save",
    ),
    "dtype": ("stepping(fsdp, lambda: None, odd().double())", "ranks 0, 1 raised RuntimeError in Subject(train_step"),
}
"""What a loader does -> the error that no check explains, because those that fail are expected to."""


def test_an_expected_failure_excuses_no_crash(project: Project) -> None:
    loader = """

@fsdp_conformance(only=CHECKS, xfail=dict.fromkeys(CHECKS[:3], "known"), timeout=8)
def test_{}(fsdp): return {}
"""
    project.loaders(EXPECTING + "".join(loader.format(name, text) for name, (text, _) in CRASHES.items()))
    result = project.run("-v")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    found = outcomes(result)
    for name, (_, summary) in CRASHES.items():
        check = "dcp_round_trip" if name == "save" else "loss_parity"
        assert found[f"test_{name}[{check}]"] in ("error", "same error"), name
        assert story(result, f"test_{name}")[0].startswith(f"test_{name}: {summary}")


@pytest.fixture
def temporary() -> Iterator[Path]:
    """A TMPDIR with a short name: the path of the fork server's socket in it must not be too long."""
    folder = Path(tempfile.mkdtemp(prefix="fsdp-faults-", dir="/tmp"))
    yield folder
    shutil.rmtree(folder)


def test_a_deadlock_is_reported_and_the_next_loaders_pass(
    project: Project, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(WORD, str(os.getpid()))
    monkeypatch.setenv("TMPDIR", str(temporary))
    result = project.run("-v", project.loaders(FAULTS).name)
    assert [*outcomes(result).values()] == ["error", "passed", "passed"]
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    first, *rest = story(result, "test_deadlock")
    assert re.fullmatch(
        r"test_deadlock: rank 0 hung in all_reduce, test_it.py:\d+; rank 1 hung in barrier, test_it.py:\d+", first
    )
    details = rest[: next(n for n, line in enumerate(rest) if line.startswith("rerun: "))]
    assert not any("pytest_fsdp_meta/worlds" in line for line in details)
    deadlock = "\n".join(details)
    assert re.search(r"rank 0 waits in all_reduce number 1 \(float\[2\], test_it.py:\d+\)", deadlock)
    assert "mismatch: collective number 1 differs between these ranks" in deadlock
    monkeypatch.delenv(WORD)
    assert_gone(processes_with(WORD, str(os.getpid())))
    assert not list(temporary.glob("fsdp-*"))


SLOW = """
only = fsdp_conformance(only=["no_meta_params"])

@only
def test_first(fsdp):
    import subprocess, time
    subprocess.Popen(["sleep", "1000"], start_new_session=True)
    note(f"rank{fsdp.rank}")
    if fsdp.rank == 0:
        fsdp.barrier()
    time.sleep(1000)

@only
def test_second(fsdp):
    return load(fsdp)
"""


@contextmanager
def running(project: Project, temporary: Path, stdout: int = subprocess.PIPE) -> Iterator[subprocess.Popen[str]]:
    """Start a run in its own session, and wait until its ranks are inside the loader of ``SLOW``."""
    file = project.loaders(SLOW)
    process = subprocess.Popen(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", file.name],
        cwd=project.path,
        env=os.environ | {WORD: str(os.getpid()), "TMPDIR": str(temporary)},
        stdin=stdout if stdout != subprocess.PIPE else subprocess.DEVNULL,
        stdout=stdout,
        stderr=subprocess.STDOUT if stdout == subprocess.PIPE else stdout,
        text=True,
        start_new_session=True,
        preexec_fn=_take_terminal if stdout != subprocess.PIPE else None,
    )
    try:
        deadline = time.monotonic() + 6 * SOON
        while len(project.notes) < 2:
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        yield process
    finally:
        process.kill()
        process.wait(10)
        if process.stdout is not None:
            process.stdout.close()


def _take_terminal() -> None:
    """Make stdin the controlling terminal, so that Ctrl-C typed there interrupts this process group."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell starts background jobs with SIGINT ignored
    import fcntl
    import termios

    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


@pytest.mark.nightly
@pytest.mark.parametrize("times", [1, 2])
def test_ctrl_c_in_a_terminal(project: Project, temporary: Path, times: int) -> None:
    terminal, its_side = pty.openpty()
    seen = b""
    with running(project, temporary, stdout=its_side) as process:
        os.close(its_side)
        for _ in range(times):
            os.write(terminal, b"\x03")
            time.sleep(0.01)
        try:
            while new := os.read(terminal, 65536):
                seen += new
        except OSError:  # the other side is closed
            pass
        process.wait(SOON)
    os.close(terminal)
    text = seen.decode()
    # The second Ctrl-C may kill Python while pytest reports the first.
    assert process.returncode in (pytest.ExitCode.INTERRUPTED, *([-signal.SIGINT] if times > 1 else [])), text
    assert "no tests ran" in text or "1 error" in text or "KeyboardInterrupt" in text
    assert "INTERNALERROR" not in text
    assert_gone(processes_with(WORD, str(os.getpid())))
    assert not list(temporary.glob("fsdp-*"))


def test_pytest_is_killed(project: Project, temporary: Path) -> None:
    with running(project, temporary) as process:
        everything = processes_with(WORD, str(os.getpid()))
        assert len(everything) >= 6, "pytest, the fork server, two ranks and what they have started"
        process.send_signal(signal.SIGKILL)
        process.wait(SOON)
        assert_gone(everything)
        assert not processes_with(WORD, str(os.getpid()))
    assert not list(temporary.glob("fsdp-*"))


@pytest.mark.nightly
def test_two_runs_at_the_same_time(project: Project) -> None:
    file = project.loaders(
        """
        @fsdp_conformance(only=["no_meta_params", "same_manifest_on_every_rank"], world_size=(1, 2))
        def test_x(fsdp):
            fsdp.barrier()
            return load(fsdp)
        """
    )
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-v", file.name]
    runs = [
        subprocess.Popen(command, cwd=project.path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for _ in range(2)
    ]
    for run in runs:
        with ended_at_last(run):
            output, _ = run.communicate(timeout=6 * SOON)
            assert run.returncode == 0, output
            assert "4 passed" in output
