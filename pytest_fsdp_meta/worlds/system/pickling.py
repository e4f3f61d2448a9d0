"""Pickle functions by value together with the name of their file, from which messages take the user's line."""

from __future__ import annotations

import io
from collections import ChainMap
from types import CodeType
from typing import Any

import cloudpickle

NO_FILE = "<dynamic-code>"
"""What cloudpickle writes from 3.1.3 on instead of the file that defines a function."""


def _reduce_code(code: CodeType) -> tuple[Any, ...]:
    make, arguments = cloudpickle.Pickler.dispatch_table[CodeType](code)
    return make, tuple(code.co_filename if one == NO_FILE else one for one in arguments)


class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """The pickler of cloudpickle, which also keeps the files of functions."""

    dispatch_table = ChainMap({CodeType: _reduce_code}, cloudpickle.Pickler.dispatch_table)


def dumps(value: object) -> bytes:
    """Pickle the value, functions and classes that cannot be imported by value."""
    file = io.BytesIO()
    Pickler(file).dump(value)
    return file.getvalue()
