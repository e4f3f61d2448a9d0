"""Items of loaders: the first item of a loader runs it on the ranks, and each item gets the result of its check."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import pytest

from pytest_fsdp_meta.catalogue import Selection, judge
from pytest_fsdp_meta.evidence import Evidence
from pytest_fsdp_meta.evidence.codec import to_plain
from pytest_fsdp_meta.loader.call import ASSUME, SKIPS, Call
from pytest_fsdp_meta.plugin import _pytest_private, hypothesis_given, outcomes
from pytest_fsdp_meta.plugin.items import RanksItem
from pytest_fsdp_meta.plugin.markers import ConformanceSpec
from pytest_fsdp_meta.plugin.outcomes import FailureLine, Outcome, outcome_of
from pytest_fsdp_meta.plugin.pickling import Unsendable, pack_call, pack_drawn
from pytest_fsdp_meta.plugin.preloading import refresh
from pytest_fsdp_meta.plugin.settings import runs_nothing
from pytest_fsdp_meta.reports.run_records import ItemContext, with_later_error
from pytest_fsdp_meta.reports.schema import CheckRecord, LoaderRecord
from pytest_fsdp_meta.reports.sizes import sizes_of
from pytest_fsdp_meta.reports.story import REMOVE, explain_pass
from pytest_fsdp_meta.reports.summary import notes_on, summarise
from pytest_fsdp_meta.reports.terminal import describe_error
from pytest_fsdp_meta.text import did_you_mean, first_line, without_occasion
from pytest_fsdp_meta.trial import LoaderFailed, Trial, judge_smaller_worlds, largest_world_size, world_facts
from pytest_fsdp_meta.worlds import LeaseError, WorldSpec


class ExampleFailed(Exception):
    """A Hypothesis example failed its check or raised an error; Hypothesis shrinks it."""

    def __init__(self, outcome: Outcome, run: LoaderRun) -> None:
        self.outcome = outcome
        self.run = run
        super().__init__(outcome.message.partition("\n")[0])


class ExampleInterrupted(BaseException):
    """A time limit ended a Hypothesis example. Not an Exception, for which Hypothesis would try more examples."""


class LoaderItem(RanksItem, pytest.Function):
    """One check of one loader in one world.

    Its result is attached to pytest's report, and recorded from there: in plain types, which xdist can send.
    """

    check: str
    spec: ConformanceSpec
    loader: Loader
    world: WorldSpec
    outcome: Outcome | None = None
    record: CheckRecord | None = None
    """What was attached to the report of an earlier phase."""
    _example: LoaderRun | None = None
    """The run of the Hypothesis example that decided the outcome."""

    @contextmanager
    def running(self) -> Iterator[None]:
        """Wrap all phases of the item, so that a loader that crashed an xdist worker does not run on another worker."""
        run = self.loader.run
        if run.has_ended:
            yield
            return
        with self.plugin.devices.running(self.loader.key, self) as (worker, crashed_item):
            if worker:
                summary = f"worker {worker} ended while the loader or its fixtures ran; the loader is not run again"
                run.failure, run.reported_by = LoaderFailed(summary), {summary: crashed_item}
            yield

    def begin(self) -> None:
        """Forget the loader's result if this item has had one already, so that the loader runs again.

        Not for an error that another item had first: that item's reruns have tried again.
        """
        before = self.outcome
        self.outcome = self.record = self.line = self._example = None
        if before is not None and not before.repeats:
            self.loader.run = LoaderRun()
            self.loader.loads += 1

    def setup(self) -> None:
        """Set up the fixtures and run the loader if it has not run yet; errors on the ranks are errors of the setup.

        A loader with ``@given`` is only pickled here; ``runtest`` draws its examples and runs it.
        """
        run = self.loader.run
        if not run.has_ended:
            self._set_up_fixtures(run)
        if runs_nothing(self.config):
            return
        if run.call is None and not run.has_ended:
            try:
                run.call = pack_call(self)
            except LoaderFailed as failure:
                run.failure = failure
        if not run.has_ended and hypothesis_given.given_test(self.obj) is None:
            self._observe(run)
        if not run.has_ended:
            return
        self.outcome = outcome = self._run_outcome(run)
        if run.failure is not None and outcome.status == "skipped":
            raise _pytest_private.skipped(outcome.message)
        if outcome.status == "failed":
            self._show_output("setup", run)
        if outcome.status == "error":
            pytest.fail(outcome.message, pytrace=False)

    def _set_up_fixtures(self, run: LoaderRun) -> None:
        """Set up the fixtures. One that does not exist is an error of the loader, which its items report once."""
        try:
            super().setup()
        except pytest.FixtureLookupError as error:
            known = _pytest_private.fixtures_instead(error)
            if runs_nothing(self.config) or not known:
                raise
            hint = did_you_mean(str(error.argname), known, "pytest --fixtures lists those that there are")
            by = f", which fixture {error.request.fixturename!r} requests," if error.request.fixturename else ""
            run.failure = LoaderFailed(f"fixture {error.argname!r}{by} does not exist{hint}")

    def complete_report(self, call: pytest.CallInfo[None], report: pytest.TestReport) -> None:
        """Attach the status of the check to pytest's report of the phase that decides it.

        ``pytest.mark.xfail`` may expect findings; pytest applies it to errors as well. The headline of an error of the
        loader names the loader, not the check whose item has it first.
        """
        raised = call.excinfo.value if call.excinfo else None
        found = report.when == "call" and self.outcome is not None and self.outcome.status == "failed"
        by_mark = report.skipped and hasattr(report, "wasxfail") and not isinstance(raised, pytest.xfail.Exception)
        if by_mark and not found:
            report.outcome = "failed"
            del report.wasxfail
        if report.outcome in outcomes.DECIDING_OUTCOMES[report.when or ""]:
            self._attach(report, raised)
        super().complete_report(call, report)
        line = self.outcome.line if self.outcome is not None else None
        if report.failed and line is not None and line.subject == self._test:
            file, number, domain = report.location
            report.location = file, number, domain.removesuffix(self.name) + self._test

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
        first = self.loader.errors.setdefault(record.reason, report.nodeid)
        if first != report.nodeid:
            report.longrepr = f"{record.check}: same error as {first}: {record.reason}"
        return first != report.nodeid

    def _add_loader_results(self, context: ItemContext) -> ItemContext:
        """Add the loader's evidence, error and durations to the context, unless its previous item attached them."""
        run, loader = self._example or self.loader.run, context.loader
        latest = run.evidence or loader.error
        if not latest or self.loader.attached is latest:
            return context
        self.loader.attached = latest
        loader = replace(loader, seconds=run.seconds)
        if (evidence := run.evidence) is None:
            return replace(context, loader=loader, describes_loader=True)
        if evidence.world.simulated:
            loader = replace(loader, sizes=sizes_of(evidence))
        else:
            loader = replace(loader, notes=notes_on(evidence))
        if self.plugin.settings.report:
            loader = replace(loader, summary=summarise(evidence))
        return replace(context, loader=loader, describes_loader=True)

    @property
    def _test(self) -> str:
        """The test in its world, such as "test_llama[world4]"."""
        assert self.parent is not None
        return self.loader.name.removeprefix(f"{self.parent.nodeid}::")

    def runtest(self) -> None:
        """Raise the outcome of the check as pytest's outcome; return if the check passed.

        A reason in ``xfail=`` makes findings an xfail, but not errors.
        """
        test, run = hypothesis_given.given_test(self.obj), self.loader.run
        self.outcome = outcome = self._run_outcome(run) if test is None else self._run_examples(run, test)
        expected = self.spec.xfail.get(self.check)
        if outcome.status == "skipped":
            raise _pytest_private.skipped(outcome.message)
        if outcome.status == "failed" and expected is not None:
            pytest.xfail(expected)
        if outcome.status in ("failed", "error"):
            pytest.fail(outcome.message, pytrace=False)
        if expected is not None:
            pytest.fail(f"{explain_pass(expected, self.check)}; {REMOVE}", pytrace=False)

    def planned(self) -> ItemContext:
        """Return the item as it is reported before it has run."""
        return ItemContext(
            key=self.loader.name,
            loader=LoaderRecord(self.loader.name, world_facts(self.world), (), loads=self.loader.loads),
            check=CheckRecord(self.check, "not run", self.nodeid),
            offered=self.spec.expected,
        )

    def context(self) -> ItemContext:
        """Return the item as it is reported afterwards, without the status of its check."""
        planned, run = self.planned(), self._example or self.loader.run
        loader = replace(
            planned.loader,
            world=run.evidence.world if run.evidence else planned.loader.world,
            error=run.failure.summary if run.failure and not run.failure.unanimous_outcome else "",
        )
        return replace(planned, loader=loader, check=replace(planned.check, again=self.rerun_command()))

    def _run_examples(self, run: LoaderRun, test: Callable[..., Any]) -> Outcome:
        """Return the outcome over all examples. All items of a loader draw the same examples; each is loaded once."""
        call, seen = run.call, list[tuple[Outcome, LoaderRun]]()
        assert call is not None
        values = {name: self.funcargs[name] for name in call.names}
        hypothesis_given.disable_deadline(test)
        if self.config.getoption("--hypothesis-seed", None) is None:
            hypothesis_given.share_seed(test, self.loader.seed)

        def judge_example(drawn: dict[str, Any]) -> None:
            packed = {name: pack_drawn(name, value) for name, value in drawn.items()}
            example = run.examples.setdefault(tuple(packed.items()), LoaderRun(call.with_drawn(packed)))
            if not example.has_ended:
                self._observe(example)
            if example.interrupted:
                run.failure, run.outputs, run.interrupted = example.failure, example.outputs, True
                raise ExampleInterrupted
            if example.failure is not None and example.failure.unanimous_outcome == ASSUME:
                from hypothesis import reject

                reject()
            seen.append((self._run_outcome(example), example))
            if seen[-1][0].status in ("failed", "error"):
                raise ExampleFailed(*seen[-1])

        try:
            hypothesis_given.run_examples(test, values, judge_example, key=self.loader.key)
        except ExampleFailed as failed:
            self._show_output("call", failed.run)
            self._example = failed.run
            example = hypothesis_given.join_notes(failed)
            detail = "\n\n".join(filter(None, [failed.outcome.detail, example]))
            return replace(failed.outcome, message=f"{failed.outcome.message}\n\n{example}", detail=detail)
        except Unsendable as error:
            return Outcome("error", str(error), reason=str(error))
        except ExampleInterrupted:
            return self._run_outcome(run)
        why = "Hypothesis drew no example; see the phases in its settings"
        no_example = Outcome("skipped", why, reason=why), run
        differing = (result for result in seen if result[0].kind == "differs")
        judged = (result for result in seen if result[0].status != "skipped")
        outcome, self._example = next(chain(differing, judged), (no_example, *seen)[-1])
        return outcome

    def _run_outcome(self, run: LoaderRun) -> Outcome:
        if run.failure is not None:
            if run.failure.unanimous_outcome in SKIPS:
                return Outcome("skipped", run.failure.reason, reason=run.failure.reason)
            line = FailureLine(self._test, run.failure.summary, run.failure.place)
            return self._error_outcome(self._test, run, line, str(run.failure))
        assert run.evidence is not None
        catalogue = self.plugin.catalogue
        verdict = judge(catalogue[self.check], run.evidence, catalogue, self.loader.selection)
        if verdict.status == "error":
            # An observation that could not be taken is a problem of the loader: many checks may need it.
            of_loader = verdict.reason in (missing.summary for missing in run.evidence.unavailable.values())
            subject = self._test if of_loader else self.check
            headline = subject if of_loader else f"{subject}: error"
            line = FailureLine(subject, verdict.reason)
            return replace(self._error_outcome(headline, run, line, verdict.detail), verdict=verdict)
        return outcome_of(verdict, run.evidence.world, self.rerun_command, self.plugin.settings.strict)

    def _error_outcome(self, subject: str, run: LoaderRun, line: FailureLine, detail: str) -> Outcome:
        """Describe an error in full for the first item of the loader that has it, in one line for the others."""
        summary = line.message
        first_item = run.reported_by.setdefault(without_occasion(summary), self.name)
        if first_item != self.name:
            message = f"{self.check}: same error as {first_item}: {summary}"
            return Outcome("error", message, reason=summary, line=line, repeats=True)
        self._show_output("setup", run)
        message = describe_error(subject, summary, detail, self.rerun_command())
        return Outcome("error", message, reason=summary, detail=detail, line=line)

    def _observe(self, run: LoaderRun) -> None:
        """Run the loader on the ranks and take the observations that the selected checks need."""
        assert run.call is not None
        plugin = self.plugin
        wanted = plugin.catalogue.observations(self.loader.checks or [self.check])
        refresh(plugin.engine)
        try:
            with plugin.devices.leased(self.world, self, largest_world_size(self.world, wanted)) as world:
                spec, selection = self.spec, self.loader.selection
                trial = Trial(world, plugin.engine, spec.steps, spec.tolerance, plugin.listener, selection)
                try:
                    run.evidence = trial.observe(run.call, wanted)
                    if run is self.loader.run:  # Hypothesis runs many examples, most of them to shrink a failing one
                        run.evidence = judge_smaller_worlds(
                            trial, run.call, run.evidence, plugin.catalogue, self.loader.checks, selection
                        )
                finally:
                    run.outputs, run.seconds = trial.outputs, trial.seconds
        except LeaseError as error:
            run.failure = LoaderFailed(str(error))
        except LoaderFailed as failure:
            run.failure = failure
        except pytest.fail.Exception as error:  # raised by a signal handler, as pytest-timeout's
            interruption = self._interruption(error)
            if run.evidence is None:  # else the loader was judged, and a smaller world took too long
                run.failure, run.interrupted = interruption, True

    def _interruption(self, error: BaseException) -> LoaderFailed:
        """Return the failure of a loader that a time limit has ended, so that its other items do not run it again."""
        ranks = self.plugin.listener.take_interruption()
        if ranks is None:  # pytest was not waiting for an answer of ranks
            while_starting = " while ranks were starting" if self.plugin.listener.is_starting else ""
            return LoaderFailed(first_line(str(error)).rstrip(".") + while_starting)
        return LoaderFailed(ranks.summary, str(ranks), place=ranks.place)

    def _show_output(self, when: str, run: LoaderRun) -> None:
        """Add the ranks' output to the report of the loader's first item that does not pass."""
        if not run.output_shown:
            run.output_shown = True
            self.plugin.listener.show(self, when, zip(self.world.ranks, run.outputs, strict=False))


@dataclass
class LoaderRun:
    """One run of a loader in one world, or of one Hypothesis example."""

    call: Call | None = None
    evidence: Evidence | None = None
    failure: LoaderFailed | None = None
    interrupted: bool = False
    """Whether a time limit such as pytest-timeout's ended the run."""
    reported_by: dict[str, str] = field(default_factory=dict)
    """Errors that were reported in full, each with the name of the item that reported it."""
    seconds: Mapping[str, float] = field(default_factory=dict)
    outputs: list[str] = field(default_factory=list)
    output_shown: bool = False
    examples: dict[object, LoaderRun] = field(default_factory=dict)
    """The runs of Hypothesis examples by their drawn values; empty for a loader without ``@given``."""

    @property
    def has_ended(self) -> bool:
        return self.evidence is not None or self.failure is not None


@dataclass
class Loader:
    """A loader in one world, which all of its items share."""

    key: str = ""
    """The same for all items of the loader in this world, and for no other item; stable from run to run."""
    name: str = ""
    """The loader in its world as reports show it: the node id without the check."""
    checks: list[str] = field(default_factory=list)
    """Those that were selected. Only the observations that they need are taken."""
    selection: Selection = field(default_factory=Selection)
    """Those to which a check may leave a defect."""
    seed: int = field(default_factory=lambda: secrets.randbits(64))
    """All items draw the same Hypothesis examples, also when they run again."""
    loads: int = 1
    """How many runs there have been: a rerun of an item, as by pytest-rerunfailures, starts another."""
    run: LoaderRun = field(default_factory=LoaderRun)
    attached: Evidence | str | None = None
    """The evidence or error that the latest item attached to its report, which the next one does not repeat."""
    errors: dict[str, str] = field(default_factory=dict)
    """Error of a fixture -> node id of the item that has shown it in full."""
