"""How ranks, names and numbers of things are written, everywhere alike."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Sequence
from itertools import product

NUMBER = re.compile(r"(?<![A-Za-z0-9_])(0|[1-9][0-9]*)(?![A-Za-z0-9_])")
"""A number that is a word of its own; ``007`` is none, because it would be written back as 7."""
WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})
"""Name components that torch's own wrappers insert; the reference, which is not wrapped, does not have them."""


def name_ranks(ranks: Iterable[int]) -> str:
    """ "rank 1", "ranks 0-3", "ranks 0, 2"."""
    ordered = sorted(set(ranks))
    return f"{'rank' if len(ordered) == 1 else 'ranks'} {joined_runs(ordered)}"


def joined_runs(numbers: Iterable[int]) -> str:
    """ "0-3", "0, 2"."""
    return ", ".join(_runs(sorted(set(numbers)), "-"))


def first_line(error: BaseException | str, width: int = 160) -> str:
    """What an error, or a text, says in its first line, without a word that is cut in two."""
    lines = str(error).splitlines()
    return textwrap.shorten(lines[0], width, placeholder=" ...") if lines else ""


def fold_names(names: Iterable[str]) -> dict[str, str]:
    """Names that differ only in numbers, written as one: ``layers.{0..31}.mlp.weight``; with the first name of each.

    Only a complete set is folded, so that what is written stands for exactly the names that were given.
    """
    families: dict[tuple[str, ...], list[tuple[int, ...]]] = {}
    for name in dict.fromkeys(names):
        parts = NUMBER.split(name)
        families.setdefault(tuple(parts[::2]), []).append(tuple(int(number) for number in parts[1::2]))
    return dict(pair for words, numbers in families.items() for pair in _fold(words, numbers))


def _fold(words: tuple[str, ...], numbers: list[tuple[int, ...]]) -> list[tuple[str, str]]:
    columns = [sorted(set(column)) for column in zip(*numbers, strict=True)]
    if set(product(*columns)) == set(numbers):
        return [(_join(words, [_braced(column) for column in columns]), _join(words, map(str, numbers[0])))]
    # An incomplete set has two columns that vary; taken apart by the first, its parts may be complete.
    vary = next(index for index, column in enumerate(columns) if len(column) > 1)
    parts = [[row for row in numbers if row[vary] == value] for value in columns[vary]]
    return [pair for part in parts for pair in _fold(words, part)]


def _join(words: Sequence[str], numbers: Iterable[str]) -> str:
    return "".join(word + number for word, number in zip(words, (*numbers, ""), strict=True))


def _braced(column: list[int]) -> str:
    return str(column[0]) if len(column) == 1 else "{" + ",".join(_runs(column, "..")) + "}"


def _runs(ordered: Sequence[int], joint: str) -> list[str]:
    """ "0-3", "7": consecutive numbers joined, two neighbours left as they are."""
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
    """A name as it is without torch's wrappers."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def counted(number: int, noun: str) -> str:
    """ "1 step", "3 steps"."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def first_of(names: Sequence[str], most: int = 1) -> str:
    """ "embed.weight and 2 more": the first ``most`` names, and how many others there are."""
    others = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + others
