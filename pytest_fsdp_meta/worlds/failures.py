"""How ranks fail, and the error message about it: the rank that failed first, then the consequences on others."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass, replace

from pytest_fsdp_meta.text import LINES, grouped, name_ranks, printable

ADDRESS = re.compile(r"\b0x[0-9a-f]{6,}\b")
"""Memory addresses, which differ between ranks that fail alike."""
LOST_PEER = re.compile(
    r"Connection (was likely )?(closed|reset)|Connection refused|Broken pipe|ncclRemoteError|failed to (recv|send)",
    re.IGNORECASE,
)
"""What gloo, NCCL and sockets say when another rank has gone."""
CUT_OFF = 113
"""The exit code of a rank whose pipe to its parent was closed. The user's code may exit with it as well, so the rank
leaves a file with the suffix ``CUT_OFF_MARK`` next to its output."""
CUT_OFF_MARK = ".cut"
UNCAUGHT = re.compile(r"^ *what\(\): +(?:\[enforce fail at [^\]]*\] *)?(.{1,300})", re.MULTILINE)
"""What C++ writes of an exception that nobody catches, such as gloo's in its own thread, before it aborts."""


@dataclass(frozen=True)
class RankFailure:
    """How a call failed on one rank.

    ``kind`` is "raised", "exited", "killed", "hung" or "unsendable" (the result); "unstarted" if the parent could not
    start it; in a cluster also "lost" (with its machine) or "refused" (by its machine, before it ran); "answered" if
    the rank itself is fine and another one hung. ``summary`` fits on one line; ``detail`` is the traceback or the
    stacks. ``when`` is the time on the machine's monotonic clock: the first failure caused the others. ``user``
    marks an error whose message is complete for the user, so that no traceback is shown. ``exception`` and ``message``
    are the qualified class and the text of the exception, and ``place`` is "path:line" of the user's innermost frame.
    ``tensors`` are those of the module in which it was raised.
    """

    rank: int
    kind: str
    summary: str
    detail: str = ""
    when: float = 0.0
    user: bool = False
    exception: str = ""
    message: str = ""
    place: str = ""
    tensors: tuple[str, ...] = ()

    @property
    def printable(self) -> RankFailure:
        """The same with control characters escaped: what a rank reports must not act on a terminal."""
        summary, detail, message = (printable(text, LINES) for text in (self.summary, self.detail, self.message))
        return replace(self, summary=summary, detail=detail, message=message)

    @property
    def lost_peer(self) -> bool:
        """Whether torch reports that another rank has gone: a consequence, even if it is reported before its cause."""
        raised_by_torch = self.exception.startswith("torch.distributed.") or "gloo" in self.message
        return self.kind == "raised" and raised_by_torch and LOST_PEER.search(self.message) is not None


@dataclass(frozen=True)
class RankState:
    """What some ranks do while a world hangs, like "hung in barrier, test_x.py:58"; ``place`` is its "path:line"."""

    ranks: tuple[int, ...]
    text: str
    place: str = ""


class CallFailed(Exception):
    """A function of the user's, which ``where`` names, raised this error's ``__cause__``.

    ``detail``, if any, is shown instead of the traceback of the cause.
    """

    def __init__(self, where: str = "", detail: str = "") -> None:
        self.where = where
        self.detail = detail
        super().__init__(where)


def cause_of(error: BaseException) -> BaseException:
    """Return what the user's function raised if the error is a CallFailed, else the error itself."""
    return error.__cause__ if isinstance(error, CallFailed) and error.__cause__ is not None else error


class Misuse(ValueError):
    """A mistake in the user's code or settings. Its message is complete, and no traceback is shown."""

    tensors: tuple[str, ...] = ()
    """Those that it is about, where the message does not name them."""


class WorldError(Exception):
    """One or more ranks failed, and their world has ended. ``str()`` is the whole message, ``summary`` its first line.

    ``doing`` says what the ranks were doing. ``label`` names the world in the message, after its ranks or instead of
    its only rank. If ranks hang, ``states`` has first those that the others wait for, and ``view`` describes all
    ranks together: who waits in which collective. ``cause`` is what ended the wait for them, if not the time-out of
    the world.
    """

    def __init__(
        self,
        failures: Sequence[RankFailure],
        doing: str,
        outputs: Sequence[str] = (),
        label: str = "",
        view: str = "",
        states: Sequence[RankState] = (),
        cause: str = "",
    ) -> None:
        assert failures
        by_time = sorted(failures, key=lambda one: (one.lost_peer, one.when, one.rank))
        self.failures = tuple(failure.printable for failure in by_time)
        self.doing = doing
        self.outputs = tuple(outputs)
        self.label = label
        self.view = view
        self.states = tuple(states)
        self.cause = cause
        super().__init__(self.summary)

    @property
    def summary(self) -> str:
        first = self.failures[0]
        if self.states:
            return self._describe_states()
        if first.user and len(self.failures) >= len(self.outputs):
            return first.summary
        text = ADDRESS.sub("", first.summary)
        same = sorted(f.rank for f in self.failures if (f.kind, ADDRESS.sub("", f.summary)) == (first.kind, text))
        if first.user:
            return f"{self._who(same)}: {first.summary}"
        summary = _plural(first.summary) if len(same) > 1 else first.summary
        return f"{self._who(same)} {summary}"

    def _describe_states(self) -> str:
        """Describe a hang, like "rank 0 hung in barrier, test_x.py:58; rank 1 had returned"."""
        whos = [self._who(self.states[0].ranks), *(name_ranks(state.ranks) for state in self.states[1:])]
        texts = [_plural(state.text) if len(state.ranks) > 1 else state.text for state in self.states]
        parts = [f"{who} {text}" for who, text in zip(whos, texts, strict=True)]
        return "; ".join(filter(None, [self.cause, *parts]))

    @property
    def place(self) -> str:
        """The "path:line" in the user's code where the first failure happened; "" if that is not known."""
        return next((state.place for state in self.states if state.place), self.failures[0].place)

    def _who(self, ranks: Sequence[int]) -> str:
        if not self.label:
            return name_ranks(ranks)
        return self.label if len(self.outputs) <= 1 else f"{name_ranks(ranks)} of {self.label}"

    @property
    def unanimous(self) -> str:
        """The qualified class of the exception that every rank raised; empty if they differ or a rank raised none."""
        raised = {failure.exception for failure in self.failures}
        return raised.pop() if len(raised) == 1 and len(self.failures) == len(self.outputs) else ""

    @property
    def user(self) -> bool:
        """Whether the first failure is a complete message for the user, without a traceback."""
        return self.failures[0].user

    def __str__(self) -> str:
        if self.user:
            return self.summary
        first = self.failures[0]
        time_out = f"{first.summary} " if self.states and not self.cause else ""
        lines = [self.summary, f"({time_out}while {self.doing})", *(["", self.view] if self.view else [])]
        for number, (summary, detail, ranks) in enumerate(self._merged()):
            if number and summary:
                lines += ["", f"then {name_ranks(ranks)} {summary}"]
            if detail:
                lines += ["", detail.rstrip()]
        return "\n".join(lines)

    def _merged(self) -> list[tuple[str, str, list[int]]]:
        """Return (summary, detail, ranks) for each distinct failure; consequences become one line without detail."""
        first = self.failures[0]
        if first.kind == "hung":
            stacks = grouped((failure.detail, failure.rank) for failure in self.failures)
            return [
                ("", f"stack of {name_ranks(ranks)} (innermost frame last):\n{stack}", ranks)
                for stack, ranks in stacks.items()
            ]
        merged: dict[str, tuple[str, str, list[int]]] = {}
        for failure in self.failures:
            lost = failure.lost_peer and not first.lost_peer
            text = ("lost the connection to it", "") if lost else (failure.summary, failure.detail)
            merged.setdefault(ADDRESS.sub("", "\n".join(text)), (*text, []))[2].append(failure.rank)
        return list(merged.values())


PLURALS = {"was killed": "were killed", "was lost": "were lost", "was stopped": "were stopped"}
PLURALS |= {"was outside": "were outside", "with its ": "with their ", "waits in ": "wait in ", "was in ": "were in "}


def _plural(summary: str) -> str:
    if summary.startswith("raised "):
        return summary  # the rest is the user's
    for one, several in PLURALS.items():
        summary = summary.replace(one, several)
    return summary


def describe_exit(code: int | None, cut_off: bool = False, written: str = "") -> tuple[str, str]:
    """Return (kind, summary) for a process that ended without a message, ``written`` its output.

    ``cut_off`` says whether it left the mark of that.
    """
    if code is None:
        return "exited", "closed its connection but did not exit"
    if code < 0:
        try:
            name = signal.Signals(-code).name
        except ValueError:
            name = f"signal {-code}"
        uncaught = UNCAUGHT.findall(written) if -code == signal.SIGABRT else []
        why = f": {uncaught[-1].rstrip()}" if uncaught else ""
        return "killed", f"was killed by {name}{why}"
    if code == CUT_OFF and cut_off:
        return "exited", "closed the file descriptor of its connection to pytest"
    return "exited", f"exited with code {code} before it answered"
