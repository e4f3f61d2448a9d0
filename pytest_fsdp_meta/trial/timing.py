"""Measure how long each phase of a trial takes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass
class Stopwatch:
    """Seconds by phase, in the order in which the phases first began."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def timing(self, phase: str) -> Iterator[None]:
        """Add the duration of the block to the phase, also when the block raises."""
        began = time.perf_counter()
        self.seconds.setdefault(phase, 0.0)
        try:
            yield
        finally:
            self.seconds[phase] += time.perf_counter() - began
