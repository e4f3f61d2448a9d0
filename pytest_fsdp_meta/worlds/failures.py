"""How ranks fail, and how that is told: by rank, the first cause first, its consequences after it."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass

from pytest_fsdp_meta.text import name_ranks

ADDRESS = re.compile(r"\b0x[0-9a-f]{6,}\b")


@dataclass(frozen=True)
class RankFailure:
    """One rank's end.

    ``kind`` is "raised", "exited", "killed", "hung" or "unsendable", in a cluster also "lost" (with its machine) or
    "refused" (by its machine, before it ran), and beside a rank that hung also "answered";
    ``summary`` fits a line; ``detail`` is the traceback or the stacks. ``when`` is the machine's monotonic clock, so
    that the first failure can be told from those that it caused. ``user`` marks an error that was made for the user to
    read: its traceback says nothing more. ``exception`` and ``message`` are the qualified class and the text of what
    was raised.
    """

    rank: int
    kind: str
    summary: str
    detail: str = ""
    when: float = 0.0
    user: bool = False
    exception: str = ""
    message: str = ""

    @property
    def lost_peer(self) -> bool:
        """Whether torch says that another rank has gone: a consequence, though it can be told before its cause."""
        told_by_torch = self.exception.startswith("torch.distributed.") or "gloo" in self.message
        return self.kind == "raised" and told_by_torch and LOST_PEER.search(self.message) is not None


class CallFailed(Exception):
    """A function of the user's failed; ``where`` names it, the cause of this error is what it raised.

    ``detail`` is what is shown in place of the cause's traceback.
    """

    def __init__(self, where: str = "", detail: str = "") -> None:
        self.where = where
        self.detail = detail
        super().__init__(where)


class Misuse(ValueError):
    """A user's mistake, told completely by its message: no traceback belongs to it."""


class WorldError(Exception):
    """One or more ranks failed; their world has ended. ``str()`` is the full story, ``summary`` one line.

    ``label`` names the world beside its ranks, and a world of one in place of its only rank. ``view`` is what is
    known of all ranks together.
    """

    def __init__(
        self,
        failures: Sequence[RankFailure],
        doing: str,
        outputs: Sequence[str] = (),
        label: str = "",
        view: str = "",
    ) -> None:
        assert failures
        self.failures = tuple(sorted(failures, key=lambda one: (one.lost_peer, one.when, one.rank)))
        self.doing = doing
        self.outputs = tuple(outputs)
        self.label = label
        self.view = view
        super().__init__(self.summary)

    @property
    def summary(self) -> str:
        first = self.failures[0]
        if first.user:
            return first.summary
        mine = ADDRESS.sub("", first.summary)
        same = sorted(f.rank for f in self.failures if (f.kind, ADDRESS.sub("", f.summary)) == (first.kind, mine))
        summary = _plural(first.summary) if len(same) > 1 else first.summary
        return f"{self._who(same)} {summary}"

    def _who(self, ranks: Sequence[int]) -> str:
        if not self.label:
            return name_ranks(ranks)
        return self.label if len(self.outputs) <= 1 else f"{name_ranks(ranks)} of {self.label}"

    @property
    def unanimous(self) -> str:
        """The qualified class of what every rank raised; empty where they differ or one did not raise."""
        raised = {failure.exception for failure in self.failures}
        return raised.pop() if len(raised) == 1 and len(self.failures) == len(self.outputs) else ""

    @property
    def user(self) -> bool:
        """Whether the first failure is a message to the user, complete in one line."""
        return self.failures[0].user

    def __str__(self) -> str:
        if self.user:
            return self.summary
        lines = [self.summary, f"(while {self.doing})", *(["", self.view] if self.view else [])]
        for number, (summary, detail, ranks) in enumerate(self._told()):
            if number and summary:
                lines += ["", f"then {name_ranks(ranks)} {summary}"]
            if detail:
                lines += ["", detail.rstrip()]
        return "\n".join(lines)

    def _told(self) -> list[tuple[str, str, list[int]]]:
        """(summary, detail, ranks): what several ranks say alike is told once, and consequences in one line."""
        if self.failures[0].kind == "hung":
            stacks: dict[str, list[int]] = {}
            for failure in self.failures:
                stacks.setdefault(failure.detail, []).append(failure.rank)
            return [("", f"{name_ranks(at)} stood at (innermost last):\n{stack}", at) for stack, at in stacks.items()]
        first = self.failures[0]
        told: dict[str, tuple[str, str, list[int]]] = {}
        for failure in self.failures:
            lost = failure.lost_peer and not first.lost_peer
            words = ("lost the connection to it", "") if lost else (failure.summary, failure.detail)
            # Where an object lies in memory is another place on every rank, and says nothing.
            told.setdefault(ADDRESS.sub("", "\n".join(words)), (*words, []))[2].append(failure.rank)
        return list(told.values())


def _plural(summary: str) -> str:
    for one, several in (("was killed", "were killed"), ("was lost", "were lost"), ("with its ", "with their ")):
        summary = summary.replace(one, several)
    return summary


LOST_PEER = re.compile(
    r"Connection (was likely )?(closed|reset)|Connection refused|Broken pipe|ncclRemoteError|failed to (recv|send)",
    re.IGNORECASE,
)


CUT_OFF = 113
"""The exit code of a rank that cannot speak to its parent any more, for that is all it can still say."""


def describe_exit(code: int | None) -> tuple[str, str]:
    """(kind, summary) of a process that ended by itself."""
    if code is None:
        return "exited", "closed its connection and did not end"
    if code < 0:
        try:
            name = signal.Signals(-code).name
        except ValueError:
            name = f"signal {-code}"
        return "killed", f"was killed by {name}"
    if code == CUT_OFF:
        return "exited", "closed a descriptor that was not its own: the connection to pytest"
    return "exited", f"exited with code {code} before it answered"
