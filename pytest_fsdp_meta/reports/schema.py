"""What a run leaves behind, as plain data: ``report.json`` is one ``Report``, and everything that is drawn reads it.

``docs/report.schema.json`` is made from these classes by ``make docs``. ``SCHEMA`` counts up when a reader of
the old form would misread the new one; a field that is added does not count.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from pytest_fsdp_meta.evidence import MeshFacts, Region, WorldFacts
from pytest_fsdp_meta.evidence.collectives import Collective, RankMemory

SCHEMA = 1

STATUSES = {
    "passed": "the promise is kept",
    "failed": "the promise is broken",
    "error": "something went wrong, so nobody knows",
    "xfailed": "as xfail= says",
    "xpassed": "xfail= expects it to fail",
    "partly": "as far as it could be judged",
    "blocked": "judged once that is mended",
    "undeclared": "needs something of Subject",
    "nothing": "the model has nothing that the promise is about",
    "skipped": "by the loader, a mark or a fixture",
    "left out": "by only= or skip=",
    "unselected": "by -k, -m, --lf, a node id, ...",
    "not run": "was selected, but the run ended before",
}
"""What may become of a check, and what that means."""
WORDS = {
    "passed": "passed",
    "failed": "failed",
    "error": "could not be judged",
    "xfailed": "failed as expected",
    "xpassed": "passed unexpectedly",
    "partly": "kept in part",
    "blocked": "blocked by what failed",
    "undeclared": "not declared",
    "nothing": "with nothing to judge",
    "skipped": "skipped",
    "left out": "left out",
    "unselected": "not selected",
    "not run": "not run",
}
"""How each is told, also after a number."""
KEPT = ("passed", "partly")
VIOLATED = ("failed", "xpassed")
"""A judge says that it is not as the author says."""
BROKEN = (*VIOLATED, "error")
JUDGED = (*KEPT, *VIOLATED, "xfailed")
"""A judge has spoken."""
BAD = (*BROKEN, "not run")
"""What makes a run bad."""
UNACCOUNTED = ("unselected", "not run")
"""Nobody knows whether the promise is kept, and no author has said why not."""


@dataclass(frozen=True)
class FindingRecord:
    """One broken promise: "<tensor>, <ranks>: <actual>, but should be <expected> (<detail>)"; ``tensor`` is None for
    the whole model."""

    tensor: str | None
    ranks: tuple[int, ...]
    actual: str
    expected: str
    detail: str = ""
    cause: str = ""
    remedy: str = ""


@dataclass(frozen=True)
class CheckRecord:
    """What became of one check of one loader in one world: ``status`` is one of ``STATUSES``."""

    check: str
    status: str
    nodeid: str = ""
    """The pytest item; empty where there was none."""
    reason: str = ""
    """Why it is not a plain pass or fail, in one line."""
    findings: tuple[FindingRecord, ...] = ()
    unjudged: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """More basic check -> the tensors that it condemned, and that were therefore not judged again."""
    seconds: float = 0.0
    """What pytest measured of the item; its loader's share is in the first item."""
    again: str = ""
    """The command that runs this item again."""
    detail: str = ""
    """The whole story, where it has more lines: what each rank raised, where each of them hangs, the example that fell.
    Of an error that all checks of a loader share, with the first of them."""


@dataclass(frozen=True)
class Piece:
    """What the ranks in ``ranks`` hold of a tensor: for each dim of its extent, half-open runs of global indices."""

    ranks: tuple[int, ...]
    regions: tuple[Region, ...]
    dtype: str
    device: str = ""
    """Where that is not the rank's own: "meta", "cpu", another GPU."""
    placements: tuple[str, ...] | None = None
    poisoned: int = 0
    """Elements that were never written."""
    nan: int = 0


@dataclass(frozen=True)
class TensorRecord:
    """How one parameter or buffer lies on the ranks. Ranks that are in no piece do not have it.

    ``extent`` is what regions are indices of: the global shape, or one row of all elements where ``flat``.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    extent: tuple[int, ...]
    pieces: tuple[Piece, ...]
    mesh: MeshFacts | None = None
    flat: bool = False
    requires_grad: bool = False
    persistent: bool = True
    tied: tuple[str, ...] = ()


@dataclass(frozen=True)
class Curves:
    """Losses step by step, without units. ``ranks`` has one curve per data-parallel slice of the batch, ``mean`` the
    global loss of N ranks; ``reference`` is empty where there is none."""

    mean: tuple[float, ...]
    ranks: tuple[tuple[float, ...], ...]
    reference: tuple[float, ...] = ()


@dataclass(frozen=True)
class Traffic:
    """The collectives of ranks that issued the same, in order: while loading and in one training step."""

    ranks: tuple[int, ...]
    loading: tuple[Collective, ...]
    step: tuple[Collective, ...] = ()


@dataclass(frozen=True)
class Summary:
    """The evidence, cut down to what a reader looks at."""

    tensors: tuple[TensorRecord, ...] = ()
    losses: Curves | None = None
    traffic: tuple[Traffic, ...] = ()
    memory: tuple[RankMemory, ...] = ()
    """In rank order."""
    unavailable: Mapping[str, str] = field(default_factory=dict)
    """Observation -> why it was not taken."""


UNKNOWN = WorldFacts(0, (), "", "")


@dataclass(frozen=True)
class LoaderRecord:
    """One loader in one world: every check of the catalogue, in its order."""

    loader: str
    """The node id without the check."""
    world: WorldFacts
    """``UNKNOWN`` where nothing of it has run in the worker of xdist that alone knew."""
    checks: tuple[CheckRecord, ...]
    error: str = ""
    """Why the loader gave no subject, in one line."""
    seconds: Mapping[str, float] = field(default_factory=dict)
    """Where the time went: what was done -> seconds, in the order in which it was begun."""
    evidence: str = ""
    """The file of the evidence, beside the report, where it was kept."""
    summary: Summary | None = None


@dataclass(frozen=True)
class CatalogueRecord:
    """A check as it was when it judged."""

    check: str
    family: str
    promise: str
    since: str
    own: bool = False
    """Whether it is downstream's."""


@dataclass(frozen=True)
class Header:
    """What ran, on what, when. ``started`` is UTC, ISO 8601."""

    started: str
    project: str
    """The name of pytest's root folder."""
    command: tuple[str, ...]
    versions: Mapping[str, str]
    hardware: Mapping[str, str]
    engine: str
    commit: str = ""
    """Of the judged repository; ends in "+" where files were changed; empty outside a repository."""
    catalogue: tuple[CatalogueRecord, ...] = ()


@dataclass(frozen=True)
class Report:
    """``complete`` is last: a file that was cut off does not have it, and of a run that was killed it is not true.

    A run that was interrupted tells so by its exit status, and by what has not run.
    """

    schema: int
    header: Header
    loaders: tuple[LoaderRecord, ...] = ()
    seconds: float = 0.0
    """From the start of pytest to the last item."""
    exit_status: int | None = None
    complete: bool = False


def statuses(loaders: Iterable[LoaderRecord]) -> Counter[str]:
    """How many checks of these loaders have each status."""
    return Counter(check.status for loader in loaders for check in loader.checks)


def how_many(counts: Mapping[str, int], of: Iterable[str]) -> int:
    """How many have one of the statuses ``of``."""
    return sum(counts.get(status, 0) for status in of)


def is_bad(loaders: Iterable[LoaderRecord]) -> bool:
    """Whether a check of theirs is broken, could not be judged or has not run."""
    return bool(how_many(statuses(loaders), BAD))


def ended_badly(before: CheckRecord, told: str) -> CheckRecord:
    """What was found stays found, and why nothing was judged stays why; only a pass is none any more."""
    status = "error" if before.status in (*KEPT, "not run") else before.status
    return replace(before, status=status, reason=and_then(before.reason, told))


def errors_by_reason(loaders: Iterable[LoaderRecord]) -> dict[tuple[str, str], list[str]]:
    """(reason, loader) -> the checks that could not be judged for it: mostly all of the loader, for one reason."""
    reasons: dict[tuple[str, str], list[str]] = {}
    for loader in loaders:
        for check in loader.checks:
            if check.status == "error" and not check.findings:
                reasons.setdefault((check.reason, loader.loader), []).append(check.check)
    return reasons


def and_then(reason: str, more: str) -> str:
    """What went wrong, and what went wrong after it."""
    return "; and then ".join(filter(None, [reason, more]))
