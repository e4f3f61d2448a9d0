"""Tests of the Markdown helper itself: a mistake in it would let wrong pages pass."""

from __future__ import annotations

import pytest

from tests.docs.markdown_help import Block, Page, missing

PAGE = """\
# A `title`, and more

<!-- not run: needs a GPU -->
```sh
nvidia-smi
```

* in a list

  ```python
  # tests/test_it.py
  assert True
  ```

A [link](other.md#a-part) and ![a picture](it.png).

## A title, and more
"""


@pytest.fixture
def page(tmp_path):
    (tmp_path / "page.md").write_text(PAGE)
    return Page(tmp_path / "page.md")


def test_blocks_are_found_everywhere_and_a_not_run_comment_applies_to_one_block(page):
    assert page.blocks == [
        Block("sh", "nvidia-smi\n", 4, "needs a GPU"),
        Block("python", "# tests/test_it.py\nassert True\n", 10, ""),
    ]
    assert [block.file for block in page.blocks] == ["", "tests/test_it.py"]


def test_links_and_anchors_are_the_same_as_on_github(page):
    assert page.links == ["other.md#a-part", "it.png"]
    assert page.anchors == {"a-title-and-more", "a-title-and-more-1"}


def test_commands_are_read_with_the_output_below_them():
    console = Block("console", "$ pytest -q \\\n  --co\nshown\n$ ls\n", 1, "")
    assert list(console.commands) == [("pytest -q \\\n  --co", "shown\n"), ("ls", "")]
    assert list(Block("sh", "a\nb\n", 1, "").commands) == [("a\nb\n", "")]


@pytest.mark.parametrize(
    ("shown", "absent"),
    [
        ("one\ntwo\n", ""),
        ("one\n...\nthree\n", ""),
        ("...\ntwo\n...\n", ""),
        ("one\nthree\n", "one\nthree"),
        ("three\n...\none\n", "one"),
        ("wo\n", "wo"),
        ("two\nthr\n", "two\nthr"),
    ],
)
def test_shown_text_must_appear_in_the_output_as_whole_lines_in_this_order(shown, absent):
    found = missing("one\ntwo\nthree\n", shown)
    assert found.partition("----")[0].strip() == absent
