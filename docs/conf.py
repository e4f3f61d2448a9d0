"""Configure Sphinx, which builds this folder as a site: ``make site``."""

from __future__ import annotations

import re

from sphinx.application import Sphinx

import pytest_fsdp_meta

project = "pytest-fsdp-meta"
version = release = pytest_fsdp_meta.__version__
extensions = ["myst_parser"]
exclude_patterns = ["requirements.txt"]
nitpicky = True
myst_heading_anchors = 3  # gives headings the same anchors as GitHub, so links work in both places
html_theme = "furo"
html_title = f"{project} {version}"
html_show_sphinx = False
html_show_copyright = False
html_copy_source = False
html_theme_options = {"top_of_page_buttons": []}
pygments_style = "friendly"

OUTSIDE = re.compile(r"\]\((\.\./[^)#]+\.md)(?:#[^)]*)?\)")
LINK = re.compile(r"\[[^\]]+\]\((\w[\w/-]*)\.md\)")


def navigation(index: str) -> str:
    """Return a hidden toctree for each heading of the index page, with the pages that are linked below the heading.

    A toctree in the page itself would be shown as code on GitHub, so Sphinx gets them from its list of links.
    """
    trees = []
    for section in re.split(r"^## ", index, flags=re.MULTILINE)[1:]:
        caption, _, text = section.partition("\n")
        pages = "\n".join(dict.fromkeys(LINK.findall(text)))
        trees.append(f"```{{toctree}}\n:hidden:\n:caption: {caption}\n\n{pages}\n```\n")
    return "\n".join(trees)


def _prepare_source(app: Sphinx, page: str, content: list[str]) -> None:
    """Turn links to Markdown files outside docs/ into downloads, and add the navigation to the index page.

    MyST would look for a page of the site behind every link to a Markdown file.
    """
    content[0] = OUTSIDE.sub(r"](path:\1)", content[0])
    if page == app.config.root_doc:
        content[0] += "\n" + navigation(content[0])


def setup(app: Sphinx) -> None:
    app.connect("source-read", _prepare_source)
