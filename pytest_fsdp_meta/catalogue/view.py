"""TODO."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import TypeVar

from pytest_fsdp_meta.catalogue.findings import Finding, Mismatch
from pytest_fsdp_meta.evidence import Comparison, Evidence, RankInventory, ReferenceFacts, TensorFacts, not_declared

T = TypeVar("T")


class Unjudgeable(Exception):
    """The truth itself is no truth (a reference that does not reproduce itself); the text says so."""


class NotJudged(Exception):
    """There is nothing to judge, for a reason that is nobody's fault here; the text says which."""


class NotDeclared(NotJudged):
    """There is nothing to judge as long as the author does not declare a field of Subject; ``so`` says what follows."""

    def __init__(self, field: str, so: str = "") -> None:
        super().__init__(f"{not_declared(field).summary}{so}")


class Blocked(NotJudged):
    """It cannot be judged before what a more basic check has found is mended; the text names it."""


class PartlyJudged(NotJudged):
    """Something of it could not be judged, for the reason in the text; the rest was, and its findings stand."""


class NotTaken(Exception):
    """The judge cannot do without an observation that its check only ``uses``; the text is its name."""


class View:
    """The evidence as one judge sees it: without the tensors that more basic checks have condemned."""

    def __init__(
        self,
        evidence: Evidence,
        check_id: str,
        tolerance: Mapping[str, float],
        condemned: dict[str, str],
        failed: tuple[str, ...] = (),
    ) -> None:
        self.evidence = evidence
        self.check_id = check_id
        self.tolerance = tolerance
        """What the check allows by dtype where the author sets nothing."""
        self.failed = failed
        """The more basic checks that found something, whether or not they condemned a tensor."""
        self._condemned = condemned
        self._left_out: dict[str, dict[str, None]] = {}

    def judgeable(self, name: str) -> bool:
        """Whether no more basic check has condemned the tensor; one that is not is counted as left out."""
        by = self._condemned.get(name)
        if by is not None:
            self._left_out.setdefault(by, {})[name] = None
        return by is None

    def condemned_by(self, name: str) -> str | None:
        """The more basic check that condemned the tensor; unlike ``judgeable``, asking does not count it."""
        return self._condemned.get(name)

    def names(self, *kinds: str, only: Collection[str] | None = None, but: Collection[str] = ()) -> list[str]:
        """Judgeable names over all ranks, each once; ``only`` and ``but`` limit what is asked for."""
        seen = {t.name: None for rank in self.evidence.inventory for t in rank.tensors if t.kind in kinds}
        asked = [name for name in seen if name not in but and (only is None or name in only)]
        return [name for name in asked if self.judgeable(name)]

    def tensors(
        self, *kinds: str, only: Collection[str] | None = None
    ) -> Iterator[tuple[str, list[tuple[int, TensorFacts]]]]:
        """(name, its facts by rank) of the judgeable tensors; ``only`` limits what is asked for."""
        for name in self.names(*kinds, only=only):
            yield name, [(rank.rank, rank.by_name[name]) for rank in self.evidence.inventory if name in rank.by_name]

    def broken(self, name: str, told: Iterable[tuple[int, Mismatch | None]]) -> Iterator[Finding]:
        """A finding per distinct thing that ranks show of one tensor; None where a rank keeps the promise."""
        for one, ranks in ranks_by(told).items():
            if one is not None:
                yield Finding(name, ranks, one.actual, one.expected, cause=one.cause, remedy=one.remedy)

    @property
    def reference(self) -> ReferenceFacts:
        if self.evidence.reference is None:
            raise NotTaken("reference")
        return self.evidence.reference

    @property
    def truth(self) -> RankInventory:
        return self.reference.inventory

    def comparisons(
        self, by_rank: tuple[tuple[Comparison, ...], ...] | None, names: Collection[str]
    ) -> dict[str, list[tuple[int, Comparison]]]:
        """Comparisons of the tensors of these names, each with its rank; without what was not compared."""
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
    """The ranks of each value, values in the order in which they first come."""
    ranks: dict[T, tuple[int, ...]] = {}
    for rank, value in pairs:
        ranks[value] = (*ranks.get(value, ()), rank)
    return ranks


def majority(values: Iterable[tuple[int, T]]) -> T:
    """The value that most ranks have; of equally many, the one of the lowest rank."""
    return Counter(value for _, value in values).most_common(1)[0][0]
