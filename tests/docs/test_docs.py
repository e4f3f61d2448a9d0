"""The pages of docs/ are correct: their files run, their commands give the output shown, their links resolve."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import Counter
from functools import cache
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import yaml

from fixtures.releases import NO_FSDP_SIZE
from pytest_fsdp_meta.judging.registry import OBSERVATIONS
from pytest_fsdp_meta.reports.schema import SKIPS, STATUSES
from tests.docs.markdown_help import ROOT, Page, missing, type_in

DOCS = ROOT / "docs"
SITE = {str(page.relative_to(DOCS)): Page(page) for page in sorted(DOCS.rglob("*.md"))}
PAGES = {**SITE, **{str(page.relative_to(ROOT)): Page(page) for page in sorted((ROOT / "results").rglob("*.md"))}}
EVERYWHERE = {
    str(page.relative_to(ROOT)): Page(page)
    for folder in (ROOT, DOCS, ROOT / "results", ROOT / "results" / "frameworks", ROOT / "benchmarks" / "results")
    for page in sorted(folder.glob("*.md"))
}
TRIED_BY = re.compile(r"tried by ((?:tests|conformance)/[\w/]+\.py)")
LANGUAGES = {"python", "console", "text", "sh", "yaml", "ini", "json"}

NOT_RUN = {
    "needs a Ray cluster": 1,
    "takes minutes": 4,
    "seen by make systems": 13,
    "seen by make field": 2,
    "tried by a test": 2,
    "a picture": 1,
    "a fragment": 13,
}
"""The accepted reasons for not running a block, and their number, so that adding one is a deliberate change."""


def params_of(pages: dict[str, Page]) -> list[object]:
    return [pytest.param(page, id=name) for name, page in pages.items()]


@pytest.mark.parametrize("page", params_of(PAGES))
def test_every_block_has_a_language_and_every_file_a_name(page):
    for block in page.blocks:
        assert block.language in LANGUAGES, f"{page.path.name}:{block.line}"
        if block.language == "python" and not block.not_run:
            assert block.file, f"{page.path.name}:{block.line}: its first line should name its file: # test_it.py"


def test_only_the_known_blocks_are_not_run():
    counted = Counter[str]()
    for name, page in PAGES.items():
        for block in page.blocks:
            tried = TRIED_BY.fullmatch(block.not_run)
            assert not tried or (ROOT / tried[1]).is_file(), f"{name}:{block.line}: {block.not_run}"
            counted["tried by a test" if tried else block.not_run] += 1
    del counted[""]
    assert counted == Counter(NOT_RUN)


@pytest.mark.slow
@pytest.mark.parametrize("page", params_of({name: page for name, page in PAGES.items() if page.blocks}))
def test_the_output_that_a_page_shows_is_real(page, tmp_path):
    """Write the files and run the commands from top to bottom; other text must be the output of one of the commands."""
    if NO_FSDP_SIZE and any("DistributedConfig(" in block.text for block in page.blocks):
        pytest.skip(NO_FSDP_SIZE)
    outputs = ""
    for block in page.blocks:
        if block.not_run:
            continue
        if block.file:
            (tmp_path / block.file).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / block.file).write_text(block.text, "utf-8")
        elif block.language in ("console", "sh"):
            for command, shown in block.commands:
                status, output = type_in(tmp_path, command)
                outputs += output
                assert shown or status == 0, f"{page.path.name}:{block.line}: {command}\n{output}"
                absent = missing(output, shown)
                assert not absent, f"{page.path.name}:{block.line}: {command}\n{absent}"
        elif block.language == "text":
            absent = missing(outputs, block.text)
            assert not absent, f"{page.path.name}:{block.line}\n{absent}"


@pytest.mark.parametrize("page", params_of(PAGES))
def test_every_block_parses(page):
    parsers = {"yaml": yaml.safe_load, "json": json.loads, "python": compile_python, "sh": parse_shell}
    for block in page.blocks:
        if block.language in parsers:
            parsers[block.language](block.text)


def compile_python(text: str) -> None:
    compile(text, "a block", "exec")


def parse_shell(text: str) -> None:
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)


@pytest.mark.parametrize(("kind", "schema"), [(".github/workflows/", "github-workflows"), (".buildkite/", "buildkite")])
def test_pipelines_match_the_schema_of_their_service(kind, schema, tmp_path):
    shown = [block for page in PAGES.values() for block in page.blocks if block.file.startswith(kind)]
    assert shown
    for number, block in enumerate(shown):
        file = tmp_path / f"{number}.yml"
        file.write_text(block.text, "utf-8")
        command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", f"vendor.{schema}", str(file)]
        checked = subprocess.run(command, capture_output=True, text=True, check=False)
        assert checked.returncode == 0, checked.stdout


def test_the_nightly_workflow_has_the_inputs_that_the_page_sets():
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "nightly.yml").read_text("utf-8"))
    called = next(block for block in PAGES["nightly.md"].blocks if block.file == ".github/workflows/nightly.yml")
    given = yaml.safe_load(called.text)["jobs"]["loaders"]["with"]
    assert given.keys() <= workflow[True]["workflow_call"]["inputs"].keys()  # YAML 1.1 reads the key "on" as true


@cache
def anchors(page: Path) -> set[str]:
    return Page(page).anchors


@pytest.mark.parametrize("page", params_of(EVERYWHERE))
def test_links_resolve(page):
    for link in page.links:
        parts = urlsplit(link)
        if parts.scheme:
            assert parts.scheme == "https", link
            assert re.fullmatch(r"[\w-]+(\.[\w-]+)+", parts.netloc), link
            continue
        target = (page.path.parent / parts.path).resolve() if parts.path else page.path
        assert target.exists(), f"{page.path.name}: {link}"
        assert target.is_relative_to(ROOT), f"{page.path.name}: {link}"
        if parts.fragment:
            assert parts.fragment in anchors(target), f"{page.path.name}: {link}"


def test_the_site_builds_and_loads_nothing_from_the_network(tmp_path):
    """The site that ``make site`` builds must also work offline."""
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", str(DOCS), str(tmp_path)]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    for name in SITE:
        assert (tmp_path / name).with_suffix(".html").is_file()
    for page in tmp_path.rglob("*.html"):
        loaded = re.findall(r'<(?:script|img|iframe|link)\b[^>]*?(?:src|href)="([^"]+)"', page.read_text("utf-8"))
        assert not [address for address in loaded if urlsplit(address).netloc], page.name
    for style in tmp_path.rglob("*.css"):
        assert not re.findall(r"(?:@import|url\()\s*['\"]?(?:https?:)?//", style.read_text("utf-8")), style.name


def test_all_statuses_of_a_check_are_described():
    row = r"^\| `([\w ]+)` \| (.*) \|$"
    described = re.findall(row, (DOCS / "reading.md").read_text("utf-8"), re.MULTILINE)
    assert described == [*STATUSES.items(), *SKIPS.items()]


def test_the_numbers_about_other_tools_were_measured():
    measured = "".join(page.read_text("utf-8") for page in (ROOT / "benchmarks" / "results").glob("*.md"))
    compared = (ROOT / "results" / "compared.md").read_text("utf-8").partition("## With other ways")[2]
    rows = [line.strip() for line in compared.splitlines() if line.strip().startswith("|")]
    assert len(rows) > 30
    assert [row for row in rows if row not in measured.splitlines()] == []


def test_all_observations_that_a_check_may_need_are_described():
    described = (DOCS / "own-checks.md").read_text("utf-8").partition("| in `needs` |")[2].partition("\n\n")[0]
    assert re.findall(r"`(\w+)`", "".join(line.split("|")[1] for line in described.splitlines()[2:])) == list(
        OBSERVATIONS
    )


def test_all_recipes_and_what_they_found_are_linked():
    links = {(DOCS / link.partition("#")[0]).resolve() for link in PAGES["frameworks.md"].links}
    recipes = {*(ROOT / "examples" / "frameworks").glob("test_*.py"), *(ROOT / "results" / "frameworks").glob("*.md")}
    assert len(recipes) > 30
    assert recipes <= links


def test_the_index_lists_all_pages():
    """Readers on GitHub navigate by the index page, readers of the site by its navigation; both come from one list."""
    listed = [link for link in PAGES["index.md"].links if link.endswith(".md") and not link.startswith("../")]
    assert sorted(listed) == sorted(SITE.keys() - {"index.md"})
