"""Hand-made evidence: that of a healthy loader, and functions that break one thing in it."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import product
from math import prod
from typing import Any

from pytest_fsdp_meta.catalogue import Selection, Verdict, built_in, judge
from pytest_fsdp_meta.checks.checkpoint.facts import Fingerprint, RankResumed, RankSaved, RankStateDict
from pytest_fsdp_meta.checks.memory.facts import GatheredGroup, StepMemory
from pytest_fsdp_meta.checks.random_numbers.facts import Draw, RandomState
from pytest_fsdp_meta.checks.structure.facts import regions
from pytest_fsdp_meta.checks.training.facts import (
    ForwardWeights,
    RankTrainingMode,
    SecondStep,
    StepNotFinite,
    TrainedBuffers,
)
from pytest_fsdp_meta.checks.values.facts import Element
from pytest_fsdp_meta.evidence import (
    Accumulation,
    Clipping,
    Comparison,
    DrawnTensor,
    Epoch,
    Evidence,
    Export,
    Measure,
    MeshFacts,
    Movement,
    OptimizerFacts,
    RankBatches,
    RankDraws,
    RankInventory,
    RankTraining,
    ReferenceFacts,
    Resharded,
    Spread,
    SubjectFacts,
    TensorFacts,
    Unavailable,
    WorldFacts,
    splits_model,
)

CATALOGUE = built_in()
EMBEDDING, HEAD, MIDDLE, FROZEN = "embed.weight", "head.weight", "layers.0.weight", "verifier.weight"
ROTARY, COUNTER = "rotary.inv_freq", "counter"
DROPOUT = "layers.0.drop"
PARAMETERS: dict[str, tuple[int, ...]] = {EMBEDDING: (8, 4), MIDDLE: (6, 4), FROZEN: (4, 4), HEAD: (8, 4)}
BUFFERS: dict[str, tuple[int, ...]] = {ROTARY: (2,), COUNTER: ()}
LOSSES = (2.0, 1.5, 1.25)
KEPT = 2**20
"""The bytes that the reference keeps for the backward."""


def parameter(
    name: str,
    shape: Sequence[int] = (8, 4),
    mesh: Mapping[str | None, int] | None = None,
    placements: Sequence[str] | None = None,
    coordinate: Sequence[int] | None = None,
    **facts: Any,
) -> TensorFacts:
    """Return a parameter on one rank: a DTensor on ``mesh`` at ``coordinate``, or plain without ``placements``."""
    held = regions(shape, (), (), ())
    on = None
    if placements is not None:
        assert mesh is not None
        assert coordinate is not None
        sizes = tuple(mesh.values())
        held = regions(shape, [shard_of(placement) for placement in placements], sizes, coordinate)
        on = MeshFacts(tuple(mesh), sizes, tuple(coordinate))
    local = tuple(sum(stop - start for start, stop in runs) for runs in held)
    return replace(
        TensorFacts(
            name=name,
            kind="parameter",
            shape=tuple(shape),
            local_shape=local,
            regions=held,
            dtype="float32",
            device="cpu",
            requires_grad=True,
            placements=None if placements is None else tuple(placements),
            mesh=on,
            storage=f"memory of {name}" if prod(local) else None,
            identity=hash(name),
            digest=f"bits of {name}",
        ),
        **facts,
    )


def buffer(name: str, shape: Sequence[int] = (2,), **facts: Any) -> TensorFacts:
    return replace(parameter(name, shape), **{"kind": "buffer", "requires_grad": False, **facts})


def shard_of(placement: str) -> tuple[int, int] | None:
    """Convert the short form of a placement to a shard as ``layout.regions`` takes it."""
    if placement.startswith("_S("):
        dim, factor = placement[3:-1].split(",")
        return int(dim), int(factor)
    return (int(placement[2:-1]), 1) if placement.startswith("S(") else None


def model(
    mesh: Mapping[str, int], coordinate: Sequence[int] | None, parameters: Mapping[str, tuple[int, ...]] = PARAMETERS
) -> tuple[TensorFacts, ...]:
    """Return all tensors of the model on one rank, sharded on dim 0 over dp_shard; whole without a coordinate."""
    placements = None if coordinate is None else ["S(0)" if dim == "dp_shard" else "R" for dim in mesh]
    found = [parameter(name, shape, mesh, placements, coordinate) for name, shape in parameters.items()]
    tied = {HEAD: EMBEDDING}
    found = [
        replace(
            tensor,
            requires_grad=tensor.name != FROZEN,
            storage=tensor.storage and f"memory of {tied.get(tensor.name, tensor.name)}",
            identity=hash(tied.get(tensor.name, tensor.name)),
        )
        for tensor in found
    ]
    rotary = buffer(ROTARY, BUFFERS[ROTARY], persistent=False)
    return (*found, rotary, buffer(COUNTER, BUFFERS[COUNTER], dtype="int64"))


def healthy(
    world: int = 2,
    mesh: Mapping[str, int] | None = None,
    parameters: Mapping[str, tuple[int, ...]] = PARAMETERS,
    losses: Sequence[float] = LOSSES,
) -> Evidence:
    """Return the evidence of a conforming loader: all usual fields declared, everything observed, nothing wrong."""
    mesh = {"dp_shard": world} if mesh is None else mesh
    coordinates = list(product(*(range(size) for size in mesh.values())))
    ranks = tuple(RankInventory(rank, "cpu", model(mesh, place, parameters)) for rank, place in enumerate(coordinates))
    batches = tuple(f"batch {step}" for step in range(len(losses)))
    reference = RankInventory(0, "cpu", model(mesh, None, parameters))
    frozen = {FROZEN} & set(parameters)
    return Evidence(
        world=WorldFacts(prod(mesh.values()), tuple(mesh.items()), "cpu", "gloo"),
        subject=SubjectFacts(declared=frozenset({"reference", "batch", "optimizer"})),
        inventory=ranks,
        reference=ReferenceFacts(
            "callable",
            reference,
            tuple(losses),
            tuple(losses),
            batches,
            state_dict=persistent(reference),
            gradients={t.name: 1.0 for t in reference.tensors if t.requires_grad},
            noise=1e-6,
            norm=3.0,
            after=stepped(reference),
            memory=tuple(StepMemory(KEPT // len(ranks), modules={"layers.0": KEPT // len(ranks)}) for _ in ranks),
        ),
        values=tuple(tuple(equal(tensor) for tensor in rank.tensors) for rank in ranks),
        verifier=tuple(tuple(equal(t) for t in rank.tensors if t.name in frozen) for rank in ranks),
        training=tuple(trained(rank, len(ranks), losses, batches) for rank in ranks),
        training_mode=tuple(drawn(mesh, place) for place in coordinates),
        **reloaded(ranks, reference),
    )


def described(**values: str) -> dict[str, Fingerprint]:
    """Return fingerprints of numbers ("3.0"), of tensors ("float32 (6, 4) digest") and of other values, by entry.

    In an entry, two underscores stand for a dot.
    """
    return {entry.replace("__", "."): _fingerprint(text) for entry, text in values.items()}


def _fingerprint(text: str) -> Fingerprint:
    tensor = re.fullmatch(r"(\w+) \(([\d, ]*)\) (.+)", text)
    dtype, sizes, content = tensor.groups() if tensor else ("", "", text)
    number = float(content) if re.fullmatch(r"[\d.]+", content) else None
    return Fingerprint(content, number, dtype, tuple(map(int, re.findall(r"\d+", sizes))) if tensor else None)


def reloaded(ranks: Sequence[RankInventory], reference: RankInventory) -> dict[str, Any]:
    """Return the observations of loading again, in which everything is restored."""
    saved = tuple(RankSaved({name: f"saved {name}" for name in persistent(rank)}) for rank in ranks)
    momenta = {t.name: described(momentum_buffer=f"momentum of {t.name}") for t in reference.tensors if t.requires_grad}
    resumed = tuple(RankResumed(held, momenta, (described(lr="0.1"),), (1.25, 1.0)) for held in saved)
    later = tuple(
        replace(run, model=RankSaved({name: f"later {name}" for name in run.model.tensors})) for run in resumed
    )
    whole = tuple(equal(tensor) for tensor in reference.tensors if tensor.persistent)
    return {
        "repetition": tuple(ranks),
        "state_dict": tuple(RankStateDict(persistent(rank)) for rank in ranks),
        "saved": saved,
        "restored": saved,
        "continued": resumed,
        "resumed": resumed,
        "saved_again": later,
        "restored_again": later,
        "export": Export(comparisons=whole),
        "resharded": Resharded((("dp_shard", 1),), (whole,)),
    }


def persistent(rank: RankInventory) -> tuple[str, ...]:
    return tuple(tensor.name for tensor in rank.tensors if tensor.persistent)


def trained(rank: RankInventory, slices: int, losses: Sequence[float], batches: Sequence[str]) -> RankTraining:
    """Return a rank's observations of a training that equals the reference's."""
    trainable = [tensor for tensor in rank.tensors if tensor.requires_grad]
    alike = tuple(replace(equal(tensor), measure=measured(tensor.numel)) for tensor in trainable)
    return RankTraining(
        losses=tuple(losses),
        data_parallel=(rank.rank, slices),
        batches=tuple(batches),
        gradients=alike,
        parameters=alike,
        labels=tuple((8, 6) for _ in losses),
        norm=3.0,
        after=stepped(rank),
        optimizer=OptimizerFacts("SGD", {t.name: int(t.requires_grad) for t in rank.tensors if t.kind == "parameter"}),
        movements=tuple(Movement(t.name, t.local_shape[0], 0) for t in trainable if t.numel),
        accumulation=Accumulation(alike),
        clipped=Clipping(alike),
        second=SecondStep(parameters=alike, gradients=alike),
        forward=ForwardWeights(len(losses)),
        buffers=TrainedBuffers(),
        memory=StepMemory(KEPT // slices, modules={"layers.0": KEPT // slices}, groups=grouped(rank, slices)),
    )


def grouped(rank: RankInventory, ranks: int) -> tuple[GatheredGroup, ...]:
    """Return one group of FSDP2 for each parameter."""
    return tuple(GatheredGroup((tensor.name,), ranks) for tensor in rank.tensors if tensor.kind == "parameter")


def drawn(mesh: Mapping[str, int], place: Sequence[int]) -> RankTrainingMode:
    """Return the draws of a rank that is seeded by its slice of the batch: one dropout, computed again in backward."""
    index, slices = 0, 1
    for (dim, size), position in zip(mesh.items(), place, strict=True):
        if not splits_model(dim):
            index, slices = index * size + position, slices * size
    draw = Draw(
        module=DROPOUT,
        call=0,
        operator="bernoulli_",
        shape=(4, 8),
        generator="cpu",
        state=f"seeded with {index}",
        seed=index,
        seeded=True,
        operand=f"rows of slice {index}",
    )
    return RankTrainingMode((index, slices), (draw, replace(draw, call=1, again=True)))


def on_some(records: Iterable[Any] | None, ranks: Iterable[int] | None, edit: Callable[[Any], Any]) -> tuple[Any, ...]:
    """Edit the records of these ranks, or all."""
    chosen = None if ranks is None else set(ranks)
    return tuple(
        edit(record) if chosen is None or rank in chosen else record for rank, record in enumerate(records or ())
    )


def redrawn(evidence: Evidence, ranks: Iterable[int] | None = None, **facts: Any) -> Evidence:
    """Change facts of the draws on these ranks, or on all."""

    def redraw(step: RankTrainingMode) -> RankTrainingMode:
        return replace(step, draws=tuple(replace(draw, **facts) for draw in step.draws))

    return replace(evidence, training_mode=on_some(evidence.training_mode, ranks, redraw))


def skipping_alike(evidence: Evidence) -> Evidence:
    """Add a step that all ranks skip because the model returns NaN on some."""
    places = [run.data_parallel for run in evidence.training or ()]
    skipped = tuple(StepNotFinite(place, (False,) * min(place[1], 2)) for place in places)
    return replace(evidence, not_finite=skipped)


def with_random_state(evidence: Evidence, ranks: Iterable[int] | None = None, **facts: Any) -> Evidence:
    """Declare save(), and let it and resume() keep each rank's random state, except for these facts after resuming."""
    saved = [
        RandomState(f"state of rank {rank}", f"state of rank {rank}", seed=rank)
        for rank in range(len(evidence.continued or ()))
    ]
    loaded = [replace(state, before=f"loaded on rank {state.seed}") for state in saved]
    loaded = list(on_some(loaded, ranks, lambda state: replace(state, **facts)))
    observed = {
        name: tuple(replace(r, generators={"cpu": s}) for r, s in zip(getattr(evidence, name), states, strict=True))
        for name, states in (("continued", saved), ("resumed", loaded))
    }
    return replace(declare(evidence, declared=evidence.subject.declared | {"save"}), **observed)


def counted(
    evidence: Evidence, factor: float = 1.0, when: str = "last", ranks: Iterable[int] | None = None, apart: float = 0.0
) -> Evidence:
    """Let training change the counter, on these ranks by ``factor`` times what it does in the reference."""
    chosen = range(len(evidence.inventory)) if ranks is None else set(ranks)
    runs = []
    for rank, run in enumerate(evidence.training or ()):
        right = Comparison(COUNTER, True, elements=1, measure=measured(1))
        wrong = replace(right, equal=factor == 1, measure=measured(1, factor, apart))
        seen = {"first": (right,), "last": (right,), **({when: (wrong,)} if rank in chosen else {})}
        digest = f"counted {factor}" if rank in chosen else "counted"
        runs.append(replace(run, buffers=TrainedBuffers(**seen), after=_with_count(run.after, digest)))
    reference = replace(evidence.reference, after=_with_count(evidence.reference.after, "counted"))
    return replace(evidence, training=tuple(runs), reference=reference)


def _with_count(rank: RankInventory, digest: str) -> RankInventory:
    return replace(rank, tensors=tuple(replace(t, digest=digest) if t.name == COUNTER else t for t in rank.tensors))


def measured(elements: int, factor: float = 1.0, apart: float = 0.0) -> Measure:
    """Measure a tensor of ones: ``factor`` times the reference, plus an orthogonal difference of norm ``apart``."""
    length = elements**0.5
    actual = ((factor * length) ** 2 + apart**2) ** 0.5
    distance = (((factor - 1) * length) ** 2 + apart**2) ** 0.5
    return Measure(actual, length, distance, factor * elements, elements)


def stepped(rank: RankInventory) -> RankInventory:
    """Return the inventory after the training steps: trainable tensors have other bits."""
    return replace(
        rank, tensors=tuple(replace(t, digest=f"trained {t.digest}") if t.requires_grad else t for t in rank.tensors)
    )


def on_runs(evidence: Evidence, ranks: Iterable[int] | None, **facts: Any) -> Evidence:
    """Change facts of the training on these ranks, or on all."""
    return replace(evidence, training=on_some(evidence.training, ranks, lambda run: replace(run, **facts)))


def in_slices(evidence: Evidence, *indices: int) -> Evidence:
    """Assign each rank to a data-parallel slice of the batch."""
    size = len(set(indices))
    runs = (replace(run, data_parallel=(i, size)) for run, i in zip(evidence.training or (), indices, strict=True))
    return replace(evidence, training=tuple(runs))


def remeasured(
    evidence: Evidence,
    name: str,
    factor: float = 1.0,
    apart: float = 0.0,
    ranks: Iterable[int] | None = None,
    observed: str = "gradients",
) -> Evidence:
    """Make a gradient or update ``factor`` times the reference's plus an orthogonal difference of norm ``apart``."""
    off = {"equal": False, "differing": 1, "index": (0, 0), "expected": 0.5, "actual": 0.75}
    off["farthest"] = Element((0, 0), actual=0.75, expected=0.5)

    def edit(run: RankTraining) -> RankTraining:
        seen = (
            replace(c, **off, measure=measured(c.elements, factor, apart)) if c.name == name else c
            for c in getattr(run, observed)
        )
        return replace(run, **{observed: tuple(seen)})

    return replace(evidence, training=on_some(evidence.training, ranks, edit))


def clipped(
    evidence: Evidence, factor: float = 1.0, apart: float = 0.0, ranks: Iterable[int] | None = None
) -> Evidence:
    """Declare a function that clips, and let it leave this gradient of MIDDLE (relative to the right one)."""
    seen = remeasured(evidence, MIDDLE, factor, apart, ranks)
    pairs = zip(evidence.training or (), seen.training or (), strict=True)
    runs = tuple(replace(run, clipped=Clipping(wrong.gradients)) for run, wrong in pairs)
    declared = replace(evidence.subject, declared=evidence.subject.declared | {"clip_grad_norm"})
    return replace(evidence, training=runs, subject=declared)


def kept_beside(evidence: Evidence) -> Evidence:
    """Declare a scheduler and an average of the weights, and let both be right everywhere."""
    runs = tuple(
        replace(run, beside=tuple(replace(c, name=f"ema.{c.name}") for c in run.parameters))
        for run in evidence.training or ()
    )
    states = described(scheduler__last_epoch="3", ema__layers__0__weight="float32 (6, 4) the average")
    kept = {
        name: tuple(replace(run, beside=states) for run in getattr(evidence, name)) for name in ("continued", "resumed")
    }
    declared = replace(evidence.subject, declared=evidence.subject.declared | {"scheduler", "beside"})
    return replace(evidence, training=runs, subject=declared, **kept)


def second_step(
    evidence: Evidence, factor: float = 1.0, apart: float = 0.0, ranks: Iterable[int] | None = None, **facts: Any
) -> Evidence:
    """Give MIDDLE another gradient in the second step."""
    seen = remeasured(evidence, MIDDLE, factor, apart, ranks)
    chosen = range(len(seen.training or ())) if ranks is None else set(ranks)
    runs = []
    for rank, (run, wrong) in enumerate(zip(evidence.training or (), seen.training or (), strict=True)):
        assert run.second is not None
        second = replace(run.second, gradients=wrong.gradients, **(facts if rank in chosen else {}))
        runs.append(replace(run, second=second))
    return replace(evidence, training=tuple(runs))


def with_batches(
    evidence: Evidence,
    by_rank: Sequence[Sequence[str]] | None = None,
    alone: Sequence[str] | str | None = "all",
    **facts: Any,
) -> Evidence:
    """Declare data and add an epoch: batches as texts, one letter for each row, with a checkpoint after the first.

    By default three batches of two rows that no other rank has. ``alone`` has the batches of a world of one rank.
    """
    size = len(evidence.inventory)
    if by_rank is None:
        letters = [chr(ord("A") + number) for number in range(6 * size)]
        own = ["".join(letters[6 * rank : 6 * rank + 6]) for rank in range(size)]
        by_rank = [[text[:2], text[2:4], text[4:]] for text in own]
    if alone == "all":
        alone = [batch for batches in by_rank for batch in batches]
    places = [(rank, size) for rank in range(size)]
    ranks = [
        replace(RankBatches(place, tuple(map(tuple, batches)), saved_after=1), **facts)
        for place, batches in zip(places, by_rank, strict=True)
    ]
    resumed = tuple(replace(rank, batches=rank.batches[1:], saved_after=0) for rank in ranks)
    single = None if alone is None else RankBatches((0, 1), tuple(map(tuple, alone)))
    declared = replace(evidence.subject, declared=evidence.subject.declared | {"data"})
    epoch = Epoch(tuple(ranks), single)
    return replace(evidence, subject=declared, batches=epoch, batches_resumed=resumed)


def equal(tensor: TensorFacts) -> Comparison:
    return Comparison(tensor.name, True, elements=tensor.numel)


def empty(world: int = 2) -> Evidence:
    """Return the evidence of a model without parameters and buffers."""
    bare = healthy(world, parameters={})
    nothing = tuple(replace(rank, tensors=()) for rank in bare.inventory)
    undrawn = tuple(replace(step, draws=()) for step in bare.training_mode or ())
    return replace(
        bare,
        inventory=nothing,
        reference=replace(bare.reference, inventory=replace(bare.reference.inventory, tensors=()), state_dict=()),
        values=tuple(() for _ in nothing),
        training_mode=undrawn,
        **reloaded(nothing, replace(bare.inventory[0], tensors=())),
    )


def drew(evidence: Evidence, *names: str, by_dtensor: bool = False) -> Evidence:
    """Declare that the loader draws these tensors; each part has its own numbers, spread as in the reference."""
    evidence = declare(evidence, drawn=names)
    evidence = on_ranks(
        evidence,
        None,
        lambda rank: tuple(
            replace(t, digest=f"draw of {t.name} {t.regions}") if t.name in names else t for t in rank.tensors
        ),
    )
    held = ([t for t in rank.tensors if t.name in names and t.numel] for rank in evidence.inventory)
    draws = (
        tuple(DrawnTensor(t.name, spread(str(t.digest)), spread(f"reference's {t.digest}")) for t in own)
        for own in held
    )
    return replace(evidence, draws=tuple(RankDraws(own, by_dtensor) for own in draws))


def spread(key: str, deviation: float = 1.0, elements: int = 4096, **facts: Any) -> Spread:
    """Return the spread of a normal draw; ``key`` stands for its values."""
    head = f"head of {key}"
    return replace(Spread(elements, elements, deviation**2, 3 * deviation**4, 1e4, f"sample of {key}", head), **facts)


def on_ranks(evidence: Evidence, ranks: Iterable[int] | None, edit: Callable[[RankInventory], tuple[TensorFacts, ...]]):
    """Replace the tensors of these ranks (default: all) by those that ``edit`` returns."""
    chosen = None if ranks is None else set(ranks)
    inventory = (replace(r, tensors=edit(r)) if chosen is None or r.rank in chosen else r for r in evidence.inventory)
    return replace(evidence, inventory=tuple(inventory))


def change(evidence: Evidence, name: str, ranks: Iterable[int] | None = None, **facts: Any) -> Evidence:
    """Change facts of one tensor on these ranks, or on all."""
    return on_ranks(evidence, ranks, lambda r: tuple(replace(t, **facts) if t.name == name else t for t in r.tensors))


def drop(evidence: Evidence, name: str, ranks: Iterable[int] | None = None) -> Evidence:
    return on_ranks(evidence, ranks, lambda r: tuple(t for t in r.tensors if t.name != name))


def add(evidence: Evidence, tensor: TensorFacts, ranks: Iterable[int] | None = None) -> Evidence:
    return on_ranks(evidence, ranks, lambda r: (*r.tensors, tensor))


def place(
    evidence: Evidence,
    name: str,
    mesh: Mapping[str | None, int],
    *placements: str,
    shape: Sequence[int] | None = None,
) -> Evidence:
    """Place one parameter on another mesh or with other placements, on every rank; plain without placements.

    A new ``shape`` is set in the reference as well.
    """
    coordinates = list(product(*(range(size) for size in mesh.values())))
    if shape is None:
        shape = evidence.inventory[0].by_name[name].shape
    elif evidence.reference is not None:
        evidence = change_reference(evidence, name, shape=tuple(shape))

    def facts_of(rank: int) -> TensorFacts:
        if not placements:
            return parameter(name, shape)
        return parameter(name, shape, mesh, placements, coordinates[rank % len(coordinates)])

    return on_ranks(evidence, None, lambda r: tuple(facts_of(r.rank) if t.name == name else t for t in r.tensors))


def with_reference(evidence: Evidence, **facts: Any) -> Evidence:
    return replace(evidence, reference=replace(evidence.reference, **facts))


def change_reference(evidence: Evidence, name: str, **facts: Any) -> Evidence:
    inventory = evidence.reference.inventory
    tensors = tuple(replace(tensor, **facts) if tensor.name == name else tensor for tensor in inventory.tensors)
    return with_reference(evidence, inventory=replace(inventory, tensors=tensors))


def drop_reference(evidence: Evidence, *names: str) -> Evidence:
    inventory = evidence.reference.inventory
    tensors = tuple(tensor for tensor in inventory.tensors if tensor.name not in names)
    return with_reference(evidence, inventory=replace(inventory, tensors=tensors))


def from_checkpoint(evidence: Evidence, *without: str) -> Evidence:
    """Use a checkpoint directory as reference: without non-persistent buffers, ``without`` and training."""
    left_out = {ROTARY, *without}
    tensors = evidence.reference.inventory.tensors
    stored = (replace(t, kind="tensor", device="disk") for t in tensors if t.name not in left_out)
    return replace(
        evidence,
        reference=ReferenceFacts("checkpoint", RankInventory(0, "disk", tuple(stored))),
        values=tuple(tuple(c for c in comparisons if c.name not in left_out) for comparisons in evidence.values or ()),
        verifier=None,
        training=None,
        unavailable={"verifier": Unavailable("nothing is frozen"), "training": Unavailable("nobody trains it")},
    )


def differ(
    evidence: Evidence, name: str, ranks: Iterable[int] | None = None, observed: str = "values", **facts: Any
) -> Evidence:
    """Let a tensor differ from the reference on these ranks; by default, one element by 0.5."""
    usual = {"differing": 1, "max_abs": 0.5, "max_rel": 0.25, "index": (0, 0), "expected": 2.0, "actual": 2.5}

    def edit(comparisons: tuple[Comparison, ...]) -> tuple[Comparison, ...]:
        return tuple(replace(c, equal=False, **{**usual, **facts}) if c.name == name else c for c in comparisons)

    return replace(evidence, **{observed: on_some(getattr(evidence, observed), ranks, edit)})


def declare(evidence: Evidence, **fields: Any) -> Evidence:
    """Declare fields of Subject, in addition to reference, batch and optimizer."""
    declared = evidence.subject.declared | {name for name in fields if name in ("frozen", "tied", "placements")}
    return replace(evidence, subject=replace(evidence.subject, **{"declared": declared, **fields}))


def undeclared(
    evidence: Evidence, *observations: str, why: str, error: bool = False, detail: str = "", **facts: Any
) -> Evidence:
    """Remove observations, with the reason why they were not taken."""
    absent = dict.fromkeys(observations, Unavailable(why, error, detail, **facts))
    return replace(
        evidence,
        unavailable={**evidence.unavailable, **absent},
        **{name: None for name in observations if name != "inventory"},
    )


def rename(evidence: Evidence, prefix: str, *names: str) -> Evidence:
    """Add a prefix to these names, or to all of them."""
    return on_ranks(
        evidence,
        None,
        lambda r: tuple(replace(t, name=f"{prefix}{t.name}") if t.name in names or not names else t for t in r.tensors),
    )


def left_out(by: str, *names: str, rest: bool = True) -> str:
    """Return the reason of a check that passed for all but these tensors, which already failed ``by``.

    Without ``rest``, there are no others.
    """
    count = f"{len(names)} tensor{'s' if len(names) > 1 else ''}"
    return f"not checked: {count} that already failed {by} (first: {names[0]})" + ("; the rest passed" if rest else "")


def verdict(id: str, evidence: Evidence, expected: Collection[str] = ()) -> Verdict:
    """Return the verdict of a check; ``expected`` are those that are expected to fail."""
    selection = Selection(frozenset(CATALOGUE.ids()).difference(expected), frozenset(expected))
    found = judge(CATALOGUE[id], evidence, CATALOGUE, selection if expected else Selection())
    assert not found.reason.startswith("this check of pytest-fsdp-meta raised"), found.detail
    return found


def findings_of(found: Verdict) -> list[tuple[str | None, tuple[int, ...], str, str, str]]:
    """Return the findings without cause and remedy."""
    return [(f.tensor, f.ranks, f.actual, f.expected, f.detail) for f in found.findings]
