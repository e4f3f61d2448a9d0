"""The forward: modules compute with the weights that the last step left, and in the mode that training takes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain

from pytest_fsdp_meta.checks.training.facts import StaleWeight
from pytest_fsdp_meta.checks.training.judge.optimization import IN_TRAIN
from pytest_fsdp_meta.judging.findings import Explanation, Finding
from pytest_fsdp_meta.judging.gates import BLOCKING_CHECKS
from pytest_fsdp_meta.judging.registry import training_check
from pytest_fsdp_meta.judging.view import NotJudged, PartlyJudged, View, ranks_by
from pytest_fsdp_meta.text import fold_names, grouped


@training_check(
    promise="after each optimizer step, the weights that FSDP2 gathers for modules, and copies of weights through "
    "which gradients flow, have the updated values",
    needs=["inventory", "training"],
    after=[*BLOCKING_CHECKS, "tied_weights_share_storage"],
    why="The optimizer updates the shards correctly, and a module still computes with old values: no error is raised. "
    "A detached copy that a module keeps is not seen here; it shows in the gradients and losses of later steps.",
    cause="what the module computes with is not gathered from this rank's shard after each step: the group stays "
    "unsharded over the step (set_reshard_after_backward(False)), or something replaced or kept the gathered weight",
    remedy="let FSDP reshard after the last backward of each step: set_reshard_after_backward(True), or "
    "model.reshard() after optimizer.step()",
    references=["pytorch/pytorch#188346"],
)
def forward_sees_current_weights(view: View) -> Iterable[Finding]:
    observed = [run.forward for run in view.evidence.training or ()]
    if all(forward.forwards < 2 for forward in observed):
        raise NotJudged("no forward follows an optimizer step; train for two steps or more")
    if not any(t.requires_grad for rank in view.evidence.inventory for t in rank.tensors):
        raise NotJudged("nothing is trainable")
    found = [(rank, stale) for rank, forward in enumerate(observed) for stale in forward.stale]
    for stale, ranks in ranks_by(found).items():
        if not view.judgeable(stale.name):
            continue
        ties = (rank.tied_with.get(stale.name, ()) for rank in view.evidence.inventory)
        tied = tuple(sorted({stale.name}.union(*ties)))
        yield Finding(
            stale.name,
            ranks,
            f"outdated in the forward from step {stale.step} on",
            "the values after each optimizer step",
            f"module {stale.module}" if stale.module else "the model's own forward",
            condemns=tied,
            **_explain(stale, tied),
        )


def _explain(stale: StaleWeight, tied: tuple[str, ...]) -> Explanation:
    if stale.how == "copied":
        return {
            "cause": "the loss depends on a copy of the weight that was computed in an earlier step, such as a cached "
            "cast or a merged weight; torch.autocast caches casts until it is left",
            "remedy": "compute the copy in every forward, or delete it after each step; enter torch.autocast in each "
            "step, not once around all of them",
        }
    if stale.how == "padded apart" and len(tied) > 1:
        return {
            "cause": "several FSDP groups manage this tied parameter, because it was tied after fully_shard(), and the "
            "ranks' shards are uneven: in the first forward each group pads its shard into memory of its own, and all "
            "but the last one gather from memory that the optimizer does not update",
            "remedy": "tie the modules before fully_shard() and shard them as one group: fully_shard([embedding, "
            "head]), or both in the root's group; if a framework does both, make dim 0 (the vocabulary) a multiple of "
            "the ranks that shard it, or untie the weights",
        }
    if stale.how == "padded apart":
        return {
            "cause": "the FSDP group gathers from other memory than the registered parameter's, which the optimizer "
            "updates: the parameter was replaced, or is managed by several groups",
            "remedy": "replace parameters before the first forward only, and let one FSDP group manage each of them",
        }
    return {}


@training_check(
    promise="in a training step, modules that learn are in train(), or the whole model is in eval(); in eval(), no "
    "module drops elements; in train(), each dropout drops the same fraction as in the reference, or nothing; frozen "
    "parts that the reference has in eval() are not in train()",
    needs=["inventory", "training_mode"],
    uses=["reference", "training"],
    after=BLOCKING_CHECKS,
    why="A part that is left in eval() trains without its dropout, and without whatever else its mode switches on: no "
    "error is raised, and the loss looks a little better than it should.",
    cause="something puts this part into eval() and not back: an evaluation or a sample in between, or a teacher whose "
    "eval() reaches the student, with which it shares modules",
    remedy="call model.train() at the beginning of each step, and eval() only of what does not train",
    references=["huggingface/trl#5862", "huggingface/trl#1066", "wkentaro/pytorch-fcn#56", "rixwew/pytorch-fm#21"],
)
def modules_train(view: View) -> Iterable[Finding]:
    steps = view.evidence.training_mode or ()
    if not any(t.requires_grad for rank in view.evidence.inventory for t in rank.tensors):
        raise NotJudged("nothing is trainable")
    evaluating = [(rank, name) for rank, step in enumerate(steps) for name in step.evaluating]
    for name, ranks in ranks_by(evaluating).items():
        yield Finding(name or None, ranks, _PART if name else _WHOLE, "in train()")
    in_training = enumerate(run.left for run in view.evidence.training or ())
    seen = chain(enumerate(step.left for step in steps), in_training)
    left = dict.fromkeys((rank, name) for rank, names in seen for name in names)
    for name, ranks in ranks_by(left).items():
        yield Finding(name or None, ranks, _LEFT, "in train()", **_NEVER_BACK)
    dropping = [(rank, name) for rank, step in enumerate(steps) for name in step.dropping]
    for name, ranks in ranks_by(dropping).items():
        yield Finding(name or None, ranks, "drops elements in eval()", "off there", **_MODE_IGNORED)
    kept = view.evidence.reference.in_eval if view.evidence.reference is not None else ()
    frozen = [(rank, name) for rank, step in enumerate(steps) for name in step.frozen_dropping if name in kept]
    for name, ranks in ranks_by(frozen).items():
        yield Finding(name, ranks, "frozen, and in train()", "in eval(), as in the reference", **_FROZEN_IN_TRAIN)
    yield from _other_fractions(view)
    problems = [step.evaluation_problem for step in steps if step.evaluation_problem]
    if problems:
        raise PartlyJudged(
            f"whether a module drops elements in eval() is unknown: a forward there raises {problems[0]}"
        )


def _other_fractions(view: View) -> Iterator[Finding]:
    """Yield the dropouts that drop another fraction than in the reference; some trainers switch them off."""
    reference = view.evidence.reference
    expected = reference.dropouts if reference is not None else {}
    pairs = ((rank, pair) for rank, run in enumerate(view.evidence.training or ()) for pair in run.dropouts.items())
    alike = grouped(
        ((fraction, expected[name], ranks), name)
        for (name, fraction), ranks in ranks_by(pairs).items()
        if fraction and fraction != expected.get(name, fraction)
    )
    for (fraction, due, ranks), names in alike.items():
        for name in fold_names(names):
            yield Finding(name, ranks, f"is {fraction:g}", f"{due:g}, as in the reference", **_OTHER_FRACTION)


_OTHER_FRACTION: Explanation = {
    "cause": "the loader builds this dropout from other settings than the reference, or changes them",
    "remedy": "build the model from the reference's configuration; if it is meant, give the reference the same",
}
_FROZEN_IN_TRAIN: Explanation = {
    "cause": "something calls train() of this frozen part, or nothing its eval(): what it drops is noise for the rest",
    "remedy": IN_TRAIN["remedy"],
}
_PART = "in eval() while the rest of the model trains"
_WHOLE = "trains in eval() although train() was called in the same step"
_LEFT = "is left in eval() by a step, and trains there in the next"
_NEVER_BACK: Explanation = {
    "cause": "the step ends with an evaluation or a sample, for which it calls eval(), and nothing calls train() "
    "after it",
    "remedy": "call model.train() at the beginning of each step",
}
_MODE_IGNORED: Explanation = {
    "cause": "a dropout ignores the mode, so evaluation and generation are random too",
    "remedy": "pass training=self.training to F.dropout, and dropout_p=self.p if self.training else 0.0 to "
    "scaled_dot_product_attention",
}
