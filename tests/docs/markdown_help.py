"""Reads the code blocks, links and anchors of a Markdown page, and runs its commands as a reader would."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token
from mdit_py_plugins.anchors import anchors_plugin

from tests.warm_runs import shell_functions

ROOT = Path(__file__).parents[2]
NOT_RUN = re.compile(r"<!-- not run: (.+) -->")
"""The comment above a block that the tests do not run, with the reason."""
FILE_NAME = re.compile(r"^#\s*([\w./-]+\.\w+)\b")
"""The first line of a block that is a file: a comment with its name."""


@dataclass(frozen=True)
class Block:
    """A code block. ``not_run`` is the reason in the comment above it, or empty."""

    language: str
    text: str
    line: int
    not_run: str

    @property
    def file(self) -> str:
        """The name of the file with this text, from the comment in its first line; empty for other blocks."""
        found = FILE_NAME.match(self.text.removeprefix("#!/bin/bash\n"))
        return found[1] if found else ""

    @property
    def commands(self) -> Iterator[tuple[str, str]]:
        """The commands with the output shown below each; a block without prompts is one command."""
        if self.language == "sh":
            yield self.text, ""
            return
        for part in re.split(r"^\$ ", self.text, flags=re.MULTILINE)[1:]:
            command, _, shown = part.partition("\n")
            while command.endswith("\\"):
                more, _, shown = shown.partition("\n")
                command += "\n" + more
            yield command, shown


class Page:
    """A Markdown page, parsed as GitHub and the site do."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tokens = (
            MarkdownIt("commonmark").enable("table").use(anchors_plugin, max_level=6).parse(path.read_text("utf-8"))
        )

    @cached_property
    def blocks(self) -> list[Block]:
        found, not_run = [], ""
        for token in self.tokens:
            if token.type in ("fence", "code_block"):
                assert token.map is not None
                found.append(Block(token.info.strip(), token.content, token.map[0] + 1, not_run))
            comment = NOT_RUN.fullmatch(token.content.strip()) if token.type == "html_block" else None
            not_run = comment[1] if comment else ""
        return found

    @property
    def links(self) -> list[str]:
        """The targets of all links and pictures."""
        return [str(token.attrs[key]) for token in self._inline for key in ("href", "src") if key in token.attrs]

    @property
    def anchors(self) -> set[str]:
        return {str(token.attrs["id"]) for token in self.tokens if token.type == "heading_open"}

    @property
    def _inline(self) -> Iterator[Token]:
        return (child for token in self.tokens for child in token.children or ())


def type_in(folder: Path, command: str) -> tuple[int, str]:
    """Run a command in a folder; return its exit status and its output, as a terminal without colours shows it."""
    environment = {name: value for name, value in os.environ.items() if name not in ("CI", "BUILD_NUMBER")}
    environment |= {
        "PATH": os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]]),
        "PYTEST_ADDOPTS": "--color=no",
        "COLUMNS": "100",
        "CUDA_VISIBLE_DEVICES": "",  # the pages show runs without GPUs
        **shell_functions(),
    }
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout


def missing(output: str, shown: str) -> str:
    """Return the first part of the shown text that does not appear in the output, or an empty string.

    Parts are separated by "...", which stands for any omitted text, and must appear as whole lines in this order.
    """
    rest = f"\n{output}\n"
    for part in f"\n{shown}".split("..."):
        before, found, rest = rest.partition(part)
        if part and not found:
            return f"{part}\n---- does not appear in the output:\n{before}"
    return ""
