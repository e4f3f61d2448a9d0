"""README, the page of options and the catalogue show real files and real output, and list all options and checks."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

from pytest_fsdp_meta.catalogue import built_in
from pytest_fsdp_meta.plugin.markers import fsdp_conformance
from pytest_fsdp_meta.plugin.settings import OPTIONS
from tests.docs.catalogue_page import catalogue_page
from tests.docs.markdown_help import Page, type_in

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text("utf-8")
OPTIONS_PAGE = (ROOT / "docs" / "options.md").read_text("utf-8")
EXAMPLE = (ROOT / "examples" / "test_llama.py").read_text("utf-8")


def blocks(language: str, page: str = "README.md") -> list[str]:
    return [block.text for block in Page(ROOT / page).blocks if block.language == language]


def test_the_example_is_the_file_in_examples():
    assert blocks("python") == [EXAMPLE]


def test_the_ranks_page_shows_the_file_in_examples():
    assert (ROOT / "examples" / "test_ranks.py").read_text("utf-8") in blocks("python", "docs/ranks.md")


def test_the_passing_output_is_real(tmp_path):
    """Only the end of each line is left out: durations and padding."""
    (tmp_path / "test_llama.py").write_text(EXAMPLE)
    shown = blocks("console")[0].splitlines()
    assert shown[0] == "$ pytest test_llama.py"
    _, output = type_in(tmp_path, shown[0].removeprefix("$ "))
    for line in shown[1:]:
        assert line in output


def test_the_failure_message_is_real(tmp_path):
    lines = EXAMPLE.splitlines(keepends=True)
    broken = [line for line in lines if "rotary_emb = " not in line]
    assert len(lines) - len(broken) == 1
    (tmp_path / "test_llama.py").write_text("".join(broken))
    _, output = type_in(tmp_path, "pytest test_llama.py")
    message = blocks("text")[0]
    assert "rerun: python -m pytest" in message
    assert message in output


@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option.name)
def test_every_option_is_listed(option):
    assert option.flag in OPTIONS_PAGE
    assert f"`{option.ini}`" in OPTIONS_PAGE


@pytest.mark.parametrize("argument", inspect.signature(fsdp_conformance).parameters)
def test_every_argument_of_the_marker_is_listed(argument):
    assert f"`{argument}`" in OPTIONS_PAGE


def test_the_pages_say_how_many_checks_there_are():
    assert sum(check.simulated != "only" for check in built_in()) == 59
    for page in ("README.md", "docs/index.md", "docs/how.md"):
        assert "fifty-nine checks" in " ".join((ROOT / page).read_text("utf-8").split()), page


def test_the_catalogue_page_is_current():
    """``make docs`` generates it."""
    assert (ROOT / "docs" / "catalogue.md").read_text("utf-8") == catalogue_page(built_in())
