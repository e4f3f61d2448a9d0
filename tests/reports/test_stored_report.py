"""A stored ``report.json`` of the current schema can be read, and each check has the same outcome.

``data/schema-2.report.json`` was written on 2026-11-25 for four loaders on 2 ranks (gloo) with different outcomes. The
machine and the date were removed, and from all loaders but the first the checks that ``only=`` left out.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from pytest_fsdp_meta.reports.io import read_report
from pytest_fsdp_meta.reports.schema import CheckRecord

STORED = Path(__file__).parent / "data" / "schema-2.report.json"
OUTCOMES = {
    "test_tiny.py::test_tiny": {
        "dtypes_match_reference": "skipped, left out",
        "requires_grad_matches_reference": "xfailed",
        "parameter_attributes_kept": "skipped, not declared",
        "no_meta_params": "xpassed",
        "no_meta_buffers": "passed",
        "params_equal_reference": "failed",
        "tied_weights_share_storage": "skipped, not applicable",
        "grad_parity": "skipped, depends on a failed check",
        "frozen_weights_stay_frozen": "skipped, not applicable",
        "update_parity": "skipped, depends on a failed check",
        "loss_parity": "skipped, depends on a failed check",
        "load_is_repeatable": "passed",
    },
    "test_tiny.py::test_left_on_meta": {
        "no_meta_params": "failed",
        "no_uninitialized_memory": "skipped, not selected",
        "params_on_rank_device": "skipped, depends on a failed check",
        "collectives_match_on_every_rank": "partly checked",
    },
    "test_tiny.py::test_raises": {"no_meta_params": "error"},
    "test_tiny.py::test_skips": {"no_meta_params": "skipped, by the test"},
}
"""The outcome of each check that the loaders did not leave out by ``only=``."""


def outcome(check: CheckRecord) -> str:
    """Return the status of a check, with the kind of a skip."""
    return ", ".join(filter(None, [check.status, check.skip]))


def test_each_check_keeps_its_outcome() -> None:
    report = read_report(STORED)
    found = {loader.loader: {check.check: outcome(check) for check in loader.checks} for loader in report.loaders}
    others = found["test_tiny.py::test_tiny"].keys() - OUTCOMES["test_tiny.py::test_tiny"].keys()
    left_out = Counter(found["test_tiny.py::test_tiny"].pop(check) for check in others)
    assert left_out == {"skipped, left out": 44}
    assert found == OUTCOMES


def test_each_finding_is_read() -> None:
    found = {
        (loader.loader.partition("::")[2], check.check): [(f.tensor, f.ranks) for f in check.findings]
        for loader in read_report(STORED).loaders
        for check in loader.checks
        if check.findings
    }
    assert found == {
        ("test_tiny", "requires_grad_matches_reference"): [("1.bias", (0, 1))],
        ("test_tiny", "params_equal_reference"): [("0.bias", (0, 1))],
        ("test_left_on_meta", "no_meta_params"): [("1.weight", (0, 1)), ("1.bias", (0, 1))],
    }


def test_a_report_names_the_version_that_wrote_it() -> None:
    report = read_report(STORED)
    assert report.header.versions["pytest-fsdp-meta"] == "0.3.0"
    assert report.complete
