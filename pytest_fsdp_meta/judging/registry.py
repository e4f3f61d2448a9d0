"""Checks and the catalogue that holds them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from types import MappingProxyType

from pytest_fsdp_meta.evidence import Evidence
from pytest_fsdp_meta.judging.findings import Finding
from pytest_fsdp_meta.judging.view import View
from pytest_fsdp_meta.text import did_you_mean

NOT_OBSERVED = {"world", "subject", "traces", "smaller", "unavailable", "tolerance"}
OBSERVATIONS = tuple(field.name for field in fields(Evidence) if field.name not in NOT_OBSERVED)


@dataclass(frozen=True)
class Check:
    """A named promise with its judge; created with ``@check``.

    ``needs`` are the observations that the judge requires; ``uses`` are those that make it more precise if available.
    ``after`` names the more basic checks: tensors that already failed one of them are not judged again. ``fields`` are
    the fields of Subject that it requires, besides those that its ``needs`` require. ``tolerance`` is the default
    tolerance by dtype; without it, the check does not accept one from the author.
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
    simulated: str = ""
    """"too" if it can also judge some ranks without values of a world that does not run, "only" if it judges these."""

    @property
    def built_in(self) -> bool:
        """Return whether the check belongs to this package, and not to a downstream repository."""
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
    since: str = "0.3",
    fields: Sequence[str] = (),
    tolerance: Mapping[str, float] = MappingProxyType({}),
    simulated: str = "",
) -> Callable[[Judge], Check]:
    """Turn a judge into a check whose id is the function's name.

    ``cause`` and ``remedy`` are shown with every finding that has none of its own.
    """
    unknown = [name for name in (*needs, *uses) if name not in OBSERVATIONS]
    if unknown:
        raise ValueError(f"unknown observation {unknown[0]!r} in a check (choose from {', '.join(OBSERVATIONS)})")

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
            simulated=simulated,
        )

    return make


# The families of the built-in checks, with the observations that most of their judges need; others say ``needs``.
LOADED = ["inventory"]
structure_check = partial(check, family="structure", needs=[*LOADED, "reference"])
materialisation_check = partial(check, family="materialisation", needs=LOADED)
sharding_check = partial(check, family="sharding", needs=LOADED)
values_check = partial(check, family="values", needs=[*LOADED, "reference", "values"])
tying_check = partial(check, family="tying", needs=LOADED)
memory_check = partial(check, family="memory", needs=LOADED)
scale_check = partial(check, family="scale", needs=[*LOADED, "simulation"])
communication_check = partial(check, family="communication", needs=[*LOADED, "collectives"])
training_check = partial(check, family="training", needs=[*LOADED, "reference", "training"])
random_numbers_check = partial(check, family="random numbers")
data_check = partial(check, family="data")
checkpoint_check = partial(check, family="checkpoint")


class Catalogue:
    """Checks by id, in the order in which they are judged: more basic ones first."""

    def __init__(self, checks: Iterable[Check] = ()) -> None:
        self._checks: dict[str, Check] = {}
        self._observations: dict[str, frozenset[str]] = {}
        for check in checks:
            self.add(check)

    def add(self, check: Check) -> None:
        """Add a check. Raises ValueError if its id is taken or if it names an unknown check in ``after``."""
        if not isinstance(check, Check):
            raise ValueError(f"{check!r} is not a check; decorate the judge with @check(...)")
        if check.id in self._checks:
            raise ValueError(f"two checks are named {check.id!r}")
        basic = frozenset[str]().union(*(self._observations[self[earlier].id] for earlier in check.after))
        if "training" not in check.needs:
            # Basic checks that merely use the training are precise enough without it; it is not run for their sake.
            basic -= {"training"}
        self._observations[check.id] = frozenset({*check.needs, *check.uses}) | basic
        self._checks[check.id] = check

    def observations(self, ids: Iterable[str]) -> set[str]:
        """Return the observations that these checks and the more basic ones before them need or use."""
        return set[str]().union(*(self._observations[id] for id in ids))

    def __getitem__(self, id: str) -> Check:
        if id not in self._checks:
            hint = did_you_mean(id, self._checks, cutoff=0.5)
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

    def ids_for(self, simulated: bool) -> list[str]:
        """Return the checks for simulated worlds, or for worlds that run, which some checks do not judge."""
        return [id for id, check in self._checks.items() if simulated or check.simulated != "only"]
