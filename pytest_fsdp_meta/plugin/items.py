"""Items that use ranks. pytest makes a Function of each test, and ``collection`` one of these classes in its place.

``CheckItem`` reports a check of a loader, which ``loader_items`` runs. ``WorldItem`` is a test that requests
``fsdp_world``, and ``SpmdItem`` one whose whole body runs on every rank.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import warnings
from abc import abstractmethod
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from pytest_fsdp_meta.evidence import Evidence, store
from pytest_fsdp_meta.evidence.codec import to_plain
from pytest_fsdp_meta.loader.call import UNANIMOUS_OUTCOMES, Call
from pytest_fsdp_meta.plugin import _pytest_private, hypothesis_given, outcomes
from pytest_fsdp_meta.plugin.fixture_worlds import Disagreement
from pytest_fsdp_meta.plugin.markers import ConformanceSpec
from pytest_fsdp_meta.plugin.outcomes import FailureLine, Outcome
from pytest_fsdp_meta.plugin.pickling import Unsendable, pack_call, pack_drawn
from pytest_fsdp_meta.plugin.session import SESSION, PluginSession
from pytest_fsdp_meta.plugin.settings import runs_nothing
from pytest_fsdp_meta.plugin.spmd_rank import BODY, TracebackStyle
from pytest_fsdp_meta.reports.evenness import evenness_of
from pytest_fsdp_meta.reports.failures import REMOVE, explain_pass
from pytest_fsdp_meta.reports.run_records import ItemContext, with_later_error
from pytest_fsdp_meta.reports.schema import CheckRecord
from pytest_fsdp_meta.reports.sizes import sizes_of
from pytest_fsdp_meta.reports.summary import notes_on, summarise
from pytest_fsdp_meta.text import first_line
from pytest_fsdp_meta.worlds import LeaseError, WorldError, WorldSpec

SHIM = 5.0
"""Seconds in which a script that stands for an interpreter has to say for which."""


class RanksItem(pytest.Item):
    """An item of this plugin."""

    line: FailureLine | None = None
    """How the phase that has just run failed, in one line."""

    @property
    def plugin(self) -> PluginSession:
        return self.config.stash[SESSION]

    def begin(self) -> None:
        """Prepare for a run of the item, or for another one; before its marks are evaluated and fixtures set up."""

    def rerun_command(self) -> str:
        """Return the shell command that reruns this item from where pytest was started, with the options given."""
        # Not from the node id, to which xdist may append a group.
        names = [node.name for node in self.listchain() if isinstance(node, (pytest.Class, pytest.Item))]
        here = self.config.invocation_params.dir
        nodeid = "::".join([os.path.relpath(self.path, here), *names])
        return shlex.join([_interpreter(here), "-m", "pytest", nodeid, *self.plugin.settings.given])

    def complete_report(self, call: pytest.CallInfo[None], report: pytest.TestReport) -> None:
        """Let pytest's report of a phase point to the line of the user's code that failed."""
        if self.line is not None:
            self.line.point(report, self)
            self.line = None  # also of an expected failure: a later phase has a line of its own


@dataclass
class Shared:
    """What items of one loader in one world have reported, so that the next one does not repeat it."""

    attached: Evidence | str | None = None
    """The evidence or error that the latest item attached."""
    errors: dict[str, str] = field(default_factory=dict)
    """Error of a fixture -> node id of the item that has shown it in full."""


class CheckItem(RanksItem):
    """One check of a loader. Its result is attached to pytest's report in plain types, which xdist can send."""

    check: str
    spec: ConformanceSpec
    shared: Shared
    outcome: Outcome | None = None
    record: CheckRecord | None = None
    """What was attached to the report of an earlier phase."""

    def begin(self) -> None:
        self.outcome = self.record = self.line = None

    @abstractmethod
    def planned(self) -> ItemContext:
        """Return the item as it is reported before it has run."""

    @abstractmethod
    def context(self) -> ItemContext:
        """Return the item as it is reported afterwards, without the status of its check."""

    @abstractmethod
    def judged_evidence(self) -> Evidence | None:
        """Return the evidence on which the outcome is based, if there is any."""

    @abstractmethod
    def is_stored(self) -> bool:
        """Return whether this evidence is stored beside the report."""

    def raise_outcome(self, outcome: Outcome) -> None:
        """Raise pytest's outcome for the outcome of the check; return if the check passed.

        A reason in ``xfail=`` makes findings an xfail, but not errors.
        """
        self.outcome = outcome
        expected = self.spec.xfail.get(self.check)
        if outcome.status == "skipped":
            raise _pytest_private.skipped(outcome.message)
        if outcome.status == "failed" and expected is not None:
            pytest.xfail(expected)
        if outcome.status in ("failed", "error"):
            pytest.fail(outcome.message, pytrace=False)
        if expected is not None:
            pytest.fail(f"{explain_pass(expected, self.check)}; {REMOVE}", pytrace=False)

    def complete_report(self, call: pytest.CallInfo[None], report: pytest.TestReport) -> None:
        """Attach the status of the check to pytest's report of the phase that decides it.

        ``pytest.mark.xfail`` may expect findings; pytest applies it to errors as well.
        """
        raised = call.excinfo.value if call.excinfo else None
        found = report.when == "call" and self.outcome is not None and self.outcome.status == "failed"
        by_mark = report.skipped and hasattr(report, "wasxfail") and not isinstance(raised, pytest.xfail.Exception)
        if by_mark and not found:
            report.outcome = "failed"
            del report.wasxfail
        if outcomes.decides_status(report):
            self._attach(report, raised)
        super().complete_report(call, report)

    def _attach(self, report: pytest.TestReport, raised: BaseException | None) -> None:
        outcome, context = self.outcome, self.context()
        if report.when == "teardown" and self.record is not None:
            record = with_later_error(self.record, outcomes.describe_exception(raised))
        else:
            record = outcomes.check_record(report, context.check, self.spec, outcome, raised, self.config.rootpath)
            self.line = outcomes.failure_line(record, outcome)
        self.record = record
        context = self._add_loader_results(replace(context, check=record))
        for properties in (self.user_properties, report.user_properties):
            others = [(name, value) for name, value in properties if not name.startswith("fsdp_")]
            properties[:] = others + outcomes.user_properties(context)
        setattr(report, outcomes.ATTRIBUTE, to_plain(context))
        setattr(report, outcomes.KIND, record.kind)
        repeats = outcome.repeats if outcome is not None else self._repeats_fixture_error(report, record)
        setattr(report, outcomes.REPEATS, report.failed and repeats)

    def _repeats_fixture_error(self, report: pytest.TestReport, record: CheckRecord) -> bool:
        """Return whether an earlier item of the loader has shown this error of a fixture; then name that item alone."""
        if report.when != "setup" or not report.failed:
            return False
        first = self.shared.errors.setdefault(record.reason, report.nodeid)
        if first != report.nodeid:
            report.longrepr = f"{record.check}: same error as {first}: {record.reason}"
        return first != report.nodeid

    def _add_loader_results(self, context: ItemContext) -> ItemContext:
        """Add the loader's evidence, error and durations to the context, unless its previous item attached them."""
        evidence = self.judged_evidence()
        latest = evidence or context.error
        if not latest or self.shared.attached is latest:
            return replace(context, error="", seconds={})
        self.shared.attached = latest
        if evidence is None:
            return context
        if evidence.world.simulated:
            context = replace(context, sizes=sizes_of(evidence))
        else:
            evenness = evenness_of(evidence.world, evidence.inventory, evidence.training)
            context = replace(context, evenness=evenness, notes=notes_on(evidence))
        if not self.plugin.settings.report:
            return context
        file, problem = "", ""
        if self.is_stored():
            try:
                file = self._store_evidence(context.loader, evidence)
            except OSError as error:
                problem = f"the evidence of {context.loader} was not stored: {error}"
        return replace(context, evidence=file, problem=problem, summary=summarise(evidence))

    def _store_evidence(self, loader: str, evidence: Evidence) -> str:
        """Write the evidence and return its file, relative to the report. Raises OSError."""
        stored = store.StoredEvidence(
            schema=store.SCHEMA,
            loader=loader,
            known=tuple(self.plugin.catalogue.ids()),
            offered=self.spec.checks,
            evidence=evidence,
            skip=self.spec.skip,
            xfail=self.spec.xfail,
        )
        folder = Path(self.plugin.settings.report, store.FOLDER)
        return f"{folder.name}/{store.write_evidence(folder, stored).name}"


class WorldItem(RanksItem, pytest.Function):
    """A test that requests ``fsdp_world``: its body runs in the pytest process and calls ranks."""

    world: WorldSpec
    scope: str
    """How long the ranks live: "function", "module" or "session"."""

    def begin(self) -> None:
        """Make ``fsdp_world`` usable in the test's fixtures."""
        test = hypothesis_given.given_test(self.obj)
        if test is not None:
            hypothesis_given.disable_deadline(test)
        self.plugin.worlds.begin(self, self.world, self.scope)

    def setup(self) -> None:
        """Start the ranks, so that a world that cannot start is an error of the setup, not a failure of the test."""
        super().setup()
        if runs_nothing(self.config):
            return
        try:
            self.start()
        except (Unsendable, WorldError, LeaseError) as error:
            message = self.set_line(error)
        else:
            return
        pytest.fail(message, pytrace=False)

    def start(self) -> None:
        self.plugin.worlds.world()

    def set_line(self, error: Exception) -> str:
        """Set the line of this failure and return its text."""
        self.line = FailureLine(self.name, first_line(error), error.place if isinstance(error, WorldError) else "")
        return str(error)


class SpmdItem(WorldItem):
    """A test whose whole body runs on every rank, which ``@fsdp_spmd`` makes it."""

    _packed: Call

    def start(self) -> None:
        self._packed = pack_call(self)
        super().start()

    def runtest(self) -> None:
        values = {name: self.funcargs[name] for name in self._packed.names}
        test = hypothesis_given.given_test(self.obj)
        try:
            if test is None:
                self._run_body({})
            else:
                hypothesis_given.run_examples(test, values, self._run_body)
        except (WorldError, Disagreement, Unsendable) as error:
            parts = [self.set_line(error), hypothesis_given.join_notes(error)]
        except pytest.fail.Exception:  # raised by a signal handler, as pytest-timeout's
            ranks = self.plugin.listener.take_interruption()
            if ranks is None:
                raise
            parts = [self.set_line(ranks)]
        else:
            return
        pytest.fail("\n\n".join(filter(None, [*parts, f"rerun: {self.rerun_command()}"])), pytrace=False)

    def _run_body(self, drawn: dict[str, Any]) -> None:
        packed = self._packed.with_drawn({name: pack_drawn(name, value) for name, value in drawn.items()})
        options = self.config.option
        style = TracebackStyle("short" if options.tbstyle == "short" else "long", bool(options.showlocals))
        results = self.plugin.worlds.call(BODY, (packed, style, frozenset(UNANIMOUS_OUTCOMES)), {})
        returned = sorted({kind for kind in results if kind is not None})
        if returned:
            message = f"{self.nodeid} returned a {returned[0]}, but a test should return None; did you mean assert?"
            line = (self.location[1] or 0) + 1
            warnings.warn_explicit(pytest.PytestReturnNotNoneWarning(message), None, str(self.path), line)


@cache
def _interpreter(cwd: Path) -> str:
    """Return "python" where that is this interpreter for a shell in ``cwd``, else the shortest path of it."""
    python = shutil.which("python")
    if python is not None and (_is_same_link(python) or _is_shim(python, cwd)):
        return "python"
    near = os.path.relpath(sys.executable, cwd)
    near = near if os.sep in near else os.path.join(os.curdir, near)  # a shell looks up a bare name on the PATH
    return min(near, sys.executable, key=len)


def _is_same_link(python: str) -> bool:
    """Return whether this is the running interpreter: the same file in the same folder, which is its environment.

    The script "pytest" of an environment may run its Python through another link, such as python3.11.
    """
    folders = (os.path.dirname(os.path.abspath(file)) for file in (python, sys.executable))
    return os.path.samefile(*folders) and os.path.samefile(python, sys.executable)


def _is_shim(python: str, cwd: Path) -> bool:
    """Return whether this is a script, as pyenv and asdf put on the PATH, that runs the running interpreter."""
    ask = [python, "-c", "import sys; print(sys.executable)"]
    try:
        with open(python, "rb") as file:
            if file.read(2) != b"#!":
                return False
        asked = subprocess.run(ask, cwd=cwd, capture_output=True, text=True, timeout=SHIM)
    except (OSError, subprocess.TimeoutExpired):  # it cannot be read or run, so the path is the answer that is certain
        return False
    return asked.stdout.strip() == sys.executable
