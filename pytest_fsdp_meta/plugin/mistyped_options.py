"""Suggest the nearest option for one that does not exist: pytest itself only says "unrecognized arguments"."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from copy import copy

import pytest

from pytest_fsdp_meta.plugin.settings import FLAGS, GONE

PREFIX = "--fsdp"


def check_options(config: pytest.Config, parser: pytest.Parser, args: Sequence[str]) -> None:
    """Raise UsageError for the first option like one of this plugin's that no plugin has registered.

    To be called when conftest files have registered theirs, which may begin with the same word.
    """
    _, unknown = parser.parse_known_and_unknown_args(args, copy(config.known_args_namespace))
    for argument in unknown:
        typed = argument.partition("=")[0]
        if typed in GONE:
            raise pytest.UsageError(f"{typed}: there is no such option any more; {GONE[typed]}")
        near = difflib.get_close_matches(typed.replace("_", "-"), FLAGS, n=1, cutoff=0.75)
        if typed.startswith("--") and near:
            raise pytest.UsageError(f"{typed}: there is no such option; did you mean {near[0]}?")
        if typed.startswith(PREFIX):
            raise pytest.UsageError(f"{typed}: there is no such option; the options are {', '.join(FLAGS)}")
