"""What the tests of the pages would overlook if the reading of pages were wrong."""

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


def test_blocks_are_found_wherever_they_stand_and_a_mark_is_of_one_block(page):
    assert page.blocks == [
        Block("sh", "nvidia-smi\n", 4, "needs a GPU"),
        Block("python", "# tests/test_it.py\nassert True\n", 10, ""),
    ]
    assert [block.file for block in page.blocks] == ["", "tests/test_it.py"]


def test_links_and_anchors_are_those_of_github(page):
    assert page.links == ["other.md#a-part", "it.png"]
    assert page.anchors == {"a-title-and-more", "a-title-and-more-1"}


def test_commands_are_taken_with_what_is_shown_below_them():
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
def test_what_is_shown_was_told_in_whole_lines_and_in_this_order(shown, absent):
    found = missing("one\ntwo\nthree\n", shown)
    assert found.partition("----")[0].strip() == absent
