"""Evidence that is kept, to be judged again later without ranks: ``pytest DIR/evidence``."""

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
from pytest_fsdp_meta.evidence.codec import from_plain, to_plain, write_whole

SCHEMA = 1
"""Counts up when a reader of the old form would misread the new one."""
FOLDER = "evidence"
ENDING = ".evidence.json.gz"


@dataclass(frozen=True)
class StoredEvidence:
    """One loader in one world as its file has it: the evidence, and what its author said of the checks."""

    schema: int
    loader: str
    known: tuple[str, ...]
    """The checks that there were."""
    offered: tuple[str, ...]
    """Those that the author did not leave out by ``only``; checks that came later are judged as well."""
    evidence: Evidence
    skip: Mapping[str, str] = field(default_factory=dict)
    xfail: Mapping[str, str] = field(default_factory=dict)


def file_of(loader: str) -> str:
    """Its name in the folder: what can be read of the loader's, and what tells it from others."""
    readable = re.sub(r"[^\w.-]+", "-", loader, flags=re.ASCII).strip("-.")[:80]
    return f"{readable}-{hashlib.sha256(loader.encode()).hexdigest()[:8]}{ENDING}"


def write(folder: Path, kept: StoredEvidence) -> Path:
    """Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(to_plain(kept), allow_nan=False, separators=(",", ":"))
    return write_whole(folder / file_of(kept.loader), gzip.compress(text.encode(), mtime=0))


def read(path: Path) -> StoredEvidence:
    """Raises ValueError, in one line, for what is no kept evidence of this form."""
    try:
        data = json.loads(gzip.decompress(path.read_bytes()))
    except (OSError, EOFError, ValueError, RecursionError, zlib.error) as error:
        raise ValueError(f"{path}: no kept evidence, or cut off ({type(error).__name__}: {error})") from None
    version = data.get("schema") if isinstance(data, dict) else None
    if version != SCHEMA:
        raise ValueError(f"{path}: kept evidence of form {version!r:.60}, but should be {SCHEMA}; keep it again")
    try:
        return from_plain(StoredEvidence, data)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def clear(folder: Path) -> None:
    """What another run has kept there would be taken for this one's. Raises OSError."""
    for path in folder.glob(f"*{ENDING}"):
        path.unlink()
