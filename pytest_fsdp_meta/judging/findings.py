"""Findings: what a check found wrong, as messages and reports show it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple, TypedDict, cast


class Explanation(TypedDict, total=False):
    """A cause and a remedy that are more specific than those of the check.

    The cause is ``cause_alone`` if a world of one rank fails as well, and ``cause_sharded`` if that passes, where they
    are given.
    """

    cause: str
    remedy: str
    cause_alone: str
    cause_sharded: str
    remedy_alone: str


def extend(explanation: Explanation, cause: str, remedy: str) -> Explanation:
    """Return the explanation with a text after each of its causes, and one after its remedy."""
    extended = {key: f"{text}{remedy if key.startswith('remedy') else cause}" for key, text in explanation.items()}
    return cast(Explanation, extended)


def either(lead: str, alone: str, sharded: str, remedy: str) -> Explanation:
    """Return an explanation by two causes: ``sharded`` takes several ranks, ``alone`` is wrong on one rank as well."""
    return {
        "cause": f"{lead}{alone}; or {sharded}",
        "cause_alone": lead + alone,
        "cause_sharded": lead + sharded,
        "remedy": remedy,
    }


class Mismatch(NamedTuple):
    """The actual and expected state of a tensor on one rank, with a more specific cause and remedy if known."""

    actual: str
    expected: str
    cause: str = ""
    remedy: str = ""
    cause_alone: str = ""
    cause_sharded: str = ""
    remedy_alone: str = ""


@dataclass(frozen=True)
class Finding:
    """One violation of a check's promise.

    It is formatted as "<tensor>, <ranks>: <actual>, but should be <expected> (<detail>)"; with an empty ``expected``,
    as "<tensor>, <ranks>: <actual> (<detail>)". ``tensor`` is None if it concerns the whole model. ``detail`` has what
    differs between tensors (numbers, indices): findings that differ only in tensor, ranks and detail are merged.
    """

    tensor: str | None
    ranks: tuple[int, ...]
    actual: str
    expected: str
    detail: str = ""
    cause: str = ""
    remedy: str = ""
    condemns: tuple[str, ...] = ()
    """Tensors that later checks skip because they already failed; default: ``tensor`` alone."""
    origin: str = ""
    """Where the difference starts, in one line above all findings of the check; the same for all of them."""
    step: int | None = None
    """The step of the training at which it shows first, where that is known."""
    cause_alone: str = ""
    cause_sharded: str = ""
    """The cause to show where a world of one rank fails as well, or passes; empty where that makes no difference."""
    remedy_alone: str = ""
    """The remedy of ``cause_alone`` if it is another one."""
    certain: bool = False
    """Whether it is wrong whatever the reference lacks, as a missing gradient or an average that never moves is."""

    def explained_by(self, explanation: Explanation) -> Finding:
        """Return the finding with this explanation in place of its own."""
        bare = replace(self, cause="", remedy="", cause_alone="", cause_sharded="", remedy_alone="")
        return replace(bare, **explanation)

    @property
    def explanation(self) -> Explanation:
        return {
            "cause": self.cause,
            "remedy": self.remedy,
            "cause_alone": self.cause_alone,
            "cause_sharded": self.cause_sharded,
            "remedy_alone": self.remedy_alone,
        }

    @property
    def failed_tensors(self) -> tuple[str, ...]:
        """The tensors that later checks skip: ``condemns`` or its default."""
        return self.condemns or ((self.tensor,) if self.tensor else ())
