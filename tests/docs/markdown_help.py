"""What is read of a page of Markdown, and its commands as a reader types them."""

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
MARK = re.compile(r"<!-- not run: (.+) -->")
NAME = re.compile(r"^#\s*([\w./-]+\.\w+)\b")


@dataclass(frozen=True)
class Block:
    """A fenced block. ``not_run`` is the reason in the comment above it, empty where there is none."""

    language: str
    text: str
    line: int
    not_run: str

    @property
    def file(self) -> str:
        """The name of the file that it is, which its first line says in a comment; empty where it is none."""
        found = NAME.match(self.text.removeprefix("#!/bin/bash\n"))
        return found[1] if found else ""

    @property
    def commands(self) -> Iterator[tuple[str, str]]:
        """Each command, with what is shown below it; where there is no prompt, all of it is one."""
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
    """A page as GitHub and the site read it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tokens = (
            MarkdownIt("commonmark").enable("table").use(anchors_plugin, max_level=6).parse(path.read_text("utf-8"))
        )

    @cached_property
    def blocks(self) -> list[Block]:
        found, mark = [], ""
        for token in self.tokens:
            if token.type in ("fence", "code_block"):
                assert token.map is not None
                found.append(Block(token.info.strip(), token.content, token.map[0] + 1, mark))
            comment = MARK.fullmatch(token.content.strip()) if token.type == "html_block" else None
            mark = comment[1] if comment else ""
        return found

    @property
    def links(self) -> list[str]:
        """All targets, pictures included."""
        return [str(token.attrs[key]) for token in self._inline for key in ("href", "src") if key in token.attrs]

    @property
    def anchors(self) -> set[str]:
        return {str(token.attrs["id"]) for token in self.tokens if token.type == "heading_open"}

    @property
    def _inline(self) -> Iterator[Token]:
        return (child for token in self.tokens for child in token.children or ())


def type_in(folder: Path, command: str) -> tuple[int, str]:
    """The exit status of the command, and what a terminal without colours shows of it."""
    environment = {name: value for name, value in os.environ.items() if name not in ("CI", "BUILD_NUMBER")}
    environment |= {
        "PATH": os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]]),
        "PYTEST_ADDOPTS": "--color=no",
        "COLUMNS": "100",
        "CUDA_VISIBLE_DEVICES": "",  # the pages are those of a reader without GPUs
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


def missing(told: str, shown: str) -> str:
    """The first part of what is shown that was not told, in this order; "..." stands for whatever is left out."""
    rest = f"\n{told}\n"
    for part in f"\n{shown}".split("..."):
        before, found, rest = rest.partition(part)
        if part and not found:
            return f"{part}\n---- is not in what follows here:\n{before}"
    return ""
