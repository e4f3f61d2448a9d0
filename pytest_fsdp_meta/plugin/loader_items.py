"""Items of loaders: the first item of a loader runs it on the ranks, and each item gets the result of its check."""

from __future__ import annotations

import secrets
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from pytest_fsdp_meta.catalogue import Catalogue, Selection, judge
from pytest_fsdp_meta.evidence import Evidence
from pytest_fsdp_meta.loader.call import ASSUME, SKIPS, Call
from pytest_fsdp_meta.plugin._pytest_private import expectation
from pytest_fsdp_meta.plugin.collection import LOADER_ITEM, LoaderItem, runs_nothing
from pytest_fsdp_meta.plugin.failure_lines import FailureLine
from pytest_fsdp_meta.plugin.hypothesis_given import (
    disable_deadline,
    given_test,
    join_notes,
    reject_example,
    run_examples,
    share_seed,
)
from pytest_fsdp_meta.plugin.outcomes import (
    RECORD,
    Outcome,
    ReportAttacher,
    decides_status,
    outcome_of,
    raise_outcome,
    skip,
)
from pytest_fsdp_meta.plugin.pickling import Unsendable, pack_call, pack_drawn
from pytest_fsdp_meta.plugin.preloading import refresh
from pytest_fsdp_meta.plugin.rank_io.listener import RankListener
from pytest_fsdp_meta.plugin.rerun_command import rerun_command
from pytest_fsdp_meta.plugin.settings import Settings
from pytest_fsdp_meta.plugin.xdist_workers import Devices
from pytest_fsdp_meta.reports.run_records import ItemContext
from pytest_fsdp_meta.reports.schema import CheckRecord
from pytest_fsdp_meta.reports.terminal import describe_error
from pytest_fsdp_meta.text import first_line
from pytest_fsdp_meta.trial import LoaderFailed, Trial, largest_world_size, world_facts
from pytest_fsdp_meta.worlds import Engine, LeaseError

OUTCOME = pytest.StashKey[Outcome]()
REPORTED_RUN = pytest.StashKey["LoaderRun"]()
"""The run of the Hypothesis example that decided the item's outcome."""
FIXTURES = pytest.StashKey[list[str]]()
"""The fixtures that the item is not given because its loader has run; a rerun may need them."""


@dataclass
class LoaderRun:
    """One run of a loader in one world, or of one Hypothesis example: the selected checks and the result."""

    checks: list[str] = field(default_factory=list)
    selection: Selection = field(default_factory=Selection)
    call: Call | None = None
    evidence: Evidence | None = None
    failure: LoaderFailed | None = None
    interrupted: bool = False
    """Whether a time limit such as pytest-timeout's ended the run."""
    loads: int = 1
    """How many runs of this loader there have been: a rerun of an item, as by pytest-rerunfailures, starts another."""
    reported_by: dict[str, str] = field(default_factory=dict)
    """Errors that were reported in full, each with the name of the item that reported it."""
    seconds: Mapping[str, float] = field(default_factory=dict)
    outputs: list[str] = field(default_factory=list)
    output_shown: bool = False
    seed: int = field(default_factory=lambda: secrets.randbits(64))
    examples: dict[object, LoaderRun] = field(default_factory=dict)
    """The runs of Hypothesis examples by their drawn values; empty for a loader without ``@given``."""

    @property
    def has_ended(self) -> bool:
        return self.evidence is not None or self.failure is not None

    def another(self) -> LoaderRun:
        """Return a run of the same checks, and of the same examples, that has not started."""
        return LoaderRun(self.checks, self.selection, seed=self.seed, loads=self.loads + 1)


class ExampleFailed(Exception):
    """A Hypothesis example failed its check or raised an error; Hypothesis shrinks it."""

    def __init__(self, outcome: Outcome, run: LoaderRun) -> None:
        self.outcome = outcome
        self.run = run
        super().__init__(outcome.message.partition("\n")[0])


class ExampleInterrupted(BaseException):
    """A time limit ended a Hypothesis example. Not an Exception, for which Hypothesis would try more examples."""


def planned_context(item: pytest.Item, loader: LoaderItem) -> ItemContext:
    """Return the item as it is reported before it has run."""
    return ItemContext(
        key=loader.name,
        loader=loader.name,
        check=CheckRecord(loader.check, "not run", item.nodeid),
        world=world_facts(loader.world),
        offered=loader.spec.expected,
    )


def _short_name(item: pytest.Item, loader: LoaderItem) -> str:
    """Return the name of the loader without its file and class, such as "test_llama[world4]"."""
    assert item.parent is not None
    return loader.name.removeprefix(f"{item.parent.nodeid}::")


class LoaderSession:
    """Runs each loader once, for the first of its items, and keeps the result for the others. One per pytest session.

    Its methods ignore items that do not belong to a loader.
    """

    def __init__(
        self,
        settings: Settings,
        catalogue: Catalogue,
        engine: Engine,
        listener: RankListener,
        devices: Devices,
        attacher: ReportAttacher,
    ) -> None:
        self.catalogue = catalogue
        self._settings = settings
        self._engine = engine
        self._listener = listener
        self._devices = devices
        self._attacher = attacher
        self._runs: dict[str, LoaderRun] = {}

    def plan(self, items: Iterable[pytest.Item]) -> None:
        """Collect the selected checks of each loader.

        Only the observations that they need are taken, and a check leaves defects only to checks that report them.
        """
        failing, xfailing = defaultdict[str, set[str]](set), defaultdict[str, set[str]](set)
        for item in items:
            loader = item.stash.get(LOADER_ITEM, None)
            if loader is None or loader.check in loader.spec.skip:
                continue
            self._run_of(loader).checks.append(loader.check)
            marked = expectation(item)
            if marked != "skip":
                expected = loader.check in loader.spec.xfail or marked == "xfail"
                (xfailing if expected else failing)[loader.key].add(loader.check)
        for key, run in self._runs.items():
            run.selection = Selection(frozenset(failing[key]), frozenset(xfailing[key]))

    @contextmanager
    def running(self, item: pytest.Item) -> Iterator[None]:
        """Wrap all phases of an item, so that a loader that crashed an xdist worker does not run on another worker."""
        loader = item.stash.get(LOADER_ITEM, None)
        if loader is None or (run := self._run_of(loader)).has_ended:
            yield
            return
        with self._devices.running(loader.key, item) as (worker, crashed_item):
            if worker:
                summary = f"worker {worker} ended while the loader or its fixtures ran; the loader is not run again"
                run.failure, run.reported_by = LoaderFailed(summary), {summary: crashed_item}
            yield

    def before_fixtures(self, item: pytest.Item) -> None:
        """Skip the fixtures of an item whose loader has run; a rerun of an item runs the loader again."""
        loader = item.stash.get(LOADER_ITEM, None)
        if loader is None:
            return
        assert isinstance(item, pytest.Function)
        self._prepare_rerun(item, loader)
        if self._run_of(loader).has_ended:
            item.stash[FIXTURES] = list(item.fixturenames)
            item.fixturenames = []

    def _prepare_rerun(self, item: pytest.Function, loader: LoaderItem) -> None:
        """Forget the loader's result if this item has had one already, so that the loader runs again.

        Not for an error that another item had first: that item's reruns have tried again.
        """
        before = item.stash.get(OUTCOME, None)
        if before is None or runs_nothing(item.config):
            return
        item.fixturenames = item.stash.get(FIXTURES, item.fixturenames)
        keys: tuple[pytest.StashKey[Any], ...] = (OUTCOME, REPORTED_RUN, RECORD)
        for key in keys:
            if key in item.stash:
                del item.stash[key]
        if not before.repeats:
            self._runs[loader.key] = self._run_of(loader).another()

    def after_fixtures(self, item: pytest.Item) -> None:
        """Run the loader if it has not run yet. Errors on the ranks are raised here, as errors of the item's setup.

        A loader with ``@given`` is only pickled here; ``call`` draws its examples and runs it.
        """
        loader = item.stash.get(LOADER_ITEM, None)
        if loader is None or runs_nothing(item.config):
            return
        assert isinstance(item, pytest.Function)
        run = self._run_of(loader)
        if run.call is None and not run.has_ended:
            try:
                run.call = pack_call(item)
            except LoaderFailed as failure:
                run.failure = failure
        if not run.has_ended and given_test(item.obj) is None:
            self._observe(item, loader, run)
        if run.has_ended:
            self._raise_setup_outcome(item, loader, run)

    def _raise_setup_outcome(self, item: pytest.Function, loader: LoaderItem, run: LoaderRun) -> None:
        outcome = item.stash[OUTCOME] = self._run_outcome(item, loader, run)
        if run.failure is not None and outcome.status == "skipped":
            skip(item, outcome.message)
        if outcome.status == "failed":
            self._show_output(item, "setup", run)
        if outcome.status == "error":
            pytest.fail(outcome.message, pytrace=False)

    def call(self, item: pytest.Function) -> bool | None:
        """Raise the outcome of the item's check as pytest's outcome; return None if the item is not a loader's."""
        loader = item.stash.get(LOADER_ITEM, None)
        if loader is None:
            return None
        test, run = given_test(item.obj), self._run_of(loader)
        outcome = self._run_outcome(item, loader, run) if test is None else self._run_examples(item, loader, run, test)
        item.stash[OUTCOME] = outcome
        raise_outcome(item, outcome, loader.check, loader.spec.xfail.get(loader.check))
        return True

    def attach(self, item: pytest.Item, call: pytest.CallInfo[None], report: pytest.TestReport) -> None:
        """Attach the result of the item to pytest's report, if this phase decides the result."""
        loader = item.stash.get(LOADER_ITEM, None)
        if loader is None or not decides_status(report):
            return
        run = item.stash.get(REPORTED_RUN, self._run_of(loader))
        failure = run.failure
        planned = planned_context(item, loader)
        context = replace(
            planned,
            check=replace(planned.check, again=rerun_command(item, self._settings.given)),
            world=run.evidence.world if run.evidence else planned.world,
            error=failure.summary if failure and not failure.unanimous_outcome else "",
            seconds=run.seconds,
            loads=self._run_of(loader).loads,
        )
        # Evidence of a drawn example is not stored: it is about one choice of arguments, not about the loader.
        known = () if REPORTED_RUN in item.stash else self.catalogue.ids()
        raised = call.excinfo.value if call.excinfo is not None else None
        outcome = item.stash.get(OUTCOME, None)
        self._attacher.attach(item, report, context, loader.spec, outcome, raised, run.evidence, known)

    def _run_examples(
        self, item: pytest.Function, loader: LoaderItem, run: LoaderRun, test: Callable[..., Any]
    ) -> Outcome:
        """Return the outcome over all examples. All items of a loader draw the same examples; each is loaded once."""
        call, seen = run.call, list[tuple[Outcome, LoaderRun]]()
        assert call is not None
        values = {name: item.funcargs[name] for name in call.names}
        disable_deadline(test)
        if item.config.getoption("--hypothesis-seed", None) is None:
            share_seed(test, run.seed)

        def judge_example(drawn: dict[str, Any]) -> None:
            packed = {name: pack_drawn(name, value) for name, value in drawn.items()}
            example = run.examples.setdefault(
                tuple(packed.items()), LoaderRun(run.checks, run.selection, call.with_drawn(packed))
            )
            if not example.has_ended:
                self._observe(item, loader, example)
            if example.interrupted:
                run.failure, run.outputs, run.interrupted = example.failure, example.outputs, True
                raise ExampleInterrupted
            if example.failure is not None and example.failure.unanimous_outcome == ASSUME:
                reject_example()
            seen.append((self._run_outcome(item, loader, example), example))
            if seen[-1][0].status in ("failed", "error"):
                raise ExampleFailed(*seen[-1])

        try:
            run_examples(test, values, judge_example, key=loader.key)
        except ExampleFailed as failed:
            self._show_output(item, "call", failed.run)
            item.stash[REPORTED_RUN] = failed.run
            example = join_notes(failed)
            detail = "\n\n".join(filter(None, [failed.outcome.detail, example]))
            return replace(failed.outcome, message=f"{failed.outcome.message}\n\n{example}", detail=detail)
        except Unsendable as error:
            return Outcome("error", str(error), reason=str(error))
        except ExampleInterrupted:
            return self._run_outcome(item, loader, run)
        why = "Hypothesis drew no example; see the phases in its settings"
        no_example = Outcome("skipped", why, reason=why), run
        judged = (result for result in seen if result[0].status != "skipped")
        outcome, item.stash[REPORTED_RUN] = next(judged, (no_example, *seen)[-1])
        return outcome

    def _run_outcome(self, item: pytest.Item, loader: LoaderItem, run: LoaderRun) -> Outcome:
        """Return the outcome of one run for one item."""
        if run.failure is not None:
            if run.failure.unanimous_outcome in SKIPS:
                return Outcome("skipped", run.failure.reason, reason=run.failure.reason)
            line = FailureLine(_short_name(item, loader), run.failure.summary, run.failure.place)
            return self._error_outcome(item, line.subject, run, line, str(run.failure))
        assert run.evidence is not None
        verdict = judge(self.catalogue[loader.check], run.evidence, self.catalogue, run.selection)
        if verdict.status == "error":
            line = FailureLine(loader.check, verdict.reason)
            outcome = self._error_outcome(item, f"{loader.check}: error", run, line, verdict.detail)
            return replace(outcome, verdict=verdict)
        return outcome_of(verdict, run.evidence.world, lambda: rerun_command(item, self._settings.given))

    def _error_outcome(
        self, item: pytest.Item, subject: str, run: LoaderRun, line: FailureLine, detail: str
    ) -> Outcome:
        """Describe an error in full for the first item of the loader that has it, in one line for the others."""
        first_item = run.reported_by.setdefault(detail, item.name)
        summary = line.message
        if first_item != item.name:
            message = f"{item.stash[LOADER_ITEM].check}: same error as {first_item}: {summary}"
            return Outcome("error", message, reason=summary, line=line, repeats=True)
        self._show_output(item, "setup", run)
        message = describe_error(subject, summary, detail, rerun_command(item, self._settings.given))
        return Outcome("error", message, reason=summary, detail=detail, line=line)

    def _run_of(self, loader: LoaderItem) -> LoaderRun:
        return self._runs.setdefault(loader.key, LoaderRun())

    def _observe(self, item: pytest.Item, loader: LoaderItem, run: LoaderRun) -> None:
        """Run the loader on the ranks and take the observations that the selected checks need."""
        assert run.call is not None
        wanted = self.catalogue.observations(run.checks or [loader.check])
        refresh(self._engine)
        try:
            with self._devices.leased(loader.world, item, largest_world_size(loader.world, wanted)) as world:
                spec, selection = loader.spec, run.selection
                trial = Trial(world, self._engine, spec.steps, spec.tolerance, self._listener, selection)
                try:
                    run.evidence = trial.observe(run.call, wanted)
                finally:
                    run.outputs, run.seconds = trial.outputs, trial.seconds
        except LeaseError as error:
            run.failure = LoaderFailed(str(error))
        except LoaderFailed as failure:
            run.failure = failure
        except pytest.fail.Exception as error:  # raised by a signal handler, as pytest-timeout's
            run.failure, run.interrupted = self._interruption(error), True

    def _interruption(self, error: BaseException) -> LoaderFailed:
        """Return the failure of a loader that a time limit has ended, so that its other items do not run it again."""
        ranks = self._listener.take_interruption()
        if ranks is None:  # pytest was not waiting for an answer of ranks
            while_starting = " while ranks were starting" if self._listener.is_starting else ""
            return LoaderFailed(first_line(str(error)).rstrip(".") + while_starting)
        return LoaderFailed(ranks.summary, str(ranks), place=ranks.place)

    def _show_output(self, item: pytest.Item, when: str, run: LoaderRun) -> None:
        """Add the ranks' output to the report of the loader's first item that does not pass."""
        if not run.output_shown:
            run.output_shown = True
            ranks = item.stash[LOADER_ITEM].world.ranks
            self._listener.show(item, when, zip(ranks, run.outputs, strict=False))
