"""Items for stored evidence: ``pytest DIR/evidence`` judges it with the current catalogue, without ranks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path

import pytest

from pytest_fsdp_meta.catalogue import Catalogue, Selection, judge
from pytest_fsdp_meta.evidence import store
from pytest_fsdp_meta.plugin.markers import ConformanceSpec
from pytest_fsdp_meta.plugin.outcomes import Outcome, ReportAttacher, decides_status, outcome_of, raise_outcome
from pytest_fsdp_meta.plugin.rerun_command import command
from pytest_fsdp_meta.reports.run_records import ItemContext
from pytest_fsdp_meta.reports.schema import CheckRecord
from pytest_fsdp_meta.reports.summary import summarise
from pytest_fsdp_meta.text import first_line, first_of

CATALOGUE = pytest.StashKey[Catalogue]()
GIVEN = pytest.StashKey[Sequence[str]]()
"""The options of pytest's command line that rerun commands repeat."""


def register(config: pytest.Config, catalogue: Catalogue, given: Sequence[str]) -> None:
    """Set what the items of this session are judged by, and the options that their rerun commands repeat."""
    config.stash[CATALOGUE] = catalogue
    config.stash[GIVEN] = given


def collect_file(path: Path, parent: pytest.Collector) -> EvidenceFile | None:
    """Return the collector of a file of stored evidence, None for any other file."""
    return EvidenceFile.from_parent(parent, path=path) if is_asked_for(path, parent.config) else None


def attach(item: pytest.Item, call: pytest.CallInfo[None], report: pytest.TestReport, attacher: ReportAttacher) -> None:
    """Put the result of an item of stored evidence on pytest's report of it; leave other items alone."""
    if isinstance(item, EvidenceItem) and decides_status(report):
        item.attach_to(report, attacher, call.excinfo.value if call.excinfo else None)


def is_asked_for(path: Path, config: pytest.Config) -> bool:
    """Return whether the command line names this file of stored evidence, or its folder.

    Evidence that pytest merely finds, for example in a report within the project, is not collected.
    """
    return path.name.endswith(store.SUFFIX) and bool(_named(config) & {path.resolve(), path.resolve().parent})


def is_judged(folder: Path, config: pytest.Config) -> bool:
    """Return whether this run judges evidence from the folder."""
    return any(path == folder.resolve() or path.parent == folder.resolve() for path in _named(config))


def _named(config: pytest.Config) -> set[Path]:
    return {(config.invocation_params.dir / argument.partition("::")[0]).resolve() for argument in config.args}


class EvidenceFile(pytest.File):
    """A file with the stored evidence of one loader in one world."""

    def collect(self) -> Iterable[pytest.Item]:
        try:
            self.stored = store.read_evidence(self.path)
        except ValueError as error:
            yield InvalidEvidence.from_parent(self, name="unreadable", message=str(error))
            return
        ids = self.config.stash[CATALOGUE].ids()
        if removed := [check for check in self.stored.known if check not in ids]:
            message = f"{self.stored.loader}: the catalogue no longer has {first_of(removed)}, which the stored run had"
            try:
                self.warn(pytest.PytestWarning(message))
            except pytest.PytestWarning:  # with -W error: an error of this file, not of the whole collection
                yield InvalidEvidence.from_parent(self, name="removed", message=message)
        try:
            self._judge_all(self.config.stash[CATALOGUE])
        except Exception as error:  # every field has its type, but an edited or damaged file may contradict itself
            message = f"{self.path}: inconsistent evidence ({type(error).__name__}: {first_line(error)})"
            yield InvalidEvidence.from_parent(self, name="inconsistent", message=message)
            return
        for check in self._offered():
            item = EvidenceItem.from_parent(self, name=check)
            if check in self.stored.skip:
                item.add_marker(pytest.mark.skip(reason=self.stored.skip[check]))
            yield item

    def _offered(self) -> tuple[str, ...]:
        """Return the checks that the author did not leave out, and those that the catalogue has gained since."""
        ids = self.config.stash[CATALOGUE].ids_for(bool(self.stored.evidence.world.simulated))
        return tuple(check for check in ids if check not in self.stored.known or check in self.stored.offered)

    def _judge_all(self, catalogue: Catalogue) -> None:
        """Judge every check twice, with all others and with none: the session's selection is not known yet.

        May raise anything if the evidence is inconsistent. That is found out before the first item exists, so that it
        is reported once.
        """
        summarise(self.stored.evidence)
        for check in catalogue:
            for selection in (Selection(), Selection(frozenset())):
                judge(check, self.stored.evidence, catalogue, selection)

    @cached_property
    def selection(self) -> Selection:
        """The checks of this file that the session runs. Only after collection."""
        items = [item for item in self.session.items if isinstance(item, EvidenceItem) and item.parent is self]
        selected = frozenset(item.name for item in items if item.name not in self.stored.skip)
        xfailing = selected.intersection(self.stored.xfail)
        return Selection(selected - xfailing, xfailing)

    def spec(self) -> ConformanceSpec:
        """Return what the author of the loader said about its checks."""
        stored = self.stored
        return ConformanceSpec((dict(stored.evidence.world.mesh),), self._offered(), stored.skip, stored.xfail)


class InvalidEvidence(pytest.Item):
    """A failing item for a file that cannot be judged, in whole or in part; other files still are."""

    def __init__(self, *, message: str, **arguments: object) -> None:
        super().__init__(**arguments)  # type: ignore[arg-type]
        self._message = message

    def runtest(self) -> None:
        pytest.fail(self._message, pytrace=False)


class EvidenceItem(pytest.Item):
    """One check of stored evidence."""

    parent: EvidenceFile
    outcome: Outcome | None = None

    def setup(self) -> None:
        """Raise an error of the stored run here, so that pytest counts it as an error again."""
        catalogue = self.config.stash[CATALOGUE]
        verdict = judge(catalogue[self.name], self.parent.stored.evidence, catalogue, self.parent.selection)
        self.outcome = outcome_of(verdict, self.parent.stored.evidence.world, self.rerun_command)
        if verdict.status == "error":
            pytest.fail(self.outcome.message, pytrace=False)

    def runtest(self) -> None:
        assert self.outcome is not None
        raise_outcome(self, self.outcome, self.name, self.parent.stored.xfail.get(self.name))

    def rerun_command(self) -> str:
        return command(self.config, self.path, [self.name], self.config.stash[GIVEN])

    def context(self) -> ItemContext:
        """Return the item as it reports itself, before it has run."""
        return ItemContext(
            key=self.parent.nodeid,
            loader=self.parent.stored.loader,
            check=CheckRecord(self.name, "not run", self.nodeid, again=self.rerun_command()),
            world=self.parent.stored.evidence.world,
            offered=self.parent.spec().expected,
        )

    def attach_to(self, report: pytest.TestReport, attacher: ReportAttacher, raised: BaseException | None) -> None:
        """Attach the status of this item to pytest's report. The evidence is not stored once more."""
        evidence, spec = self.parent.stored.evidence, self.parent.spec()
        attacher.attach(self, report, self.context(), spec, self.outcome, raised, evidence)

    def reportinfo(self) -> tuple[str, int, str]:
        return str(self.path), 0, f"{self.parent.stored.loader}[{self.name}]"
