"""Give the reference what only the ranks have, so that the rest of the training can be compared.

The values of drawn and of wrong tensors, what is frozen, the state of an optimizer that the loader has built, and the
buffers that the author's step changes by itself.
"""

from __future__ import annotations

import math
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from pytest_fsdp_meta.checks.training.facts import BETWEEN, GIVEN_BUFFERS, GIVEN_STATE, Moment, RecordedPart
from pytest_fsdp_meta.evidence import (
    VALUES_CHECKS,
    Evidence,
    PartFacts,
    RankTraining,
    ReferenceFacts,
    frozen_sources,
)
from pytest_fsdp_meta.judging.engine import RETRAINED
from pytest_fsdp_meta.trial import on_ranks
from pytest_fsdp_meta.trial.on_ranks import run_on
from pytest_fsdp_meta.worlds import World

ROUNDED = 2**-7
"""Relative: a smaller difference of a tensor in another dtype than the reference's is rounding, in bfloat16 as well."""
Held = Sequence[Mapping[Moment, RecordedPart]]


class OwnChanges(NamedTuple):
    """The buffers that the author's steps change by themselves: fields of ``ReferenceFacts``."""

    changed_by_steps: tuple[str, ...]
    not_given: Mapping[str, str]
    steering: bool
    """Whether the reference's loss depends on any of them, so that it trains again with their values."""

    @property
    def facts(self) -> dict[str, Any]:
        return {"changed_by_steps": self.changed_by_steps, "not_given": self.not_given}


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

    def own_changes(self, reference: ReferenceFacts, runs: Sequence[RankTraining]) -> OwnChanges:
        """Give the reference the buffers that the steps have changed by themselves.

        It runs one forward for all micro-batches, and what changes between these can be given for the update only.
        """
        folder = str(self.folder)
        held = run_on(self.world, on_ranks.given.record_buffers, folder)
        given, not_given = self._divide(held, "differs between the ranks in train_step")
        backwards = dict(enumerate(max(step) for step in zip(*(run.backwards for run in runs), strict=True)))
        for moment in dict.fromkeys(moment for own in given for moment in own):
            if moment.event == BETWEEN and backwards.get(moment.step, 0) > 1:
                not_given[moment.name] = "train_step changes it between micro-batches"
        names = tuple(dict.fromkeys(moment.name for own in given for moment in own))
        changed, depends_on = (*dict.fromkeys((*names, *not_given)),), on_ranks.reference_training.depends_on
        steering = run_on(self.reference_world, depends_on, self.recipe, changed, folder)[0]
        if steering:
            run_on(self.reference_world, on_ranks.given.give, given, GIVEN_BUFFERS, folder)
        unknown = {name: why for name, why in not_given.items() if name in steering}
        return OwnChanges(names, {**reference.not_given, **unknown}, bool(steering))

    def _give_state(self) -> dict[str, str]:
        """Give the reference's optimizer the state of the loader's; return what could not be given, and why."""
        found = run_on(self.world, on_ranks.given.record_optimizer_state, str(self.folder))
        given, not_given = self._divide([parts for parts, _ in found], "optimizer state differs between the ranks")
        for _, unknown in found:
            not_given |= dict.fromkeys(unknown, "optimizer state of another shape")
        # A part of a parameter's state is worse than none.
        given = [{moment: part for moment, part in own.items() if moment.name not in not_given} for own in given]
        run_on(self.reference_world, on_ranks.given.give, given, GIVEN_STATE, str(self.folder))
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
