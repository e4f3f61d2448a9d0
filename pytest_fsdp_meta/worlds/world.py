"""Start the ranks of a world from the parent process, call functions on them, report failures at once, and end them."""

from __future__ import annotations

import copy
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from multiprocessing import util
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, Protocol

from pytest_fsdp_meta.text import grouped, name_ranks
from pytest_fsdp_meta.worlds.conversation import Conversation, Replies, pack_call, unpack_results
from pytest_fsdp_meta.worlds.engine import Engine, Member, Message
from pytest_fsdp_meta.worlds.failures import RankFailure, WorldError
from pytest_fsdp_meta.worlds.local.engine import ForkServerEngine
from pytest_fsdp_meta.worlds.rank.warnings import RankWarning, reissue
from pytest_fsdp_meta.worlds.spec import WorldSpec
from pytest_fsdp_meta.worlds.system import processes
from pytest_fsdp_meta.worlds.system.output import OutputFollower, OutputTail
from pytest_fsdp_meta.worlds.system.processes import defer_interrupts

STARTING = 60.0
"""Seconds that ranks have at least to start and join, because ``WorldSpec.timeout`` may be meant for short calls."""
END_TIMEOUT = 10.0
"""Seconds to wait for killed ranks to end. A rank that does not, because a driver blocks it, is left to the system."""
MOST_ACTIVITIES = 4
"""Activities that an error names when ranks did different things, so that they fit on a line."""
_DEFAULT_ENGINE: Engine = ForkServerEngine()


class ObservedWorld(Protocol):
    """The part of a ``World`` that its listener may use."""

    @property
    def label(self) -> str: ...

    @property
    def spec(self) -> WorldSpec: ...

    def can_debug(self, rank: int) -> bool:
        """Return whether ``post_mortem`` is possible on the rank."""

    def post_mortem(self, rank: int, debugger: str) -> bool:
        """Open a debugger where the last call failed on the rank; return whether the user typed "quit".

        It borrows the terminal from the listener. Raises ValueError, with the reason, if it got none.
        """

    def close(self) -> None:
        """End every rank."""


class Listener:
    """Receives the reports of one or more worlds. Override what you need; the default only reissues warnings of ranks.

    Every method but ``on_output`` is called in the thread that called the world.
    """

    live = False
    """Whether ``on_output`` is called."""

    def on_wait(self, world: ObservedWorld, doing: str) -> None:
        """Handle that the world starts to wait for its ranks, which are now ``doing``: "starting", "running load"."""

    def on_note(self, world: ObservedWorld, rank: int, kind: str, what: Any) -> None:
        """Handle a rank's call of ``note(kind, what)``."""
        if isinstance(what, RankWarning):
            reissue(what, f"on rank {rank}")

    def failed(self, world: ObservedWorld, error: WorldError, keep: Callable[[], ObservedWorld]) -> None:
        """Handle that a call failed; the world ends afterwards.

        ``keep()`` takes the ranks out of this world and returns them, still running, as a world that the listener has
        to close.
        """

    def interrupted(self, world: ObservedWorld, error: BaseException, describe: Callable[[str], WorldError]) -> None:
        """Handle that an exception ended the wait for the ranks, such as that of a time limit; the world ends now.

        ``describe(cause)`` asks the ranks where they are.
        """

    @contextmanager
    def lend_terminal(self, world: ObservedWorld, rank: int, pid: int) -> Iterator[None]:
        """Lend the rank's process the terminal for one prompt of a debugger. Raise ValueError with a reason if not."""
        raise ValueError("this world has no listener that provides one")
        yield

    def on_output(self, world: ObservedWorld, rank: int, lines: Sequence[str]) -> None:
        """Handle lines that the rank has written. Called from another thread until the world is closed."""


class World:
    """Ranks that share one process group. A context manager; ``run`` calls a function on every rank.

    After a ``WorldError``, or when a call is interrupted, the world has ended together with its ranks, and the next
    test needs a fresh one. ``label`` names the world in error messages, such as "the reference": after the ranks, or
    alone if there is one rank. ``shared`` is a folder of the parent, which the ranks remove if the parent is killed.
    ``listener`` is notified of events while a call runs.
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
        self._engine = engine or _DEFAULT_ENGINE
        self._members: list[Member] = []
        self._conversation: Conversation | None = None
        self._calls = 0
        self._written: list[OutputTail] = []
        """The output by rank; set when the ranks have ended."""
        self._follower: OutputFollower | None = None
        self._folder: Path | None = None
        self._at_exit: util.Finalize | None = None
        self._closing = threading.RLock()
        """Held while the world ends: a call in another thread closes it as well, because its ranks are killed."""

    def __enter__(self) -> World:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def folder(self) -> Path:
        """The folder for messages and output, removed when the world ends (by its ranks if the parent is killed)."""
        assert self._folder is not None, "the world has not been started"
        return self._folder

    @property
    def alive(self) -> bool:
        return bool(self._members)

    def start(self) -> None:
        """Start the ranks and let them join the process group. Raises WorldError if one of them fails to."""
        if self._members:
            raise RuntimeError("this world has already been started")
        with self._closed_on_error("starting"):
            self._listener.on_wait(self, "starting")
            conversation = self._launch()
            store = self._collect(conversation, "store", "starting", ranks=[self._members[0].rank])[0]
            conversation.send_to_all(("store", *store))
            self._collect(conversation, "ready", "joining the process group")

    def run(self, function: Callable[..., Any] | str, *args: Any, **kwargs: Any) -> list[Any]:
        """Call ``function`` on every rank and return the results in rank order.

        ``function`` may be "module:name", so that the parent need not import the module. Raises WorldError when a
        rank raises, ends or does not answer within the world's timeout, and ValueError for arguments that cannot be
        pickled or results that cannot be unpickled.
        """
        return self.call(function, args, kwargs)

    def call(
        self,
        function: Callable[..., Any] | str,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        doing: str = "",
        unanimous_outcomes: Collection[str] = (),
    ) -> list[Any]:
        """Call ``function`` as ``run`` does. ``doing`` says in error messages what the ranks were doing.

        ``unanimous_outcomes`` are qualified names of exceptions, such as a skip, that are an outcome if every rank
        raises them. After the first, the other ranks get more time; if all raise, the world survives the WorldError.
        """
        if not self._members or self._conversation is None:
            raise RuntimeError("this world has ended; create a new one")
        number = self._calls + 1
        message = pack_call(number, function, args, kwargs or {})
        self._calls = number
        name = function if isinstance(function, str) else getattr(function, "__qualname__", repr(function))
        doing = doing or f"running {name.rpartition(':')[2]}"
        with self._closed_on_error(doing):
            self._conversation.send_to_all(message)
            answers = self._collect(self._conversation, "result", doing, unanimous_outcomes=unanimous_outcomes)
        return unpack_results(number, answers)

    @contextmanager
    def _closed_on_error(self, doing: str) -> Iterator[None]:
        """Close the world after any error, even an interrupt: a late answer must not reach the next call."""
        try:
            yield
        except WorldError:
            if not self._members:
                self.close()  # the engine started no rank, but left a folder
            raise  # otherwise the world has ended already, or stays usable after a unanimous outcome
        except BaseException as error:
            shortage = processes.describe_shortage(error) if isinstance(error, OSError) else ""
            try:
                if self._conversation is not None:
                    self._listener.interrupted(self, error, partial(self._describe_wait, self._conversation, doing))
            finally:
                self.close()
            if shortage:
                raise WorldError([RankFailure(0, "unstarted", shortage, user=True)], doing, label=self.label) from error
            raise

    def close(self) -> None:
        """Kill every rank, whatever it is doing. Safe to call twice. Ctrl-C takes effect when the ranks have ended."""
        with defer_interrupts(), self._closing:
            for member in self._members:
                member.kill()
            deadline = time.monotonic() + END_TIMEOUT
            for member in self._members:
                member.join(max(0.0, deadline - time.monotonic()))
            self._written = self._all_written()
            if self._follower is not None:
                self._follower.stop()
                self._follower = None
            for member in self._members:
                member.release()
            self._members, self._conversation = [], None
            if self._folder is not None:
                shutil.rmtree(self._folder, ignore_errors=True)
                self._folder = None
            if self._at_exit is not None:
                self._at_exit.cancel()
                self._at_exit = None

    def _set_aside(self) -> World:
        """Move the running ranks to a new World and return it, so that closing this one does not end them."""
        aside = copy.copy(self)
        aside._at_exit = util.Finalize(None, aside.close, exitpriority=1)
        if self._at_exit is not None:
            self._at_exit.cancel()
        self._written = self._all_written()
        self._members, self._conversation, self._folder, self._follower, self._at_exit = [], None, None, None, None
        return aside

    def post_mortem(self, rank: int, debugger: str) -> bool:
        """Open a debugger where the last call failed on the rank, as ``Conversation.post_mortem`` does."""
        assert self._conversation is not None
        return self._conversation.post_mortem(rank, debugger)

    def can_debug(self, rank: int) -> bool:
        """Return whether the rank runs on this machine and has been called, so that ``post_mortem`` is possible."""
        here = [member for member in self._members if member.rank == rank and member.pid is not None]
        return self._calls > 0 and any(not member.has_ended for member in here)

    def outputs(self, since: Sequence[int] = ()) -> list[str]:
        """Return what each rank has written to stdout and stderr so far, or the end of it if it is long.

        ``since`` is a result of ``mark``; what was written before it is left out.
        """
        written = self._all_written()
        return [one.since(mark) for one, mark in zip(written, since or [0] * len(written), strict=True)]

    def mark(self) -> list[int]:
        """Return how many bytes each rank has written so far."""
        return [one.size for one in self._all_written()]

    def _all_written(self) -> list[OutputTail]:
        return [member.written() for member in self._members] if self._members else list(self._written)

    def _launch(self) -> Conversation:
        # Runs at exit before multiprocessing joins all child processes, which would wait for ranks of an open world.
        self._at_exit = util.Finalize(None, self.close, exitpriority=1)
        self._engine.start()  # first, because the engine removes the folder if this process is killed
        self._folder = Path(tempfile.mkdtemp(prefix=processes.folder_prefix("world")))
        leftovers = str(self._folder), *self._shared
        for member in self._engine.launch(self.spec, self._folder, leftovers):
            self._members.append(member)
        if self._listener.live:
            ranks = [member.rank for member in self._members]
            self._follower = OutputFollower(
                [member.read for member in self._members],
                lambda index, lines: self._listener.on_output(self, ranks[index], lines),
            )
        self._conversation = Conversation(
            self._members,
            self._folder,
            partial(self._listener.on_note, self),
            partial(self._listener.lend_terminal, self),
        )
        return self._conversation

    def _collect(
        self,
        conversation: Conversation,
        kind: str,
        doing: str,
        ranks: Collection[int] | None = None,
        unanimous_outcomes: Collection[str] = (),
    ) -> Sequence[Message]:
        """Return one message of this kind from each of ``ranks`` (default: all), and watch the others too."""
        self._listener.on_wait(self, doing)
        seconds = self.spec.timeout if kind == "result" else max(self.spec.timeout, STARTING)
        awaited = [member.rank for member in self._members] if ranks is None else ranks
        replies = conversation.collect(kind, awaited, seconds, unanimous_outcomes)
        if replies.failures:
            self._fail(replies, conversation.activities, doing, unanimous_outcomes)
        return replies.answers

    def _describe_wait(self, conversation: Conversation, doing: str, cause: str) -> WorldError:
        """Return where the ranks are when ``cause`` ends the wait for those that have not answered."""
        waiting = sorted({member.rank for member in self._members} - conversation.answered)
        replies = conversation.describe_hang(waiting, "was interrupted", verb="was")
        doing = _describe_activities(replies.failures, conversation.activities, doing)
        return WorldError(replies.failures, doing, self.outputs(), self.label, replies.view, replies.states, cause)

    def _fail(
        self, replies: Replies, activities: Mapping[int, str], doing: str, unanimous_outcomes: Collection[str]
    ) -> NoReturn:
        doing = _describe_activities(replies.failures, activities, doing)
        error = WorldError(replies.failures, doing, self.outputs(), self.label, replies.view, replies.states)
        if error.unanimous in unanimous_outcomes:
            raise error  # every rank has answered and waits for the next call
        self._listener.failed(self, error, self._set_aside)
        self.close()
        error.outputs = tuple(self.outputs())
        raise error


def _describe_activities(failures: Sequence[RankFailure], activities: Mapping[int, str], doing: str) -> str:
    """Say what the ranks that failed were doing, by rank if they differ. ``doing`` is for ranks that did not report."""
    failed = sorted(failure.rank for failure in failures if failure.kind != "answered")
    ranks_by_activity = grouped((activities.get(rank, doing), rank) for rank in failed)
    if len(ranks_by_activity) == 1:
        return next(iter(ranks_by_activity))
    parts = [f"{activity} on {name_ranks(ranks)}" for activity, ranks in ranks_by_activity.items()]
    if len(parts) > MOST_ACTIVITIES:
        rest = [rank for ranks in list(ranks_by_activity.values())[MOST_ACTIVITIES - 1 :] for rank in ranks]
        parts[MOST_ACTIVITIES - 1 :] = [f"other activities on {name_ranks(rest)}"]
    return "; ".join(parts)
