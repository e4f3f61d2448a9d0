"""Modes: what learns is in ``train()`` while the model trains, and nothing drops elements in ``eval()``."""

from __future__ import annotations

from collections.abc import Iterable

from pytest_fsdp_meta.judging.findings import Explanation, Finding
from pytest_fsdp_meta.judging.gates import BLOCKING_CHECKS
from pytest_fsdp_meta.judging.registry import training_check
from pytest_fsdp_meta.judging.view import NotJudged, PartlyJudged, View, ranks_by


@training_check(
    promise="in a training step, modules that learn are in train(), or the whole model is in eval(); in eval(), no "
    "module drops elements",
    needs=["inventory", "training_mode"],
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
    left = [(rank, name) for rank, step in enumerate(steps) for name in step.left]
    for name, ranks in ranks_by(left).items():
        yield Finding(name or None, ranks, _LEFT, "in train()", **_NEVER_BACK)
    dropping = [(rank, name) for rank, step in enumerate(steps) for name in step.dropping]
    for name, ranks in ranks_by(dropping).items():
        yield Finding(name or None, ranks, "drops elements in eval()", "off there", **_MODE_IGNORED)
    problems = [step.evaluation_problem for step in steps if step.evaluation_problem]
    if problems:
        raise PartlyJudged(
            f"whether a module drops elements in eval() is unknown: a forward there raises {problems[0]}"
        )


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
