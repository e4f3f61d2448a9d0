"""Format ranks, names and counts for messages, group what they have in common, and find the nearest name."""

from __future__ import annotations

import difflib
import re
import textwrap
from collections.abc import Collection, Iterable, Iterator, Sequence
from math import prod
from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")
NUMBER = re.compile(r"(?<![A-Za-z0-9_])(0|[1-9][0-9]{0,17})(?![A-Za-z0-9_])")
"""A number between separators; not ``007``, which would be written back as 7, nor more digits than Python converts."""
QUANTITY = re.compile(r"[-+]?\d[\d.]*(?:e[-+]?\d+)?")
OCCASION = re.compile(r" of (?:another|the second) load\b|, called as \w+\([^)]*\)")
UNPRINTABLE = re.compile(
    r"[\x00-\x1f\x7f-\x9f\xad\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ud800-\udfff\ufeff]"
)
"""Characters that terminals and browsers obey, that hide or reorder others, or that UTF-8 cannot encode."""
LINES = "\n\t"
"""What ``printable`` keeps of a text of several lines."""
WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})
"""Name components that torch's wrappers insert and the names of an unwrapped reference lack."""
CLOSE = 0.6
"""Least ratio of difflib for a text that may be a misspelling of another."""
MOST_SHOWN = 3
"""Names shown where none is close."""


def grouped(pairs: Iterable[tuple[K, V]]) -> dict[K, list[V]]:
    """Return each key with its values, in the order in which the keys come first."""
    groups: dict[K, list[V]] = {}
    for key, value in pairs:
        groups.setdefault(key, []).append(value)
    return groups


def name_ranks(ranks: Iterable[int]) -> str:
    """Format ranks, like "rank 1", "ranks 0-3" or "ranks 0, 2"."""
    ordered = sorted(set(ranks))
    return f"{'rank' if len(ordered) == 1 else 'ranks'} {joined_runs(ordered)}"


def joined_runs(numbers: Iterable[int]) -> str:
    """Format numbers with runs joined, like "0-3" or "0, 2"."""
    return ", ".join(_runs(sorted(set(numbers)), "-"))


def first_line(error: BaseException | str, width: int = 160) -> str:
    """Return the first line of an error or a text, shortened to ``width`` at a word boundary."""
    lines = str(error).splitlines()
    return textwrap.shorten(lines[0], width, placeholder=" ...") if lines else ""


def without_numbers(text: str) -> str:
    """Return the text with "#" for each number: two texts that differ only in numbers become the same."""
    return QUANTITY.sub("#", text)


def without_occasion(text: str) -> str:
    """Return an error in one line without the load and the call in which it occurred: it is the same in any of them."""
    return OCCASION.sub("", text)


def printable(text: str, keep: str = "") -> str:
    """Return the text with unprintable characters, except those in ``keep``, written as in Python ("\\x1b")."""
    return UNPRINTABLE.sub(lambda found: found[0] if found[0] in keep else repr(found[0])[1:-1], text)


def did_you_mean(name: str, names: Iterable[str], otherwise: str = "", cutoff: float = 0.6) -> str:
    """Return the end of a message about a name that does not exist: the nearest that does, or else ``otherwise``."""
    near = difflib.get_close_matches(name, list(names), n=1, cutoff=cutoff)
    hint = f"did you mean {near[0]!r}?" if near else otherwise
    return f"; {hint}" if hint else ""


def fold_names(names: Iterable[str]) -> dict[str, str]:
    """Merge names that differ only in numbers, like ``layers.{0..31}.mlp.weight``, mapped to the first name of each.

    Only complete sets are merged, so that a merged name stands for exactly the names that were given.
    """
    families: dict[tuple[str, ...], list[tuple[int, ...]]] = {}
    for name in dict.fromkeys(names):
        parts = NUMBER.split(name)
        families.setdefault(tuple(parts[::2]), []).append(tuple(int(number) for number in parts[1::2]))
    return dict(pair for texts, numbers in families.items() for pair in _fold(texts, numbers))


def _fold(texts: tuple[str, ...], numbers: list[tuple[int, ...]]) -> list[tuple[str, str]]:
    columns = [sorted(set(column)) for column in zip(*numbers, strict=True)]
    if prod(map(len, columns)) == len(numbers):  # distinct, so they are all combinations
        braced = (
            "{" + ",".join(_runs(column, "..")) + "}" if len(column) > 1 else str(column[0]) for column in columns
        )
        return [(_join(texts, braced), _join(texts, map(str, numbers[0])))]
    # An incomplete set varies in two or more columns; split by the first of them, the parts may be complete.
    vary = next(index for index, column in enumerate(columns) if len(column) > 1)
    parts = [[row for row in numbers if row[vary] == value] for value in columns[vary]]
    return [pair for part in parts for pair in _fold(texts, part)]


def _join(texts: Sequence[str], numbers: Iterable[str]) -> str:
    return "".join(text + number for text, number in zip(texts, (*numbers, ""), strict=True))


def _runs(ordered: Sequence[int], joint: str) -> list[str]:
    """Join consecutive numbers, like "0-3"; with the joint "-", a run of two stays two numbers."""
    runs: list[list[int]] = []
    for number in ordered:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    parts: list[str] = []
    for run in runs:
        parts += [f"{run[0]}{joint}{run[-1]}"] if len(run) > 2 or (len(run) == 2 and joint == "..") else map(str, run)
    return parts


def clean_name(name: str) -> str:
    """Return a name without the components that torch's wrappers insert."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def names_in(text: str, names: Iterable[str]) -> list[str]:
    """Return the names of tensors that are in the text, also within a longer name, such as a checkpoint's.

    A name without a dot may be any word.
    """
    known = sorted((name for name in names if "." in name), key=len, reverse=True)
    return re.findall(rf"(?<!\w)(?:{'|'.join(map(re.escape, known))})(?!\w)", text) if known else []


def counted(number: int, noun: str) -> str:
    """Format a count, like "1 step" or "3 steps"."""
    ending = "" if number == 1 else "es" if noun.endswith(("ch", "sh", "ss")) else "s"
    return f"{number} {noun}{ending}"


def as_bytes(number: int) -> str:
    """Format a number of bytes in binary units, like "15.0 GiB"."""
    size, unit = float(number), "bytes"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if round(size) < 1024:
            break
        size, unit = size / 1024, larger
    digits = ".0f" if size >= 1000 else ".3g"  # 1010 GiB, not 1.01e+03
    return f"{number} bytes" if unit == "bytes" else f"{size:{digits}} {unit}"


def first_of(names: Sequence[str], most: int = 1) -> str:
    """Return the first ``most`` names and the number of others, like "embed.weight and 2 more"."""
    others = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + others


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
