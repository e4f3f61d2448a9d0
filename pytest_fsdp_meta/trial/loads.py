"""The loads of one trial: the first one, a second one of the same size, and those in worlds of other sizes."""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from pytest_fsdp_meta.evidence import Unavailable, shards_data
from pytest_fsdp_meta.loader.call import ASSUME, SKIPS
from pytest_fsdp_meta.trial.on_ranks import author_saving, run_on
from pytest_fsdp_meta.worlds import World, WorldError, WorldSpec

if TYPE_CHECKING:
    from pytest_fsdp_meta.checks.materialisation.observe import Loaded

LOADER_OUTCOMES = (*SKIPS, ASSUME)
"""Exceptions that count as an outcome of the loader when every rank raises them; xfail is set by the marker only."""
P = ParamSpec("P")
R = TypeVar("R")
Load = Callable[[WorldSpec, str, list[World]], "tuple[World, list[Loaded]]"]
"""Start a world with a spec and a label, add it to a list, and run the loader in it."""


@dataclass
class Loads:
    """Starts worlds where they are needed, and again where an observation has ended them."""

    first: World
    """The loader's own world, or another load once training has ended it."""
    load: Load
    failure: WorldError | None = None
    """Why the second load failed; it is not tried again."""
    _worlds: list[World] = field(default_factory=list)
    _second: tuple[World, list[Loaded]] | None = None

    def first_world(self) -> World:
        """Return the loader's own world; load again where training has ended it."""
        if not self.first.alive:
            self.begin_again()
        return self.first

    def begin_again(self) -> None:
        """Replace the loader's own world by another load."""
        end_world(self.first)
        self.first, _ = self.load(self.first.spec, "another load", self._worlds)

    def second_world(self) -> World:
        return self.second()[0]

    def run_first(self, observer: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> list[R]:
        return run_on(self.first_world(), observer, *args, **kwargs)

    def run_second(self, observer: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> list[R]:
        return run_on(self.second_world(), observer, *args, **kwargs)

    def second(self) -> tuple[World, list[Loaded]]:
        """Return the second load; repeat it where an observation has ended its world, but not after it failed."""
        if self.failure is not None:
            raise self.failure
        if self._second is None or not self._second[0].alive:
            end_world(self.first)  # so that the ranks never hold two loads
            try:
                self._second = self.load(self.first.spec, "the second load", self._worlds)
            except WorldError as error:
                self.failure = error
                raise
        return self._second

    def new_second_world(self) -> World:
        """Return a second load whose loader of batches has not been used."""
        self.close_second()
        return self.second_world()

    def close_second(self) -> None:
        if self._second is not None:
            end_world(self._second[0])

    def of_size(self, spec: WorldSpec, label: str) -> World:
        """Load in a world of another size."""
        return self.load(spec, label, self._worlds)[0]

    def close(self) -> None:
        """Close all worlds but the loader's own."""
        for world in self._worlds:
            world.close()


def end_world(world: World) -> None:
    """Close a world once its checkpoints are written: save() may return before, and ranks are killed."""
    if world.alive:
        with suppress(WorldError):  # after the time limit, loading reports what is missing
            run_on(world, author_saving.finish_saving)
    world.close()


def largest_world_size(spec: WorldSpec, wanted: Collection[str]) -> int:
    """Return how many ranks the largest world of a trial runs; its worlds run one after the other."""
    if spec.simulated:
        return len(spec.ranks)
    other = other_size(spec) if "resharded" in wanted else spec
    return spec.size if isinstance(other, Unavailable) else max(spec.size, other.size)


def other_size(spec: WorldSpec) -> WorldSpec | Unavailable:
    """Return the spec of a world with half the ranks along one mesh dimension.

    The dimension is the largest one that shards data, or the largest of all where none does. A world of one rank
    gets two ranks instead.
    """
    sharding = {dim: size for dim, size in spec.mesh.items() if shards_data(dim)}
    dims = sharding if max(sharding.values(), default=0) > 1 else spec.mesh
    halved = max(dims, key=lambda dim: dims[dim])
    if dims[halved] > 1:
        mesh = {**spec.mesh, halved: spec.mesh[halved] // 2}
    elif spec.backend == "nccl":
        return Unavailable("a world of 2 needs another GPU than this world of 1 has")
    else:
        mesh = {**spec.mesh, next(iter(sharding or spec.mesh)): 2}
    other = replace(spec, mesh=mesh)
    devices = spec.devices[: other.size] if other.size <= len(spec.devices) else spec.devices * other.size
    return replace(other, devices=devices)


def describe_size(spec: WorldSpec) -> str:
    """Return the size and the mesh of a world for a message: "a world of 2 (dp_shard=2)"."""
    return f"a world of {spec.size} ({', '.join(f'{name}={size}' for name, size in spec.mesh.items())})"
