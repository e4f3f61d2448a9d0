"""Optimization: the steps change all trainable parameters and nothing else. These checks need no reference."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from pytest_fsdp_meta.evidence import OptimizerFacts, RankInventory, RankTraining, TensorFacts
from pytest_fsdp_meta.judging.findings import Explanation, Finding, either
from pytest_fsdp_meta.judging.gates import (
    BLOCKING_CHECKS,
    EXPLAINING_CHECKS,
    comparable_training,
    require_finite,
    require_no_other_cause,
    require_same_forward,
)
from pytest_fsdp_meta.judging.registry import training_check
from pytest_fsdp_meta.judging.view import NotDeclared, Noted, NotJudged, PartlyJudged, View, ranks_by
from pytest_fsdp_meta.text import counted, first_of, grouped


@training_check(
    promise="the optimizer holds each trainable parameter of the model exactly once, before and after the steps, in a "
    "group with the reference's settings, and no frozen one",
    needs=["inventory"],
    fields=["optimizer"],
    uses=["reference", "training"],
    after=BLOCKING_CHECKS,
    why="An optimizer that was built before sharding holds the old parameters: it steps without an error and trains "
    "nothing.",
    cause="the optimizer was built from other parameters than the trainable ones of the loaded model",
    remedy="build the optimizer last: optimizer(p for p in model.parameters() if p.requires_grad)",
    references=["huggingface/accelerate#3394", "pytorch/pytorch#149205"],
    simulated="too",
)
def optimizer_owns_parameters(view: View) -> Iterable[Finding]:
    optimizers = _optimizers(view)
    missing: dict[str, list[int]] = {}
    stale: list[tuple[int, str]] = []
    for rank, optimizer in optimizers:
        unheld = _unheld(view, rank, optimizer)
        for name in unheld:
            missing.setdefault(name, []).append(rank)
        without_storage = sum(without for _, without in optimizer.others)
        if without_storage and not unheld:
            stale.append((rank, counted(without_storage, "parameter")))
    kind = optimizers[0][1].kind
    explanation = _REPLACED if any(optimizer.others for _, optimizer in optimizers) else {}
    for name, ranks in missing.items():
        yield Finding(name, tuple(ranks), f"in no parameter group of {kind}", "in exactly one", **explanation)
    for name, ranks in _unfrozen(view).items():
        yield Finding(name, tuple(ranks), f"unfrozen by a step, and in no group of {kind}", "in one", **_UNFROZEN)
    for parameters, stale_on in ranks_by(stale).items():
        actual = f"{kind} holds {parameters} without storage, not registered by the model"
        yield Finding(None, stale_on, actual, "", **_REPLACED)
    yield from _wrongly_held(view, optimizers)
    yield from _otherwise_set(view, optimizers)
    # Of an optimizer that is passed as an object, the reference copies the groups with their mistakes.
    if groups := describe_groups(optimizer for _, optimizer in optimizers):
        raise Noted(f"{kind}: {groups}")


def describe_groups(optimizers: Iterable[OptimizerFacts]) -> str:
    """Return how many parameters have which settings, as far as these differ; empty if there are none."""
    known = list({name: own for optimizer in optimizers for name, own in optimizer.settings.items()}.values())
    shown = [key for key in SETTINGS if len({own.get(key) for own in known}) > 1] or ["weight_decay"]
    groups = Counter(", ".join(f"{key}={own.get(key)}" for key in shown) for own in known)
    return "; ".join(f"{counted(number, 'parameter')} with {settings}" for settings, number in groups.items())


def _optimizers(view: View) -> list[tuple[int, OptimizerFacts]]:
    """Return each rank's optimizer: the one it trained with, else the one that the loader built."""
    runs = view.evidence.training
    if "optimizer" not in view.evidence.subject.declared:
        raise NotDeclared("optimizer", ", so the plugin built one itself, over the trainable parameters")
    inventory = view.evidence.inventory
    found = [run.optimizer for run in runs] if runs else [rank.optimizer for rank in inventory]
    numbered = zip((rank.rank for rank in inventory), found, strict=True)
    optimizers = [(rank, optimizer) for rank, optimizer in numbered if optimizer is not None]
    if optimizers:
        return optimizers
    if runs:
        raise NotJudged("nothing is trainable")
    failed = view.evidence.unavailable.get("training")
    if failed is not None and failed.kind == "undeclared":
        raise NotDeclared(failed.missing_field, ", so Subject(optimizer=...) was not called")
    why = f" ({failed.summary})" if failed is not None and (failed.error or failed.kind == "unsupported") else ""
    raise NotJudged(f"Subject(optimizer=...) is a callable, and nothing was trained{why}")


def _unheld(view: View, rank: int, optimizer: OptimizerFacts) -> list[str]:
    """Return trainable parameters in no group, unless others, such as float32 copies, are stepped in their place."""
    inventory = next(one for one in view.evidence.inventory if one.rank == rank)
    storages = {inventory.by_name[name].storage for name, count in optimizer.held.items() if count}
    own = [t for t in inventory.tensors if t.kind == "parameter" and t.requires_grad and view.judgeable(t.name)]
    missing = [t for t in own if not optimizer.held.get(t.name) and (t.storage is None or t.storage not in storages)]
    runs = view.evidence.training
    if not runs:
        copies = {dtype for dtype, without in optimizer.others if not without} - {t.dtype for t in own}
        return [] if copies else [t.name for t in missing]
    after = runs[rank].after
    stepped = [t for t in missing if after is not None and after.by_name[t.name].digest != t.digest]
    return [] if stepped else [t.name for t in missing]


def _unfrozen(view: View) -> dict[str, list[int]]:
    """Return the parameters that a step has unfrozen, that no group holds after the last one, and that never move."""
    moved, found = set[str](), list[tuple[str, int]]()
    for facts, run in zip(view.evidence.inventory, view.evidence.training or (), strict=False):
        if run.after is None or run.after.optimizer is None:
            continue
        frozen = {t.name: t for t in facts.tensors if t.kind == "parameter" and not t.requires_grad and t.numel}
        unfrozen = [t for t in run.after.tensors if t.requires_grad and t.name in frozen]
        moved |= {t.name for t in unfrozen if t.digest != frozen[t.name].digest}
        found += [(t.name, facts.rank) for t in unfrozen if not run.after.optimizer.held.get(t.name)]
    return grouped((name, rank) for name, rank in found if name not in moved)


def _otherwise_set(view: View, optimizers: list[tuple[int, OptimizerFacts]]) -> Iterator[Finding]:
    """Report parameters whose group has other settings than the reference's, however little that moves them."""
    reference, kind = view.evidence.reference, optimizers[0][1].kind
    built = any(rank.optimizer is not None for rank in view.evidence.inventory)
    for name, theirs in (reference.settings if reference is not None else {}).items():
        known = [key for key in SETTINGS if key in theirs]
        held = [(rank, optimizer.settings.get(name, theirs)) for rank, optimizer in optimizers]
        off = [(rank, tuple((k, own[k]) for k in known if own.get(k, theirs[k]) != theirs[k])) for rank, own in held]
        for ours, ranks in ranks_by((rank, differing) for rank, differing in off if differing).items():
            actual, expected = (", ".join(f"{k}={own[k]}" for k, _ in ours) for own in (dict(ours), theirs))
            renamed = any(name in optimizer.renamed for _, optimizer in optimizers)
            explanation = _UNLIKE_RANK_0 if built else _RENAMED if renamed else _OTHER_GROUP
            yield Finding(name, ranks, f"in a group of {kind} with {actual}", f"with {expected}", **explanation)


def _wrongly_held(view: View, optimizers: list[tuple[int, OptimizerFacts]]) -> Iterator[Finding]:
    kind = optimizers[0][1].kind
    for name, tensors in view.tensors("parameter"):
        trainable = {rank: tensor.requires_grad for rank, tensor in tensors}
        counts = [(rank, optimizer.held.get(name, 0)) for rank, optimizer in optimizers]
        # A parameter with optimizer state was trained before it was frozen, and may be unfrozen again.
        stepped = {rank for rank, optimizer in optimizers if name in optimizer.stepped}
        frozen = tuple(
            rank for rank, count in counts if count and not trainable.get(rank, True) and rank not in stepped
        )
        if frozen:
            yield Finding(name, frozen, f"frozen and in a parameter group of {kind}", "in none", **_FROZEN)
        for count, ranks in ranks_by((rank, count) for rank, count in counts if count > 1).items():
            yield Finding(name, ranks, f"listed {count} times in the parameter groups of {kind}", "listed once")


_REPLACED: Explanation = {
    "cause": "the optimizer was built before sharding or materialisation, which replaced the parameters that it holds",
    "remedy": "build the optimizer after fully_shard and to_empty",
}
SETTINGS = ("lr", "weight_decay", "betas", "eps", "momentum", "dampening", "nesterov", "alpha", "amsgrad", "maximize")
"""Those of torch's optimizers that change a step; an optimizer of somebody else may keep its rank beside them."""
_OTHER_GROUPS = "Subject(optimizer=...) builds or returns another optimizer for the ranks than for the reference: "
_OTHER_CODE = "the two are not built by the same code"
_BY_SHAPES = "it chooses groups by the shapes of shards, or depends on the number of ranks (1 for the reference)"
_ONE_FUNCTION = (
    "let one function choose the groups of both, by the names and the whole shapes of the unwrapped model, or declare "
    "the trainer's own optimizer; compute what depends on the number of ranks outside of the function"
)
_OTHER_GROUP = either(_OTHER_GROUPS, _OTHER_CODE, _BY_SHAPES, _ONE_FUNCTION)
_BY_NAMES = f"it chooses groups by names, which a wrapper changes on the ranks, or {_OTHER_CODE}"
_RENAMED = either(_OTHER_GROUPS, _BY_NAMES, _BY_SHAPES, _ONE_FUNCTION)
_UNLIKE_RANK_0: Explanation = {
    "cause": "the optimizer is built by the rank, or by what the rank holds; the reference has what rank 0 has",
    "remedy": "choose groups and settings alike on all ranks, by names and whole shapes",
}
_UNFROZEN: Explanation = {
    "cause": "it was frozen when the optimizer was built, and nothing adds it when a step unfreezes it",
    "remedy": "call optimizer.add_param_group() where it is unfrozen",
}
_FROZEN: Explanation = {
    "cause": "the optimizer was given all parameters; a frozen one keeps its values only while it has no gradient",
    "remedy": "give it the parameters that require a gradient: [p for p in model.parameters() if p.requires_grad]",
}


@training_check(
    promise="frozen weights and buffers are bit-identical before and after training steps",
    needs=["inventory", "training"],
    uses=["reference", "training_mode"],
    after=BLOCKING_CHECKS,
    why="If a frozen verifier drifts, the model trains towards a moving target, and no gradient shows it.",
    cause="something other than the optimizer writes to it: a moving average, a hook, a tie to a trained weight",
    remedy="look for copy_(), lerp_() and .data on it in hooks and forwards, and for ties to trainable parameters",
    references=["vllm-project/speculators#593"],
)
def frozen_weights_stay_frozen(view: View) -> Iterable[Finding]:
    after, steps, runs = inventories_after_steps(view), count_steps(view), view.evidence.training or ()
    declared, reference = view.evidence.subject.frozen, view.evidence.reference
    moving, judged = set[str](), bool(view.names("buffer", only=declared))
    if reference is not None and reference.after is not None:  # trainable parameters, and intended moving averages
        moving = {t.name for t in reference.inventory.tensors if _changed(reference.after, t)}
    for name, tensors in view.tensors("parameter"):
        frozen = [(rank, t) for rank, t in tensors if not t.requires_grad or name in declared]
        meant = name in moving or (frozen and _added_by_step(name, after[frozen[0][0]], runs))
        if not frozen or (meant and name not in declared):
            continue
        judged = True
        moved = tuple(rank for rank, t in frozen if _changed(after[rank], t))
        if moved:
            yield Finding(name, moved, f"changed in {steps}", _UNCHANGED, **explain_written(runs, name, moved))
    buffers = [*_moved_buffers(view, after, runs)]
    yield from buffers
    if not (judged or buffers):
        raise NotJudged("nothing is frozen")


def _added_by_step(name: str, after: RankInventory, runs: Sequence[RankTraining]) -> bool:
    """Return whether a step has unfrozen the parameter and given it to the optimizer, which did not hold it before."""
    before, later = runs[after.rank].optimizer, after.optimizer
    held = before is not None and later is not None and not before.held.get(name) and later.held.get(name)
    return bool(held) and after.by_name[name].requires_grad


def _moved_buffers(view: View, after: Sequence[RankInventory], runs: Sequence[RankTraining]) -> Iterator[Finding]:
    """Find buffers that change although they are declared frozen, or no parameter around them trains or moves."""
    steps, declared = view.evidence.training_mode or (), view.evidence.subject.frozen
    changed, moves = list[set[str]](), dict[str, bool]()
    for rank, facts in enumerate(view.evidence.inventory):
        # BatchNorm has the mode of production in the step with dropout only.
        later = [after[rank], *(step.after for step in steps[rank : rank + 1] if step.after is not None)]
        changed.append({t.name for t in facts.tensors if any(_changed(one, t) for one in later)})
        for t in (t for t in facts.tensors if t.kind == "parameter"):
            for part in _around(t.name):
                moves[part] = moves.get(part, False) or t.requires_grad or t.name in changed[rank]
    by_author = "train_step" in view.evidence.subject.declared
    for name in dict.fromkeys(t.name for rank in view.evidence.inventory for t in rank.tensors if t.kind == "buffer"):
        held = view.holders(name)
        frozen = by_author and held[0][1].persistent and not next((moves[p] for p in _around(name) if p in moves), True)
        ranks = tuple(rank for rank, _ in held if name in changed[rank] and name not in runs[rank].buffers.broadcast)
        if ranks and (name in declared or frozen) and view.judgeable(name):
            modes = [name.rpartition(".")[0] in steps[rank].frozen_in_train for rank in ranks] if steps else [False]
            in_train = by_author and all(modes) and not any(name in runs[rank].buffers.by_step for rank in ranks)
            yield Finding(name, ranks, "changed in a step", _UNCHANGED, **(IN_TRAIN if in_train else {}))


def _around(name: str) -> Iterator[str]:
    """Yield the names of the modules around a tensor, the innermost first and the model, "", last."""
    while name:
        name = name.rpartition(".")[0]
        yield name


_UNCHANGED = "bit-identical to the loaded values"
IN_TRAIN: Explanation = {
    "cause": "its module has nothing to train and runs in train(), where norms update their statistics all the same",
    "remedy": "put frozen parts into eval() when loading and after each train(), or let their own train() do nothing",
}


def explain_written(runs: Sequence[RankTraining], name: str, ranks: Sequence[int]) -> Explanation:
    """Explain how a parameter changed that train_step itself writes to on all these ranks; else return {}."""
    if not all(name in runs[rank].buffers.written_parameters for rank in ranks):
        return {}
    return {
        "cause": "train_step itself writes to it outside of the optimizer's step, which the reference does not, or "
        "swaps it for an evaluation and does not put it back",
        "remedy": "write to it in a hook of the optimizer's step, which runs on the reference as well, and put back "
        "what an evaluation swaps",
    }


def _changed(after: RankInventory, loaded: TensorFacts) -> bool:
    now = after.by_name.get(loaded.name)
    return now is not None and None not in (now.digest, loaded.digest) and now.digest != loaded.digest


@training_check(
    promise="training changes every trainable tensor, every rank's shard of it and every row that got a gradient",
    needs=["inventory", "training"],
    uses=["reference", "values", "verifier"],
    after=[*EXPLAINING_CHECKS, "forward_sees_current_weights", "grad_parity", "optimizer_owns_parameters"],
    why="A shard that is never stepped keeps its loaded values, and the other weights learn around it.",
    cause="the optimizer step does not write to this memory: the optimizer or a wrapper steps a copy, or leaves out "
    "this shard",
    remedy="check which parameters the optimizer's groups hold on this rank, and look for copies that are not written "
    "back",
    references=["NVIDIA/Megatron-LM#6228", "huggingface/accelerate#1527", "pytorch/pytorch#176076"],
)
def every_trainable_moves(view: View) -> Iterable[Finding]:
    runs = view.evidence.training or ()
    require_finite(view, runs, "the losses")  # NaN replaces every value, so everything would count as moved
    swallowed = list(_swallowed(view, runs))
    yield from swallowed
    unreached = _unreached(view, runs)
    if _reference_is_trained(view):
        yield from _most_unreached(view, unreached)
    if not any(run.movements for run in runs):
        raise NotJudged("nothing is trainable")
    if not swallowed and not any(movement.due for run in runs for movement in run.movements):
        raise NotJudged(
            "no update is larger than rounding: the learning rate or the gradients are zero or very small; give "
            "Subject(optimizer=...) a larger learning rate"
        )
    found = list(_unmoved(view, runs))
    if found and _reference_is_trained(view):
        require_same_forward(view, comparable_training(view))
        require_no_other_cause(view, f"{found[0].tensor}: {found[0].actual}")
    yield from found
    if unreached:
        raise PartlyJudged(_describe_unreached(view, unreached))


def _swallowed(view: View, runs: Sequence[RankTraining]) -> Iterator[Finding]:
    """Report the parameters that no rank can move, with the optimizer that the author declares."""
    if "optimizer" not in view.evidence.subject.declared:
        return  # the plugin's own learning rate says nothing about the author's training
    named = {name: None for run in runs for name in run.swallowed}
    for name, tensors in view.tensors("parameter", only=named):
        holders = [rank for rank, tensor in tensors if tensor.numel]
        if holders and all(name in runs[rank].swallowed for rank in holders):
            dtype = tensors[0][1].dtype
            actual = f"no element changed in {count_steps(view)}: each update is rounded away in {dtype}"
            explanation = _NOT_BY_CHANCE if runs[holders[0]].steps_by_chance else _SWALLOWED
            yield Finding(name, tuple(holders), actual, "trained", **explanation)


_SWALLOWED: Explanation = {
    "cause": "each update is smaller than half a unit in the last place, as of a norm's weight of 1.0 with a learning "
    "rate below 0.002 in bfloat16; the reference trains in the same dtype and does not move either",
    "remedy": "keep parameters in float32 and compute in bfloat16 (MixedPrecisionPolicy), round stochastically, or "
    "freeze them",
}
_NOT_BY_CHANCE: Explanation = {
    "cause": "the step draws random numbers, but rounds this parameter to the nearest value: with stochastic rounding, "
    "the chance that no element moves is below one in a million",
    "remedy": "compute the new weight in float32 and round that stochastically, not a weight that is rounded already",
}


def _unreached(view: View, runs: Sequence[RankTraining]) -> list[str]:
    """Return the trainable parameters that have no gradient, or only zeros, on any rank and in the reference."""
    sizes = view.reference.gradients if _reference_is_trained(view) else {}
    reached = {name for name, size in sizes.items() if size != 0}
    for run in runs:
        zero = {c.name for c in run.gradients if c.equal and not sizes.get(c.name, 1.0)}
        if run.after is not None:
            reached |= {t.name for t in run.after.tensors if t.numel} - {*run.without_gradient, *zero}
    if _reference_is_trained(view):
        # Behind weights that begin as zeros, such as the B of LoRA or a new head, gradients begin with the second step.
        reached |= set(view.reference.reached_later)
    return [name for name, facts in view.tensors("parameter") if facts[0][1].requires_grad and name not in reached]


def _reference_is_trained(view: View) -> bool:
    return view.evidence.reference is not None and view.evidence.reference.losses is not None


def _most_unreached(view: View, unreached: Sequence[str]) -> Iterator[Finding]:
    """Report a loss that does not reach most of what has computed. A few parameters without a use are not a defect.

    Neither are modules that the batch does not use: images for a vision tower, tokens for an expert.
    """
    trainable = {
        name: math.prod(facts[0][1].shape) for name, facts in view.tensors("parameter") if facts[0][1].requires_grad
    }
    if len(unreached) < len(trainable):
        idle, unreached = _split_idle(view, unreached)
        trainable = {name: size for name, size in trainable.items() if name not in idle}
    missing = sum(trainable[name] for name in unreached)
    if 2 * missing > sum(trainable.values()):
        actual = f"{len(unreached)} of {counted(len(trainable), 'trainable parameter')} get no gradient"
        detail = (
            f"{missing / sum(trainable.values()):.0%} of the elements, {first_of(unreached)}; none in the reference"
        )
        ranks = tuple(range(len(view.evidence.inventory)))
        explanation = _CUT_OFF if len(unreached) < len(trainable) else _CONSTANT
        yield Finding(None, ranks, actual, "a gradient for each", detail, **explanation)


def _split_idle(view: View, unreached: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the parameters of modules that did not run, and the others."""
    idle = set() if view.evidence.reference is None else {*view.evidence.reference.idle}
    return [name for name in unreached if name in idle], [name for name in unreached if name not in idle]


def _describe_unreached(view: View, unreached: Sequence[str]) -> str:
    unused, others = _split_idle(view, unreached)
    parts = []
    if unused:
        parts.append(
            f"the batch does not use {first_of(unused)}: these modules ran neither on the ranks nor in the reference; "
            "give batches that use them, or freeze what is not trained"
        )
    if others:
        alike = ", in the reference neither" * _reference_is_trained(view)
        parts.append(f"the loss gives {first_of(others)} no gradient{alike}; freeze what is not trained")
    return "; ".join(parts)


_CONSTANT: Explanation = {
    "cause": "the loss does not depend on the parameters: it is constant or detached, or the batch is zero",
    "remedy": "give Subject(loss=...) a loss that depends on the model's output, and Subject(batch=...) rows that are "
    "not zero",
}
_CUT_OFF: Explanation = {
    "cause": "the loss does not depend on them: an output is detached or computed under no_grad, or a fused loss "
    "cuts off the rest of the model",
    "remedy": "look for detach(), no_grad() and custom autograd functions between these parameters and the loss; "
    "freeze what should not be trained",
}


def _unmoved(view: View, runs: Sequence[RankTraining]) -> Iterator[Finding]:
    by_name = grouped((m.name, (rank, m)) for rank, run in enumerate(runs) for m in run.movements if m.still)
    for name in view.names("parameter", only=by_name):
        for whole, ranks in ranks_by((rank, m.still == m.due) for rank, m in by_name[name]).items():
            first = next(m for rank, m in by_name[name] if rank in ranks)
            row = "" if first.first is None else f", first row {first.first}"
            detail = f"{first.still} of {first.due} rows on rank {ranks[0]}{row}"
            steps = count_steps(view)
            actual = (
                f"no row changed in {steps}, although it has gradients"
                if whole
                else f"some rows did not change in {steps}, although they have gradients"
            )
            yield Finding(name, ranks, actual, "", detail, **explain_written(runs, name, ranks))


def inventories_after_steps(view: View) -> list[RankInventory]:
    """Return each rank's inventory after the steps."""
    found = [run.after for run in view.evidence.training or () if run.after is not None]
    if len(found) < len(view.evidence.inventory):
        raise NotJudged("the parameters were not recorded after the steps")
    return found


def count_steps(view: View) -> str:
    return counted(max((len(run.losses) for run in view.evidence.training or ()), default=0), "step")
