"""Files of stored evidence, which can be judged again later without ranks."""

from __future__ import annotations

import gzip
import hashlib
import json
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pytest_fsdp_meta.evidence import Evidence
from pytest_fsdp_meta.evidence.codec import LARGEST, TooLarge, from_plain, read_json, to_plain, write_whole

SCHEMA = 3
"""Incremented when old readers would misread new files; adding a field with a default does not count."""
FOLDER = "evidence"
"""The folder inside a report's folder."""
SUFFIX = ".evidence.json.gz"


@dataclass(frozen=True)
class StoredEvidence:
    """One loader in one world as stored in a file: its evidence, and its author's settings for the checks."""

    schema: int
    loader: str
    """The node id of the test without the check."""
    known: tuple[str, ...]
    """The ids of all checks that existed when the file was written."""
    offered: tuple[str, ...]
    """Those of them that ``only=`` did not exclude. Checks added to the catalogue later are judged too."""
    evidence: Evidence
    skip: Mapping[str, str] = field(default_factory=dict)
    """Check id to reason, as in ``skip=``."""
    xfail: Mapping[str, str] = field(default_factory=dict)
    """Check id to reason, as in ``xfail=``."""


def evidence_file_name(loader: str) -> str:
    """Return a file name for a loader: the readable part of its node id, and a hash that makes it unique."""
    readable = re.sub(r"[^\w.-]+", "-", loader, flags=re.ASCII).strip("-.")[:80]
    return f"{readable}-{hashlib.sha256(loader.encode()).hexdigest()[:8]}{SUFFIX}"


def write_evidence(folder: Path, stored: StoredEvidence) -> Path:
    """Write stored evidence into a folder, which is created if needed. Raises OSError, also if it is too large."""
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(to_plain(stored), allow_nan=False, separators=(",", ":")).encode()
    if len(text) > LARGEST:
        raise OSError(f"{len(text) / 2**20:.0f} MiB, but at most {LARGEST / 2**20:g} MiB can be read again")
    return write_whole(folder / evidence_file_name(stored.loader), gzip.compress(text, mtime=0))


def read_evidence(path: Path) -> StoredEvidence:
    """Read a file of stored evidence.

    Raises ValueError with a one-line message if the file cannot be read, is not stored evidence, has another schema, or
    is too large.
    """
    try:
        return _read(path)
    except MemoryError:
        raise ValueError(f"{path}: not enough memory to read it") from None


def _read(path: Path) -> StoredEvidence:
    try:
        with gzip.open(path) as file:
            data = read_json(file)
    except TooLarge as error:
        raise ValueError(f"{path}: {error}") from None
    except (OSError, EOFError, ValueError, RecursionError, zlib.error) as error:
        raise ValueError(f"{path}: not stored evidence, or truncated ({type(error).__name__}: {error})") from None
    version = data.get("schema") if isinstance(data, dict) else None
    if version != SCHEMA:
        raise ValueError(
            f"{path}: stored evidence of schema {version!r:.60}, but should be {SCHEMA}; "
            "run the tests again with --fsdp-report"
        )
    try:
        return from_plain(StoredEvidence, data)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def clear_evidence(folder: Path) -> None:
    """Delete the evidence of an earlier run, which would be taken for this run's. Raises OSError."""
    for path in folder.glob(f"*{SUFFIX}"):
        path.unlink()
