"""Writes down what the items tell: in the process that pytest was started in, whoever runs them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from pytest_fsdp_meta import kept
from pytest_fsdp_meta.catalogue import Catalogue
from pytest_fsdp_meta.collection import case_of, take_apart
from pytest_fsdp_meta.comparing import Comparer
from pytest_fsdp_meta.rejudging import KeptItem
from pytest_fsdp_meta.reports.heading import describe_run, heading
from pytest_fsdp_meta.reports.ledger import Ledger
from pytest_fsdp_meta.reports.record import SCHEMA, Header, LoaderRecord, Report
from pytest_fsdp_meta.reports.totals import describe_totals, nothing_judged
from pytest_fsdp_meta.reports.writing import Writer
from pytest_fsdp_meta.settings import Settings
from pytest_fsdp_meta.telling import told
from pytest_fsdp_meta.trial import world_facts
from pytest_fsdp_meta.words import first_line

NAME = "fsdp_scribe"


class Scribe:
    """A plugin of its own: under xdist the workers do without it."""

    def __init__(self, config: pytest.Config, settings: Settings) -> None:
        self._config = config
        self._settings = settings
        self._began = time.monotonic()
        self._ledger = Ledger()
        self._catalogue = Catalogue()
        self._header: Header | None = None
        self._others_passed = self._others_failed = False
        self._problem = ""
        """Why the report could not be written."""
        self._writer = Writer(Path(settings.report)) if settings.report else None
        self._comparer = Comparer(settings)

    def begin(self, catalogue: Catalogue) -> None:
        """The session begins, and with it the checks are known."""
        self._catalogue = catalogue
        if self._idle:
            return
        if self._writer is not None or self._comparer.asked:
            command = ("pytest", *map(str, self._config.invocation_params.args))
            self._header = heading(self._config.rootpath, command, self._settings.engine, catalogue)
        if self._writer is not None and self._header is not None:
            if self._settings.keep_evidence:
                kept.clear(self._writer.folder / kept.FOLDER)
            self._write(Report(SCHEMA, self._header))

    @property
    def _idle(self) -> bool:
        """Whether no item is going to run."""
        return bool(self._config.getoption("collectonly") or self._config.getoption("setupplan", False))

    def pytest_report_header(self) -> str:
        settings = self._settings
        return describe_run(settings.engine, settings.device, settings.backend, settings.world_sizes, self._catalogue)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_finish(self, session: pytest.Session) -> None:
        for item in session.items:
            case = case_of(item)
            if isinstance(item, KeptItem):
                self._ledger.plan(item.share.loader, item.share.check, item.nodeid, item.share.world)
            elif case is not None and (apart := take_apart(item.nodeid, self._catalogue)):
                self._ledger.plan(*apart, item.nodeid, world_facts(case.spec))

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, node: Any, ids: Sequence[str]) -> None:
        for nodeid in ids:
            if apart := take_apart(nodeid, self._catalogue):
                self._ledger.plan(*apart, nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        entry = told(report)
        self._others_failed |= entry is None and report.failed and not self._ledger.knows(report.nodeid)
        if entry is not None:
            self._ledger.enter(entry)
        elif report.failed and report.when not in ("setup", "call", "teardown"):
            self._ledger.crashed(report.nodeid, first_line(RuntimeError(report.longreprtext)))
        elif report.when == "call" and report.passed:
            self._ledger.strike(report.nodeid)
            self._others_passed = True
        self._ledger.spend(report.nodeid, report.duration)
        if self._writer is not None and self._writer.is_due:
            self._write(self._report(None))

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        if self._idle:
            return
        if exitstatus == pytest.ExitCode.OK and nothing_judged(self.loaders, self._others_passed):
            session.exitstatus = pytest.ExitCode.NO_TESTS_COLLECTED
        if self._comparer.asked:
            report = self._report(int(session.exitstatus))
            others = self._others_failed or bool(session.shouldfail or session.shouldstop)
            session.exitstatus = self._comparer.settle(report, int(session.exitstatus), others)
        if self._writer is not None:
            self._write(self._report(int(session.exitstatus)))
        if self._problem and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.INTERNAL_ERROR

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self._idle:
            return
        if self.loaders:
            self._tell_totals(terminalreporter)
        if self._comparer.asked:
            terminalreporter.section("fsdp conformance, compared")
            for line, markup in self._comparer.lines():
                terminalreporter.write_line(line, **markup)

    def _tell_totals(self, terminalreporter: pytest.TerminalReporter) -> None:
        terminalreporter.section("fsdp conformance")
        for line, markup in describe_totals(self.loaders, self._config.get_verbosity()):
            terminalreporter.write_line(line, **markup)
        if self._problem:
            terminalreporter.write_line(f"--fsdp-report: the report is not whole: {self._problem}", red=True)
        elif self._writer is not None:
            terminalreporter.write_line(f"report: {self._writer.folder}")

    @property
    def loaders(self) -> tuple[LoaderRecord, ...]:
        return self._ledger.loaders(self._catalogue)

    def _report(self, exit_status: int | None) -> Report:
        assert self._header is not None
        seconds = time.monotonic() - self._began
        return Report(SCHEMA, self._header, self.loaders, seconds, exit_status, exit_status is not None)

    def _write(self, report: Report) -> None:
        assert self._writer is not None
        try:
            self._writer.write(report)
            # At the beginning too: the page of an earlier run must not stand for one that is killed.
            if report.complete or not report.loaders:
                from pytest_fsdp_meta.reports.page import write_page

                write_page(report, self._writer.folder / "index.html")
                self._comparer.write(report, self._writer.folder)
        except OSError as error:
            self._problem = str(error)  # told at the end: what the tests say goes first
