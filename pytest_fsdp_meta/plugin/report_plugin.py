"""The plugin that collects what items report, writes the report and prints the totals.

It runs in the process that pytest was started in; under xdist the workers do not register it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pytest_fsdp_meta.catalogue import Catalogue
from pytest_fsdp_meta.evidence import store
from pytest_fsdp_meta.evidence.codec import write_whole
from pytest_fsdp_meta.plugin.collection import LOADER_ITEM, runs_nothing
from pytest_fsdp_meta.plugin.evidence_items import EvidenceItem, is_judged
from pytest_fsdp_meta.plugin.loader_items import planned_context
from pytest_fsdp_meta.plugin.node_ids import split_evidence_node_id, split_node_id
from pytest_fsdp_meta.plugin.outcomes import attached_context
from pytest_fsdp_meta.plugin.settings import Settings
from pytest_fsdp_meta.plugin.skip_lines import name_checks
from pytest_fsdp_meta.reports.badge import badge_json, badge_svg
from pytest_fsdp_meta.reports.compare import Comparison, compare, describe_comparison, describe_verdict
from pytest_fsdp_meta.reports.io import PAGE, ReportWriter, UnknownSchema, read_report
from pytest_fsdp_meta.reports.markdown import summarise_run
from pytest_fsdp_meta.reports.run_header import describe_run, read_header
from pytest_fsdp_meta.reports.run_records import ItemContext, RunRecords
from pytest_fsdp_meta.reports.schema import FAILED, SCHEMA, CheckRecord, Header, LoaderRecord, Report
from pytest_fsdp_meta.reports.totals import GREEN, RED, YELLOW, Line, describe_totals, nothing_judged
from pytest_fsdp_meta.text import first_line

NAME = "fsdp_report"
EXTRA_FILES = ("summary.md", "badge.json", "badge.svg")
MARKUP = {"worse": RED, "better": GREEN, "neutral": YELLOW}


class ReportPlugin:
    """Records the results of loaders, writes their report while the run goes on, and decides its exit status."""

    def __init__(self, config: pytest.Config, settings: Settings) -> None:
        self._config = config
        self._settings = settings
        self._began = time.monotonic()
        self._records = RunRecords()
        self._catalogue = Catalogue()
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

    def begin(self, catalogue: Catalogue) -> None:
        """Take the catalogue, which is known once the session has started."""
        self._catalogue = catalogue
        if self._is_idle:
            return
        if self._writer is not None or self._comparer.is_requested:
            command = ("pytest", *map(str, self._config.invocation_params.args))
            settings = self._settings
            memory = settings.device_memory
            self._header = read_header(self._config.rootpath, command, settings.engine, catalogue, memory)

    def _start_report(self) -> None:
        """Replace the old report. Called once tests were collected, so a mistyped path deletes nothing."""
        if self._writer is not None and self._header is not None and not self._is_started:
            self._is_started = True
            self._write(Report(SCHEMA, self._header), self._clear)

    def _clear(self) -> None:
        """Delete the files of an earlier run, so that they never pass for this run's if the disk is full.

        Stored evidence goes as well, unless this run judges it.
        """
        assert self._writer is not None
        self._writer.clear((PAGE, *EXTRA_FILES))
        folder = self._writer.folder / store.FOLDER
        if not is_judged(folder, self._config):
            store.clear_evidence(folder)

    @property
    def _is_idle(self) -> bool:
        """Whether pytest runs no tests at all (--collect-only and the like)."""
        return runs_nothing(self._config)

    def pytest_report_header(self) -> str:
        settings = self._settings
        return describe_run(settings.engine, settings.device, settings.backend, settings.world_sizes, self._catalogue)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_finish(self, session: pytest.Session) -> None:
        if session.items:
            self._start_report()
        for item in session.items:
            loader = item.stash.get(LOADER_ITEM, None)
            if isinstance(item, EvidenceItem):
                self._records.plan(item.context())
            elif loader is not None:
                self._records.plan(planned_context(item, loader))

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, node: Any, ids: Sequence[str]) -> None:
        if ids:
            self._start_report()
        worker = self._worker_suffix(node)
        for nodeid in ids:
            if parts := split_node_id(nodeid, self._catalogue) or split_evidence_node_id(nodeid):
                key, check = parts[0] + worker, parts[1]
                self._records.plan(ItemContext(key, key, CheckRecord(check, "not run", nodeid + worker)))

    def _worker_suffix(self, node: Any) -> str:
        """Return a suffix that distinguishes workers under ``--dist each``, where every worker runs every item."""
        each = node is not None and self._config.getoption("dist", "no") == "each"
        return f" on {node.gateway.id}" if each else ""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        context, worker = attached_context(report), self._worker_suffix(getattr(report, "node", None))
        nodeid = report.nodeid + worker
        if context is not None:
            self._any_item_reported = True
            # A report that failed while its record did not (a fixture's teardown after a skip) is counted among
            # pytest's other failures, which no comparison excuses.
            in_record = context.check.status in FAILED
            self._failed_items += report.failed and in_record and not hasattr(report, "wasxfail")
            self._records.add(replace(context, key=context.key + worker, loader=context.loader + worker))
        elif report.when not in ("setup", "call", "teardown"):  # xdist reports the crash of a worker
            self._failed_items += self._records.add_crash(nodeid, first_line(str(report.longrepr))) in FAILED
        elif report.when == "call" or (report.when == "setup" and not report.passed):
            self._records.forget_loader(nodeid)
            self._others_passed |= report.passed
        self._records.add_seconds(nodeid, report.duration)
        self._has_news |= context is not None
        if self._is_started and self._writer is not None and self._writer.is_due:
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
        if self._is_idle:
            return
        if session.testsfailed:
            # Nothing may have been collected because of an error: the old report must not pass for this run's.
            self._start_report()
        if self._comparer.is_requested:
            report = self._report(int(session.exitstatus))
            # Only pytest counts other failures (tests, imports, coverage). Tests that were not run because of an
            # earlier failure might have failed as well.
            others = session.testsfailed > self._failed_items or bool(session.shouldfail or session.shouldstop)
            session.exitstatus = self._comparer.compare(report, int(session.exitstatus), others)
        if session.exitstatus == pytest.ExitCode.OK and nothing_judged(self.loaders, self._others_passed):
            session.exitstatus = pytest.ExitCode.NO_TESTS_COLLECTED
        self._finish_report(session)

    def _finish_report(self, session: pytest.Session) -> None:
        """Write the complete report; if that fails, try once more with the exit status that the failure causes."""
        for _ in range(2):
            if self._problems and session.exitstatus == pytest.ExitCode.OK:
                session.exitstatus = pytest.ExitCode.INTERNAL_ERROR
            if self._is_started:
                self._write(self._report(int(session.exitstatus)))
            if not self._write_problem:
                return

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter, exitstatus: int) -> None:
        name_checks(terminalreporter)
        ended_early = exitstatus not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)
        if self._is_idle or (ended_early and not self._any_item_reported):  # pytest itself says why nothing ran
            return
        if self.loaders or self._problems:
            terminalreporter.section("fsdp conformance")
            self._print_totals(terminalreporter)
        if self._comparer.is_requested:
            terminalreporter.section("fsdp conformance, compared")
            for line, markup in self._comparer.lines():
                terminalreporter.write_line(line, **markup)

    def _print_totals(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self.loaders:
            memory = self._settings.device_memory
            for line, markup in describe_totals(self.loaders, self._config.get_verbosity(), memory):
                terminalreporter.write_line(line, **markup)
        for problem in self._problems:
            terminalreporter.write_line(f"--fsdp-report: {problem}", red=True)
        if self._is_started and self._writer is not None and not self._write_problem:
            terminalreporter.write_line(f"report: {self._writer.folder}")

    @property
    def _problems(self) -> list[str]:
        incomplete = [f"the report is incomplete: {self._write_problem}"] if self._write_problem else []
        return [*incomplete, *self._records.problems]

    @property
    def loaders(self) -> tuple[LoaderRecord, ...]:
        return self._records.loaders(self._catalogue)

    def _report(self, exit_status: int | None) -> Report:
        assert self._header is not None
        seconds = time.monotonic() - self._began
        return Report(SCHEMA, self._header, self.loaders, seconds, exit_status, exit_status is not None)

    def _write(self, report: Report, before: Callable[[], None] = lambda: None) -> None:
        """Write report.json, and at the start and end of the run the page; a failure is printed with the totals."""
        assert self._writer is not None
        try:
            before()
            self._writer.write(report)
            if report.complete or not report.loaders:  # a page opened during the run says that it is not complete
                from pytest_fsdp_meta.reports.page import write_page

                folder, comparer = self._writer.folder, self._comparer
                write_page(report, folder / PAGE, comparer.comparison, comparer.problem)
                comparer.write(report, folder)
            self._write_problem = ""
        except OSError as error:
            self._write_problem = str(error)
        except Exception as error:  # a bug in drawing the page must not hide pytest's own summary
            self._write_problem = f"the page could not be drawn ({type(error).__name__}: {first_line(error)})"


class Comparer:
    """Compares the run with an earlier report, which is read before anything runs.

    Raises UsageError if the file is not a report. A report of an unknown schema is not an error, since every nightly
    run may meet one after an update: ``problem`` then says so, and the run fails as it would without a comparison.
    """

    def __init__(self, settings: Settings) -> None:
        self._fail_on = settings.fail_on
        self._before: Report | None = None
        self.comparison: Comparison | None = None
        self.problem = ""
        """Why there is no comparison although one was requested."""
        if settings.compare:
            try:
                self._before = read_report(Path(settings.compare))
            except UnknownSchema as error:
                self.problem = f"no comparison: {error}"
            except ValueError as error:
                raise pytest.UsageError(f"--fsdp-compare: {error}") from None

    @property
    def is_requested(self) -> bool:
        return self._before is not None or bool(self.problem)

    def compare(self, report: Report, status: int, others_failed: bool) -> int:
        """Compare the report with the earlier one, and return the exit status of a run that would exit with ``status``.

        ``others_failed`` says whether anything failed that is not in the report, or was not run after a failure.
        """
        if self._before is None:
            return status
        self.comparison = compare(self._before, report)
        if self._fail_on == "failure" or status not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
            return status
        bad = others_failed or self.comparison.fails(self._fail_on)
        return int(pytest.ExitCode.TESTS_FAILED if bad else pytest.ExitCode.OK)

    def lines(self) -> Iterator[Line]:
        """Yield the lines of the section in the terminal."""
        if self.problem:
            yield self.problem, RED
        if self.comparison is None:
            return
        for mark, headline, lines in describe_comparison(self.comparison):
            yield headline, MARKUP[mark]
            yield from ((f"  {line}", {}) for line in lines)
        yield describe_verdict(self.comparison), RED if self.comparison.fails(self._fail_on) else GREEN

    def write(self, report: Report, folder: Path) -> None:
        """Write the summary and the badge. Raises OSError."""
        write_whole(folder / "summary.md", summarise_run(report, self.comparison, self.problem).encode())
        write_whole(folder / "badge.json", badge_json(report).encode())
        write_whole(folder / "badge.svg", badge_svg(report).encode())
