"""Parse the values of options, as text from the command line or the ini file.

Each function raises ValueError for a value that the option does not take; the option says which ones it does.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryFile
from typing import TypeVar

from pytest_fsdp_meta.reports.io import FILE, PAGE

T = TypeVar("T")
UNITS = {"MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "": 0}
"""Bytes of a unit; a number without one is refused."""


def checked(convert: Callable[[str], T], is_valid: Callable[[T], bool]) -> Callable[[str], T]:
    """Return a function that converts a text and raises ValueError for a value that is not valid."""

    def parse(text: str) -> T:
        value = convert(text)
        if not is_valid(value):
            raise ValueError
        return value

    return parse


parse_count = checked(int, lambda count: count >= 1)
parse_seconds = checked(float, lambda seconds: 0 < seconds < 1e9)
parse_sizes = checked(
    lambda text: tuple(map(int, text.split(","))), lambda sizes: min(sizes) >= 1 and len(set(sizes)) == len(sizes)
)


def parse_bytes(text: str) -> int:
    unit = next(unit for unit in UNITS if text.endswith(unit) or not unit)
    size = float(text.removesuffix(unit)) * UNITS[unit]
    if not 0 < size < 2**63:
        raise ValueError
    return int(size)


def parse_share(text: str) -> float:
    share = float(text.removesuffix("%")) / 100
    if not text.endswith("%") or not 0 <= share < 1:
        raise ValueError
    return share


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
