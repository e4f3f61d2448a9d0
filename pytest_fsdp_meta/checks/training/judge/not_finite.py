"""Steps that are not finite: all ranks make them, or all skip them."""

from __future__ import annotations

from collections.abc import Iterable

from pytest_fsdp_meta.judging.findings import Explanation, Finding
from pytest_fsdp_meta.judging.gates import EXPLAINING_CHECKS
from pytest_fsdp_meta.judging.registry import training_check
from pytest_fsdp_meta.judging.view import Blocked, NotDeclared, NotJudged, View, ranks_by
from pytest_fsdp_meta.text import name_ranks


@training_check(
    promise="a step in which the model returns NaN on some ranks is taken by all ranks, or skipped by all, and what is "
    "skipped has no effect on the next step, the schedule or averages",
    needs=["inventory", "not_finite"],
    uses=["training"],  # before it, the optimizer has no state, and averages are the weights
    fields=["train_step"],
    after=EXPLAINING_CHECKS,
    why="After one bad batch, ranks that have taken the step hold other weights than those that have skipped it, or "
    "wait for gradients that the others never reduce.",
    cause="each rank decides by its own loss whether it skips the step",
    remedy="decide by what all ranks know: the norm of the gradients, or whether all losses are finite "
    "(dist.all_reduce of isfinite(loss) with ReduceOp.MIN) before the backward",
    references=["ecmwf/WeatherGenerator#2718", "Project-MONAI/monai-physio#137", "espnet/espnet#3283"],
)
def ranks_skip_alike(view: View) -> Iterable[Finding]:
    ranks = view.evidence.not_finite
    if ranks is None:
        raise NotDeclared("train_step", ", so nothing decides whether a step is skipped")
    if waiting := next((own.waiting for own in ranks if own.waiting), ""):
        yield Finding(None, tuple(range(len(ranks))), "the step does not end", MADE_OR_SKIPPED, waiting)
        return
    if not all(own.moved for own in ranks):
        raise NotJudged(
            "train_step calls neither the model nor its parts, or these return no tensors, so none could be made NaN"
        )
    slices = ranks[0].data_parallel[1]
    changed = ranks_by((rank, name) for rank, own in enumerate(ranks) for name in own.changed)
    replaced = tuple(rank for rank, own in enumerate(ranks) if own.replaced)
    if slices == 1 and not (changed or replaced or any(own.kept for own in ranks)):
        raise NotJudged("all ranks have the same rows, and so the same loss")
    inventory = enumerate(view.evidence.inventory)
    # A rank without elements that train shows nothing of a step.
    training = [rank for rank, own in inventory if any(t.requires_grad and t.numel for t in own.tensors)]
    for step, index in zip(range(len(ranks[0].moved)), (0, slices - 1), strict=False):
        made = tuple(rank for rank in training if ranks[rank].moved[step])
        skipped = tuple(rank for rank in training if rank not in made)
        nan = "NaN on " + name_ranks(rank for rank, own in enumerate(ranks) if own.data_parallel[0] == index)
        if made and skipped:
            detail = f"{nan}; {name_ranks(made)} made the step"
            yield Finding(None, skipped, "the step is skipped, and other ranks make it", MADE_OR_SKIPPED, detail)
            return
        if made and step:
            if view.failed:
                raise Blocked("a step is made in which a rank has NaN", view.failed)
            actual = "the step is made, although it is skipped where rank 0 has NaN"
            yield Finding(None, made, actual, "skipped as well", nan, **_ONE_DECIDES)
    if replaced:
        actual = "the step changes the weights to numbers although the model returns NaN on every rank"
        yield Finding(None, replaced, actual, "skipped, or makes them NaN", **_REPLACED)
    for what, holders in changed.items():
        yield Finding(None, holders, f"a step that is skipped changes {what}", "left as it was", **_COUNTED)
    kept = ranks_by((rank, name) for rank, own in enumerate(ranks) for name in own.kept)
    for name, holders in kept.items():
        yield Finding(name, holders, "NaN after the step that follows a skipped one", "a number", **_KEPT)


MADE_OR_SKIPPED = "made or skipped by all"
_KEPT: Explanation = {
    "cause": "a skipped step keeps its gradients, and the next one adds to them",
    "remedy": "call zero_grad() whether the step is made or skipped",
}
_COUNTED: Explanation = {
    "cause": "it is stepped or updated whether the step is made or skipped",
    "remedy": "step the scheduler, and update averages, only where optimizer.step() has run",
}
_REPLACED: Explanation = {
    "cause": "gradients or losses that are NaN are replaced by numbers (nan_to_num, zeros), and the optimizer makes a "
    "step from its moments and the weight decay alone, and counts it",
    "remedy": "skip the whole step on all ranks where the loss or the norm of the gradients is not finite",
}
_ONE_DECIDES: Explanation = {
    "cause": "one rank decides for all by its own loss",
    "remedy": "reduce over all data-parallel ranks whether the loss is finite, with ReduceOp.MIN",
}
