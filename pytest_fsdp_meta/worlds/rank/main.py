"""The life of one rank: join the world, answer calls, end at once when told to or when the parent is gone."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import pickle
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import import_module
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from pytest_fsdp_meta.worlds.diagnosis import disk
from pytest_fsdp_meta.worlds.failures import CallFailed, Misuse, RankFailure
from pytest_fsdp_meta.worlds.rank import coverage, debugging, preload, tracebacks, warnings
from pytest_fsdp_meta.worlds.rank.channel import Channel
from pytest_fsdp_meta.worlds.rank.rendezvous import Rank, join
from pytest_fsdp_meta.worlds.spec import Place, Sources, WorldSpec
from pytest_fsdp_meta.worlds.system import output, processes
from pytest_fsdp_meta.worlds.system.messages import DOING, POST_MORTEM

OUTSIDE = "this process is not a rank of a world of pytest-fsdp-meta"


_CURRENT: Rank | None = None
_CHANNEL: Channel | None = None
_TELLER: warnings.WarningForwarder | None = None
_MEASUREMENT: coverage.Measurement | None = None
_RAISED: BaseException | None = None
"""What the last call raised, for a debugger."""


def note(kind: str, what: Any) -> None:
    """Tells the parent something beside the answer that it waits for: what this rank is doing, a warning.

    Not from a process that a rank has forked, where it does nothing. Raises RuntimeError outside a world.
    """
    if _CHANNEL is None:
        raise RuntimeError(OUTSIDE)
    if _CHANNEL.is_own:
        _CHANNEL.send("note", kind, what)


def doing(what: str) -> None:
    """Says what this rank does from now on: "training step 2 of 3". For whoever waits, and for the error it may become.

    Outside of a world it does nothing.
    """
    if _CHANNEL is not None:
        note(DOING, what)


@contextmanager
def telling(unless: str = "") -> Iterator[None]:
    """Within it, warnings are the parent's to show, but those that match the pattern ``unless``, which are dropped.

    ``World.run`` puts it around a function that it is given; one that is only named does so itself, where it calls
    what the user wrote. Outside of a world it does nothing.
    """
    with nullcontext() if _TELLER is None else _TELLER.telling(unless):
        yield


def current() -> Rank:
    """The rank that this process is. Raises RuntimeError outside a world."""
    if _CURRENT is None:
        raise RuntimeError(OUTSIDE)
    return _CURRENT


@dataclass(frozen=True)
class Assignment:
    """Everything a new rank is told."""

    place: Place
    spec: WorldSpec
    sources: Sources
    folder: str
    """For its messages, its output and its stacks."""
    leftovers: tuple[str, ...]
    """The folders that go when the parent is killed; its own is one of them."""
    environ: dict[str, str]
    cwd: str
    measuring: coverage.Measuring | None = field(default_factory=coverage.wanted)
    """As the parent measures coverage."""

    @property
    def output(self) -> Path:
        return Path(self.folder, f"rank{self.place.rank}.out")

    @property
    def stacks(self) -> Path:
        return Path(self.folder, f"rank{self.place.rank}.stacks")


def main(connection: Connection, task: Assignment, dies_with_parent: bool) -> None:
    """The target of a rank's process; does not return, because interpreters with a process group end badly.

    ``dies_with_parent``: the system shall kill it when its parent ends, which is a thread where ranks are spawned.
    """
    global _CHANNEL, _CURRENT, _TELLER
    try:
        _isolate(dies_with_parent)
        _CHANNEL = channel = Channel(connection, task.output, task.leftovers)
        warnings.hear_all()
        _TELLER = warnings.WarningForwarder(partial(note, warnings.KIND))
        debugging.borrow_by(channel)
        try:
            _redirect(task)
            _adopt(task)
            _CURRENT = join(channel, task.spec, task.place)
        except BaseException as error:
            _report(channel, _failure(task, error))
            threading.Event().wait()  # for its end, so that it is not mistaken for a rank that vanished
        channel.send("ready")
        while True:
            message = channel.receive()
            if message[0] == POST_MORTEM:
                assert _RAISED is not None
                channel.send(POST_MORTEM, debugging.post_mortem(_RAISED, *message[1:]))
            else:
                _answer(channel, task, message)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


def _isolate(dies_with_parent: bool) -> None:
    """Own process group (no Ctrl-C from the terminal), death with the parent."""
    os.setpgid(0, 0)
    processes.heed_signals()
    # The fork server's children inherit "forkserver"; a loader's own workers get what they get under torchrun.
    multiprocessing.set_start_method(None, force=True)
    if dies_with_parent:
        processes.die_with_parent()
    # So that what the children of this rank leave behind is not taken for what a rank has left that has ended.
    processes.adopt_orphans()
    _leave_server_alone()


def _redirect(task: Assignment) -> None:
    """Own output file, stacks on demand."""
    output.redirect(task.output)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, file=open(task.stacks, "w"), all_threads=True)  # noqa: SIM115


def _leave_server_alone() -> None:
    """Lets the fork server end with the parent: it lives as long as anybody holds this descriptor.

    Its end is what the system's signal waits for, the last resort for a rank whose threads are all stuck.
    """
    server: Any = forkserver._forkserver
    if server._forkserver_alive_fd is not None:
        os.close(server._forkserver_alive_fd)
        server._forkserver_alive_fd = None


def _adopt(task: Assignment) -> None:
    """The parent's working directory, environment and modules."""
    os.chdir(task.cwd)
    os.environ.clear()
    os.environ.update(task.environ)
    preload.share(task.sources)
    if task.measuring is not None:
        global _MEASUREMENT
        _MEASUREMENT = coverage.Measurement(task.measuring)
        if task.place.rank == 0 and (before := coverage.before_the_fork()):
            note(coverage.KIND, ("imports", before))


def _answer(channel: Channel, task: Assignment, message: tuple[Any, ...]) -> None:
    _, call, target, payload = message
    if _TELLER is not None:
        _TELLER.forget()
    try:
        function, args, kwargs = _unpack(target, payload)
        with nullcontext() if target else telling():
            result = function(*args, **kwargs)
    except BaseException as error:
        global _RAISED
        _RAISED = error
        _tell_coverage()
        _report(channel, _failure(task, error))
        return
    _tell_coverage()
    try:
        channel.send("result", call, _pack(result))
    except Exception as error:
        why = disk.hint(task.folder, error) or f"{type(error).__name__}: {error}"
        summary = f"returned a {type(result).__name__} that cannot be sent back: {why}"
        _report(channel, RankFailure(task.place.rank, "unsendable", summary, when=time.monotonic()))


def _report(channel: Channel, failure: RankFailure) -> None:
    try:
        channel.send("failure", failure)
    except OSError:  # there is no room on the disk for a long one, and the pipe takes a short one
        short = replace(failure, detail=_shortened(failure.detail, 1500), message=_shortened(failure.message, 1500))
        channel.send("failure", short)


def _tell_coverage() -> None:
    """With every answer, because a rank is killed in the end."""
    if _MEASUREMENT is not None and (news := _MEASUREMENT.news()):
        note(coverage.KIND, ("calls", news))


def _pack(result: Any) -> bytes:
    import cloudpickle

    packed = cloudpickle.dumps(result)
    assert isinstance(packed, bytes)
    return packed


def _unpack(target: str, payload: bytes) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    function, args, kwargs = pickle.loads(payload)
    if target:
        module, _, name = target.partition(":")
        function = getattr(import_module(module), name)
    return function, args, kwargs


def _failure(task: Assignment, error: BaseException) -> RankFailure:
    where = detail = ""
    if isinstance(error, CallFailed) and error.__cause__ is not None:
        where, detail, error = f" in {error.where}" if error.where else "", error.detail, error.__cause__
    kind = type(error)
    try:
        text = str(error)
    except Exception:
        text = "(its text cannot be made)"
    first = _shortened(text.strip().splitlines()[0], 300) if text.strip() else ""
    said = ": ".join(filter(None, (f"raised {kind.__name__}{where}", first, disk.hint(task.folder, error, text))))
    return RankFailure(
        task.place.rank,
        "raised",
        text if isinstance(error, Misuse) else said,
        detail=_shortened(detail or tracebacks.tell(error, hide=Path(__file__).parents[2]), 20_000),
        when=time.monotonic(),
        user=isinstance(error, Misuse),
        exception=f"{kind.__module__}.{kind.__qualname__}",
        message=_shortened(text, 20_000),
    )


def _shortened(text: str, limit: int) -> str:
    """The beginning and the end: a loader may list three thousand missing keys in one line."""
    half = limit // 2
    return text if len(text) <= limit else f"{text[:half]} ... ({len(text) - limit} characters) ... {text[-half:]}"
