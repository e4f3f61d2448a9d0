"""Optimization: the steps change what they should change, and nothing else. Judged without a reference, too."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from pytest_fsdp_meta.catalogue.diagnosis.parity import (
    BASIC,
    EXPLAINING,
    require_no_other_cause,
    require_same_forward,
    trained,
)
from pytest_fsdp_meta.catalogue.findings import Explanation, Finding
from pytest_fsdp_meta.catalogue.registry import check
from pytest_fsdp_meta.catalogue.view import NotDeclared, NotJudged, View, majority, ranks_by
from pytest_fsdp_meta.evidence import Movement, OptimizerFacts, RankInventory, RankTraining
from pytest_fsdp_meta.text import counted


@check(
    promise="the optimizer holds each trainable parameter of the model exactly once, and no frozen one",
    family="training",
    needs=["inventory"],
    fields=["optimizer"],
    uses=["training"],
    after=BASIC,
    why="An optimizer over the parameters of before sharding steps happily, and trains nothing.",
    cause="the optimizer was given another list of parameters than the trainable ones of the loaded model",
    remedy="make the optimizer last: optimizer(p for p in model.parameters() if p.requires_grad)",
    references=["huggingface/accelerate#3394", "pytorch/pytorch#149205"],
    since="0.2",
)
def optimizer_owns_parameters(view: View) -> Iterable[Finding]:
    facts = _optimizers(view)
    missing: dict[str, list[int]] = {}
    stale: list[tuple[int, str]] = []
    for rank, held in facts:
        unheld = _unheld(view, rank, held)
        for name in unheld:
            missing.setdefault(name, []).append(rank)
        without_memory = sum(without for _, without in held.others)
        if without_memory and not unheld:
            stale.append(
                (rank, f"{counted(without_memory, 'parameter')} without memory that the model does not register")
            )
    kind = facts[0][1].kind
    words = _REPLACED if any(held.others for _, held in facts) else {}
    for name, ranks in missing.items():
        yield Finding(name, tuple(ranks), f"in no group of {kind}", "in exactly one", **words)
    for actual, ranks_of in ranks_by(stale).items():
        yield Finding(None, ranks_of, f"{kind} holds {actual}", "the model's parameters", **_REPLACED)
    yield from _wrongly_held(view, facts)


def _optimizers(view: View) -> list[tuple[int, OptimizerFacts]]:
    """(rank, its optimizer); of the training, else as the loader built it."""
    runs = view.evidence.training
    if "optimizer" not in view.evidence.subject.declared:
        raise NotDeclared("optimizer", ", so the training had one that is right by construction")
    inventory = view.evidence.inventory
    found = [run.optimizer for run in runs] if runs else [rank.optimizer for rank in inventory]
    facts = [(rank, one) for rank, one in enumerate(found) if one is not None]
    if not facts and runs:
        raise NotJudged("nothing is trainable")
    if not facts:
        raise NotJudged("Subject(optimizer=...) is a callable and was not called: nothing was trained")
    return facts


def _unheld(view: View, rank: int, held: OptimizerFacts) -> list[str]:
    """Trainable parameters in no group; none where others, such as copies in float32, evidently stand in for them."""
    inventory = view.evidence.inventory[rank]
    memory = {inventory.by_name[name].storage for name, count in held.held.items() if count}
    own = [t for t in inventory.tensors if t.kind == "parameter" and t.requires_grad and view.judgeable(t.name)]
    missing = [t for t in own if not held.held.get(t.name) and (t.storage is None or t.storage not in memory)]
    runs = view.evidence.training
    if not runs:
        copies = {dtype for dtype, without in held.others if not without} - {t.dtype for t in own}
        return [] if copies else [t.name for t in missing]
    after = runs[rank].after
    stepped = [t for t in missing if after is not None and after.by_name[t.name].digest != t.digest]
    return [] if stepped else [t.name for t in missing]


def _wrongly_held(view: View, facts: list[tuple[int, OptimizerFacts]]) -> Iterator[Finding]:
    for name, tensors in view.tensors("parameter"):
        trainable = {rank: tensor.requires_grad for rank, tensor in tensors}
        counts = [(rank, held.held.get(name, 0)) for rank, held in facts]
        # One with a state was trained before it was frozen, and may be thawed again.
        stepped = {rank for rank, held in facts if name in held.stepped}
        frozen = tuple(
            rank for rank, count in counts if count and not trainable.get(rank, True) and rank not in stepped
        )
        if frozen:
            yield Finding(name, frozen, f"frozen, and in a group of {facts[0][1].kind}", "in none", **_FROZEN)
        for count, ranks in ranks_by((rank, count) for rank, count in counts if count > 1).items():
            yield Finding(name, ranks, f"{count} times in the groups of {facts[0][1].kind}", "in exactly one")


_REPLACED: Explanation = {
    "cause": "the optimizer was made before sharding or materialisation, which put other parameters in place of those "
    "that it holds",
    "remedy": "make the optimizer after fully_shard and to_empty",
}
_FROZEN: Explanation = {
    "cause": "the optimizer was given all parameters; a frozen one then stays as it is only as long as nothing gives "
    "it a gradient",
    "remedy": "give it the parameters that require a gradient: [p for p in model.parameters() if p.requires_grad]",
}


@check(
    promise="frozen weights have the same bits after training steps",
    family="training",
    needs=["inventory", "training"],
    uses=["reference"],
    after=BASIC,
    why="A verifier that drifts judges by another measure every step, and no gradient ever tells.",
    cause="something other than the optimizer writes to it: a moving average, a hook, a tie to a trained weight",
    remedy="look for copy_(), lerp_() and .data on it in hooks and forwards, and for ties to trainable parameters",
    references=["vllm-project/speculators#593"],
    since="0.2",
)
def frozen_weights_stay_frozen(view: View) -> Iterable[Finding]:
    after, steps = _after(view), _steps(view)
    declared, moving = view.evidence.subject.frozen, _moving_reference(view)
    judged = False
    for name, tensors in view.tensors("parameter"):
        frozen = [(rank, t) for rank, t in tensors if not t.requires_grad or name in declared]
        if not frozen or (name in moving and name not in declared):
            continue
        judged = True
        moved = tuple(
            rank for rank, t in frozen if name in after[rank].by_name and _other_bits(after[rank], t.name, t.digest)
        )
        if moved:
            yield Finding(name, moved, f"other bits after {steps}", "the bits that it was loaded with")
    if not judged:
        raise NotJudged("nothing is frozen")


def _moving_reference(view: View) -> set[str]:
    """Parameters that the reference changes as well, trainable or by an average that is meant to move."""
    reference = view.evidence.reference
    if reference is None or reference.after is None:
        return set()
    return {t.name for t in reference.inventory.tensors if _other_bits(reference.after, t.name, t.digest)}


def _other_bits(after: RankInventory, name: str, digest: str | None) -> bool:
    now = after.by_name.get(name)
    return now is not None and None not in (now.digest, digest) and now.digest != digest


@check(
    promise="every trainable tensor, every rank's shard and every row that got a gradient changes in training",
    family="training",
    needs=["inventory", "training"],
    uses=["reference", "values", "verifier"],
    after=[*EXPLAINING, "grad_parity", "optimizer_owns_parameters"],
    why="A shard that is never stepped keeps its first values for good, and the others learn around it.",
    cause="the step does not reach this memory: the optimizer or a wrapper writes to a copy, or leaves out this shard",
    remedy="look at what the optimizer's groups hold on this rank, and for copies that are not written back",
    references=["NVIDIA/Megatron-LM#6228", "huggingface/accelerate#1527", "pytorch/pytorch#176076"],
    since="0.2",
)
def every_trainable_moves(view: View) -> Iterable[Finding]:
    runs = _runs(view)
    if not any(run.movements for run in runs):
        raise NotJudged("nothing is trainable")
    if not any(movement.due for run in runs for movement in run.movements):
        raise NotJudged(
            "no update is larger than rounding: the learning rate is zero or small, or the gradients are; give "
            "Subject(optimizer=...) a larger one"
        )
    found = list(_still(view, runs))
    if found and view.evidence.reference is not None and view.evidence.reference.losses is not None:
        require_same_forward(view, trained(view))
        require_no_other_cause(view, f"{found[0].tensor}: {found[0].actual}")
    yield from found


def _still(view: View, runs: Sequence[RankTraining]) -> Iterator[Finding]:
    by_name: dict[str, list[tuple[int, Movement]]] = {}
    for rank, run in enumerate(runs):
        for movement in run.movements:
            if movement.still:
                by_name.setdefault(movement.name, []).append((rank, movement))
    for name in view.names("parameter", only=by_name):
        for whole, ranks in ranks_by((rank, m.still == m.due) for rank, m in by_name[name]).items():
            first = next(m for rank, m in by_name[name] if rank in ranks)
            row = "" if first.first is None else f", first row {first.first}"
            detail = f"{first.still} of {first.due} rows on rank {ranks[0]}{row}"
            actual = f"{'no row' if whole else 'not every row'} moved in {_steps(view)}"
            yield Finding(name, ranks, actual, "moved, for it got a gradient", detail)


@check(
    promise="what is replicated has the same bits on all its ranks after training steps",
    family="training",
    needs=["inventory", "training"],
    uses=["reference", "values", "verifier"],
    after=[*EXPLAINING, "grad_parity", "optimizer_owns_parameters", "every_trainable_moves"],
    why="Replicas that drift apart compute other things for the same rows, and full_tensor() shows only one of them.",
    cause="the replicas are stepped by different gradients, or by something that depends on the rank",
    remedy="reduce gradients over every dimension that replicates, and keep ranks out of optimizer settings and hooks",
    references=["NVIDIA-NeMo/RL#3716", "NVIDIA/Megatron-LM#1446"],
    since="0.2",
)
def replicas_stay_equal(view: View) -> Iterable[Finding]:
    after, judged = _after(view), False
    for name, tensors in view.tensors("parameter"):
        held = ranks_by(
            (rank, tensor.regions) for rank, tensor in tensors if tensor.digest is not None and tensor.numel
        )
        odd: dict[int, int] = {}
        for ranks in held.values():
            before = {view.evidence.inventory[rank].by_name[name].digest for rank in ranks}
            if (
                len(ranks) > 1 and len(before) == 1
            ):  # what differs from the start is no replica, or replicas_equal tells
                judged = True
                odd |= _odd([(rank, after[rank].by_name[name].digest) for rank in ranks if name in after[rank].by_name])
        if odd:
            rank, usual = min(odd.items())
            detail = f"rank {rank} is unlike rank {usual}"
            actual = f"other bits than its replicas after {_steps(view)}"
            yield Finding(name, tuple(sorted(odd)), actual, "the same bits", detail)
    if not judged:
        raise NotJudged("nothing is replicated: no two ranks hold the same part of a parameter")


def _odd(digests: list[tuple[int, str | None]]) -> dict[int, int]:
    """The ranks whose bits are not those of most, each with one of the most."""
    usual = majority(digests)
    first = next(rank for rank, digest in digests if digest == usual)
    return {rank: first for rank, digest in digests if digest != usual}


def _runs(view: View) -> Sequence[RankTraining]:
    return view.evidence.training or ()


def _after(view: View) -> list[RankInventory]:
    """The inventories once the steps are over, by rank."""
    found = [run.after for run in _runs(view) if run.after is not None]
    if len(found) < len(view.evidence.inventory):
        raise NotJudged("nobody looked at the parameters after the steps")
    return found


def _steps(view: View) -> str:
    count = max((len(run.losses) for run in _runs(view)), default=0)
    return counted(count, "step")
