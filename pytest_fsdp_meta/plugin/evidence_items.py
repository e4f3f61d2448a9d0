"""Items for stored evidence: ``pytest DIR/evidence`` judges it with the current catalogue, without ranks."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from pathlib import Path

import pytest

from pytest_fsdp_meta.catalogue import Catalogue, Selection, judge
from pytest_fsdp_meta.evidence import Evidence, store
from pytest_fsdp_meta.plugin.items import CheckItem, Shared
from pytest_fsdp_meta.plugin.markers import ConformanceSpec
from pytest_fsdp_meta.plugin.outcomes import describe_exception, outcome_of
from pytest_fsdp_meta.plugin.session import SESSION
from pytest_fsdp_meta.reports.run_records import ItemContext
from pytest_fsdp_meta.reports.schema import CheckRecord
from pytest_fsdp_meta.reports.summary import summarise
from pytest_fsdp_meta.text import first_of


def collect_file(path: Path, parent: pytest.Collector) -> EvidenceFile | None:
    """Return the collector of a file of stored evidence if the command line names the file or its folder, else None.

    Evidence that pytest merely finds, for example in a report within the project, is not collected.
    """
    if not path.name.endswith(store.SUFFIX) or not _named(parent.config) & {path.resolve(), path.resolve().parent}:
        return None
    return EvidenceFile.from_parent(parent, path=path)


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
        catalogue = self.config.stash[SESSION].catalogue
        ids = catalogue.ids()
        if removed := [check for check in self.stored.known if check not in ids]:
            message = f"{self.stored.loader}: the catalogue no longer has {first_of(removed)}, which the stored run had"
            try:
                self.warn(pytest.PytestWarning(message))
            except pytest.PytestWarning:  # with -W error: an error of this file, not of the whole collection
                yield InvalidEvidence.from_parent(self, name="removed", message=message)
        if problem := self._inconsistency(catalogue):
            message = f"{self.path}: inconsistent evidence ({problem})"
            yield InvalidEvidence.from_parent(self, name="inconsistent", message=message)
            return
        ids = catalogue.ids_for(bool(self.stored.evidence.world.simulated))
        # Those that the author did not leave out, and those that the catalogue has gained since.
        offered = tuple(check for check in ids if check not in self.stored.known or check in self.stored.offered)
        stored, shared = self.stored, Shared()
        spec = ConformanceSpec((dict(stored.evidence.world.mesh),), offered, stored.skip, stored.xfail)
        for check in offered:
            item = EvidenceItem.from_parent(self, name=check)
            item.check, item.spec, item.shared = check, spec, shared
            if check in self.stored.skip:
                item.add_marker(pytest.mark.skip(reason=self.stored.skip[check]))
            yield item

    def _inconsistency(self, catalogue: Catalogue) -> str:
        """Return what a judge raises, before the first item exists, so that it is reported once; else "".

        Every field has its type, but an edited or damaged file may contradict itself. Each check is judged twice, with
        all others and with none: the session's selection is not known yet.
        """
        try:
            summarise(self.stored.evidence)
        except Exception as error:
            return describe_exception(error)
        selections = Selection(), Selection(frozenset())
        verdicts = (judge(check, self.stored.evidence, catalogue, one) for check in catalogue for one in selections)
        return next((found.detail.rpartition("\n")[2] for found in verdicts if found.why == "raised"), "")

    @cached_property
    def selection(self) -> Selection:
        """The checks of this file that the session runs. Only after collection."""
        items = [item for item in self.session.items if isinstance(item, EvidenceItem) and item.parent is self]
        selected = frozenset(item.name for item in items if item.name not in self.stored.skip)
        xfailing = selected.intersection(self.stored.xfail)
        return Selection(selected - xfailing, xfailing)


class InvalidEvidence(pytest.Item):
    """A failing item for a file that cannot be judged, in whole or in part; other files still are."""

    def __init__(self, *, message: str, **arguments: object) -> None:
        super().__init__(**arguments)  # type: ignore[arg-type]
        self._message = message

    def runtest(self) -> None:
        pytest.fail(self._message, pytrace=False)


class EvidenceItem(CheckItem):
    """One check of stored evidence, which is not stored once more."""

    parent: EvidenceFile

    def setup(self) -> None:
        """Raise an error of the stored run here, so that pytest counts it as an error again."""
        catalogue, evidence = self.plugin.catalogue, self.judged_evidence()
        verdict = judge(catalogue[self.check], evidence, catalogue, self.parent.selection)
        self.outcome = outcome_of(verdict, evidence.world, self.rerun_command, self.plugin.settings.strict)
        if verdict.status == "error":
            pytest.fail(self.outcome.message, pytrace=False)

    def runtest(self) -> None:
        assert self.outcome is not None
        self.raise_outcome(self.outcome)

    def planned(self) -> ItemContext:
        return ItemContext(
            key=self.parent.nodeid,
            loader=self.parent.stored.loader,
            check=CheckRecord(self.check, "not run", self.nodeid, again=self.rerun_command()),
            world=self.judged_evidence().world,
            offered=self.spec.expected,
        )

    def context(self) -> ItemContext:
        return self.planned()

    def judged_evidence(self) -> Evidence:
        return self.parent.stored.evidence

    def reportinfo(self) -> tuple[str, int, str]:
        return str(self.path), 0, f"{self.parent.stored.loader}[{self.name}]"
