"""The parent's side of a world: start its ranks, call them, notice at once how they fail, leave nothing behind."""

from __future__ import annotations

import copy
import math
import pickle
import shutil
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from multiprocessing import connection, util
from pathlib import Path
from types import TracebackType
from typing import Any

from pytest_fsdp_meta.worlds.diagnosis import disk, hang
from pytest_fsdp_meta.worlds.engine import Engine, Member
from pytest_fsdp_meta.worlds.failures import RankFailure, WorldError
from pytest_fsdp_meta.worlds.listener import Listener
from pytest_fsdp_meta.worlds.local.engine import ForkServerEngine
from pytest_fsdp_meta.worlds.rank.debugging import BORROWING, RETURNING
from pytest_fsdp_meta.worlds.spec import WorldSpec
from pytest_fsdp_meta.worlds.system import messages, processes, temp_folders
from pytest_fsdp_meta.worlds.system.messages import DOING, POST_MORTEM
from pytest_fsdp_meta.worlds.system.output import Follower, Written
from pytest_fsdp_meta.worlds.system.processes import held_back
from pytest_fsdp_meta.worlds.system.terminal import Terminal

GRACE = 0.8
"""Seconds that the other ranks get, after the first failure, to report theirs."""
VOTING = 10.0
"""Seconds that they get to say that they, too, leave the call: a skip on one rank may come long before the next."""
STARTING = 60.0
"""Seconds that ranks get at least to start and to join: the timeout may be that of a call which should be short."""
GLANCE = 0.5
"""Seconds between two looks at whether a rank has ended of which no pipe tells."""
_SHARED: Engine = ForkServerEngine()
"""For worlds that name none."""


class World:
    """Ranks with one process group. A context manager; ``run`` calls a function on every rank.

    After a ``WorldError``, or when a call is interrupted, the world is over: its ranks are ended, and the next test
    takes a fresh one. ``label`` is what errors call it beside its ranks, or in place of its only one. ``shared``
    is a folder of the parent's, which the ranks remove where the parent is killed. ``listener`` is told what happens
    while a call runs.
    """

    def __init__(
        self,
        spec: WorldSpec,
        engine: Engine | None = None,
        label: str = "",
        shared: Path | None = None,
        listener: Listener | None = None,
    ) -> None:
        self.spec = spec
        self._shared = [] if shared is None else [str(shared)]
        self.label = label
        self._listener = listener or Listener()
        self._engine = engine or _SHARED
        self._members: list[Member] = []
        self._calls = 0
        self._written: list[Written] = []
        """By rank, once the ranks have ended."""
        self._follower: Follower | None = None
        self._doing: dict[int, str] = {}
        """What ranks say that they do in the call that runs."""
        self._folder: Path | None = None
        self._at_exit: util.Finalize | None = None

    def __enter__(self) -> World:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def folder(self) -> Path:
        """Removed when the world ends, by its ranks where the parent was killed."""
        assert self._folder is not None, "the world has not been started"
        return self._folder

    @property
    def alive(self) -> bool:
        return bool(self._members)

    def start(self) -> None:
        """Starts the ranks and joins them. Raises WorldError when one of them fails to."""
        if self._members:
            raise RuntimeError("this world has been started")
        with self._or_end("starting"):
            self._listener.waits(self, "starting")
            self._launch()
            store = self._collect("store", "starting", self._members[:1])[0]
            self._send(("store", *store))
            self._collect("ready", "joining the process group")

    def run(self, function: Callable[..., Any] | str, *args: Any, **kwargs: Any) -> list[Any]:
        """Calls ``function`` on every rank; the results in rank order.

        ``function`` may be "module:name", which spares the parent importing the module. Raises WorldError when a
        rank raises, ends or does not answer within the world's timeout, and ValueError for arguments that cannot be
        sent or results that cannot be read.
        """
        return self.call(function, args, kwargs)

    def call(
        self,
        function: Callable[..., Any] | str,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        doing: str = "",
        votes: Collection[str] = (),
    ) -> list[Any]:
        """As ``run``. ``doing`` is what an error says was going on.

        ``votes`` are qualified classes of exceptions that mean something only when every rank raises one (a skip):
        the others get longer to do so, and when all have, the world goes on after the WorldError.
        """
        import cloudpickle

        if not self._members:
            raise RuntimeError("this world has ended; a test takes a fresh one")
        target = function if isinstance(function, str) else ""
        try:
            payload = cloudpickle.dumps((None if target else function, tuple(args), dict(kwargs or {})))
        except Exception as error:
            raise ValueError(f"the arguments cannot be sent to the ranks: {type(error).__name__}: {error}") from error
        self._calls += 1
        name = target or getattr(function, "__qualname__", repr(function))
        doing = doing or f"running {name.rpartition(':')[2]}"
        with self._or_end(doing):
            self._send(("call", self._calls, target, payload))
            answers = self._collect("result", doing, votes=votes)
        assert all(call == self._calls for call, _ in answers), "an answer belongs to another call"
        try:
            return [pickle.loads(packed) for _, packed in answers]
        except Exception as error:
            raise ValueError(f"a rank's result cannot be read here: {type(error).__name__}: {error}") from error

    @contextmanager
    def _or_end(self, doing: str) -> Iterator[None]:
        """Also when it is interrupted: an answer that comes later must not be taken for the next one's."""
        try:
            yield
        except WorldError:
            if not self._members:
                self.close()  # the engine gave none, and left a folder
            raise  # it has ended, unless its ranks voted
        except BaseException as error:
            # Of the ranks' own errors they have said it themselves.
            want = self._want(error) if isinstance(error, OSError) else ""
            self.close()
            if want:
                raise WorldError([RankFailure(0, "unstarted", want, user=True)], doing, label=self.label) from error
            raise

    def _want(self, error: OSError) -> str:
        """What this machine has no more of, in one line that says what to do; empty for another error."""
        return disk.hint(self._folder or tempfile.gettempdir(), error) or processes.no_descriptors(error)

    def close(self) -> None:
        """Ends every rank, at once and whatever it is doing; safe to call twice. Ctrl-C waits until it is done."""
        with held_back():
            self._close()

    def _close(self) -> None:
        for member in self._members:
            member.kill()
        deadline = time.monotonic() + 10
        for member in self._members:
            member.join(max(0.0, deadline - time.monotonic()))
        if self._members:
            self._written = self._all_written()
        if self._follower is not None:
            self._follower.stop()
            self._follower = None
        for member in self._members:
            member.release()
        self._members = []
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None
        if self._at_exit is not None:
            self._at_exit.cancel()
            self._at_exit = None

    def _set_aside(self) -> World:
        """The ranks in a world of their own, while this one ends without them."""
        aside = copy.copy(self)
        aside._at_exit = util.Finalize(None, aside.close, exitpriority=1)
        if self._at_exit is not None:
            self._at_exit.cancel()
        self._written = self._all_written()
        self._members, self._folder, self._follower, self._at_exit = [], None, None, None
        return aside

    def post_mortem(self, rank: int, terminal: Terminal, debugger: str) -> bool:
        """Has the user look at where a call has failed on this rank; whether that ended with "quit".

        ``debugger`` is a class as "module:name", empty for Python's own. Waits for the user, and for nobody else.
        """
        member = next(member for member in self._members if member.rank == rank)
        assert member.pid is not None
        others = [one.rank for one in self._members if one is not member]
        with terminal.lent_to(member.pid):
            member.send(messages.pack((POST_MORTEM, debugger), self.folder / "call"))
            while True:
                for _, message in self._events(math.inf, skip=others):
                    if message is None or message[0] == POST_MORTEM:
                        return bool(message and message[1])

    def can_debug(self, rank: int) -> bool:
        """Whether the rank is there and listens, and on this machine."""
        here = [member for member in self._members if member.rank == rank and member.pid is not None]
        return self._calls > 0 and any(not member.has_ended for member in here)

    def outputs(self, since: Sequence[int] = ()) -> list[str]:
        """What each rank has written to stdout and stderr so far; of a long one, the end.

        ``since`` is what ``mark`` gave: only what was written after it.
        """
        written = self._all_written()
        return [one.since(mark) for one, mark in zip(written, since or [0] * len(written), strict=True)]

    def mark(self) -> list[int]:
        """How much each rank has written so far."""
        return [one.size for one in self._all_written()]

    def _all_written(self) -> list[Written]:
        return [member.written() for member in self._members] if self._members else list(self._written)

    def _launch(self) -> None:
        # Before multiprocessing joins all processes at exit, which would wait for ranks of a forgotten world for ever.
        self._at_exit = util.Finalize(None, self.close, exitpriority=1)
        self._engine.start()  # first, because it sees to the folder when this process is killed
        self._folder = Path(tempfile.mkdtemp(prefix=temp_folders.prefix("world")))
        leftovers = str(self._folder), *self._shared
        for member in self._engine.launch(self.spec, self._folder, leftovers):
            self._members.append(member)
        if self._listener.live:
            self._follower = Follower([member.read for member in self._members], partial(self._listener.wrote, self))

    def _send(self, message: tuple[Any, ...]) -> None:
        assert self._folder is not None
        note = messages.pack(message, self._folder / "call")
        for member in self._members:
            member.send(note)

    def _collect(
        self, kind: str, doing: str, members: Sequence[Member] | None = None, votes: Collection[str] = ()
    ) -> list[tuple[Any, ...]]:
        """One message of this kind from each member. Every other rank is watched as well."""
        self._doing = {}
        self._listener.waits(self, doing)
        awaited = {member.rank for member in (self._members if members is None else members)}
        answers: dict[int, tuple[Any, ...]] = {}
        failures: dict[int, RankFailure] = {}
        seconds = self.spec.timeout if kind == "result" else max(self.spec.timeout, STARTING)
        deadline = time.monotonic() + seconds
        while (missing := awaited - answers.keys() - failures.keys()) and time.monotonic() < deadline:
            for member, message in self._events(deadline, skip=failures.keys()):
                if message is None:
                    failures[member.rank] = member.ending()
                elif message[0] == "failure":
                    failures[member.rank] = message[1]
                elif message[0] == "note":
                    self._hear_note(member.rank, *message[1:])
                elif message[0] == BORROWING:
                    deadline += self._lend_terminal(member)
                else:
                    assert message[0] == kind, message
                    answers[member.rank] = message[1:]
            if failures:
                voting = all(failure.exception in votes for failure in failures.values())
                deadline = min(deadline, time.monotonic() + (VOTING if voting else GRACE))
        if missing or failures:
            failed, view = (list(failures.values()), "") if failures else self._hung(sorted(missing), seconds)
            self._fail(failed, doing, view, votes)
        return [answers[rank] for rank in sorted(awaited)]

    def _lend_terminal(self, member: Member) -> float:
        """For one prompt of a debugger on this rank; how long it took, for which nobody is to blame."""
        began = time.monotonic()
        others = [one.rank for one in self._members if one is not member]
        reply = self.folder / "reply"
        try:
            if member.pid is None:
                raise ValueError("it runs on another machine")
            with self._listener.terminal(self, member.rank) as terminal, terminal.lent_to(member.pid):
                member.send(messages.pack((BORROWING, ""), reply))
                over = False
                while not over:
                    for _, message in self._events(math.inf, skip=others):
                        if message is not None and message[0] == "note":
                            self._hear_note(member.rank, *message[1:])
                        over = over or message is None or message[0] == RETURNING
        except ValueError as error:
            member.send(messages.pack((BORROWING, str(error)), reply))
        return time.monotonic() - began

    def _hear_note(self, rank: int, kind: str, what: Any) -> None:
        if kind == DOING:
            self._doing[rank] = what
        self._listener.noted(self, rank, kind, what)

    def _events(self, deadline: float, skip: Collection[int]) -> Iterator[tuple[Member, tuple[Any, ...] | None]]:
        """What members have said (None: it ended), waiting for the first a while, at most until the deadline."""
        watched = [member for member in self._members if member.rank not in skip]
        handles = [handle for member in watched for handle in member.handles]
        ready = connection.wait(handles, timeout=max(0.0, min(GLANCE, deadline - time.monotonic())))
        for member in watched:
            if any(handle in ready for handle in member.handles) or member.has_news:
                yield member, member.hear()

    def _hung(self, waiting: Sequence[int], seconds: float) -> tuple[list[RankFailure], str]:
        """What is known of every rank when some did not answer, and of all together."""
        stood = hang.look(self._members)
        when = time.monotonic()
        summary = f"did not answer within {seconds:g} s"
        late = [RankFailure(rank, "hung", summary, stood[rank].stack, when) for rank in waiting]
        others = sorted({member.rank for member in self._members} - set(waiting))
        answered = [RankFailure(rank, "answered", "had answered", stood[rank].stack, when + 1) for rank in others]
        return late + answered, hang.describe({rank: there.flight for rank, there in stood.items()}, returned=others)

    def _fail(self, failures: list[RankFailure], doing: str, view: str, votes: Collection[str]) -> None:
        told = [self._doing[failure.rank] for failure in failures if failure.rank in self._doing]
        if told:
            doing = " or ".join(dict.fromkeys(told))
        error = WorldError(failures, doing, self.outputs(), self.label, view)
        if error.unanimous in votes:
            raise error  # every rank is back, and waits for the next call
        self._listener.failed(self, error, self._set_aside)
        self.close()
        error.outputs = tuple(self.outputs())
        raise error
