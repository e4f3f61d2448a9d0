"""What the items of one loader in one world share: its runs, and what has been reported of them."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field

from pytest_fsdp_meta.catalogue import Selection
from pytest_fsdp_meta.evidence import Evidence
from pytest_fsdp_meta.loader.call import Call
from pytest_fsdp_meta.trial import LoaderFailed


@dataclass
class LoaderRun:
    """One run of a loader in one world, or of one Hypothesis example."""

    call: Call | None = None
    evidence: Evidence | None = None
    failure: LoaderFailed | None = None
    interrupted: bool = False
    """Whether a time limit such as pytest-timeout's ended the run."""
    reported_by: dict[str, str] = field(default_factory=dict)
    """Errors that were reported in full, each with the name of the item that reported it."""
    seconds: Mapping[str, float] = field(default_factory=dict)
    outputs: list[str] = field(default_factory=list)
    output_shown: bool = False
    examples: dict[object, LoaderRun] = field(default_factory=dict)
    """The runs of Hypothesis examples by their drawn values; empty for a loader without ``@given``."""

    @property
    def has_ended(self) -> bool:
        return self.evidence is not None or self.failure is not None


@dataclass
class Loader:
    """A loader in one world, which all of its items share."""

    key: str = ""
    """The same for all items of the loader in this world, and for no other item; stable from run to run."""
    name: str = ""
    """The loader in its world as reports show it: the node id without the check."""
    checks: list[str] = field(default_factory=list)
    """Those that were selected. Only the observations that they need are taken."""
    selection: Selection = field(default_factory=Selection)
    """Those to which a check may leave a defect."""
    seed: int = field(default_factory=lambda: secrets.randbits(64))
    """All items draw the same Hypothesis examples, also when they run again."""
    loads: int = 1
    """How many runs there have been: a rerun of an item, as by pytest-rerunfailures, starts another."""
    run: LoaderRun = field(default_factory=LoaderRun)
    attached: Evidence | str | None = None
    """The evidence or error that the latest item attached to its report, which the next one does not repeat."""
    errors: dict[str, str] = field(default_factory=dict)
    """Error of a fixture -> node id of the item that has shown it in full."""
