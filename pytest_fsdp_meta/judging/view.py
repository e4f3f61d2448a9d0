"""The evidence as a judge sees it, and the exceptions by which a judge reports that it cannot judge."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

from pytest_fsdp_meta.evidence import (
    Comparison,
    Evidence,
    RankInventory,
    ReferenceFacts,
    TensorFacts,
    not_declared,
    partly_held,
)
from pytest_fsdp_meta.judging.findings import Finding, Mismatch
from pytest_fsdp_meta.text import grouped, names_in

T = TypeVar("T")
DEPENDS = "depends on a failed check"


class Unjudgeable(Exception):
    """Raised if the evidence is unusable, such as a reference that is not reproducible: the check is an error."""


class NotJudged(Exception):
    """Raised if there is nothing to judge: the check is skipped, with the message as the reason."""

    why = "not applicable"
    """The kind of the skip: ``Verdict.why``."""


class NotDeclared(NotJudged):
    """Raised if there is nothing to judge until the author declares a field of Subject.

    ``so`` is appended to the message and states what follows from the missing declaration. If the field is declared in
    a form that cannot be judged, ``instead`` is the message.
    """

    why = "not declared"

    def __init__(self, field: str, so: str = "", instead: str = "") -> None:
        super().__init__(instead or f"{not_declared(field).summary}{so}")
        self.field = field


class Differs(NotJudged):
    """Raised if a difference was measured, is beyond its limit, and is not judged for the reason in the message."""

    why = "differs"


class Blocked(NotJudged):
    """Raised if the difference that the message describes follows from findings of other checks, ``by`` their ids.

    The verdict names those that fail the run. If none does, nothing else reports the difference, and it differs.
    """

    why = DEPENDS

    def __init__(self, message: str, by: Iterable[str]) -> None:
        super().__init__(message)
        self.by = tuple(by)


class PartlyJudged(NotJudged):
    """Raised if a part could not be judged, for the reason in the message; findings yielded before remain valid."""

    why = "partly checked"


class Noted(Exception):
    """Raised if nothing is wrong: the check passes, with the message as its reason."""


class NotTaken(Exception):
    """Raised if the judge turns out to require an observation that its check only ``uses``; the message is its name."""


@dataclass(frozen=True)
class Selection:
    """The checks whose findings a run shows. A check may leave a defect to these, and to no others.

    ``failing`` are those whose findings fail the run, None for all; those of ``xfailing`` are expected.
    """

    failing: frozenset[str] | None = None
    xfailing: frozenset[str] = frozenset()

    def __contains__(self, check_id: object) -> bool:
        return self.failing is None or check_id in self.failing or check_id in self.xfailing


class View:
    """The evidence without the tensors that already failed a more basic check of the ``selection``."""

    def __init__(
        self,
        evidence: Evidence,
        check_id: str,
        tolerance: Mapping[str, float],
        already_failed: dict[str, str],
        failed: tuple[str, ...],
        selection: Selection,
    ) -> None:
        self.evidence = evidence
        self.check_id = check_id
        self.tolerance = tolerance
        """The default tolerance of the check, by dtype."""
        self.failed = failed
        """The more basic checks that failed, including those whose findings name no tensor."""
        self.selection = selection
        self._already_failed = already_failed
        self._left_out: dict[str, dict[str, None]] = {}
        self.has_judgeable = False
        """Whether the judge has asked for a tensor that passed the more basic checks."""

    def judgeable(self, name: str) -> bool:
        """Return whether the tensor passed the more basic checks; if not, record it as left out."""
        by = self._already_failed.get(name)
        if by is not None:
            self._left_out.setdefault(by, {})[name] = None
        self.has_judgeable |= by is None
        return by is None

    def explained_by(self, name: str) -> str | None:
        """Return the more basic check that the tensor failed, if that explains other differences; record nothing."""
        return self._already_failed.get(name)

    def explaining(self, error: str) -> list[str]:
        """Return the more basic checks that fail the run in a tensor that the text of an error names."""
        failed = dict.fromkeys(self._already_failed[name] for name in names_in(error, self._already_failed))
        return [check_id for check_id in failed if check_id not in self.selection.xfailing]

    def names(self, *kinds: str, only: Collection[str] | None = None, but: Collection[str] = ()) -> list[str]:
        """Return the judgeable names on any rank, in ``only`` and not in ``but``, each once."""
        seen = {t.name: None for rank in self.evidence.inventory for t in rank.tensors if t.kind in kinds}
        asked = [name for name in seen if name not in but and (only is None or name in only)]
        return [name for name in asked if self.judgeable(name)]

    def tensors(
        self, *kinds: str, only: Collection[str] | None = None
    ) -> Iterator[tuple[str, list[tuple[int, TensorFacts]]]]:
        """Yield each judgeable tensor (in ``only``) as its name and its facts on each rank."""
        for name in self.names(*kinds, only=only):
            yield name, self.holders(name)

    def holders(self, name: str) -> list[tuple[int, TensorFacts]]:
        """Return the facts of a tensor with the ranks that have it."""
        return [(rank.rank, rank.by_name[name]) for rank in self.evidence.inventory if name in rank.by_name]

    def findings_for(self, name: str | None, mismatches: Iterable[tuple[int, Mismatch | None]]) -> Iterator[Finding]:
        """Yield one finding for each distinct mismatch of a tensor, or of none; ranks without one have None."""
        for found, ranks in ranks_by(mismatches).items():
            if found is not None:
                yield Finding(name, ranks, **found._asdict())

    @cached_property
    def on_some_ranks(self) -> frozenset[str]:
        """The tensors that some ranks have and others lack, as declared."""
        return partly_held(self.evidence.subject, self.evidence.inventory)

    @cached_property
    def tied_over_stages(self) -> frozenset[str]:
        """The weights that are one in the reference, and that stages of a pipeline hold apart."""
        reference, by_stage = self.evidence.reference, set(self.evidence.subject.by_stage)
        groups = reference.inventory.ties() if reference is not None and by_stage else ()
        return frozenset(name for group in groups if by_stage.intersection(group) for name in group)

    @property
    def reference(self) -> ReferenceFacts:
        if self.evidence.reference is None:
            raise NotTaken("reference")
        return self.evidence.reference

    @property
    def reference_inventory(self) -> RankInventory:
        return self.reference.inventory

    def comparisons(
        self, by_rank: tuple[tuple[Comparison, ...], ...] | None, names: Collection[str]
    ) -> dict[str, list[tuple[int, Comparison]]]:
        """Return the comparisons of the named tensors with their ranks; tensors that were not compared are absent."""
        found: dict[str, list[tuple[int, Comparison]]] = {name: [] for name in names}
        for rank, comparisons in enumerate(by_rank or ()):
            for comparison in comparisons:
                if comparison.name in found:
                    found[comparison.name].append((rank, comparison))
        return {name: pairs for name, pairs in found.items() if pairs}

    @property
    def left_out(self) -> dict[str, tuple[str, ...]]:
        return {by: tuple(names) for by, names in self._left_out.items()}


def ranks_by(pairs: Iterable[tuple[int, T]]) -> dict[T, tuple[int, ...]]:
    """Return the ranks that have each value, in order of first occurrence."""
    return {value: tuple(ranks) for value, ranks in grouped((value, rank) for rank, value in pairs).items()}


def majority(values: Iterable[tuple[int, T]]) -> T:
    """Return the most frequent value; in a tie, the one of the lowest rank."""
    return Counter(value for _, value in values).most_common(1)[0][0]
