"""Worlds that are kept for whoever wants the same again, and handed on only while nothing of the last use is left."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import astuple, dataclass, field

from pytest_fsdp_meta.text import name_ranks
from pytest_fsdp_meta.worlds.failures import WorldError
from pytest_fsdp_meta.worlds.rank.reset import Counts, Left
from pytest_fsdp_meta.worlds.spec import WorldSpec
from pytest_fsdp_meta.worlds.world import World

TIDYING = "pytest_fsdp_meta.worlds.rank.reset"
DOING = "tidying up after the test"


@dataclass
class _Kept:
    """A world, and what its ranks were started with."""

    world: World
    environ: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    folder: str = field(default_factory=os.getcwd)
    idle: bool = False

    def follow(self, but: Collection[str]) -> None:
        """Lets the ranks have what a fresh world would have now; without a call where that is what they have."""
        names = (self.environ.keys() | os.environ.keys()) - set(but)
        changed = {name: os.environ.get(name) for name in names if os.environ.get(name) != self.environ.get(name)}
        folder = os.getcwd()
        if changed or folder != self.folder:
            self.world.run(f"{TIDYING}:follow", changed, folder if folder != self.folder else None)


class Pool:
    """Running worlds by owner: each is kept until its owner's end.

    ``private`` are names of the parent's environment variables that mean nothing to ranks.
    """

    def __init__(self, make: Callable[[WorldSpec], World], private: Collection[str] = ()) -> None:
        self._make = make
        self._private = private
        self._kept: dict[tuple[Hashable, str], _Kept] = {}

    def take(self, owner: Hashable, spec: WorldSpec) -> World:
        """The owner's world of this kind, a fresh one where there is none or it has ended. Raises WorldError."""
        key = owner, repr(astuple(spec))
        kept = self._kept.get(key)
        if kept is None or not kept.world.alive:
            kept = self._kept[key] = _Kept(self._make(spec))
            kept.world.start()
            kept.world.run(f"{TIDYING}:remember")
        elif kept.idle:
            kept.follow(self._private)
        kept.idle = False
        return kept.world

    def tidy(self, owner: Hashable) -> str:
        """Puts the owner's worlds back as they began, and ends those that cannot be. Says what is wrong, or nothing."""
        told = [_tidied(kept) for (whose, _), kept in self._kept.items() if whose == owner and kept.world.alive]
        return next(filter(None, told), "")

    def end(self, owner: Hashable) -> None:
        """Ends every world of the owner."""
        for key in [key for key in self._kept if key[0] == owner]:
            self._kept.pop(key).world.close()

    def close(self) -> None:
        for owner, _ in list(self._kept):
            self.end(owner)


def _tidied(kept: _Kept) -> str:
    """Says what is wrong, or nothing."""
    world, kept.idle, told = kept.world, True, ""
    try:
        left: list[Left] = world.call(f"{TIDYING}:tidy", doing=DOING)
        # Ranks that only sent each other something have begun more than the others, and rightly so.
        uneven = bool(_uneven([one.begun for one in left]))
        if uneven:
            told = _unpaired(world.call(f"{TIDYING}:collectives", doing=DOING))
    except WorldError as error:
        return str(error)
    if uneven or any(one.stays for one in left):
        world.close()
    return told


def _uneven(counts: Sequence[Counts]) -> dict[tuple[int, ...], dict[int, list[int]]]:
    """The groups in which not all ranks have counted the same, and which of them have counted what. By rank."""
    said: dict[tuple[int, ...], dict[int, list[int]]] = {}
    for rank, mine in enumerate(counts):
        for group, number in mine.items():
            said.setdefault(group, {}).setdefault(number, []).append(rank)
    return {group: numbers for group, numbers in said.items() if len(numbers) > 1}


def _unpaired(counts: Sequence[Counts]) -> str:
    """What is wrong where ranks have not called the same collectives: the next test's would pair with the rest."""
    for group, numbers in _uneven(counts).items():
        where = "" if len(group) == len(counts) else f" in the group of {name_ranks(group)}"
        said = ", ".join(f"{name_ranks(ranks)}: {number}" for number, ranks in numbers.items())
        return (
            f"the ranks have not called the same number of collectives{where} ({said}), and what is left would pair "
            "with those of the next test, so this world was ended; call every collective on all ranks, and wait for "
            "the async ones"
        )
    return ""
