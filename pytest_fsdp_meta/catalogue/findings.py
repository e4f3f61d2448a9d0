"""A finding: one broken promise, in the words that messages and reports show."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, TypedDict


class Explanation(TypedDict, total=False):
    """What a finding may say better than its check does."""

    cause: str
    remedy: str


class Mismatch(NamedTuple):
    """What a rank shows of a tensor, what it should show and, where it is known better than the check, why."""

    actual: str
    expected: str
    cause: str = ""
    remedy: str = ""


@dataclass(frozen=True)
class Finding:
    """One broken promise. It reads "<tensor>, <ranks>: <actual>, but should be <expected>".

    ``tensor`` is None for what concerns the whole model. ``detail`` is what differs from one tensor to the next
    (numbers, indices): findings that are equal but for tensor, ranks and detail are told as one.
    """

    tensor: str | None
    ranks: tuple[int, ...]
    actual: str
    expected: str
    detail: str = ""
    cause: str = ""
    remedy: str = ""
    condemns: tuple[str, ...] = ()
    """The tensors that no later check judges, where they are not just ``tensor``."""
