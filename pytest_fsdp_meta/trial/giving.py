"""The loads of one trial, and what the reference is given of them, so that the rest of a training can be compared.

Given are the values of drawn and of wrong tensors, what is frozen, the state of an optimizer that the loader has built,
and the buffers that the author's step changes by itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Container, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from pytest_fsdp_meta.checks.training.facts import BETWEEN, GIVEN_BUFFERS, GIVEN_STATE, Moment, RecordedPart
from pytest_fsdp_meta.evidence import (
    VALUES_CHECKS,
    Evidence,
    PartFacts,
    RankTraining,
    ReferenceFacts,
    Unavailable,
    frozen_sources,
    shards_data,
)
from pytest_fsdp_meta.judging.engine import RETRAINED
from pytest_fsdp_meta.loader.call import ASSUME, SKIPS
from pytest_fsdp_meta.trial import on_ranks
from pytest_fsdp_meta.trial.on_ranks import author_saving, run_on
from pytest_fsdp_meta.worlds import World, WorldError, WorldSpec

if TYPE_CHECKING:
    from pytest_fsdp_meta.checks.materialisation.observe import Loaded


ROUNDED = 2**-7
"""Relative: a smaller difference of a tensor in another dtype than the reference's is rounding, in bfloat16 as well."""
Held = Sequence[Mapping[Moment, RecordedPart]]


@dataclass(frozen=True)
class Giving:
    """The two worlds of a trial, and what was seen in them before the training."""

    seen: Evidence
    world: World
    reference_world: World
    folder: Path
    recipe: Mapping[str, bytes]
    selection: Container[str] | None
    """The checks that will be judged; None for all."""

    def as_loaded(self, reference: ReferenceFacts) -> ReferenceFacts:
        """Give the reference what the ranks have before the training; return its facts.

        The checks of the training then find what else is wrong, and only that.
        """
        reference = self._adopt_values(reference)
        if names := self._retrained(reference):
            run_on(self.reference_world, on_ranks.reference.adopt_requires_grad, names)
            reference = replace(reference, retrained=tuple(names))
        optimizers = [rank.optimizer for rank in self.seen.inventory if rank.optimizer is not None]
        if not any(optimizer.stepped and not optimizer.counted for optimizer in optimizers):
            return reference
        return replace(reference, not_given={**reference.not_given, **self._give_state()})

    def own_changes(self, reference: ReferenceFacts, runs: Sequence[RankTraining]) -> tuple[dict[str, Any], bool]:
        """Give the reference the buffers that the steps have changed by themselves; return its changed facts.

        It runs one forward for all micro-batches, and what changes between these can be given for the update only.
        Return also whether its loss depends on any of them, so that it trains again with their values.
        """
        folder = str(self.folder)
        held = run_on(self.world, on_ranks.reference.record_buffers, folder)
        given, not_given = self._divide(held, "differs between the ranks in train_step")
        backwards = dict(enumerate(max(step) for step in zip(*(run.backwards for run in runs), strict=True)))
        for moment in dict.fromkeys(moment for own in given for moment in own):
            if moment.event == BETWEEN and backwards.get(moment.step, 0) > 1:
                not_given[moment.name] = "train_step changes it between micro-batches"
        names = tuple(dict.fromkeys(moment.name for own in given for moment in own))
        changed, depends_on = (*dict.fromkeys((*names, *not_given)),), on_ranks.reference_training.depends_on
        steering = run_on(self.reference_world, depends_on, self.recipe, changed, folder)[0]
        if steering:
            run_on(self.reference_world, on_ranks.reference.give, given, GIVEN_BUFFERS, folder)
        unknown = {name: why for name, why in not_given.items() if name in steering}
        return {"changed_by_steps": names, "not_given": {**reference.not_given, **unknown}}, bool(steering)

    def _give_state(self) -> dict[str, str]:
        """Give the reference's optimizer the state of the loader's; return what could not be given, and why."""
        found = run_on(self.world, on_ranks.reference.record_optimizer_state, str(self.folder))
        given, not_given = self._divide([parts for parts, _ in found], "optimizer state differs between the ranks")
        for _, unknown in found:
            not_given |= dict.fromkeys(unknown, "optimizer state of another shape")
        # A part of a parameter's state is worse than none.
        given = [{moment: part for moment, part in own.items() if moment.name not in not_given} for own in given]
        run_on(self.reference_world, on_ranks.reference.give, given, GIVEN_STATE, str(self.folder))
        return not_given

    def _divide(self, held: Held, unlike: str) -> tuple[list[dict[Moment, PartFacts]], dict[str, str]]:
        """Return what can be given of each rank, and the tensors whose replicas have other values on other ranks."""
        differing: set[Moment] = set()
        for moment in dict.fromkeys(moment for own in held for moment in own):
            holders = [rank.rank for rank in self.seen.inventory if (t := rank.by_name.get(moment.name)) and t.numel]
            parts = {own[moment] for own in held if moment in own}
            lacking = any(moment not in held[rank] for rank in holders)
            if lacking or len(parts) > len({part.facts for part in parts}):
                differing.add(moment)
        given = [{m: part.facts for m, part in own.items() if m not in differing} for own in held]
        return given, {moment.name: unlike for moment in differing}

    def _retrained(self, reference: ReferenceFacts) -> dict[str, bool]:
        """Return the parameters that are frozen or trainable on all ranks other than in the reference, as reported."""
        if self.selection is not None and RETRAINED not in self.selection:
            return {}
        found: dict[str, bool] = {}
        for name, theirs in reference.inventory.by_name.items():
            own = {rank.by_name[name].requires_grad for rank in self.seen.inventory if name in rank.by_name}
            if own == {not theirs.requires_grad}:
                found[name] = not theirs.requires_grad
        return found

    def _adopt_values(self, reference: ReferenceFacts) -> ReferenceFacts:
        """Let the reference train from what the loader drew, and where a selected check reports that values differ."""
        drawn = self._drawn(reference)
        taken = drawn | self._reported_as_wrong(reference)
        ties = reference.inventory.tied_with
        # Writing one name of a tie writes the others too.
        names = tuple(sorted(name for name in taken if ties.get(name, frozenset()) <= taken))
        if not names:
            return reference
        held = run_on(self.world, on_ranks.values.record_own_values, names, str(self.folder))
        adopt, attributes = on_ranks.reference.adopt_values, self.seen.subject.kept_attributes
        inventory = run_on(self.reference_world, adopt, held, str(self.folder), attributes)[0]
        return replace(reference, inventory=inventory, adopted=tuple(name for name in names if name not in drawn))

    def _drawn(self, reference: ReferenceFacts) -> set[str]:
        """Return the tensors that are declared drawn and that the reference can take over.

        Those with values that are not finite are reported, and make no useful training.
        """
        shapes = {t.name: t.shape for t in reference.inventory.tensors}
        tensors = [t for rank in self.seen.inventory for t in rank.tensors]
        compared = [c for rank in self.seen.values or () for c in rank]
        unwritten = {t.name for t in tensors if t.nan or (t.numel and t.poisoned == t.numel)}
        unusable = unwritten | {t.name for t in tensors if t.shape != shapes.get(t.name)}
        unusable |= {c.name for c in compared if c.problem or (c.measure and not math.isfinite(c.measure.actual))}
        return {name for name in self.seen.subject.drawn if name in shapes} - unusable

    def _reported_as_wrong(self, reference: ReferenceFacts) -> set[str]:
        """Return the tensors with other finite values on some rank that a selected check reports."""
        selected = {check for check in VALUES_CHECKS.values() if self.selection is None or check in self.selection}
        by_verifier = self.seen.verifier is not None and VALUES_CHECKS["frozen"] in selected
        frozen = frozen_sources(self.seen.subject, reference) if by_verifier else {}
        kinds = {t.name: t.kind for rank in self.seen.inventory for t in rank.tensors}
        reported = [
            *(c for rank in self.seen.verifier or () for c in rank if c.name in frozen),
            *(c for rank in self.seen.values or () for c in rank if c.name not in frozen),
        ]
        differing = [
            c
            for c in reported
            if not c.equal
            and c.name not in self.seen.subject.drawn
            and c.name in reference.inventory.by_name
            and (c.name in frozen or VALUES_CHECKS[kinds[c.name]] in selected)
        ]
        unusable = {c.name for c in differing if c.problem is not None or not math.isfinite(c.max_abs)}
        return {c.name for c in differing if not (c.cast and c.max_rel <= ROUNDED)} - unusable


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
    other = other_size(spec) if not {"resharded", "batches_resharded"}.isdisjoint(wanted) else spec
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
