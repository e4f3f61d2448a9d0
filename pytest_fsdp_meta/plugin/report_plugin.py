"""Writes down what the items tell: in the process that pytest was started in, whoever runs them."""

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
from pytest_fsdp_meta.plugin.collection import case_of, runs_nothing
from pytest_fsdp_meta.plugin.evidence_items import EvidenceItem, is_judged, split_evidence_node_id
from pytest_fsdp_meta.plugin.node_ids import display_name, split_node_id
from pytest_fsdp_meta.plugin.outcomes import told
from pytest_fsdp_meta.plugin.settings import Settings
from pytest_fsdp_meta.reports.badge import badge_json, badge_svg
from pytest_fsdp_meta.reports.compare import Comparison, compare, describe_comparison, verdict
from pytest_fsdp_meta.reports.io import PAGE, OtherSchema, Writer, read_report
from pytest_fsdp_meta.reports.markdown import summarise_run
from pytest_fsdp_meta.reports.run_header import describe_run, heading
from pytest_fsdp_meta.reports.run_records import RunRecords
from pytest_fsdp_meta.reports.schema import BROKEN, SCHEMA, Header, LoaderRecord, Report
from pytest_fsdp_meta.reports.totals import GREEN, RED, YELLOW, Line, describe_totals, nothing_judged
from pytest_fsdp_meta.text import first_line
from pytest_fsdp_meta.trial import world_facts

NAME = "fsdp_scribe"


class ReportPlugin:
    """A plugin of its own: under xdist the workers do without it."""

    def __init__(self, config: pytest.Config, settings: Settings) -> None:
        self._config = config
        self._settings = settings
        self._began = time.monotonic()
        self._ledger = RunRecords()
        self._catalogue = Catalogue()
        self._header: Header | None = None
        self._others_passed = False
        self._told = False
        """Whether any loader has said anything."""
        self._at = ""
        """The loader that is running, as the ledger has it."""
        self._failed = 0
        """Reports of loaders that failed."""
        self._problem = ""
        """Why the report could not be written."""
        self._begun = self._news = False
        """Whether the report is being written, and whether it lacks something by now."""
        self._writer = Writer(Path(settings.report)) if settings.report else None
        if self._writer is not None and self._writer.is_foreign:
            raise pytest.UsageError(
                f"--fsdp-report: {settings.report} has an index.html that is not of a report, and would be lost; "
                "name a folder of its own"
            )
        self._comparer = Comparer(settings)

    def begin(self, catalogue: Catalogue) -> None:
        """The session begins, and with it the checks are known."""
        self._catalogue = catalogue
        if self._idle:
            return
        if self._writer is not None or self._comparer.asked:
            command = ("pytest", *map(str, self._config.invocation_params.args))
            self._header = heading(self._config.rootpath, command, self._settings.engine, catalogue)

    def _begin_report(self) -> None:
        """There is something to run, so what an earlier run has left gives way: not for a name that was mistyped."""
        if self._writer is not None and self._header is not None and not self._begun:
            self._begun = True
            self._write(Report(SCHEMA, self._header), self._clear)

    def _clear(self) -> None:
        """The report of an earlier run must not stand for this one, whose own the disk may have no room for.

        What that has kept goes as well, unless it is what this one judges.
        """
        assert self._writer is not None
        self._writer.clear((PAGE, *PAGES))
        folder = self._writer.folder / store.FOLDER
        if not is_judged(folder, self._config):
            store.clear_evidence(folder)

    @property
    def _idle(self) -> bool:
        return runs_nothing(self._config)

    def pytest_report_header(self) -> str:
        settings = self._settings
        return describe_run(settings.engine, settings.device, settings.backend, settings.world_sizes, self._catalogue)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_finish(self, session: pytest.Session) -> None:
        if session.items:
            self._begin_report()
        for item in session.items:
            case = case_of(item)
            if isinstance(item, EvidenceItem):
                share = item.share
                self._ledger.plan(share.key, share.check, item.nodeid, share.loader, share.world, share.order.expected)
            elif case is not None:
                name = display_name(item, case)
                self._ledger.plan(name, case.check, item.nodeid, name, world_facts(case.spec), case.order.expected)

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, node: Any, ids: Sequence[str]) -> None:
        if ids:
            self._begin_report()
        worker = self._on(node)
        for nodeid in ids:
            if apart := split_node_id(nodeid, self._catalogue) or split_evidence_node_id(nodeid):
                self._ledger.plan(apart[0] + worker, apart[1], nodeid + worker)

    def _on(self, node: Any) -> str:
        """With ``--dist each`` every worker runs all of it: several runs of a loader, of which one may fail."""
        each = node is not None and self._config.getoption("dist", "no") == "each"
        return f" on {node.gateway.id}" if each else ""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        entry, worker = told(report), self._on(getattr(report, "node", None))
        nodeid = report.nodeid + worker
        if entry is not None:
            self._told = True
            # What fails and is in no record as broken (a fixture's end after a skip) is beyond any comparison.
            broken = entry.record.status in BROKEN
            self._failed += report.failed and broken and not hasattr(report, "wasxfail")
            self._ledger.enter(replace(entry, key=entry.key + worker, loader=entry.loader + worker))
        elif report.when not in ("setup", "call", "teardown"):
            self._failed += self._ledger.crashed(nodeid, first_line(str(report.longrepr))) in BROKEN
        elif report.when == "call" or (report.when == "setup" and not report.passed):
            self._ledger.strike(nodeid)
            self._others_passed |= report.passed
        self._ledger.spend(nodeid, report.duration)
        self._news |= entry is not None
        if self._begun and self._writer is not None and self._writer.is_due:
            self._write_news()

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """An item of something else may take long, and end the process: what is known is written before."""
        key = self._ledger.key_of(nodeid)
        if key != self._at:
            self._at = key
            if not key:
                self._write_news()

    def _write_news(self) -> None:
        if self._begun and self._news:
            self._news = False
            self._write(self._report(None))

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        if self._idle:
            return
        if (
            session.testsfailed
        ):  # also where nothing could be collected: the report of an earlier run would stand for it
            self._begin_report()
        if self._comparer.asked:
            report = self._report(int(session.exitstatus))
            # What else failed (a test, a module that cannot be imported, coverage) is counted by pytest alone; what has
            # not run because something failed might have failed as well.
            others = session.testsfailed > self._failed or bool(session.shouldfail or session.shouldstop)
            session.exitstatus = self._comparer.settle(report, int(session.exitstatus), others)
        if session.exitstatus == pytest.ExitCode.OK and nothing_judged(self.loaders, self._others_passed):
            session.exitstatus = pytest.ExitCode.NO_TESTS_COLLECTED
        self._end_report(session)

    def _end_report(self, session: pytest.Session) -> None:
        """The exit status is in it, also that of a report that could not be written as it should."""
        for _ in range(2):
            if self._problems and session.exitstatus == pytest.ExitCode.OK:
                session.exitstatus = pytest.ExitCode.INTERNAL_ERROR
            if self._begun:
                self._write(self._report(int(session.exitstatus)))
            if not self._problem:
                return

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter, exitstatus: int) -> None:
        never_ran = exitstatus not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED) and not self._told
        if self._idle or never_ran:  # there, pytest tells why
            return
        if self.loaders or self._problems:
            terminalreporter.section("fsdp conformance")
            self._tell(terminalreporter)
        if self._comparer.asked:
            terminalreporter.section("fsdp conformance, compared")
            for line, markup in self._comparer.lines():
                terminalreporter.write_line(line, **markup)

    def _tell(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self.loaders:
            for line, markup in describe_totals(self.loaders, self._config.get_verbosity()):
                terminalreporter.write_line(line, **markup)
        for problem in self._problems:
            terminalreporter.write_line(f"--fsdp-report: {problem}", red=True)
        if self._begun and self._writer is not None and not self._problem:
            terminalreporter.write_line(f"report: {self._writer.folder}")

    @property
    def _problems(self) -> list[str]:
        whole = [f"the report is not whole: {self._problem}"] if self._problem else []
        return [*whole, *self._ledger.problems]

    @property
    def loaders(self) -> tuple[LoaderRecord, ...]:
        return self._ledger.loaders(self._catalogue)

    def _report(self, exit_status: int | None) -> Report:
        assert self._header is not None
        seconds = time.monotonic() - self._began
        return Report(SCHEMA, self._header, self.loaders, seconds, exit_status, exit_status is not None)

    def _write(self, report: Report, first: Callable[[], None] = lambda: None) -> None:
        assert self._writer is not None
        try:
            first()
            self._writer.write(report)
            if report.complete or not report.loaders:  # at the beginning too: who looks meanwhile is told
                from pytest_fsdp_meta.reports.page import write_page

                folder, comparer = self._writer.folder, self._comparer
                write_page(report, folder / PAGE, comparer.comparison, comparer.problem)
                comparer.write(report, folder)
            self._problem = ""
        except OSError as error:
            self._problem = str(error)  # told at the end: what the tests say goes first
        except Exception as error:  # of drawing: pytest's own summary must not be lost for it
            self._problem = f"the page could not be drawn ({type(error).__name__}: {first_line(error)})"


PAGES = ("summary.md", "badge.json", "badge.svg")
MARKUP = {"worse": RED, "better": GREEN, "odd": YELLOW}


class Comparer:
    """The earlier report is read before anything runs: raises UsageError where there is none in the file.

    A report of another schema is the fate of every nightly run once, after an update: nothing is compared then, which
    is told, and what fails a run is what does without a comparison.
    """

    def __init__(self, settings: Settings) -> None:
        self._fail_on = settings.fail_on
        self._before: Report | None = None
        self.comparison: Comparison | None = None
        self.problem = ""
        """Why nothing is compared, though it was asked for."""
        if settings.compare:
            try:
                self._before = read_report(Path(settings.compare))
            except OtherSchema as error:
                self.problem = f"nothing is compared: {error}"
            except ValueError as error:
                raise pytest.UsageError(f"--fsdp-compare: {error}") from None

    @property
    def asked(self) -> bool:
        return self._before is not None or bool(self.problem)

    def settle(self, report: Report, status: int, others_failed: bool) -> int:
        """The exit status, where the run would end with ``status``.

        ``others_failed``: a test that is no loader did, or has not run because another failed.
        """
        if self._before is None:
            return status
        self.comparison = compare(self._before, report)
        if self._fail_on == "failure" or status not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
            return status
        bad = others_failed or self.comparison.fails(self._fail_on)
        return int(pytest.ExitCode.TESTS_FAILED if bad else pytest.ExitCode.OK)

    def lines(self) -> Iterator[Line]:
        """For the terminal."""
        if self.problem:
            yield self.problem, RED
        if self.comparison is None:
            return
        for mark, headline, lines in describe_comparison(self.comparison):
            yield headline, MARKUP[mark]
            yield from ((f"  {line}", {}) for line in lines)
        yield verdict(self.comparison), RED if self.comparison.fails(self._fail_on) else GREEN

    def write(self, report: Report, folder: Path) -> None:
        """The summary and the badge. Raises OSError."""
        write_whole(folder / "summary.md", summarise_run(report, self.comparison, self.problem).encode())
        write_whole(folder / "badge.json", badge_json(report).encode())
        write_whole(folder / "badge.svg", badge_svg(report).encode())
