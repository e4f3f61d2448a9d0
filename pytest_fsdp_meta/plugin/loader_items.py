"""From pytest items to trials and back: what is sent to the ranks, and what their verdict means for the item."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from pytest_fsdp_meta.catalogue import Catalogue, judge
from pytest_fsdp_meta.evidence import Evidence
from pytest_fsdp_meta.loader.call import ASSUME, SKIPS, Call
from pytest_fsdp_meta.plugin.collection import CheckCase, case_of, values_of
from pytest_fsdp_meta.plugin.hypothesis_given import draw, given_test, notes, reject, relax, same_draws
from pytest_fsdp_meta.plugin.node_ids import display_name, shared_name
from pytest_fsdp_meta.plugin.outcomes import Outcome, ReportAttacher, outcome_of, settle, skip
from pytest_fsdp_meta.plugin.pickling import Unsendable, pack_call, pack_drawn
from pytest_fsdp_meta.plugin.preloading import refresh
from pytest_fsdp_meta.plugin.rank_io.listener import RankListener
from pytest_fsdp_meta.plugin.rerun_command import again
from pytest_fsdp_meta.plugin.settings import Settings
from pytest_fsdp_meta.plugin.xdist_workers import Devices
from pytest_fsdp_meta.reports.run_records import ItemContext
from pytest_fsdp_meta.reports.schema import CheckRecord
from pytest_fsdp_meta.reports.terminal import describe_error
from pytest_fsdp_meta.trial import LoaderFailed, Trial, ranks_of, world_facts
from pytest_fsdp_meta.worlds import Engine, LeaseError

OUTCOME = pytest.StashKey[Outcome]()
SHOWN = pytest.StashKey["LoaderRun"]()
"""Of what Hypothesis drew, the example that the outcome is of."""


@dataclass
class LoaderRun:
    """One loader in one world: its selected checks, and what came of it."""

    checks: list[str] = field(default_factory=list)
    call: Call | None = None
    evidence: Evidence | None = None
    failure: LoaderFailed | None = None
    told_by: dict[str, str] = field(default_factory=dict)
    """Errors that were told in full, and the item that told them."""
    seconds: Mapping[str, float] = field(default_factory=dict)
    outputs: list[str] = field(default_factory=list)
    output_shown: bool = False
    seed: int = field(default_factory=lambda: secrets.randbits(64))
    examples: dict[object, LoaderRun] = field(default_factory=dict)
    """By what Hypothesis drew, where the loader takes drawn arguments."""

    @property
    def over(self) -> bool:
        return self.evidence is not None or self.failure is not None


class ExampleFailed(Exception):
    """An example that is broken or could not be judged, for Hypothesis to make smaller."""

    def __init__(self, outcome: Outcome, run: LoaderRun) -> None:
        self.outcome = outcome
        self.run = run
        super().__init__(outcome.told.partition("\n")[0])


class LoaderSession:
    """Keeps the run of each loader between its items. One per pytest session."""

    def __init__(
        self,
        settings: Settings,
        catalogue: Catalogue,
        engine: Engine,
        ear: RankListener,
        devices: Devices,
        teller: ReportAttacher,
    ) -> None:
        self.settings = settings
        self.catalogue = catalogue
        self.engine = engine
        self.ear = ear
        self.devices = devices
        self.teller = teller
        self._runs: dict[object, LoaderRun] = {}

    def plan(self, items: Iterable[pytest.Item]) -> None:
        """Notes which checks are selected, so that each loader observes what they need and no more."""
        for item in items:
            case = case_of(item)
            if case is not None and case.check not in case.order.skip:
                self._run(item, case).checks.append(case.check)

    @contextmanager
    def running(self, item: pytest.Item, case: CheckCase) -> Iterator[None]:
        """Around everything that an item does: a loader that has ended a worker of xdist is not run by the next one."""
        run = self._run(item, case)
        if run.over:
            yield
            return
        with self.devices.running("\0".join(shared_name(item, case)), item) as (worker, where):
            if worker:
                summary = f"worker {worker} ended while the loader or its fixtures ran, so it is not run again"
                run.failure, run.told_by = LoaderFailed(summary), {summary: where}
            yield

    def before_fixtures(self, item: pytest.Item, case: CheckCase) -> None:
        """Spares the fixtures of an item whose loader has run."""
        assert isinstance(item, pytest.Function)
        if self._run(item, case).over:
            item.fixturenames = []

    def after_fixtures(self, item: pytest.Item, case: CheckCase) -> None:
        """Runs the loader if it has not run, and takes the item's verdict; an error of the ranks is raised here.

        A loader with ``@given`` is only made ready: its examples are drawn in the call.
        """
        assert isinstance(item, pytest.Function)
        run = self._run(item, case)
        if run.call is None and not run.over:
            try:
                run.call = pack_call(item)
            except LoaderFailed as failure:
                run.failure = failure
        drawn = given_test(item.obj) is not None
        if not drawn and not run.over:
            self._observe(item, case, run)
        if run.over:
            outcome = item.stash[OUTCOME] = self._outcome(item, case, run)
            if run.failure is not None and outcome.status == "skipped":
                skip(item, outcome.told)
            if outcome.status == "failed":
                self._show_output(item, "setup", run)
            if outcome.status == "error":
                pytest.fail(outcome.told, pytrace=False)

    def call(self, item: pytest.Item, case: CheckCase) -> None:
        """Turns the verdict into pytest's outcome; ``xfail`` is strict and covers findings only."""
        assert isinstance(item, pytest.Function)
        test = given_test(item.obj)
        run = self._run(item, case)
        outcome = self._outcome(item, case, run) if test is None else self._draw(item, case, run, test)
        item.stash[OUTCOME] = outcome
        settle(item, outcome, case.check, case.order.xfail.get(case.check))

    def tell(self, item: pytest.Item, case: CheckCase, report: pytest.TestReport, raised: BaseException | None) -> None:
        """Puts on pytest's report what has become of the item, for whoever writes the run down."""
        run = item.stash.get(SHOWN, self._run(item, case))
        failure = run.failure
        name = display_name(item, case)
        context = ItemContext(
            key=name,
            loader=name,
            check=CheckRecord(case.check, "not run", again=again(item, self.settings.given)),
            world=run.evidence.world if run.evidence else world_facts(case.spec),
            offered=case.order.expected,
            error=failure.summary if failure and not failure.vote else "",
            seconds=run.seconds,
        )
        # An example that Hypothesis drew is not stored: it does not stand for the loader.
        known = () if SHOWN in item.stash else self.catalogue.ids()
        outcome = item.stash.get(OUTCOME, None)
        self.teller.attach(item, report, context, case.order, outcome, raised, run.evidence, known)

    def _draw(self, item: pytest.Function, case: CheckCase, run: LoaderRun, test: Callable[..., Any]) -> Outcome:
        """The outcome over all examples; the items of one loader draw the same, and each example is loaded once."""
        call, seen = run.call, list[tuple[Outcome, LoaderRun]]()
        assert call is not None
        values = {name: item.funcargs[name] for name in call.names}
        relax(test)
        if item.config.getoption("--hypothesis-seed", None) is None:
            same_draws(test, run.seed)

        def judge_example(drawn: dict[str, Any]) -> None:
            packed = {name: pack_drawn(name, value) for name, value in drawn.items()}
            example = run.examples.setdefault(tuple(packed.items()), LoaderRun(run.checks, call.with_drawn(packed)))
            if not example.over:
                self._observe(item, case, example)
            if example.failure is not None and example.failure.vote == ASSUME:
                reject()
            seen.append((self._outcome(item, case, example), example))
            if seen[-1][0].status in ("failed", "error"):
                raise ExampleFailed(*seen[-1])

        try:
            draw(test, values, judge_example, key="\0".join(shared_name(item, case)))
        except ExampleFailed as fallen:
            self._show_output(item, "call", fallen.run)
            item.stash[SHOWN] = fallen.run
            example = notes(fallen)
            detail = "\n\n".join(filter(None, [fallen.outcome.detail, example]))
            return replace(fallen.outcome, told=f"{fallen.outcome.told}\n\n{example}", detail=detail)
        except Unsendable as error:
            return Outcome("error", str(error), reason=str(error))
        why = "Hypothesis has drawn no example; see the phases in its settings"
        nothing = Outcome("skipped", why, reason=why), run
        outcome, item.stash[SHOWN] = next((one for one in seen if one[0].status != "skipped"), (nothing, *seen)[-1])
        return outcome

    def _outcome(self, item: pytest.Item, case: CheckCase, run: LoaderRun) -> Outcome:
        """What came of one run, for one item."""
        if run.failure is not None:
            if run.failure.vote in SKIPS:
                return Outcome("skipped", run.failure.reason, reason=run.failure.reason)
            return self._error(item, case, run, run.failure.summary, str(run.failure))
        assert run.evidence is not None
        verdict = judge(self.catalogue[case.check], run.evidence, self.catalogue)
        if verdict.status == "error":
            return replace(self._error(item, case, run, verdict.reason, verdict.detail), verdict=verdict)
        return outcome_of(verdict, run.evidence.world, lambda: again(item, self.settings.given))

    def _error(self, item: pytest.Item, case: CheckCase, run: LoaderRun, summary: str, story: str) -> Outcome:
        """In full for the first item of the loader, in one line for the others."""
        told_by = run.told_by.setdefault(story, item.name)
        if told_by != item.name:
            told = f"{case.check} could not be judged, see {told_by}: {summary}"
            return Outcome("error", told, reason=summary, repeats=True)
        self._show_output(item, "setup", run)
        check = self.catalogue[case.check]
        told = describe_error(check, summary, story, again(item, self.settings.given))
        return Outcome("error", told, reason=summary, detail=story)

    def _run(self, item: pytest.Item, case: CheckCase) -> LoaderRun:
        assert isinstance(item, pytest.Function)
        key = (shared_name(item, case), values_of(item), tuple(case.spec.mesh.items()))
        return self._runs.setdefault(key, LoaderRun())

    def _observe(self, item: pytest.Item, case: CheckCase, run: LoaderRun) -> None:
        assert run.call is not None
        wanted = self.catalogue.observations(run.checks or [case.check])
        refresh(self.engine)
        try:
            with self.devices.leased(case.spec, item, ranks_of(case.spec, wanted)) as spec:
                trial = Trial(spec, self.engine, case.order.steps, case.order.tolerance, self.ear)
                try:
                    run.evidence = trial.observe(run.call, wanted)
                finally:
                    run.outputs, run.seconds = trial.outputs, trial.seconds
        except LeaseError as error:
            run.failure = LoaderFailed(str(error))
        except LoaderFailed as failure:
            run.failure = failure

    def _show_output(self, item: pytest.Item, when: str, run: LoaderRun) -> None:
        """What the ranks wrote, with the first item of the loader that does not pass."""
        if not run.output_shown:
            run.output_shown = True
            self.ear.show(item, when, run.outputs)
