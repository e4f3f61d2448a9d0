"""Kept evidence, collected: ``pytest DIR/evidence`` judges it again by the checks that there are now, without ranks."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest

from pytest_fsdp_meta import kept
from pytest_fsdp_meta.catalogue import Catalogue, judge
from pytest_fsdp_meta.collection import SKIPPED
from pytest_fsdp_meta.reports.terminal import describe_error, describe_failure
from pytest_fsdp_meta.sending import command
from pytest_fsdp_meta.telling import Outcome, Share

CATALOGUE = pytest.StashKey[Catalogue]()


def is_asked_for(path: Path, config: pytest.Config) -> bool:
    """Whether it is kept evidence that the command line names, or its folder: a report in the project is no test."""
    if not path.name.endswith(kept.ENDING):
        return False
    named = {(config.invocation_params.dir / argument.partition("::")[0]).resolve() for argument in config.args}
    return bool(named & {path.resolve(), path.resolve().parent})


class KeptFile(pytest.File):
    """One loader in one world, as it was seen."""

    def collect(self) -> Iterable[pytest.Item]:
        try:
            self.kept = kept.read(self.path)
        except ValueError as error:
            raise self.CollectError(str(error)) from None
        for check in self.config.stash[CATALOGUE].ids():
            if check in self.kept.offered:
                item = KeptItem.from_parent(self, name=check)
                if check in self.kept.skip:
                    item.add_marker(pytest.mark.skip(reason=self.kept.skip[check]))
                yield item


class KeptItem(pytest.Item):
    """One check of it."""

    parent: KeptFile
    outcome: Outcome | None = None

    def runtest(self) -> None:
        catalogue, told = self.config.stash[CATALOGUE], self.parent.kept
        verdict = judge(catalogue[self.name], told.evidence, catalogue)
        self.outcome = Outcome(verdict.status, verdict=verdict, reason=verdict.reason)
        if verdict.status == "skipped":
            self.stash[SKIPPED] = verdict.reason
            pytest.skip(verdict.reason)
        if verdict.status == "error":
            pytest.fail(describe_error(verdict.check, verdict.reason, verdict.detail, self.again), pytrace=False)
        expected = told.xfail.get(self.name)
        if verdict.status == "failed":
            if expected is not None:
                pytest.xfail(expected)
            pytest.fail(describe_failure(verdict, str(told.evidence.world), self.again), pytrace=False)
        if expected is not None:
            pytest.fail(f"{self.name} passes, but xfail expects it to fail ({expected})", pytrace=False)

    @property
    def again(self) -> str:
        return command(self.config, self.path, [self.name], ())

    @property
    def share(self) -> Share:
        told = self.parent.kept
        return Share(
            loader=told.loader,
            check=self.name,
            world=told.evidence.world,
            offered=told.offered,
            skip=told.skip,
            xfail=told.xfail,
            again=self.again,
            evidence=told.evidence,
            seconds=told.seconds,
            keeps=False,
        )

    def reportinfo(self) -> tuple[str, int, str]:
        return str(self.path), 0, f"{self.parent.kept.loader}[{self.name}]"
