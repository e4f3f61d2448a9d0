"""From pytest items to trials and back: what is sent to the ranks, and what their verdict means for the item."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from pytest_fsdp_meta._pytest_private import parameters, requested_fixtures
from pytest_fsdp_meta.calls import Call
from pytest_fsdp_meta.catalogue import Catalogue, Verdict, judge
from pytest_fsdp_meta.collection import ARGUMENT, Case, case_of
from pytest_fsdp_meta.evidence import Evidence
from pytest_fsdp_meta.reports.listener import Ear
from pytest_fsdp_meta.reports.terminal import describe_error, describe_failure
from pytest_fsdp_meta.settings import Settings
from pytest_fsdp_meta.trial import ON_RANKS, LoaderFailed, Trial
from pytest_fsdp_meta.worlds import Engine, Sources

SKIPPED = pytest.StashKey[str]()
"""Why an item is skipped, where the place of the test should be told instead of that of ``pytest.skip``."""


class Unsendable(LoaderFailed):
    """The loader or a fixture value cannot be pickled; the message says what to do."""


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

    def plan(self, items: Iterable[pytest.Item], config: pytest.Config) -> None:
        """Notes which checks are selected, so that each loader observes what they need and no more.

        Starts importing torch and the test modules beside whatever runs first.
        """
        modules: dict[str, str] = {}
        for item in items:
            case = case_of(item)
            if case is not None and case.check not in case.order.skip:
                assert isinstance(item, pytest.Function)
                self._run(item, case).checks.append(case.check)
                modules[item.module.__name__] = str(item.path)
        if modules:
            named = config.hook.pytest_fsdp_preload()
            downstream = [name for names in named for name in ([names] if isinstance(names, str) else names)]
            self.engine.sources = Sources(tuple(sys.path), modules | _conftests(config))
            self.engine.modules = [*ON_RANKS, *downstream]
            self.engine.test_modules = list(modules)
            self.engine.start()

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
            pytest.fail(describe_failure(verdict, str(run.evidence.world), self.again(item)), pytrace=False)
        if expected is not None:
            pytest.fail(
                f"{case.check} passes, but xfail expects it to fail ({expected}); remove it from xfail", pytrace=False
            )

    def again(self, item: pytest.Item) -> str:
        """A shell command that runs this one item again from where pytest was started."""
        path = os.path.relpath(item.path, item.config.invocation_params.dir)
        # Not from the node id, to which xdist may append a group.
        names = [node.name for node in item.listchain() if isinstance(node, (pytest.Class, pytest.Function))]
        python = _interpreter(item.config.invocation_params.dir)
        return shlex.join([python, "-m", "pytest", "::".join([path, *names]), *self.settings.given])

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
            run.evidence = trial.observe(pack_loader(item), self.catalogue.observations(run.checks or [case.check]))
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
        pytest.fail(describe_error(self.catalogue[case.check], summary, story, self.again(item)), pytrace=False)

    def _show_output(self, item: pytest.Item, run: _Run) -> None:
        """What the ranks wrote, with the first item of the loader that does not pass; unless it was shown live."""
        if not run.output_shown and not self.ear.live:
            run.output_shown = True
            for rank, text in enumerate(run.outputs):
                if text.strip():
                    item.add_report_section("setup", f"rank {rank}", text)


def _interpreter(cwd: Path) -> str:
    """How a shell in ``cwd`` calls this Python: "python", unless that is another one."""
    if os.path.abspath(shutil.which("python") or "") == os.path.abspath(sys.executable):
        return "python"
    near = os.path.relpath(sys.executable, cwd)
    return sys.executable if near.startswith("..") else near


def _conftests(config: pytest.Config) -> dict[str, str]:
    """Files by module name. Of several that are all called "conftest", the one that this name stands for."""
    names = {getattr(plugin, "__name__", "") for plugin in config.pluginmanager.get_plugins()}
    modules = {name: sys.modules.get(name) for name in names if name.rpartition(".")[2] == "conftest"}
    return {name: module.__file__ for name, module in modules.items() if module is not None and module.__file__}


def _skip(item: pytest.Item, reason: str) -> None:
    item.stash[SKIPPED] = reason
    pytest.skip(reason)


def pack_loader(item: pytest.Function) -> Call:
    """The loader and its fixture values, pickled one by one. Raises Unsendable."""
    import cloudpickle

    wanted = [name for name in requested_fixtures(item) if name != ARGUMENT]
    arguments: dict[str, bytes] = {}
    for name in wanted:
        if name == "fsdp":
            continue
        value = item.funcargs[name]
        try:
            arguments[name] = cloudpickle.dumps(value)
        except Exception as error:
            raise Unsendable(_unsendable(name, value, error)) from error
    try:
        function = cloudpickle.dumps(item.obj)
    except Exception as error:
        what = "the loader and its instance (self)" if item.cls else "the loader"
        raise Unsendable(f"{what} cannot be sent to the ranks: {type(error).__name__}: {error}") from error
    return Call(function, arguments, "fsdp" if "fsdp" in wanted else None)


def _unsendable(name: str, value: Any, error: Exception) -> str:
    return (
        f"fixture {name!r} gives a {type(value).__name__}, which cannot be sent to the ranks "
        f"({type(error).__name__}: {error}); return plain data, such as a path or a config, and build the rest in the "
        "loader"
    )
