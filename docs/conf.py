"""How the pages of this folder become a site: ``make site``."""

from __future__ import annotations

import re

from sphinx.application import Sphinx

import pytest_fsdp_meta

project = "pytest-fsdp-meta"
version = release = pytest_fsdp_meta.__version__
extensions = ["myst_parser"]
exclude_patterns = ["requirements.txt"]
nitpicky = True
myst_heading_anchors = 3  # the anchors of GitHub, where the pages are read as well
html_theme = "furo"
html_title = f"{project} {version}"
html_show_sphinx = False
html_show_copyright = False
html_copy_source = False
html_theme_options = {"top_of_page_buttons": []}
pygments_style = "friendly"

OUTSIDE = re.compile(r"\]\((\.\./[^)#]+\.md)\)")
LINK = re.compile(r"\[[^\]]+\]\((\w[\w-]*)\.md\)")


def navigation(index: str) -> str:
    """The tables of contents that the index page comes to: one per heading, of the pages that are linked below it.

    Markdown has no word for navigation that GitHub would not show as code, so the index page itself is the list.
    """
    trees = []
    for section in re.split(r"^## ", index, flags=re.MULTILINE)[1:]:
        caption, _, text = section.partition("\n")
        pages = "\n".join(dict.fromkeys(LINK.findall(text)))
        trees.append(f"```{{toctree}}\n:hidden:\n:caption: {caption}\n\n{pages}\n```\n")
    return "\n".join(trees)


def _read(app: Sphinx, page: str, content: list[str]) -> None:
    """MyST takes any link to Markdown for one to a page; what lies beside docs/ is a file to be downloaded."""
    content[0] = OUTSIDE.sub(r"](path:\1)", content[0])
    if page == app.config.root_doc:
        content[0] += "\n" + navigation(content[0])


def setup(app: Sphinx) -> None:
    app.connect("source-read", _read)
