"""The life of one rank: join the world, then answer calls until it is killed or its parent has gone."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import pickle
import re
import signal
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from pytest_fsdp_meta.worlds.engine import DOING
from pytest_fsdp_meta.worlds.failures import CallFailed, Misuse, RankFailure
from pytest_fsdp_meta.worlds.rank import coverage, debugging, preload, tracebacks, warnings
from pytest_fsdp_meta.worlds.rank.channel import Channel
from pytest_fsdp_meta.worlds.rank.rendezvous import Rank, join
from pytest_fsdp_meta.worlds.spec import Location, Sources, WorldSpec
from pytest_fsdp_meta.worlds.system import output, processes
from pytest_fsdp_meta.worlds.system.multiprocessing_private import leave_server_alone

OUTSIDE = "this process is not a rank of a world of pytest-fsdp-meta"
_CURRENT: Rank | None = None
_CHANNEL: Channel | None = None
_FORWARDER: warnings.WarningForwarder | None = None
_MEASUREMENT: coverage.Measurement | None = None
_RAISED: BaseException | None = None
"""The exception of the last call that failed, for a post-mortem debugger."""


def note(kind: str, what: Any) -> None:
    """Send the parent a message besides the answer that it waits for, such as what this rank is doing, or a warning.

    Does nothing in a process that a rank has forked. Raises RuntimeError outside a world.
    """
    if _CHANNEL is None:
        raise RuntimeError(OUTSIDE)
    if _CHANNEL.is_own:
        _CHANNEL.send("note", kind, what)


def doing(what: str) -> None:
    """Report what this rank is doing from now on, such as "training step 2 of 3".

    pytest's progress line shows it, and an error message if the call fails. Does nothing outside a world.
    """
    if _CHANNEL is not None:
        note(DOING, what)


@contextmanager
def forward_warnings(unless: str = "") -> Iterator[None]:
    """Forward warnings to the parent, which shows them, except those that match the pattern ``unless``.

    ``World.run`` does this around a function that it is given. A function that it is given by name does this itself,
    around the user's code. Does nothing outside a world.
    """
    with nullcontext() if _FORWARDER is None else _FORWARDER.forwarding(unless):
        yield


def current() -> Rank:
    """Return the rank that this process is. Raises RuntimeError outside a world."""
    if _CURRENT is None:
        raise RuntimeError(OUTSIDE)
    return _CURRENT


@dataclass(frozen=True)
class Assignment:
    """All that a new rank needs to know."""

    place: Location
    spec: WorldSpec
    sources: Sources
    folder: str
    """The folder of its messages, output and stacks."""
    leftovers: tuple[str, ...]
    """The folders to remove if the parent is killed, including its own."""
    environ: dict[str, str]
    cwd: str
    coverage_settings: coverage.CoverageSettings | None = field(default_factory=coverage.current_settings)
    """How the parent measures coverage, if it does."""

    @property
    def output(self) -> Path:
        return Path(self.folder, f"rank{self.place.rank}.out")

    @property
    def stacks(self) -> Path:
        return Path(self.folder, f"rank{self.place.rank}.stacks")


def main(connection: Connection, task: Assignment, dies_with_parent: bool) -> None:
    """Run a rank, as the target of its process. Never returns: interpreter shutdown with a process group can abort.

    ``dies_with_parent`` lets the system kill this rank when its parent ends; for a spawned rank that is the thread that
    started it.
    """
    global _CHANNEL, _CURRENT, _FORWARDER
    try:
        _isolate(dies_with_parent)
        _CHANNEL = channel = Channel(connection, task.output, task.leftovers)
        warnings.enable_all()
        _FORWARDER = warnings.WarningForwarder(partial(note, warnings.KIND))
        debugging.borrow_terminal_through(channel)
        try:
            _follow_parent(task)
            _CURRENT = join(channel, task.spec, task.place, Path(task.folder))
        except BaseException as error:
            _report_failure(channel, _describe_failure(task, error))
            threading.Event().wait()  # to be killed: a rank that exits by itself would be reported as well
        channel.send("ready")
        while True:
            message = channel.receive()
            if message[0] == debugging.POST_MORTEM:
                assert _RAISED is not None
                debugging.post_mortem(channel, _RAISED, *message[1:])
            else:
                _answer_call(channel, task, message)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


def _isolate(dies_with_parent: bool) -> None:
    """Lead a process group of its own, which gets no Ctrl-C from the terminal, and end together with the parent."""
    os.setpgid(0, 0)
    processes.restore_signals()
    # Children of the fork server inherit "forkserver"; a loader's own workers should start as they do under torchrun.
    multiprocessing.set_start_method(None, force=True)
    if dies_with_parent:
        processes.die_with_parent()
    # Otherwise what children of this rank leave behind goes to the fork server, which ends it as a dead rank's.
    processes.adopt_orphans()
    leave_server_alone()


def _follow_parent(task: Assignment) -> None:
    """Write output to a file, and stacks to another whenever SIGUSR1 arrives; take over what the parent has.

    That is its working directory, environment, modules and coverage settings.
    """
    output.redirect(task.output)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, file=open(task.stacks, "w"), all_threads=True)  # noqa: SIM115
    os.chdir(task.cwd)
    os.environ.clear()
    os.environ.update(task.environ)
    # DeviceMesh asks whether CUDA is available, also on the CPU; on a machine with GPUs that takes 0.1 s and memory.
    os.environ.setdefault(preload.NVML_CHECK, "1")
    preload.use_sources(task.sources)
    if task.coverage_settings is not None:
        global _MEASUREMENT
        _MEASUREMENT = coverage.Measurement(task.coverage_settings)


def _answer_call(channel: Channel, task: Assignment, message: tuple[Any, ...]) -> None:
    global _RAISED
    _RAISED = None  # its traceback keeps the test's model alive
    _, call, target, payload = message
    if _FORWARDER is not None:
        _FORWARDER.forget()
    try:
        try:
            function, args, kwargs = pickle.loads(payload)
            if target:
                module, _, name = target.partition(":")
                function = getattr(import_module(module), name)
            with nullcontext() if target else forward_warnings():
                result = function(*args, **kwargs)
        finally:
            if _MEASUREMENT is not None:
                _MEASUREMENT.save()
    except BaseException as error:
        _RAISED = error
        _report_failure(channel, _describe_failure(task, error))
        return
    try:
        from pytest_fsdp_meta.worlds.system.pickling import dumps

        channel.send("result", call, dumps(result))
    except Exception as error:
        summary = f"returned a {type(result).__name__} that cannot be sent back: {type(error).__name__}: {error}"
        _report_failure(channel, RankFailure(task.place.rank, "unsendable", summary, when=time.monotonic()))


def _report_failure(channel: Channel, failure: RankFailure) -> None:
    try:
        channel.send("failure", failure)
    except OSError:  # the disk is full; a short message needs only the pipe
        short = replace(failure, detail=_shortened(failure.detail, 1500), message=_shortened(failure.message, 1500))
        channel.send("failure", short)


def _describe_failure(task: Assignment, error: BaseException) -> RankFailure:
    where = detail = ""
    if isinstance(error, CallFailed) and error.__cause__ is not None:
        where, detail, error = f" in {error.where}" if error.where else "", error.detail, error.__cause__
    kind = type(error)
    try:
        text = str(error)
        said = (_first_failure(error) or text).strip()
    except Exception:
        text = said = "(its __str__ raised an exception)"
    first = _shortened(re.sub(r":\n\s*", ": ", said).splitlines()[0], 300) if said else ""
    summary = ": ".join(filter(None, (f"raised {kind.__name__}{where}", first, preload.hint(text))))
    return RankFailure(
        task.place.rank,
        "raised",
        text if isinstance(error, Misuse) else summary,
        detail=_shortened(detail or tracebacks.format_traceback(error, hide=Path(__file__).parents[2]), 20_000),
        when=time.monotonic(),
        user=isinstance(error, Misuse),
        exception=f"{kind.__module__}.{kind.__qualname__}",
        message=_shortened(text, 20_000),
        place=tracebacks.user_place(error),
        tensors=(error.tensors if isinstance(error, Misuse) else ()) or tracebacks.tensors_in_use(error),
    )


def _first_failure(error: BaseException) -> str:
    """Return what the first rank raised, of torch's CheckpointException, whose first line only counts the ranks."""
    failures = getattr(error, "failures", {}) if type(error).__name__ == "CheckpointException" else {}
    return next((f"{type(cause).__name__}: {cause}" for cause, _ in failures.values()), "")


def _shortened(text: str, limit: int) -> str:
    """Return beginning and end of a text, without colours: an exception may list 3,000 missing keys on one line."""
    text, half = re.sub(r"\x1b\[[\d;]*m", "", text), limit // 2
    note = f" ... ({len(text) - limit} characters) ... "
    return text if len(text) <= limit + len(note) else f"{text[:half]}{note}{text[-half:]}"
