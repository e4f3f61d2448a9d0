"""Reuse running worlds: a later test of the same owner gets a world only if nothing of the last test is left in it."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import astuple, dataclass, field

from pytest_fsdp_meta.text import name_ranks
from pytest_fsdp_meta.worlds.failures import WorldError
from pytest_fsdp_meta.worlds.rank.reset import Counts, GroupKey
from pytest_fsdp_meta.worlds.spec import WorldSpec
from pytest_fsdp_meta.worlds.world import World

RESET = "pytest_fsdp_meta.worlds.rank.reset"
PREPARING = "preparing the ranks for the test"
RESETTING = "resetting the ranks after the test"


@dataclass
class _PooledWorld:
    """A world, and the environment that its ranks were started with."""

    world: World
    environ: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    idle: bool = False

    def begin_test(self, private: Collection[str]) -> None:
        """Reset the ranks, and give them the environment and folder that a fresh world would get now."""
        names = (self.environ.keys() | os.environ.keys()) - set(private)
        changed = {name: os.environ.get(name) for name in names if os.environ.get(name) != self.environ.get(name)}
        self.world.call(f"{RESET}:begin_test", (changed, os.getcwd()), doing=PREPARING)


class Pool:
    """Running worlds, each kept for its owner until ``end(owner)``.

    ``private`` names environment variables of the parent that mean nothing to ranks.
    """

    def __init__(self, make: Callable[[WorldSpec], World], private: Collection[str] = ()) -> None:
        self._make = make
        self._private = private
        self._worlds: dict[tuple[Hashable, str], _PooledWorld] = {}

    def take(self, owner: Hashable, spec: WorldSpec) -> World:
        """Return the owner's world with this spec, or a fresh one if it has none that runs. Raises WorldError."""
        key = owner, repr(astuple(spec))
        pooled = self._worlds.get(key)
        if pooled is None or not pooled.world.alive:
            pooled = self._worlds[key] = _PooledWorld(self._make(spec))
            pooled.world.start()
            pooled.world.call(f"{RESET}:record_start", doing=PREPARING)
        elif pooled.idle:
            pooled.begin_test(self._private)
        pooled.idle = False
        return pooled.world

    def end_test(self, owner: Hashable) -> str:
        """Keep the owner's worlds, or end those that cannot be reused. Return what the test did wrong, or ""."""
        problems = [
            _end_test(pooled) for (whose, _), pooled in self._worlds.items() if whose == owner and pooled.world.alive
        ]
        return next(filter(None, problems), "")

    def end(self, owner: Hashable) -> None:
        """End every world of the owner."""
        for key in [key for key in self._worlds if key[0] == owner]:
            self._worlds.pop(key).world.close()

    def close(self) -> None:
        for owner, _ in list(self._worlds):
            self.end(owner)


def _end_test(pooled: _PooledWorld) -> str:
    world, pooled.idle, problem = pooled.world, True, ""
    try:
        counts: list[Counts | None] = world.call(f"{RESET}:end_test", doing=RESETTING)
        known = [count for count in counts if count is not None]
        if uneven := bool(_find_uneven(known)):
            # Not a mistake if only some ranks sent each other something, so compare the collectives alone.
            problem = _describe_uneven(world.call(f"{RESET}:count_collectives", doing=RESETTING))
    except WorldError as error:
        return str(error)
    if uneven or len(known) < len(counts):
        world.close()
    return problem


def _find_uneven(counts: Sequence[Counts]) -> dict[GroupKey, dict[int, list[int]]]:
    """Return the groups whose ranks have different counts, each with the ranks by count. ``counts`` are by rank."""
    ranks_by_count: dict[GroupKey, dict[int, list[int]]] = {}
    for rank, by_group in enumerate(counts):
        for group, number in by_group.items():
            ranks_by_count.setdefault(group, {}).setdefault(number, []).append(rank)
    return {group: by_count for group, by_count in ranks_by_count.items() if len(by_count) > 1}


def _describe_uneven(counts: Sequence[Counts]) -> str:
    """Return what is wrong if ranks have called different numbers of collectives, else ""."""
    for (_, group), by_count in _find_uneven(counts).items():
        where = "" if len(group) == len(counts) else f" in the group of {name_ranks(group)}"
        numbers = ", ".join(f"{name_ranks(ranks)}: {number}" for number, ranks in by_count.items())
        return (
            f"the ranks have not called the same number of collectives{where} ({numbers}), so the unmatched ones would "
            "pair with those of the next test; this world was ended. Call every collective on all ranks, and wait for "
            "the async ones"
        )
    return ""
