"""Write the tables of results/released.md from the reports of ``make wild``.

``python -m conformance.released FOLDER`` reads FOLDER/SYSTEM/report.json for each system that has a recipe in
examples/frameworks; a system without a report keeps its row. The tables have what was judged, not what was expected:
new findings are in them as well. What was found is added to the history, as is what ``make field`` finds.
"""

from __future__ import annotations

import argparse
import json
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conformance.released_history import Judged, history_table, read_history, with_runs, write_history

ROOT = Path(__file__).parents[1]
RECIPES, SYSTEMS = ROOT / "examples" / "frameworks", ROOT / "conformance" / "systems"
PAGE, HISTORY = ROOT / "results" / "released.md", ROOT / "conformance" / "released_history.json"
BEGIN, END = "<!-- written by make wild -->\n", "<!-- until here -->\n"
HISTORY_BEGIN = "<!-- written by make wild and make field -->\n"
FIELD, PUBLISHED = "field", ROOT / "results" / "field.md"
"""The system of the history that ``make field`` judges, and its page."""
PACKAGES = {
    "composer": "mosaicml",
    "fms": "ibm-fms",
    "ignite": "pytorch-ignite",
    "muon_fsdp2": "muon-fsdp2",
    "olmo_core": "ai2-olmo-core",
    "physicsnemo": "nvidia-physicsnemo",
    "sentence_transformers": "sentence-transformers",
    "trainer": "transformers",
}
"""The package that a system judges, where it has another name."""
LINE = re.compile(r"^\| \[[^\]]*\]\(frameworks/(\w+)\.md\) .*\|$", re.MULTILINE)
"""A system's line in the table of what was judged."""
CHECKED = ("passed", "differs", "partly checked", "failed", "xfailed", "xpassed", "error")


@dataclass(frozen=True)
class Row:
    """What the run of one system's tests has shown."""

    date: str
    system: str
    release: str
    torch: str
    loaders: int
    statuses: Counter[str]
    findings: tuple[str, ...]
    """The checks that have a finding, known or not."""
    seconds: float
    lines: int
    """Lines of the recipe without imports."""

    def cells(self) -> list[str]:
        checked = sum(self.statuses[status] for status in CHECKED)
        findings = ", ".join(f"`{id}`" for id in self.findings) or "none"
        first = f"[{self.release}](frameworks/{self.system}.md)"
        counts = [str(self.loaders), str(checked), str(self.statuses["skipped"]), findings]
        return [first, self.date, *counts, f"{self.seconds:.0f}", str(self.lines)]

    @property
    def judged(self) -> Judged:
        return Judged(self.date, self.system, self.release, self.torch, self.findings)


def systems() -> list[str]:
    """Return the systems that have a recipe."""
    return sorted(file.stem.removeprefix("test_") for file in RECIPES.glob("test_*.py"))


def recipe_of(system: str) -> str:
    """Return the test file that shows how a system's loader is judged."""
    return (RECIPES / f"test_{system}.py").read_text("utf-8")


def count_lines(recipe: str) -> int:
    """Return the number of lines without imports, comments and blank lines."""
    lines = map(str.lstrip, recipe.splitlines())
    return sum(bool(line) and not line.startswith(("import ", "from ", "#")) for line in lines)


def read_row(system: str, report: dict[str, Any]) -> Row:
    """Return the row of a system. Raises ValueError for a run that was cut short or judged nothing."""
    if not report["complete"] or not report["loaders"]:
        raise ValueError(f"{system}: " + ("no loader was judged" if report["complete"] else "the run was cut short"))
    checks = [check for loader in report["loaders"] for check in loader["checks"]]
    found = Counter(check["check"] for check in checks if check["status"] in ("failed", "xfailed", "error"))
    return Row(
        date=report["header"]["started"][:10],
        system=system,
        release=released(system),
        torch=pinned("torch", system),
        loaders=len(report["loaders"]),
        statuses=Counter(check["status"] for check in checks),
        findings=tuple(sorted(found)),
        seconds=report["seconds"],
        lines=count_lines(recipe_of(system)),
    )


def released(system: str) -> str:
    package = PACKAGES.get(system, system)
    return f"{package} {pinned(package, system)}"


def pinned(package: str, system: str) -> str:
    """Return the version that a system pins. Raises ValueError if it pins none."""
    pins = (SYSTEMS / system / "requirements.txt").read_text("utf-8")
    version = re.search(rf"^{package}==(\S+)$", pins, re.MULTILINE)
    if version is None:
        raise ValueError(f"conformance/systems/{system}/requirements.txt does not pin {package}")
    return version[1]


def table(rows: list[Row], page: str) -> str:
    """Return a line for each system: that of its row, or else the one that the page has. Raises ValueError without."""
    head = ["release", "judged on", "loaders", "checks", "skipped", "findings of", "seconds", "lines of the recipe"]
    lines = {found[1]: found[0] for found in LINE.finditer(page)}
    lines |= {row.system: _line(row.cells()) for row in rows}
    if unknown := [system for system in systems() if system not in lines]:
        raise ValueError(f"{unknown[0]} was never judged: run make wild")
    return "\n".join([_line(head), _line(["---"] * len(head)), *(lines[system] for system in systems())]) + "\n"


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def replace_table(page: str, written: str, mark: str = BEGIN) -> str:
    """Replace what is between the mark and END. Raises ValueError if the page lacks one of them."""
    before, begin, rest = page.partition(mark)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"the page lacks the lines {mark.strip()!r} and {END.strip()!r}")
    return f"{before}{begin}\n{written}\n{end}{after}"


def record(runs: Iterable[Judged]) -> None:
    """Add runs to the history, and write its table."""
    history = with_runs(read_history(HISTORY), runs)
    write_history(history, HISTORY)
    PAGE.write_text(replace_table(PAGE.read_text("utf-8"), written_history(history), HISTORY_BEGIN), "utf-8")


def written_history(history: list[Judged]) -> str:
    """Return the table of the history, with links to the page of each system."""
    links = {FIELD: "[transformers' own loader](field.md)"}
    for system in systems():
        page = f"frameworks/{system}.md"
        title = (ROOT / "results" / page).read_text("utf-8").partition("\n")[0].removeprefix("# ")
        links[system] = f"[{title}]({page})"
    return history_table(history, links)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m conformance.released", description=__doc__)
    parser.add_argument("folder", type=Path, help="has a folder with the report of each system")
    folder = parser.parse_args().folder
    files = [(system, folder / system / "report.json") for system in systems()]
    try:
        rows = [read_row(system, json.loads(file.read_text("utf-8"))) for system, file in files if file.is_file()]
        if not rows:
            parser.error(f"{folder} has no report: run make wild")
        page = PAGE.read_text("utf-8")
        PAGE.write_text(replace_table(page, table(rows, page)), "utf-8")
    except ValueError as error:
        parser.error(str(error))
    record(row.judged for row in rows)


if __name__ == "__main__":
    main()
