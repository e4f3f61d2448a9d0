"""Warnings of ranks, raised again in the pytest process, where the user's filters and pytest's summary apply."""

from __future__ import annotations

from pytest_fsdp_meta.text import name_ranks
from pytest_fsdp_meta.worlds import ObservedWorld
from pytest_fsdp_meta.worlds.rank.warnings import RankWarning, reissue


class Warnings:
    """The warnings of one item, each once, however many ranks and worlds have raised it."""

    def __init__(self) -> None:
        self._collected: dict[RankWarning, tuple[set[int], list[str]]] = {}
        """The ranks that raised each warning, and the labels of worlds of one rank that did."""

    def add(self, world: ObservedWorld, rank: int, warning: RankWarning) -> None:
        ranks, labels = self._collected.setdefault(warning, (set(), []))
        if not world.label or world.spec.size > 1:
            ranks.add(rank)
        elif world.label not in labels:
            labels.append(world.label)

    def raise_collected(self) -> list[Warning]:
        """Raise all warnings again, and return those that the user's filters turn into errors."""
        collected, self._collected = self._collected, {}
        errors = []
        for warning, (ranks, labels) in collected.items():
            try:
                reissue(warning, f"on {name_ranks(ranks)}" if ranks else f"in {' and '.join(labels)}")
            except Warning as error:
                error.__notes__ = [f"raised at {warning.file}:{warning.line}"]  # type: ignore[attr-defined]
                errors.append(error)
        return errors
