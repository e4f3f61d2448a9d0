"""Stored evidence: a file of the current schema gives the same verdicts, and unreadable files say why.

``data/schema-3.evidence.json.gz`` was written on 2026-11-25 for a loader of two ``nn.Linear`` layers on 2 ranks (gloo),
which adds 1 to ``0.bias`` and freezes ``1.bias``.
"""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pytest_fsdp_meta.catalogue import Verdict, built_in, judge
from pytest_fsdp_meta.evidence import store
from pytest_fsdp_meta.evidence.store import (
    SUFFIX,
    clear_evidence,
    evidence_file_name,
    read_evidence,
    write_evidence,
)

STORED = Path(__file__).parent / "data" / f"schema-3{SUFFIX}"
STATUSES = {
    "dtypes_match_reference": "passed",  # skip= left it out of the run
    "requires_grad_matches_reference": "failed",  # xfail= expected it to
    "parameter_attributes_kept": "skipped",
    "no_meta_params": "passed",
    "no_meta_buffers": "passed",
    "params_equal_reference": "failed",
    "tied_weights_share_storage": "skipped",
    "grad_parity": "skipped",
    "frozen_weights_stay_frozen": "skipped",
    "update_parity": "skipped",
    "loss_parity": "skipped",
    "load_is_repeatable": "passed",
}
"""The verdict of each check in ``only=``."""


def judge_stored() -> dict[str, Verdict]:
    stored, catalogue = read_evidence(STORED), built_in()
    return {id: judge(catalogue[id], stored.evidence, catalogue) for id in stored.offered}


def test_stored_evidence_gives_the_same_verdicts() -> None:
    assert {id: verdict.status for id, verdict in judge_stored().items()} == STATUSES


def test_stored_evidence_gives_the_same_findings() -> None:
    verdicts = judge_stored()
    findings = {id: [(f.tensor, f.ranks) for f in verdict.findings] for id, verdict in verdicts.items()}
    assert {id: found for id, found in findings.items() if found} == {
        "params_equal_reference": [("0.bias", (0, 1))],
        "requires_grad_matches_reference": [("1.bias", (0, 1))],
    }


def test_stored_evidence_keeps_its_settings() -> None:
    stored = read_evidence(STORED)
    assert stored.loader == "test_tiny.py::test_tiny"
    assert set(stored.offered) < set(stored.known) <= set(built_in().ids())
    assert stored.skip == {"dtypes_match_reference": "left out on purpose"}
    assert stored.xfail == {"requires_grad_matches_reference": "a known defect", "no_meta_params": "fixed by now"}


def test_evidence_survives_a_round_trip(tmp_path: Path) -> None:
    stored = read_evidence(STORED)
    path = write_evidence(tmp_path / "new", stored)
    assert path.name == evidence_file_name(stored.loader)
    assert read_evidence(path) == stored
    clear_evidence(path.parent)
    assert not list(path.parent.iterdir())


def compress(data: Any) -> bytes:
    return gzip.compress(json.dumps(data).encode())


def change(**changes: Any) -> Callable[[bytes], bytes]:
    return lambda data: compress(json.loads(gzip.decompress(data)) | changes)


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (lambda data: b"", "not stored evidence, or truncated"),
        (lambda data: data[: len(data) // 2], "not stored evidence, or truncated (EOFError: "),
        (lambda data: b"{}", "not stored evidence, or truncated (BadGzipFile: "),
        (lambda data: compress([]), "stored evidence of schema None, but should be 3; run the tests again with"),
        (change(schema=1), "stored evidence of schema 1, but should be 3; run the tests again with --fsdp-report"),
        (change(known=[1]), "StoredEvidence.known[0]: 1, but should be str"),
        # 2 MiB of a gzip file that stand for 2 GiB.
        (lambda data: gzip.compress(bytes(2**26)) * 32, "more than 512 MiB of JSON, which is the limit"),
    ],
    ids=["empty", "truncated", "not compressed", "not an object", "another schema", "a wrong field", "too large"],
)
def test_unreadable_files_say_why(tmp_path: Path, damage: Callable[[bytes], bytes], problem: str) -> None:
    path = tmp_path / STORED.name
    path.write_bytes(damage(STORED.read_bytes()))
    with pytest.raises(ValueError) as caught:
        read_evidence(path)
    assert str(caught.value).startswith(f"{path}: {problem}")
    assert "\n" not in str(caught.value)


def test_evidence_that_could_not_be_read_again_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "LARGEST", 2**14)
    with pytest.raises(OSError, match=r"^0 MiB, but at most 0\.015625 MiB can be read again$"):
        write_evidence(tmp_path, read_evidence(STORED))
    assert not list(tmp_path.iterdir())


READ_WITH_LITTLE_MEMORY = """
import resource, sys
from pathlib import Path
from pytest_fsdp_meta.{module} import {function}
used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 2**28,) * 2)
try:
    {function}(Path(sys.argv[1]))
except ValueError as error:
    print(error)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs a limit of memory and /proc")
@pytest.mark.parametrize(
    ("module", "function"), [("evidence.store", "read_evidence"), ("reports.io", "read_report")], ids=["gz", "json"]
)
def test_a_file_for_which_the_memory_is_too_small(tmp_path: Path, module: str, function: str) -> None:
    """Each empty list takes 64 bytes in Python, and three in the file."""
    path, text = tmp_path / "file", b"[" + b"[]," * 2**23 + b"[]]"
    path.write_bytes(gzip.compress(text, 1) if module == "evidence.store" else text)
    code = READ_WITH_LITTLE_MEMORY.format(module=module, function=function)
    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == (f"{path}: not enough memory to read it\n", "")
