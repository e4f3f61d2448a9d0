"""Parse the values of options, as text from the command line or the ini file.

Each function raises ValueError for a value that the option does not take; the option says which ones it does.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryFile

from pytest_fsdp_meta.reports.io import FILE, PAGE

UNITS = {"MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "": 0}
"""Bytes of a unit; a number without one is refused."""


def parse_sizes(text: str) -> tuple[int, ...]:
    sizes = tuple(int(part) for part in text.split(","))
    if any(size < 1 for size in sizes) or len(set(sizes)) != len(sizes):
        raise ValueError
    return sizes


def parse_bytes(text: str) -> int:
    unit = next(unit for unit in UNITS if text.endswith(unit) or not unit)
    size = float(text.removesuffix(unit)) * UNITS[unit]
    if not 0 < size < 2**63:
        raise ValueError
    return int(size)


def parse_share(text: str) -> float:
    if not text.endswith("%"):
        raise ValueError
    share = float(text.removesuffix("%")) / 100
    if not 0 <= share < 1:
        raise ValueError
    return share


def parse_count(text: str) -> int:
    count = int(text)
    if count < 1:
        raise ValueError
    return count


def parse_seconds(text: str) -> float:
    seconds = float(text)
    if not 0 < seconds < 1e9:
        raise ValueError
    return seconds


def one_of(values: Sequence[str]) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in values:
            raise ValueError
        return text

    return parse


def parse_loader(text: str) -> str:
    """Return "MODULE:NAME" if it may be such a name. Raises ValueError."""
    module, _, name = text.partition(":")
    if not all(part.isidentifier() for part in (*module.split("."), *name.split("."))):
        raise ValueError
    return text


def parse_folder(text: str) -> str:
    folder = os.path.expanduser(text)  # shells do not expand the ~ in --fsdp-checkpoint=~/model
    if not os.path.isdir(folder):
        raise ValueError
    return folder


def parse_reports(text: str) -> tuple[str, ...]:
    parts = [text] if os.path.exists(os.path.expanduser(text)) else text.split(",")
    paths = tuple(Path(part.strip()).expanduser() for part in parts)
    if not all(part.strip() for part in parts) or not all(path.is_file() or path.is_dir() for path in paths):
        raise ValueError
    return tuple(map(str, paths))


def parse_patterns(text: str) -> tuple[str, ...]:
    try:
        return ("*",) if parse_switch(text) else ()
    except KeyError:
        patterns = tuple(filter(None, (part.strip() for part in re.split(r"[,\n]", text))))
        if not all("::" in pattern or "*" in pattern for pattern in patterns):
            raise ValueError from None
        return patterns


def parse_new_folder(text: str) -> str:
    if not text.strip():
        raise ValueError
    folder = Path(text).expanduser().absolute()
    existing = next(path for path in (folder, *folder.parents) if path.exists() or path.is_symlink())
    if not existing.is_dir() or any((folder / name).is_dir() for name in (FILE, PAGE)):
        raise ValueError
    try:
        TemporaryFile(dir=existing).close()  # os.access allows root everything, also in /proc
    except OSError as error:
        raise ValueError from error
    return str(folder)


def parse_switch(text: str) -> bool:
    return {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}[
        text.lower()
    ]
