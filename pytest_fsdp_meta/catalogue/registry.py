"""What a check is: a promise, the evidence it needs, a judge, and what to tell the one who broke it."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from pytest_fsdp_meta.catalogue.findings import Finding
from pytest_fsdp_meta.catalogue.view import View

OBSERVATIONS = (
    *("inventory", "reference", "values", "verifier", "training", "collectives", "memory"),
    *("repetition", "state_dict", "export", "saved", "restored", "resharded", "continued", "resumed"),
)


@dataclass(frozen=True)
class Check:
    """A named promise with its judge; made by ``@check``.

    ``needs`` are the observations without which there is nothing to judge, ``uses`` those that sharpen the judgement
    where they can be had. ``after`` names the more basic checks: a tensor that one of them condemned is not judged
    again here. ``fields`` are those of Subject that it cannot do without, beside those that its ``needs`` are taken by.
    ``tolerance`` is what it allows by dtype where the author sets none; a check without it takes none of the author.
    """

    id: str
    promise: str
    family: str
    needs: tuple[str, ...]
    uses: tuple[str, ...]
    after: tuple[str, ...]
    why: str
    cause: str
    remedy: str
    references: tuple[str, ...]
    since: str
    fields: tuple[str, ...]
    judge: Callable[[View], Iterable[Finding]]
    tolerance: Mapping[str, float] = field(default_factory=dict, hash=False)

    @property
    def built_in(self) -> bool:
        """Whether it is this package's, and not downstream's own."""
        return getattr(self.judge, "__module__", "").partition(".")[0] == __name__.partition(".")[0]


Judge = Callable[[View], Iterable[Finding]]


def check(
    *,
    promise: str,
    family: str,
    needs: Sequence[str],
    why: str,
    cause: str,
    remedy: str,
    uses: Sequence[str] = (),
    after: Sequence[str] = (),
    references: Sequence[str] = (),
    since: str = "0.1",
    fields: Sequence[str] = (),
    tolerance: Mapping[str, float] = MappingProxyType({}),
) -> Callable[[Judge], Check]:
    """Makes a judge into a check whose id is the function's name.

    ``cause`` and ``remedy`` are told with every finding that does not bring better ones.
    """
    unknown = [name for name in (*needs, *uses) if name not in OBSERVATIONS]
    if unknown:
        raise ValueError(f"check needs {unknown[0]!r}, which no observer takes; there are {', '.join(OBSERVATIONS)}")

    def make(judge: Judge) -> Check:
        return Check(
            id=judge.__name__,
            promise=promise,
            family=family,
            needs=tuple(needs),
            uses=tuple(uses),
            after=tuple(after),
            why=why,
            cause=cause,
            remedy=remedy,
            references=tuple(references),
            since=since,
            fields=tuple(fields),
            judge=judge,
            tolerance=dict(tolerance),
        )

    return make


class Catalogue:
    """Checks by id, in the order in which they are judged: the more basic ones first."""

    def __init__(self, checks: Iterable[Check] = ()) -> None:
        self._checks: dict[str, Check] = {}
        self._read: dict[str, frozenset[str]] = {}
        for one in checks:
            self.add(one)

    def add(self, one: Check) -> None:
        """Raises ValueError when the id is taken, or when it comes after a check that does not exist."""
        if not isinstance(one, Check):
            raise ValueError(f"{one!r} is not a check; decorate the judge with @check(...)")
        if one.id in self._checks:
            raise ValueError(f"two checks are called {one.id!r}")
        basic = frozenset[str]().union(*(self._read[self[earlier].id] for earlier in one.after))
        if "training" not in one.needs:
            # What it would tell a more basic check beside what that needs is not worth training for.
            basic -= {"training"}
        self._read[one.id] = frozenset({*one.needs, *one.uses}) | basic
        self._checks[one.id] = one

    def observations(self, ids: Iterable[str]) -> set[str]:
        """The observations that these checks read, and those of the more basic checks that they look at first."""
        return set[str]().union(*(self._read[id] for id in ids))

    def __getitem__(self, id: str) -> Check:
        if id not in self._checks:
            near = difflib.get_close_matches(id, self._checks, n=1, cutoff=0.3)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"there is no check {id!r}{hint} (pytest --fsdp-list-checks shows all)")
        return self._checks[id]

    def __iter__(self) -> Iterator[Check]:
        return iter(self._checks.values())

    def __len__(self) -> int:
        return len(self._checks)

    def __contains__(self, id: object) -> bool:
        return id in self._checks

    def ids(self) -> list[str]:
        return list(self._checks)
