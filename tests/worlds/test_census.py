"""Many worlds in a row leave no memory, descriptors, threads, processes, folders or shared memory behind."""

from __future__ import annotations

import os
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.many_worlds import ALLOWED_KIB, Count, Holdings, count_while_running, problems
from tests.world_help import preload

WORLDS = int(os.environ.get("FSDP_TEST_WORLDS", "24"))
"""How many worlds to run; 100 take a minute."""


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="needs /proc")
def test_worlds_in_a_row_leave_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    preload().start()
    before, after = count_while_running(preload(), WORLDS, every=WORLDS)
    assert after.worlds == WORLDS
    assert not problems(before, after)
    assert not list(tmp_path.glob("fsdp-world-*"))


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="needs /proc")
def test_a_descriptor_that_stays_open_is_found() -> None:
    counts = count_while_running(preload(), 1, every=1)
    before = next(counts)
    with open(os.devnull):
        after = next(counts)
    now = before.parent.descriptors + 1
    assert problems(before, after) == [f"pytest process: descriptors grew from {now - 1} to {now}"]


def test_what_counts_as_a_leak() -> None:
    held = Holdings(anonymous_kib=1000, pss_kib=1500, descriptors=10, threads=1, children=0)
    before = Count(0, 0.0, held, held, ())
    grown = replace(held, descriptors=11, anonymous_kib=1001 + ALLOWED_KIB, pss_kib=9000)
    assert problems(before, replace(before, server=grown, left=("fsdp-world-1",))) == [
        "fork server: descriptors grew from 10 to 11",
        f"fork server: anonymous_kib grew from 1000 to {1001 + ALLOWED_KIB}",
        "fsdp-world-1 remains",
    ]
    less = replace(held, descriptors=9, anonymous_kib=1000 + ALLOWED_KIB)
    assert not problems(before, replace(before, parent=less))
