"""The plugin that collects what items report, writes the report and prints the totals.

It runs in the process that pytest was started in; under xdist the workers do not register it.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterable, Sequence
from copy import copy
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest

from pytest_fsdp_meta.catalogue import Catalogue
from pytest_fsdp_meta.evidence.codec import write_whole
from pytest_fsdp_meta.plugin.collection import split_node_id
from pytest_fsdp_meta.plugin.comparer import Comparer
from pytest_fsdp_meta.plugin.loader_items import LoaderItem
from pytest_fsdp_meta.plugin.outcomes import KIND, attached_context
from pytest_fsdp_meta.plugin.session import PluginSession
from pytest_fsdp_meta.plugin.settings import hide_values, runs_nothing, settings_elsewhere
from pytest_fsdp_meta.reports.io import PAGE, ReportWriter
from pytest_fsdp_meta.reports.markdown import summarise_run
from pytest_fsdp_meta.reports.run_records import ItemContext, RunRecords, describe_run, read_header
from pytest_fsdp_meta.reports.schema import FAILED, SCHEMA, UNKNOWN, CheckRecord, Header, LoaderRecord, Report
from pytest_fsdp_meta.reports.totals import describe_totals, nothing_judged
from pytest_fsdp_meta.text import first_line
from pytest_fsdp_meta.worlds import LeaseError
from pytest_fsdp_meta.worlds.leases import LockedFile

SUMMARY = "summary.md"
LOCK = ".lock"
"""The file in a report's folder that a run holds locked."""


def register(config: pytest.Config, session: PluginSession) -> None:
    """Register the plugin in the process that pytest was started in, and in each the one that knows its scope."""
    scope = RunScope(config)
    config.pluginmanager.register(scope)
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(ReportPlugin(config, session, scope), "fsdp_report")


class ReportPlugin:
    """Records the results of loaders, writes their report while the run goes on, and decides its exit status."""

    def __init__(self, config: pytest.Config, session: PluginSession, scope: RunScope) -> None:
        self._config = config
        self._session = session
        self._settings = settings = session.settings
        self._began = time.monotonic()
        self._records = RunRecords()
        self._header: Header | None = None
        self._others_passed = False
        """Whether a test that is not a loader has passed."""
        self._any_item_reported = False
        self._running_loader = ""
        """Key of the loader whose item ran last; "" after an item that is not a loader's."""
        self._failed_items = 0
        """Reports of loaders' items that pytest counts as failed."""
        self._write_problem = ""
        """Why the report could not be written."""
        self._exit_status: int | None = None
        """With which pytest exits, which the hooks of the summary do not get; None until the run ends."""
        self._is_started = False
        """Whether this run has written its report at least once."""
        self._has_news = False
        """Whether items have reported since the report was last written."""
        self._writer = ReportWriter(Path(settings.report)) if settings.report else None
        if self._writer is not None and self._writer.is_foreign:
            raise pytest.UsageError(
                f"--fsdp-report: {settings.report} has an index.html that pytest-fsdp-meta did not write and would "
                "overwrite; choose another folder"
            )
        self._comparer = Comparer(settings)
        self._scope = scope
        self._any_test_reported = False
        self._not_collected = ""
        """The first error of collection."""

    @property
    def _catalogue(self) -> Catalogue:
        return self._session.catalogue  # known once the session has started

    @pytest.hookimpl(trylast=True)
    def pytest_sessionstart(self) -> None:
        if runs_nothing(self._config):
            return
        if self._writer is not None:
            self._lock(self._writer.folder)
        if self._writer is not None or self._comparer.is_requested:
            command = ("pytest", *hide_values(map(str, self._config.invocation_params.args), self._config.args))
            engine, others = self._settings.engine, settings_elsewhere(self._config)
            self._header = read_header(self._config.rootpath, command, engine, self._catalogue, others)

    def _lock(self, folder: Path) -> None:
        """Keep other runs from writing into the folder until this one ends, even if it is killed."""
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lock = LockedFile.attempt(folder / LOCK)
        except (OSError, LeaseError):  # a disk on which nothing can be written, which ``_write`` reports, or locked
            return
        if lock is None:
            raise pytest.UsageError(
                f"--fsdp-report: another run of pytest is writing its report to {self._settings.report}; wait until it "
                "has ended, or choose another folder"
            )
        self._config.add_cleanup(lock.release)

    def _start_report(self) -> None:
        """Replace the old report. Called once tests were collected, so a mistyped path deletes nothing."""
        if self._writer is not None and self._header is not None and not self._is_started:
            self._write(Report(SCHEMA, self._header))

    def pytest_report_header(self) -> str:
        settings, simulated = self._settings, bool(self._settings.simulate)
        sizes, catalogue = settings.world_sizes, self._catalogue
        return describe_run(settings.engine, settings.device, settings.backend, sizes, catalogue, simulated)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed and not self._not_collected:
            raised = [line[1:].strip() for line in report.longreprtext.splitlines() if line.startswith("E ")]
            self._not_collected = f"{report.nodeid}: {first_line(raised[-1] if raised else report.longreprtext)}"

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_collection_modifyitems(self) -> Generator[None, None, None]:
        try:
            yield
        except pytest.UsageError as error:
            self._not_collected = first_line(str(error), 400)
            raise

    @pytest.hookimpl(trylast=True)
    def pytest_collection_finish(self, session: pytest.Session) -> None:
        if session.items:
            self._start_report()
        for item in session.items:
            if isinstance(item, LoaderItem):
                self._records.plan(item.planned())

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, node: Any, ids: Sequence[str]) -> None:
        if ids:
            self._start_report()
        worker = self._worker_suffix(node)
        for nodeid in ids:
            if parts := split_node_id(nodeid, self._catalogue):
                key, check = parts[0] + worker, parts[1]
                loader = LoaderRecord(key, UNKNOWN, ())
                self._records.plan(ItemContext(key, loader, CheckRecord(check, "not run", nodeid + worker)))

    def _worker_suffix(self, node: Any) -> str:
        """Return a suffix that distinguishes workers under ``--dist each``, where every worker runs every item."""
        each = node is not None and self._config.getoption("dist", "no") == "each"
        return f" on {node.gateway.id}" if each else ""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._any_test_reported = True
        context, worker = attached_context(report), self._worker_suffix(getattr(report, "node", None))
        nodeid = report.nodeid + worker
        if context is not None:
            self._any_item_reported = True
            # A report that failed while its record did not (a fixture's teardown after a skip) is counted among
            # pytest's other failures, which no comparison excuses.
            in_record = context.check.status in FAILED
            self._failed_items += report.failed and in_record and not hasattr(report, "wasxfail")
            key = self._records.key_of(nodeid) or context.key + worker  # as planned: what was sent was made printable
            loader = replace(context.loader, loader=context.loader.loader + worker)
            self._records.add(replace(context, key=key, loader=loader))
        elif report.when not in ("setup", "call", "teardown"):  # xdist reports the crash of a worker
            self._failed_items += self._records.add_crash(nodeid, first_line(str(report.longrepr))) in FAILED
        elif report.when == "call" or (report.when == "setup" and not report.passed):
            self._records.forget_loader(nodeid)
            self._others_passed |= report.passed
        self._records.add_seconds(nodeid, report.duration)
        self._has_news |= context is not None
        if self._writer is not None and self._writer.is_due:
            self._write_news()

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Write the report before an ordinary test, which may take long or end the process."""
        key = self._records.key_of(nodeid)
        if key != self._running_loader:
            self._running_loader = key
            if not key:
                self._write_news()

    def _write_news(self) -> None:
        if self._is_started and self._has_news:
            self._has_news = False
            self._write(self._report(None))

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        if runs_nothing(self._config):
            return
        if session.testsfailed:
            # Nothing may have been collected because of an error: the old report must not pass for this run's.
            self._start_report()
        if self._comparer.is_requested:
            report = self._report(int(session.exitstatus))
            # Only pytest counts other failures (tests, imports, coverage). Tests that were not run because of an
            # earlier failure might have failed as well.
            others = "failures outside of the checks" if session.testsfailed > self._failed_items else ""
            others = "pytest stopped early" if session.shouldfail or session.shouldstop else others
            session.exitstatus = self._comparer.compare(report, int(session.exitstatus), others, self._scope.has)
        if session.exitstatus == pytest.ExitCode.OK and nothing_judged(self.loaders, self._others_passed):
            session.exitstatus = pytest.ExitCode.NO_TESTS_COLLECTED
        self._finish_report(session)
        self._exit_status = int(session.exitstatus)

    def _finish_report(self, session: pytest.Session) -> None:
        """Write the complete report; if that fails, try once more with the exit status that the failure causes."""
        for _ in range(2):
            if self._write_problem and session.exitstatus == pytest.ExitCode.OK:
                session.exitstatus = pytest.ExitCode.INTERNAL_ERROR
            if self._is_started:
                self._write(self._report(int(session.exitstatus)))
            if not self._write_problem:
                return

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter, exitstatus: int) -> None:
        _name_checks(terminalreporter)
        ended_early = exitstatus not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)
        if runs_nothing(self._config) or (
            ended_early and not self._any_item_reported
        ):  # pytest itself says why nothing ran
            return
        if self.loaders or self._write_problem:
            terminalreporter.write_sep("=", "fsdp conformance")
            self._print_totals(terminalreporter)
        if self._comparer.is_requested:
            terminalreporter.write_sep("=", "fsdp conformance, compared")
            for line, markup in self._comparer.lines(self._exit_status):
                terminalreporter.write_line(line, **markup)

    def _print_totals(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self.loaders:
            is_shown = self._config.getoption("tbstyle", "auto") not in ("no", "line")
            for line, markup in describe_totals(self.loaders, self._config.get_verbosity(), is_shown):
                terminalreporter.write_line(line, **markup)
        if self._write_problem:
            terminalreporter.write_line(f"--fsdp-report: the report is incomplete: {self._write_problem}", red=True)
        elif self._is_started and self._writer is not None:
            terminalreporter.write_line(f"report: {self._writer.folder}")

    @property
    def loaders(self) -> tuple[LoaderRecord, ...]:
        return self._records.loaders(self._catalogue)

    def _report(self, exit_status: int | None) -> Report:
        assert self._header is not None
        seconds = time.monotonic() - self._began
        stopped_by = "" if self._any_test_reported else self._not_collected
        report = Report(
            SCHEMA,
            self._header,
            self.loaders,
            stopped_by=stopped_by,
            seconds=seconds,
            exit_status=exit_status,
            complete=exit_status is not None,
        )
        return self._comparer.add_earlier(report)

    def _write(self, report: Report) -> None:
        """Write report.json, and at the start and end of the run the page; a failure is printed with the totals."""
        assert self._writer is not None
        try:
            if not self._is_started:
                self._is_started = True
                # Delete the files of an earlier run, so that they never pass for this run's if the disk is full.
                self._writer.clear((PAGE, SUMMARY))
            self._writer.write(report)
            if report.complete or not report.loaders:  # a page opened during the run says that it is not complete
                from pytest_fsdp_meta.reports.page import write_page

                folder, compared = self._writer.folder, (self._comparer.comparison, self._comparer.problem)
                write_page(report, folder / PAGE, *compared)
                write_whole(folder / SUMMARY, summarise_run(report, *compared).encode())
            self._write_problem = ""
        except OSError as error:
            self._write_problem = str(error)
        except Exception as error:  # a bug in drawing the page must not hide pytest's own summary
            self._write_problem = f"the page could not be drawn ({type(error).__name__}: {first_line(error)})"


def _name_checks(reporter: pytest.TerminalReporter) -> None:
    """Add to the reason of each skipped item the checks that are skipped at the same line for the same reason.

    pytest's summary folds the items of a loader that have one reason into one line. What is not declared comes last.
    """
    if not reporter.config.getoption("fold_skipped", True):
        return  # each item has its own line, with its node id
    skipped: list[Any] = reporter.stats.get("skipped", [])
    skipped.sort(key=lambda report: getattr(report, KIND, "") == "not declared")
    checks: dict[tuple[object, ...], dict[str, None]] = {}
    for report in skipped:
        if (check := _check_of(report)) is not None:
            checks.setdefault(report.longrepr, {})[check] = None
    for number, report in enumerate(skipped):
        if _check_of(report) is not None:
            path, line, reason = report.longrepr
            skipped[number] = copy(report)  # other plugins may still read the report
            setattr(skipped[number], KIND, "")  # pytest writes the word of the first before the reasons of all
            skipped[number].longrepr = (path, line, f"{reason} [{', '.join(checks[report.longrepr])}]")


def _check_of(report: Any) -> str | None:
    context = attached_context(report) if isinstance(report, pytest.TestReport) else None
    return context.check.check if context is not None and isinstance(report.longrepr, tuple) else None


DESELECTED = "fsdp_deselected"
"""Key of ``workeroutput``: the loaders that a worker of pytest-xdist deselected, by name."""
PARTIAL = ("lf", "stepwise")
"""Options with which pytest does not even collect all files."""


class RunScope:
    """A pytest plugin that knows what was deselected and which paths pytest was given."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._deselected: set[str] = set()

    def pytest_deselected(self, items: Iterable[pytest.Item]) -> None:
        """Record loaders with a deselected item; on a worker also for the controller, which collects nothing."""
        self._deselected.update(item.loader.name for item in items if isinstance(item, LoaderItem))
        if hasattr(self._config, "workeroutput"):
            self._config.workeroutput[DESELECTED] = sorted(self._deselected)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        self._deselected.update(getattr(node, "workeroutput", {}).get(DESELECTED, ()))

    def has(self, loader: str) -> bool:
        """Return whether the run would have a loader with this name, if it still existed."""
        option = self._config.getoption
        if loader in self._deselected or any(option(name, False) for name in PARTIAL):
            return False
        path, _, node = loader.partition("::")
        try:
            file = (self._config.rootpath / path).resolve()
        except ValueError:  # a name that no file can have, from a report that something else wrote
            return False
        return not self._is_ignored(file) and any(self._covers(arg, file, node) for arg in self._config.args)

    def _covers(self, arg: str, file: Path, node: str) -> bool:
        given, _, part = arg.partition("::")
        path = self._absolute(given)
        if self._config.getoption("pyargs", False) and not path.exists():
            return True  # the name of a package: what it held before is not known
        within = file == path or path in file.parents
        return within and (not part or node == part or node.startswith((f"{part}::", f"{part}[")))

    def _is_ignored(self, file: Path) -> bool:
        ignored = map(self._absolute, self._config.getoption("ignore", None) or ())
        patterns = (str(self._absolute(glob)) for glob in self._config.getoption("ignore_glob", None) or ())
        paths = (file, *file.parents)
        return any(path in paths for path in ignored) or any(
            fnmatchcase(str(path), pattern) for pattern in patterns for path in paths
        )

    def _absolute(self, path: str) -> Path:
        return (self._config.invocation_params.dir / path).resolve()
