"""The report as a single, self-contained HTML page: ``write_page``."""

from __future__ import annotations

from pytest_fsdp_meta.reports.page.rendering import render, write_page

__all__ = ["render", "write_page"]
