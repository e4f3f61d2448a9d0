"""The report of a run as plain data: ``report.json`` is one ``Report``, and terminal, page and summary show it.

``make docs`` generates ``docs/report.schema.json`` from these classes. ``SCHEMA`` is incremented when a reader of the
previous schema would misread the new one; adding a field does not count.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from pytest_fsdp_meta.checks.memory.facts import RankMemory
from pytest_fsdp_meta.checks.simulation.facts import SimulatedSize
from pytest_fsdp_meta.checks.tracing.facts import AGREES, DEPARTS
from pytest_fsdp_meta.evidence import MeshFacts, Region, WorldFacts
from pytest_fsdp_meta.text import counted

SCHEMA = 2

STATUSES = {
    "passed": "the promise holds",
    "differs": "a measured difference is beyond its limit, and is not judged for the reason given",
    "partly checked": "something could not be checked, and the rest passed",
    "failed": "the promise is broken",
    "error": "it could not be checked, because something went wrong",
    "xfailed": "failed, as xfail= expects",
    "xpassed": "passed, but xfail= expects it to fail",
    "skipped": "not checked, for the reason given",
    "not run": "selected, but the run ended first",
}
"""Every status of a check, with its meaning."""
SKIPS = {
    "not declared": "a field of Subject is missing",
    "not applicable": "the model has nothing of the kind",
    "depends on a failed check": "fix that check first",
    "not supported": "this release of torch lacks a name that the check needs",
    "left out": "by only= or skip=",
    "not selected": "by -k, -m, --lf, a node id, ...",
    "by the test": "by a mark, a fixture or the loader itself",
}
"""Every kind of a skip, with its meaning."""
PASSED = ("passed", "partly checked")
FAILED = ("failed", "xpassed", "error")
"""Statuses that need a fix."""
UNSETTLED = ("differs", "partly checked")
"""Statuses that every report explains, and that ``--fsdp-strict`` makes failures."""
JUDGED = (*PASSED, "differs", "failed", "xfailed", "xpassed")
"""Statuses that a judge has decided, or measured."""
BAD = (*FAILED, "not run")
"""Statuses that make a run bad."""
LETTERS = {
    "passed": ".",
    "differs": "d",
    "partly checked": "p",
    "failed": "F",
    "error": "E",
    "xfailed": "x",
    "xpassed": "X",
    "skipped": "s",
    "not run": "n",
}
"""Status -> its character in ``CheckHistory.results``; ``ABSENT`` stands for a run without the check or the loader."""
ABSENT = "-"
UNACCOUNTED = ("not selected", "not run")
"""Kinds of checks that were not judged, without a reason given by the author of the test."""
TRACED = {
    "agrees": f"off by at most {AGREES:g} times its noise",
    "not compared": "its part of the reference's tensor is not known, or it is a part of a sum",
    "in between": "neither agrees nor departs",
    "departs": f"off by more than {DEPARTS:g} times its noise",
}
"""Every state of a module's call in a traced step, with its meaning, in ascending order of severity."""


@dataclass(frozen=True)
class EarlierRun:
    """A run before this one: when it started (UTC, ISO 8601), of which commit, and how it ended."""

    started: str
    commit: str = ""
    exit_status: int | None = None
    """None for a run that was killed."""


@dataclass(frozen=True)
class FindingRecord:
    """One broken promise: "<tensor>, <ranks>: <actual>, but should be <expected> (<detail>)".

    ``tensor`` is None where the finding concerns the whole model. ``expected`` may be empty; then ``actual`` stands
    alone.
    """

    tensor: str | None
    ranks: tuple[int, ...]
    actual: str
    expected: str
    detail: str = ""
    cause: str = ""
    remedy: str = ""
    origin: str = ""
    """Where the difference starts; the same for all findings of a check."""
    since: EarlierRun | None = None
    """The first run since which the check has had a finding on this tensor with this cause; this run itself if it is
    new. None without earlier runs."""


@dataclass(frozen=True)
class CheckHistory:
    """What became of a check in ``Report.earlier``.

    ``results`` has one character for each of these runs, oldest first: the letters of pytest and four more, which
    ``LETTERS`` lists. ``flaky`` takes this run into account as well.
    """

    results: str
    broken_since: EarlierRun | None = None
    """If the check fails: the first run since which it has not passed; this run itself if it is new."""
    last_passed: EarlierRun | None = None
    """If the check fails: the last run in which it passed, where that is known."""
    flaky: bool = False
    """Whether it passed in at least two stretches of runs, and failed in two."""
    reason_since: EarlierRun | None = None
    """If the check fails without findings: the first run since which it has failed for the same reason."""


@dataclass(frozen=True)
class CheckRecord:
    """The result of one check of one loader in one world: ``status`` is one of ``STATUSES``."""

    check: str
    status: str
    nodeid: str = ""
    """The pytest item; empty where there was none."""
    reason: str = ""
    """Why the check did not simply pass or fail, in one line."""
    findings: tuple[FindingRecord, ...] = ()
    unjudged: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Failed check -> its tensors, which this check therefore did not judge."""
    seconds: float = 0.0
    """The duration that pytest measured for the item; the first item of a loader includes the load."""
    again: str = ""
    """The command that reruns this item."""
    detail: str = ""
    """The full message, where it has more than one line: tracebacks or stacks of ranks, or the example that failed.
    The first check of a loader has the detail of an error that all its checks share."""
    skip: str = ""
    """The kind of the skip, one of ``SKIPS``; empty unless ``status`` is "skipped"."""
    missing_field: str = ""
    """The field of Subject that a check needs which is "not declared", if it is a single one."""
    place: str = ""
    """The line of the user's code that an error points to, as "path:line"; the path is relative to pytest's root folder
    if it is inside. Empty if no frame is the user's."""
    history: CheckHistory | None = None
    """None without earlier runs."""
    all_of: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Kind of tensors, such as "parameter" -> all tensors of the kind, if each of them has a finding."""

    @property
    def kind(self) -> str:
        """The kind of a skip; the status of any other check."""
        return self.skip or self.status


@dataclass(frozen=True)
class Piece:
    """The part of a tensor that ``ranks`` hold: for each dim of its extent, half-open runs of global indices."""

    ranks: tuple[int, ...]
    regions: tuple[Region, ...]
    dtype: str
    device: str = ""
    """The device of the tensor if it is not the rank's own: "meta", "cpu", another GPU."""
    placements: tuple[str, ...] | None = None
    poisoned: int = 0
    """Elements that were never written."""
    nan: int = 0


@dataclass(frozen=True)
class TensorRecord:
    """The layout of one parameter or buffer on the ranks. Ranks in no piece do not have the tensor.

    Regions are indices into ``extent``: the global shape, or a single row of all elements where ``flat``.
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
    """Losses by training step, without units.

    ``ranks`` has one curve per data-parallel slice of the batch, ``mean`` is the global loss over all ranks, and
    ``reference`` is empty if there is no reference.
    """

    mean: tuple[float, ...]
    ranks: tuple[tuple[float, ...], ...]
    reference: tuple[float, ...] = ()
    tolerance: tuple[float, ...] = ()
    """How far ``mean`` may be from the reference at each step, relative to the largest loss of the reference.
    Empty without a reference."""


@dataclass(frozen=True)
class TracedRow:
    """One call of a module in a traced step, or the first of ``calls`` successive ones.

    ``states`` has one of ``TRACED`` for each group of ranks: the worst of the row, which ``times`` of its calls have.
    ``distances`` are the greatest of these, in multiples of what rounding does; None where nothing was compared.
    """

    stage: str
    """What was compared: "input", "output", "gradient" (of the output), "recomputed input" or "recomputed output"."""
    module: str
    states: tuple[str, ...]
    distances: tuple[float | None, ...]
    kind: str = ""
    """The class of the module."""
    turn: int = 0
    """The number of earlier calls of the module."""
    calls: int = 1
    until: str = ""
    """The module of the last call, where there are several."""
    times: tuple[int, ...] = ()
    """Empty for a row of one call."""


@dataclass(frozen=True)
class TracedPhase:
    """The calls of modules in a forward or a backward, in the order in which they ran.

    Calls far from where something begins to depart share rows. An input has no row if its states are those of the
    output of the same call.
    """

    rows: tuple[TracedRow, ...] = ()

    @property
    def first(self) -> TracedRow | None:
        """The first call that departs on some rank."""
        return next((row for row in self.rows if "departs" in row.states), None)


@dataclass(frozen=True)
class TracedStep:
    """A step that ran once more with hooks on all modules, compared with the reference's.

    ``origin`` says in one line where the difference starts, inside ``module``; both are empty if that is not sure.
    """

    ranks: tuple[tuple[int, ...], ...]
    """The groups of ranks with the same states, one column each."""
    forward: TracedPhase
    backward: TracedPhase
    """Without rows if the author's own step trains, nothing is trainable, or the ranks' calls differ."""
    step: int = 0
    """The number of the batch; the weights are those that were loaded."""
    origin: str = ""
    module: str | None = None
    phase: str = ""
    """Where the difference starts: "forward", "backward", or "recomputation", which is part of the backward."""


@dataclass(frozen=True)
class Summary:
    """The part of the evidence that a report shows."""

    tensors: tuple[TensorRecord, ...] = ()
    losses: Curves | None = None
    memory: tuple[RankMemory, ...] = ()
    """In rank order."""
    model_bytes: int = 0
    """The size of all parameters together."""
    load_budget: int = 0
    """Bytes that a rank may hold while loading, as ``load_peak_memory_bounded`` judges it: its shards with copies of
    them and a few full tensors, or the whole model if that is more."""
    traced: TracedStep | None = None
    """None if no step was traced, or the ranks ran different modules."""
    unavailable: Mapping[str, str] = field(default_factory=dict)
    """Observation -> why it was not taken."""


UNKNOWN = WorldFacts(0, (), "", "")


@dataclass(frozen=True)
class LoaderRecord:
    """One loader in one world: every check of the catalogue, in its order."""

    loader: str
    """The node id without the check."""
    world: WorldFacts
    """``UNKNOWN`` under xdist where no item of the loader has run: only its worker knows the world."""
    checks: tuple[CheckRecord, ...]
    error: str = ""
    """Why no check of the loader was judged, in one line: it raised, returned no model, hung or died."""
    seconds: Mapping[str, float] = field(default_factory=dict)
    """Activity -> seconds, in the order in which activities began."""
    summary: Summary | None = None
    notes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """What no check fails for -> where: what the model's values or sizes hide. Of "even shards",
    nothing says that this loader has uneven ones."""
    sizes: tuple[SimulatedSize, ...] = ()
    """What ranks need in this world and in smaller ones, if it was simulated."""
    loads: int = 1
    """How often the loader has run: a rerun of an item, as by pytest-rerunfailures, runs it again."""

    @property
    def is_crashed(self) -> bool:
        """Whether all errors of its checks are one."""
        return bool(self.error)


@dataclass(frozen=True)
class CatalogueRecord:
    """A check of the catalogue as it was in the run."""

    check: str
    family: str
    promise: str
    since: str
    own: bool = False
    """Whether it is a check of the user's project."""


@dataclass(frozen=True)
class Header:
    """The command, environment and time of a run. ``started`` is UTC, ISO 8601."""

    started: str
    project: str
    """The name of pytest's root folder."""
    command: tuple[str, ...]
    versions: Mapping[str, str]
    hardware: Mapping[str, str]
    engine: str
    commit: str = ""
    """The commit of the user's repository, with "+" if tracked files have changes; empty outside a repository."""
    catalogue: tuple[CatalogueRecord, ...] = ()
    settings: Mapping[str, str] = field(default_factory=dict)
    """Environment variable or ini option -> its value, for options that ``command`` does not have."""


@dataclass(frozen=True)
class Outcome:
    """What ``--fsdp-fail-on`` made of the run."""

    passes: bool
    reason: str
    """Why, such as "1 known failure" or "1 loader missing"."""
    fail_on: str
    """The option's value."""

    def __str__(self) -> str:
        return f"{'passes' if self.passes else 'fails'}: {self.reason}"


@dataclass(frozen=True)
class Report:
    """The report of one run.

    ``complete`` is false in the report of a run that was killed. It is the last field, so a truncated file lacks it. An
    interrupted run is complete; its exit status and its checks that were not run show the interruption.
    """

    schema: int
    header: Header
    loaders: tuple[LoaderRecord, ...] = ()
    earlier: tuple[EarlierRun, ...] = field(default=(), kw_only=True)
    """Runs whose results the checks have as ``history``, oldest first."""
    missing: tuple[str, ...] = field(default=(), kw_only=True)
    """Loaders of the run that this one was compared with, for whose absence it fails."""
    outcome: Outcome | None = field(default=None, kw_only=True)
    """None unless the run ended, with ``--fsdp-fail-on=regression`` or ``any``, and passed or failed by that."""
    stopped_by: str = field(default="", kw_only=True)
    """What went wrong while pytest collected tests, if it ran none because of that."""
    seconds: float = 0.0
    """From the start of pytest to the end of the last item."""
    exit_status: int | None = None
    complete: bool = False

    @property
    def is_bad(self) -> bool:
        """Whether a check needs a fix or was not run, or a loader is missing."""
        return is_bad(self.loaders) or bool(self.missing)


def count_kinds(loaders: Iterable[LoaderRecord]) -> Counter[str]:
    """Return how many checks of the loaders have each kind: a status, or the kind of a skip."""
    return Counter(check.kind for loader in loaders for check in loader.checks)


def how_many(counts: Mapping[str, int], kinds: Iterable[str]) -> int:
    """Return the sum of the counts of ``kinds``."""
    return sum(counts.get(kind, 0) for kind in kinds)


def describe_counts(counts: Mapping[str, int]) -> str:
    """Return a text such as "34 passed, 1 error, 9 skipped (4 not declared, 5 not applicable)"."""
    by_status = {status: counts.get(status, 0) for status in STATUSES}
    skipped = by_status["skipped"] = how_many(counts, ("skipped", *SKIPS))
    parts = {status: describe_count(number, status) for status, number in by_status.items() if number}
    if kinds := ", ".join(describe_count(counts[kind], kind) for kind in SKIPS if counts.get(kind)):
        parts["skipped"] = f"{skipped} skipped ({kinds})"
    return ", ".join(parts.values())


def describe_count(number: int, kind: str) -> str:
    """Return a text such as "3 passed", "2 errors", "2 differ" or "2 depend on a failed check"."""
    if kind == "error":
        return counted(number, kind)
    return f"{number} {kind if number == 1 else re.sub('(?<=^depend|^differ)s', '', kind)}"


def describe_kind(kind: str) -> str:
    """Return a text such as "failed" or "skipped: not declared"."""
    return f"skipped: {kind}" if kind in SKIPS else kind


def is_bad(loaders: Iterable[LoaderRecord]) -> bool:
    """Return whether a loader crashed, or any check needs a fix or was not run."""
    return any(loader.is_crashed or how_many(count_kinds([loader]), BAD) for loader in loaders)
