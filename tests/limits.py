"""Compare the sizes of the repository with ``limits.json``, as ``make lint`` does: what is new pays with something old.

A commit that makes something smaller lowers its limit to what was reached.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def sizes(root: Path) -> dict[str, int]:
    """Return what each entry of ``limits.json`` limits: files and lines of Python, words of Markdown."""
    package, tests = [*(root / "pytest_fsdp_meta").rglob("*.py")], [*(root / "tests").rglob("*.py")]
    pages = [*(root / "docs").rglob("*.md")]
    return {
        "files of the package": len(package),
        "lines of the package": sum(map(_lines, package)),
        "lines of tests": sum(map(_lines, tests)),
        "pages of docs": len(pages),
        "words of docs": sum(len(page.read_text(encoding="utf-8").split()) for page in pages),
    }


def _lines(file: Path) -> int:
    return file.read_bytes().count(b"\n")


def main() -> int:
    """Print each size with its limit, and return whether one is above its limit."""
    limits: dict[str, int] = json.loads((ROOT / "limits.json").read_text(encoding="utf-8"))
    now = sizes(ROOT)
    for what, limit in limits.items():
        left = limit - now[what]
        print(f"{now[what]:6} {what}: " + (f"{left} left" if left >= 0 else f"{-left} more than limits.json allows"))
    return int(any(now[what] > limit for what, limit in limits.items()))


if __name__ == "__main__":
    sys.exit(main())
