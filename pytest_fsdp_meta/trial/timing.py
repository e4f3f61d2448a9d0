"""Where the time of a trial goes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass
class Stopwatch:
    """Seconds by what was done, in the order in which it was first begun."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def timing(self, what: str) -> Iterator[None]:
        began = time.perf_counter()
        self.seconds.setdefault(what, 0.0)
        try:
            yield
        finally:
            self.seconds[what] += time.perf_counter() - began
