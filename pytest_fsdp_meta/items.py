"""From pytest items to trials and back: what is sent to the ranks, and what their verdict means for the item."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import pytest

from pytest_fsdp_meta._pytest_private import parameters
from pytest_fsdp_meta.catalogue import Catalogue, Verdict, judge
from pytest_fsdp_meta.collection import ARGUMENT, SKIPPED, Case, case_of
from pytest_fsdp_meta.evidence import Evidence
from pytest_fsdp_meta.reports.listener import Ear
from pytest_fsdp_meta.reports.terminal import describe_error, describe_failure
from pytest_fsdp_meta.sending import again, pack_call
from pytest_fsdp_meta.settings import Settings
from pytest_fsdp_meta.trial import LoaderFailed, Trial
from pytest_fsdp_meta.worlds import Engine


@dataclass
class _Run:
    """One loader in one world: its selected checks, and what came of it."""

    checks: list[str] = field(default_factory=list)
    evidence: Evidence | None = None
    failure: LoaderFailed | None = None
    told_by: dict[str, str] = field(default_factory=dict)
    """Errors that were told in full, and the item that told them."""
    outputs: list[str] = field(default_factory=list)
    output_shown: bool = False

    @property
    def over(self) -> bool:
        return self.evidence is not None or self.failure is not None


class Conductor:
    """Keeps the run of each loader between its items. One per pytest session."""

    def __init__(self, settings: Settings, catalogue: Catalogue, engine: Engine, ear: Ear) -> None:
        self.settings = settings
        self.catalogue = catalogue
        self.engine = engine
        self.ear = ear
        self._runs: dict[object, _Run] = {}

    def plan(self, items: Iterable[pytest.Item]) -> None:
        """Notes which checks are selected, so that each loader observes what they need and no more."""
        for item in items:
            case = case_of(item)
            if case is not None and case.check not in case.order.skip:
                self._run(item, case).checks.append(case.check)

    def before_fixtures(self, item: pytest.Item, case: Case) -> None:
        """Spares the fixtures of an item whose loader has run."""
        assert isinstance(item, pytest.Function)
        if self._run(item, case).over:
            item.fixturenames = []

    def after_fixtures(self, item: pytest.Item, case: Case) -> None:
        """Runs the loader if it has not run, and takes the item's verdict; an error of the ranks is raised here."""
        run = self._run(item, case)
        if not run.over:
            self._observe(item, case, run)
        if run.failure is not None:
            self._raise_failure(item, case, run, run.failure)
        verdict = self._verdict(case, run)
        if verdict.status == "failed":
            self._show_output(item, run)
        if verdict.status == "error":
            self._raise_error(item, case, run, verdict.reason, verdict.detail)

    def call(self, item: pytest.Item, case: Case) -> None:
        """Turns the verdict into pytest's outcome; ``xfail`` is strict and covers findings only."""
        run = self._run(item, case)
        verdict = self._verdict(case, run)
        expected = case.order.xfail.get(case.check)
        if verdict.status == "skipped":
            _skip(item, verdict.reason)
        if verdict.status == "failed":
            if expected is not None:
                pytest.xfail(expected)
            assert run.evidence is not None
            pytest.fail(
                describe_failure(verdict, str(run.evidence.world), again(item, self.settings.given)), pytrace=False
            )
        if expected is not None:
            pytest.fail(
                f"{case.check} passes, but xfail expects it to fail ({expected}); remove it from xfail", pytrace=False
            )

    def _run(self, item: pytest.Item, case: Case) -> _Run:
        assert isinstance(item, pytest.Function)
        assert item.parent is not None
        # Items of one loader differ in the check only. Names alone do not tell ("a", "b-c") from ("a-b", "c").
        name = tuple(item.name.rsplit(case.check, 1))
        values = tuple((name, id(value)) for name, value in parameters(item).items() if name != ARGUMENT)
        key = (item.parent.nodeid, name, values, tuple(case.spec.mesh.items()))
        return self._runs.setdefault(key, _Run())

    def _verdict(self, case: Case, run: _Run) -> Verdict:
        assert run.evidence is not None
        return judge(self.catalogue[case.check], run.evidence, self.catalogue)

    def _observe(self, item: pytest.Item, case: Case, run: _Run) -> None:
        assert isinstance(item, pytest.Function)
        trial = Trial(case.spec, self.engine, case.order.steps, case.order.tolerance, self.ear)
        # Fixtures may have extended the search path since collection.
        self.engine.sources = replace(self.engine.sources, path=tuple(sys.path))
        try:
            run.evidence = trial.observe(pack_call(item), self.catalogue.observations(run.checks or [case.check]))
        except LoaderFailed as failure:
            run.failure = failure
        run.outputs = trial.outputs

    def _raise_failure(self, item: pytest.Item, case: Case, run: _Run, failure: LoaderFailed) -> None:
        if failure.skipped is not None:
            _skip(item, failure.skipped)
        self._raise_error(item, case, run, failure.summary, str(failure))

    def _raise_error(self, item: pytest.Item, case: Case, run: _Run, summary: str, story: str) -> None:
        """In full for the first item of the loader, in one line for the others."""
        told_by = run.told_by.setdefault(story, item.name)
        if told_by != item.name:
            pytest.fail(f"{case.check} could not be judged, see {told_by}: {summary}", pytrace=False)
        self._show_output(item, run)
        pytest.fail(
            describe_error(self.catalogue[case.check], summary, story, again(item, self.settings.given)), pytrace=False
        )

    def _show_output(self, item: pytest.Item, run: _Run) -> None:
        """What the ranks wrote, with the first item of the loader that does not pass; unless it was shown live."""
        if not run.output_shown and not self.ear.live:
            run.output_shown = True
            for rank, text in enumerate(run.outputs):
                if text.strip():
                    item.add_report_section("setup", f"rank {rank}", text)


def _skip(item: pytest.Item, reason: str) -> None:
    item.stash[SKIPPED] = reason
    pytest.skip(reason)
