"""The protocol between a world and its running ranks: send a message to all, collect one reply from each in time."""

from __future__ import annotations

import math
import pickle
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pytest_fsdp_meta.worlds.diagnosis import hang
from pytest_fsdp_meta.worlds.engine import DOING, Member, Message, pack_message, receive
from pytest_fsdp_meta.worlds.failures import RankFailure, RankState
from pytest_fsdp_meta.worlds.rank.debugging import BORROWING, POST_MORTEM, RETURNING

GRACE_PERIOD = 0.8
"""Seconds that the other ranks have to report their own failure after the first one was reported."""
UNANIMITY_TIMEOUT = 10.0
"""Seconds that the other ranks have to leave the call with an outcome such as a skip after the first rank did so."""


@dataclass(frozen=True)
class Replies:
    """What ranks replied to a message: one answer each, or why at least one of them did not answer."""

    answers: Sequence[Message] = ()
    """In rank order, each without its kind; complete if there are no failures."""
    failures: Sequence[RankFailure] = ()
    view: str = ""
    """If ranks hang, or their collectives do not match: which of them are in which collective."""
    states: Sequence[RankState] = ()
    """If ranks hang: what they do, those that are behind first."""


@dataclass(frozen=True)
class Conversation:
    """Exchanges messages with the ranks that are its members."""

    members: Sequence[Member]
    folder: Path
    """Where messages are stored that are too large for the pipe."""
    on_note: Callable[[int, str, Any], None]
    """Called with rank, kind and content of each note."""
    lend_terminal: Callable[[int, int], AbstractContextManager[None]]
    """Called with rank and process id when a debugger there needs the terminal. Raises ValueError if there is none."""
    activities: dict[int, str] = field(default_factory=dict)
    """What ranks have reported that they are doing since the last message, by rank."""
    answered: set[int] = field(default_factory=set)
    """The ranks that have answered the last message to all."""

    def send_to_all(self, message: Message) -> None:
        self.answered.clear()
        note = pack_message(message, self.folder / "call")
        for member in self.members:
            member.send(note)

    def collect(
        self, kind: str, ranks: Collection[int], seconds: float, unanimous_outcomes: Collection[str] = ()
    ) -> Replies:
        """Wait for one message of this kind from each of ``ranks``, and for failures of any member.

        Return early once a rank has failed and the others had time to report theirs. They get more time while every
        failure is one of ``unanimous_outcomes``, because a skip on one rank may come long before the next. The time
        that a debugger has the terminal does not count.
        """
        self.activities.clear()
        self.answered.clear()
        answers: dict[int, Message] = {}
        failures: dict[int, RankFailure] = {}
        deadline = time.monotonic() + seconds
        while (missing := set(ranks) - answers.keys() - failures.keys()) and time.monotonic() < deadline:
            running = [member for member in self.members if member.rank not in failures]
            for member, message in receive(running, deadline):
                if message is None:
                    failures[member.rank] = member.ending()
                elif message[0] == "failure":
                    failures[member.rank] = message[1]
                elif message[0] == "note":
                    self.handle_note(member.rank, *message[1:])
                elif message[0] == BORROWING:
                    began = time.monotonic()
                    self._lend_terminal(member)
                    deadline += time.monotonic() - began
                else:
                    assert message[0] == kind, message
                    answers[member.rank] = message[1:]
                    self.answered.add(member.rank)
            if failures:
                unanimous = all(failure.exception in unanimous_outcomes for failure in failures.values())
                deadline = min(deadline, time.monotonic() + (UNANIMITY_TIMEOUT if unanimous else GRACE_PERIOD))
        if failures:
            return Replies(
                failures=list(failures.values()), view=hang.describe_mismatch(self.members, failures.values())
            )
        if missing:
            return self.describe_hang(sorted(missing), f"did not answer within {seconds:g} s")
        return Replies([answers[rank] for rank in sorted(ranks)])

    def post_mortem(self, rank: int, debugger: str) -> bool:
        """Open a debugger where the last call failed on the rank; return whether the user left it with "quit".

        ``debugger`` is a class as "module:name", empty for ``pdb.Pdb``. There is no deadline: this waits for the user.
        Raises ValueError, with the reason, if the debugger got no terminal.
        """
        alone = replace(self, members=[member for member in self.members if member.rank == rank])
        alone.send_to_all((POST_MORTEM, debugger))
        answers = alone.collect(POST_MORTEM, [rank], math.inf).answers
        if not answers:
            return False  # the rank has ended
        quits, why_not = answers[0]
        if why_not:
            raise ValueError(why_not)
        return bool(quits)

    def _lend_terminal(self, member: Member) -> None:
        """Lend the terminal to a debugger on this rank for one prompt, or send the rank the reason why not."""
        reply = self.folder / "reply"
        try:
            if member.pid is None:
                raise ValueError("it runs on another machine")
            with self.lend_terminal(member.rank, member.pid):
                member.send(pack_message((BORROWING, ""), reply))
                over = False
                while not over:
                    for _, message in receive([member], math.inf):
                        if message is not None and message[0] == "note":
                            self.handle_note(member.rank, *message[1:])
                        over = over or message is None or message[0] == RETURNING
        except ValueError as error:
            member.send(pack_message((BORROWING, str(error)), reply))

    def handle_note(self, rank: int, kind: str, content: Any) -> None:
        if kind == DOING:
            self.activities[rank] = content
        self.on_note(rank, kind, content)

    def describe_hang(self, waiting: Sequence[int], summary: str, verb: str = "hung") -> Replies:
        """Ask every rank where it is, also those that answered: one may have left a collective that others wait in.

        ``verb`` says what a rank did there that others wait for.
        """
        found = hang.look(self.members)
        when = time.monotonic()
        late = [RankFailure(rank, "hung", summary, found[rank].stack, when) for rank in waiting]
        others = sorted({member.rank for member in self.members} - set(waiting))
        answered = [RankFailure(rank, "answered", "had answered", found[rank].stack, when + 1) for rank in others]
        flights = {rank: whereabouts.flight for rank, whereabouts in found.items()}
        view, states = hang.describe(flights, returned=others), hang.rank_states(found, others, verb)
        return Replies(failures=late + answered, view=view, states=states)


def pack_call(
    number: int, function: Callable[..., Any] | str, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Message:
    """Return the message that calls the function, which may be "module:name". Raises ValueError if it cannot be sent.

    ``number`` comes back with each result, so that no answer can be taken for that of another call.
    """
    from pytest_fsdp_meta.worlds.system.pickling import dumps

    target = function if isinstance(function, str) else ""
    try:
        payload = dumps((None if target else function, tuple(args), dict(kwargs)))
    except Exception as error:
        raise ValueError(f"the arguments cannot be sent to the ranks: {type(error).__name__}: {error}") from error
    return "call", number, target, payload


def unpack_results(number: int, answers: Sequence[Message]) -> list[Any]:
    """Return the results that ranks have sent for this call. Raises ValueError if one cannot be unpickled here."""
    assert all(call == number for call, _ in answers), "an answer belongs to another call"
    try:
        return [pickle.loads(packed) for _, packed in answers]
    except Exception as error:
        raise ValueError(f"a rank's result cannot be read here: {type(error).__name__}: {error}") from error
