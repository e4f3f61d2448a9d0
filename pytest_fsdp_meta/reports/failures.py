"""How many failures a run has, in words, for terminal, page and summary."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pytest_fsdp_meta.reports.schema import CheckRecord, LoaderRecord, count_kinds, describe_count
from pytest_fsdp_meta.text import counted

REMOVE = "remove it from xfail"


def is_crashed(loader: LoaderRecord) -> bool:
    """Return whether the loader crashed, so that all its errors are one."""
    return bool(loader.error)


def errors_by_reason(loader: LoaderRecord) -> dict[str, list[CheckRecord]]:
    """Return reason -> the checks with this error. Most often all checks of a loader share one reason."""
    reasons: dict[str, list[CheckRecord]] = {}
    for check in loader.checks:
        if check.status == "error" and not check.findings:
            reasons.setdefault(check.reason, []).append(check)
    return reasons


def count_failures(loaders: Sequence[LoaderRecord]) -> dict[str, int]:
    """Return the number of crashed loaders, failed checks, errors, unexpected passes and checks that were not run.

    A crash is one failure of its loader, and an error that several checks of a loader share is one error, as in
    pytest's own summary.
    """
    crashed = [loader for loader in loaders if is_crashed(loader)]
    others = [loader for loader in loaders if not is_crashed(loader)]
    counts = count_kinds(loaders)
    errors = [check for loader in others for check in loader.checks if check.status == "error" and check.findings]
    return {
        "crashed": len(crashed),
        "failed": counts["failed"],
        "error": sum(len(errors_by_reason(loader)) for loader in others) + len(errors),
        "xpassed": counts["xpassed"],
        "not run": counts["not run"],
    }


def describe_failures(loaders: Sequence[LoaderRecord], missing: int = 0) -> str:
    """Return a text such as "3 loaders crashed, 6 checks failed, 1 unexpected pass"; empty if nothing needs a fix.

    ``missing`` loaders are those that an earlier run had.
    """
    counts = count_failures(loaders)
    texts = {
        "crashed": f"{counted(counts['crashed'], 'loader')} crashed",
        "failed": f"{counted(counts['failed'], 'check')} failed",
        "error": describe_count(counts["error"], "error"),
        "xpassed": counted(counts["xpassed"], "unexpected pass"),
        "not run": f"{counts['not run']} not run",
    }
    gone = [f"{counted(missing, 'loader')} missing"] if missing else []
    return ", ".join([*(text for kind, text in texts.items() if counts[kind]), *gone])


def explain_pass(reason: str, check: str = "") -> str:
    """Return what an unexpected pass means, with the check as its subject; ``reason`` is that of the expectation."""
    return f"{check} passes, but xfail expects it to fail ({reason})".lstrip()


def failing_loaders(loaders: Iterable[LoaderRecord]) -> list[LoaderRecord]:
    """Return the loaders that crashed or have a failure of any kind."""
    return [loader for loader in loaders if describe_failures([loader])]
