"""Kept evidence, collected: ``pytest DIR/evidence`` judges it again by the checks that there are now, without ranks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest

from pytest_fsdp_meta.catalogue import Catalogue, Verdict, judge
from pytest_fsdp_meta.evidence import store
from pytest_fsdp_meta.plugin.markers import ConformanceSpec
from pytest_fsdp_meta.plugin.outcomes import ItemContext, Outcome, outcome_of, settle
from pytest_fsdp_meta.plugin.rerun_command import command
from pytest_fsdp_meta.reports.summary import summarise
from pytest_fsdp_meta.text import first_line, first_of

CATALOGUE = pytest.StashKey[Catalogue]()
GIVEN = pytest.StashKey[Sequence[str]]()
"""The options that a command which runs one item again repeats."""


def is_asked_for(path: Path, config: pytest.Config) -> bool:
    """Whether it is kept evidence that the command line names, or its folder: a report in the project is no test."""
    return path.name.endswith(store.ENDING) and bool(_named(config) & {path.resolve(), path.resolve().parent})


def is_judged(folder: Path, config: pytest.Config) -> bool:
    """Whether this run judges evidence of the folder."""
    return any(path == folder.resolve() or path.parent == folder.resolve() for path in _named(config))


def _named(config: pytest.Config) -> set[Path]:
    return {(config.invocation_params.dir / argument.partition("::")[0]).resolve() for argument in config.args}


class EvidenceFile(pytest.File):
    """One loader in one world, as it was seen."""

    def collect(self) -> Iterable[pytest.Item]:
        try:
            self.kept = store.read_evidence(self.path)
        except ValueError as error:
            yield Unreadable.from_parent(self, name="unreadable", why=str(error))
            return
        ids = self.config.stash[CATALOGUE].ids()
        if gone := [check for check in self.kept.known if check not in ids]:
            told = f"{self.kept.loader}: the catalogue has no check {first_of(gone)} any more, which judged it then"
            try:
                self.warn(pytest.PytestWarning(told))
            except pytest.PytestWarning:  # an error, where the user wants it so: of this file, not of the collection
                yield Unreadable.from_parent(self, name="gone", why=told)
        try:
            self.verdicts = self._judged(self.config.stash[CATALOGUE])
        except Exception as error:  # a hand may have written it, or a broken disk: every field is of its type
            why = f"{self.path}: evidence that does not fit together ({type(error).__name__}: {first_line(error)})"
            yield Unreadable.from_parent(self, name="unfit", why=why)
            return
        for check in ids:
            if check not in self.kept.known or check in self.kept.offered:
                item = EvidenceItem.from_parent(self, name=check)
                if check in self.kept.skip:
                    item.add_marker(pytest.mark.skip(reason=self.kept.skip[check]))
                yield item

    def _judged(self, catalogue: Catalogue) -> dict[str, Verdict]:
        """By every check, before any item: evidence that does not fit together is told once, whatever it raises."""
        summarise(self.kept.evidence)
        return {check.id: judge(check, self.kept.evidence, catalogue) for check in catalogue}


class Unreadable(pytest.Item):
    """A file that cannot be judged, in whole or in part: an item of its own, so that the others are judged."""

    def __init__(self, *, why: str, **known: object) -> None:
        super().__init__(**known)  # type: ignore[arg-type]
        self._why = why

    def runtest(self) -> None:
        pytest.fail(self._why, pytrace=False)


class EvidenceItem(pytest.Item):
    """One check of it."""

    parent: EvidenceFile
    outcome: Outcome | None = None

    def setup(self) -> None:
        """What went wrong is an error of pytest, as it was in the run that was kept."""
        verdict = self.parent.verdicts[self.name]
        self.outcome = outcome_of(verdict, self.parent.kept.evidence.world, lambda: self.again)
        if verdict.status == "error":
            pytest.fail(self.outcome.told, pytrace=False)

    def runtest(self) -> None:
        assert self.outcome is not None
        settle(self, self.outcome, self.name, self.parent.kept.xfail.get(self.name))

    @property
    def again(self) -> str:
        return command(self.config, self.path, [self.name], self.config.stash[GIVEN])

    @property
    def share(self) -> ItemContext:
        told, ids = self.parent.kept, tuple(self.config.stash[CATALOGUE].ids())
        offered = tuple(check for check in ids if check not in told.known or check in told.offered)
        return ItemContext(
            key=self.parent.nodeid,
            loader=told.loader,
            check=self.name,
            world=told.evidence.world,
            known=ids,
            order=ConformanceSpec((dict(told.evidence.world.mesh),), offered, told.skip, told.xfail),
            again=self.again,
            evidence=told.evidence,
            keeps=False,
        )

    def reportinfo(self) -> tuple[str, int, str]:
        return str(self.path), 0, f"{self.parent.kept.loader}[{self.name}]"


def split_evidence_node_id(nodeid: str) -> tuple[str, str] | None:
    """The file and the check of an item of kept evidence; None for any other."""
    file, _, check = nodeid.partition("::")
    return (file, check) if file.endswith(store.ENDING) and check else None
