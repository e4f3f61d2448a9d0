"""Which names may be meant by one that does not exist: a close one, or else a few real ones."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterator, Sequence

from pytest_fsdp_meta.text import counted, fold_names

CLOSE = 0.6
"""Least ratio of difflib for a text that may be a misspelling of another."""
MOST_SHOWN = 3
"""Names shown where none is close."""


def describe_nearest(name: str, names: Collection[str], noun: str) -> str:
    """Return the end of a message about a name that does not exist: the close name, or a few real ones.

    ``name`` may be a shell pattern. ``noun`` is what the ``names`` name, such as "parameter".
    """
    families = list(fold_names(names).values())  # one of the names that differ only in numbers
    close = next(_close_names(name, families), "")
    if close:
        return f"; the nearest is {close!r}"
    shown = difflib.get_close_matches(name, families, n=MOST_SHOWN, cutoff=0)
    if not shown:
        return f"; there is no {noun}"
    joint = ": " if len(shown) == len(names) else ", such as "
    return f"; it has {counted(len(names), noun)}{joint}{', '.join(map(repr, shown))}"


def _close_names(name: str, names: Sequence[str]) -> Iterator[str]:
    """Yield the names that ``name`` may misspell, then those with a part that it may, most similar first.

    The part is the one most like the longest text between the pattern's wildcards.
    """
    yield from (real for real in names if real.lower() == name.lower())
    yield from (real for real in difflib.get_close_matches(name, names) if _is_close(name, real))
    yield from (real for real in names if real.endswith(f".{name}") or name.endswith(f".{real}"))
    literals = re.split(r"[*?]|\[[^]]*\]", name)
    if len(literals) == 1:
        return
    literal = ".".join(_unnumbered(max((text.strip(".") for text in literals), key=len)))
    size = literal.count(".") + 1
    by_part: dict[str, str] = {}
    for real in names:
        parts = _unnumbered(real)
        for start in range(len(parts) - size + 1):
            by_part.setdefault(".".join(parts[start : start + size]), real)
    yield from (by_part[part] for part in difflib.get_close_matches(literal, by_part) if _is_close(literal, part))


def _is_close(name: str, real: str) -> bool:
    """Return whether the components in which the names differ are similar; numbers always are.

    The whole names may be similar by their common components alone, as '*.router.weight' and 'head.weight' are.
    """
    one, other = _unnumbered(name), _unnumbered(real)
    while one and other and one[0] == other[0]:
        del one[0], other[0]
    while one and other and one[-1] == other[-1]:
        del one[-1], other[-1]
    if not one or not other:
        return True
    return difflib.SequenceMatcher(None, ".".join(one), ".".join(other)).ratio() >= CLOSE


def _unnumbered(name: str) -> list[str]:
    """Return the components of a name, with 0 for every number."""
    return ["0" if part.isdecimal() else part for part in name.split(".")]
