"""Worlds that are kept for whoever wants the same again, and handed on only while nothing of the last use is left."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import astuple

from pytest_fsdp_meta.words import name_ranks
from pytest_fsdp_meta.worlds.failures import WorldError
from pytest_fsdp_meta.worlds.spec import WorldSpec
from pytest_fsdp_meta.worlds.tidying import Left
from pytest_fsdp_meta.worlds.world import World

TIDYING = "pytest_fsdp_meta.worlds.tidying"


class Pool:
    """Running worlds by owner: each is kept until its owner's end."""

    def __init__(self, make: Callable[[WorldSpec], World]) -> None:
        self._make = make
        self._worlds: dict[tuple[Hashable, str], World] = {}

    def take(self, owner: Hashable, spec: WorldSpec) -> World:
        """The owner's world of this kind, a fresh one where there is none or it has ended. Raises WorldError."""
        key = owner, repr(astuple(spec))
        world = self._worlds.get(key)
        if world is None or not world.alive:
            world = self._worlds[key] = self._make(spec)
            world.start()
            world.run(f"{TIDYING}:remember")
        return world

    def tidy(self, owner: Hashable) -> str:
        """Puts the owner's worlds back as they began, and ends those that cannot be. Says what is wrong, or nothing."""
        told = ""
        for world in [world for (whose, _), world in self._worlds.items() if whose == owner and world.alive]:
            try:
                left: list[Left] = world.call(f"{TIDYING}:tidy", doing="tidying up after the test")
            except WorldError as error:
                told = told or str(error)
                continue
            told = told or _unpaired(left)
            if told or any(one.stays for one in left):
                world.close()
        return told

    def end(self, owner: Hashable) -> None:
        """Ends every world of the owner."""
        for key in [key for key in self._worlds if key[0] == owner]:
            self._worlds.pop(key).close()

    def close(self) -> None:
        for owner, _ in list(self._worlds):
            self.end(owner)


def _unpaired(left: list[Left]) -> str:
    """What is wrong where ranks have not called the same collectives: the next test's would pair with the rest."""
    by_number: dict[int, list[int]] = {}
    for rank, one in enumerate(left):
        by_number.setdefault(one.collectives, []).append(rank)
    if len(by_number) == 1:
        return ""
    counts = ", ".join(f"{name_ranks(ranks)}: {number}" for number, ranks in by_number.items())
    return (
        f"the ranks have not called the same number of collectives ({counts}), and what is left would pair with those "
        "of the next test, so this world was ended; call every collective on all ranks, and wait for the async ones"
    )
