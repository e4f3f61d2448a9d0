"""Warnings of ranks, raised again in the pytest process: there the user's filters are, and pytest's summary."""

from __future__ import annotations

from pytest_fsdp_meta.text import name_ranks
from pytest_fsdp_meta.worlds import ObservedWorld
from pytest_fsdp_meta.worlds.rank.warnings import Warned, raise_again


class Warnings:
    """Those of one item: each once, however many ranks and loads have raised it."""

    def __init__(self) -> None:
        self._heard: dict[Warned, tuple[set[int], list[str]]] = {}

    def hear(self, world: ObservedWorld, rank: int, one: Warned) -> None:
        ranks, alone = self._heard.setdefault(one, (set(), []))
        if not world.label or world.spec.size > 1:
            ranks.add(rank)
        elif world.label not in alone:
            alone.append(world.label)

    def tell(self) -> list[Warning]:
        """Raises them all again, and returns those that the user's filters make errors of."""
        heard, self._heard = self._heard, {}
        errors = []
        for one, (ranks, alone) in heard.items():
            try:
                raise_again(one, f"on {name_ranks(ranks)}" if ranks else f"in {' and '.join(alone)}")
            except Warning as error:
                error.__notes__ = [f"raised at {one.file}:{one.line}"]  # type: ignore[attr-defined]
                errors.append(error)
        return errors
