"""From pytest items to trials and back: what is sent to the ranks, and what their verdict means for the item."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import pytest

from pytest_fsdp_meta.catalogue import Catalogue, Verdict, judge
from pytest_fsdp_meta.collection import ARGUMENT, Case, case_of
from pytest_fsdp_meta.evidence import Evidence
from pytest_fsdp_meta.reports.terminal import describe_error, describe_failure
from pytest_fsdp_meta.settings import Settings
from pytest_fsdp_meta.trial import Loader, LoaderFailed, Trial
from pytest_fsdp_meta.worlds import Preload

VERDICT = pytest.StashKey[Verdict]()


@dataclass
class _Run:
    """One loader in one world: its selected checks, and what came of it."""

    checks: list[str] = field(default_factory=list)
    evidence: Evidence | None = None
    failure: LoaderFailed | None = None
    told_by: str = ""
    outputs: list[str] = field(default_factory=list)
    output_shown: bool = False

    @property
    def over(self) -> bool:
        return self.evidence is not None or self.failure is not None


class Conductor:
    """Keeps the run of each loader between its items. One per pytest session."""

    def __init__(self, settings: Settings, catalogue: Catalogue, preload: Preload) -> None:
        self.settings = settings
        self.catalogue = catalogue
        self.preload = preload
        self._runs: dict[str, _Run] = {}

    def plan(self, items: Iterable[pytest.Item]) -> None:
        """Notes which checks are selected, so that each loader observes what they need and no more."""
        for item in items:
            case = case_of(item)
            if case is not None and case.check not in case.order.skip:
                self._run(item, case).checks.append(case.check)

    def before_fixtures(self, item: pytest.Item, case: Case) -> None:
        """Spares the fixtures of an item whose loader has run; ``fsdp`` itself exists on the ranks only."""
        assert isinstance(item, pytest.Function)
        item.funcargs["fsdp"] = None
        if self._run(item, case).over:
            item.fixturenames = []

    def after_fixtures(self, item: pytest.Item, case: Case) -> None:
        """Runs the loader if it has not run, and takes the item's verdict; an error of the ranks is raised here."""
        run = self._run(item, case)
        if not run.over:
            self._observe(item, case, run)
        if run.failure is not None:
            self._raise_failure(item, case, run)
        assert run.evidence is not None
        verdict = judge(self.catalogue[case.check], run.evidence, self.catalogue)
        item.stash[VERDICT] = verdict
        if verdict.status in ("failed", "error"):
            self._show_output(item, run)
        if verdict.status == "error":
            pytest.fail(describe_error(verdict.check, verdict.reason, verdict.detail, self.again(item)), pytrace=False)

    def call(self, item: pytest.Item, case: Case) -> None:
        """Turns the verdict into pytest's outcome; ``xfail`` is strict and covers findings only."""
        verdict = item.stash[VERDICT]
        expected = case.order.xfail.get(case.check)
        if verdict.status == "skipped":
            pytest.skip(verdict.reason)
        if verdict.status == "failed":
            if expected is not None:
                pytest.xfail(expected)
            run = self._run(item, case)
            assert run.evidence is not None
            pytest.fail(describe_failure(verdict, str(run.evidence.world), self.again(item)), pytrace=False)
        if expected is not None:
            pytest.fail(
                f"{case.check} passes, but xfail expects it to fail ({expected}); remove it from xfail", pytrace=False
            )

    def again(self, item: pytest.Item) -> str:
        """A shell command that runs this one item again from where pytest was started."""
        path = os.path.relpath(item.path, item.config.invocation_params.dir)
        _, _, inner = item.nodeid.partition("::")
        words = ["python", "-m", "pytest", f"{path}::{inner}", *self.settings.given]
        return shlex.join(words)

    def _run(self, item: pytest.Item, case: Case) -> _Run:
        return self._runs.setdefault(loader_id(item.nodeid, case.check), _Run())

    def _observe(self, item: pytest.Item, case: Case, run: _Run) -> None:
        assert isinstance(item, pytest.Function)
        trial = Trial(case.spec, self.preload, case.order.steps, case.order.tolerance)
        try:
            run.evidence = trial.observe(pack_loader(item), self._wanted(run.checks or [case.check]))
        except LoaderFailed as failure:
            run.failure, run.told_by = failure, item.name
        run.outputs = trial.outputs

    def _wanted(self, checks: Iterable[str]) -> set[str]:
        """The observations that the checks read, and those of the more basic checks that they look at first."""
        wanted: set[str] = set()
        for id in checks:
            check = self.catalogue[id]
            wanted |= {*check.needs, *check.uses} | self._wanted(check.after)
        return wanted

    def _raise_failure(self, item: pytest.Item, case: Case, run: _Run) -> None:
        """In full for the first item of the loader, in one line for the others."""
        assert run.failure is not None
        if run.failure.skipped is not None:
            pytest.skip(run.failure.skipped)
        check = self.catalogue[case.check]
        if run.told_by == item.name:
            self._show_output(item, run)
            pytest.fail(describe_error(check, run.failure.summary, str(run.failure), self.again(item)), pytrace=False)
        pytest.fail(f"the loader failed, see {run.told_by}: {run.failure.summary}", pytrace=False)

    @staticmethod
    def _show_output(item: pytest.Item, run: _Run) -> None:
        """What the ranks wrote, with the first item of the loader that does not pass."""
        if not run.output_shown:
            run.output_shown = True
            for rank, text in enumerate(run.outputs):
                if text.strip():
                    item.add_report_section("setup", f"rank {rank}", text)


def loader_id(nodeid: str, check: str) -> str:
    """The node id without the check: what all items of one loader in one world share."""
    return nodeid.removesuffix(f"{check}]").rstrip("-[")


def pack_loader(item: pytest.Function) -> Loader:
    """The loader and its fixture values, pickled one by one. Fails the item for a value that cannot be sent."""
    import cloudpickle

    arguments: dict[str, bytes] = {}
    wanted = [name for name in item._fixtureinfo.argnames if name != ARGUMENT]
    for name in wanted:
        if name == "fsdp":
            continue
        value = item.funcargs[name]
        try:
            arguments[name] = cloudpickle.dumps(value)
        except Exception as error:
            pytest.fail(_unsendable(name, value, error), pytrace=False)
    try:
        function = cloudpickle.dumps(item.obj)
    except Exception as error:
        pytest.fail(f"{item.name}: the loader cannot be sent to the ranks: {type(error).__name__}: {error}", pytrace=False)
    return Loader(function, arguments, "fsdp" if "fsdp" in wanted else None)


def _unsendable(name: str, value: Any, error: Exception) -> str:
    return (
        f"fixture {name!r} gives a {type(value).__name__}, which cannot be sent to the ranks "
        f"({type(error).__name__}: {error}); return plain data, such as a path or a config, and build the rest in the loader"
    )
