"""Hooks that a downstream ``conftest.py`` or plugin may implement."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pytest_fsdp_meta.catalogue import Check


@pytest.hookspec
def pytest_fsdp_checks() -> Sequence[Check]:  # type: ignore[empty-body]
    """Return checks made with ``@check`` of ``pytest_fsdp_meta.catalogue``; they run after the built-in ones.

    pytest must know the hook before it collects: implement it in the ``conftest.py`` of the root folder or of a folder
    in ``testpaths``, or in a plugin.
    """


@pytest.hookspec
def pytest_fsdp_preload() -> Sequence[str]:  # type: ignore[empty-body]
    """Return names of modules that ranks should import before they start, such as ``["transformers"]``."""
