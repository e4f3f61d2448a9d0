"""Decide whether training can be compared with the reference, and by how much the two may differ."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from pytest_fsdp_meta.checks.checkpoint.facts import RankResumed
from pytest_fsdp_meta.checks.values.facts import LOSS_TOLERANCE
from pytest_fsdp_meta.evidence import VALUES_CHECKS, Comparison, Evidence, RankTraining
from pytest_fsdp_meta.judging.expectations import share_places
from pytest_fsdp_meta.judging.findings import Explanation, Finding, extend
from pytest_fsdp_meta.judging.limits import loss_limits, require_noise
from pytest_fsdp_meta.judging.view import Blocked, Differs, NotJudged, PartlyJudged, Unjudgeable, View, ranks_by
from pytest_fsdp_meta.text import counted, first_of, grouped, name_ranks

BLOCKING_CHECKS = (
    "same_manifest_on_every_rank",
    "names_match_reference",
    "shapes_match_reference",
    "collectives_match_on_every_rank",
    "dtypes_match_reference",
    "requires_grad_matches_reference",
    "no_meta_params",
    "no_meta_buffers",
    "no_uninitialized_memory",
    "managed_params_are_registered",
)
"""Checks whose failure can make a training step raise, or train other parameters than the model registers."""
EXPLAINING_CHECKS = (
    *BLOCKING_CHECKS,
    "shards_tile_the_tensor",
    "replicas_equal",
    "params_equal_reference",
    "buffers_equal_reference",
    "frozen_weights_equal_verifier",
    "tied_weights_share_storage",
)
"""Checks whose failure alone makes training differ. The training checks then stay silent: one cause, one finding."""
BEFORE_UPDATES = (
    *EXPLAINING_CHECKS,
    "forward_sees_current_weights",
    "grad_parity",
    "optimizer_owns_parameters",
    "frozen_weights_stay_frozen",
    "tied_weights_stay_tied",
    "every_trainable_moves",
    "replicas_stay_equal",
    "buffers_follow_training",
)
"""Checks whose failure makes later steps differ."""


def comparable_training(view: View) -> Sequence[RankTraining]:
    """Return each rank's training run, or raise if the reference's run is missing or is not comparable with them."""
    runs, reference = view.evidence.training or (), view.reference
    if reference.losses is None and reference.evaluated:
        raise NotJudged(f"ranks and reference cannot be compared: {reference.evaluated}")
    if reference.losses is None:
        raise NotJudged("a checkpoint directory cannot be trained; declare Subject(reference=<callable>)")
    for step, loss in enumerate(reference.losses):
        if not math.isfinite(loss) and reference.adopted:
            message = f"with the loader's values of {first_of(reference.adopted)}, the reference's loss is {loss:g}"
            raise Blocked(message, VALUES_CHECKS.values())
        if not math.isfinite(loss):
            raise Unjudgeable(
                f"the reference's own loss is {loss:g} at step {step}; give it a batch, a loss and an optimizer that "
                "keep it finite"
            )
    for step, (loss, rerun) in enumerate(zip(reference.losses, reference.losses_again or (), strict=False)):
        if loss != rerun:
            raise Unjudgeable(
                f"the reference is not reproducible: from the same weights, step {step} gives loss {loss:.9g} and, in "
                f"a second run, {rerun:.9g}; make its forward deterministic"
            )
    for rank, run in enumerate(runs):
        for step, (ours, theirs) in enumerate(zip(run.batches, reference.batches, strict=True)):
            if ours != theirs:
                raise Unjudgeable(
                    f"batch({step}) on rank {rank} differs from the reference's; make batch(step) depend on step only"
                )
    trainable = any(t.requires_grad for t in view.reference_inventory.tensors)
    if trainable and not reference.gradients and any(run.norm for run in runs):
        raise Unjudgeable(
            "Subject(loss=...) gives gradients on the ranks, and none in the reference: there it depends on another "
            "model than its argument, such as a copy of the loaded one; compute it from the argument alone"
        )
    return runs


def require_no_other_cause(view: View, message: str, first_forward: bool = False) -> None:
    """Raise if an unreproducible reference or an earlier finding explains the difference that ``message`` describes.

    Findings about training do not explain the ``first_forward``, which runs before any step.
    """
    if view.reference.unstable:
        raise Unjudgeable(
            f"{message}, and the reference is not reproducible: building it again gives different values "
            f"({view.reference.unstable[0]}); make it build the same model every time"
        )
    names = {t.name: None for rank in view.evidence.inventory for t in rank.tensors}
    by: dict[str, None] = {}
    for name in names | dict.fromkeys(view.reference_inventory.by_name):
        check_id = view.explained_by(name)
        if check_id and (check_id in EXPLAINING_CHECKS or not first_forward):
            view.judgeable(name)  # records that it is left out
            by[check_id] = None
    if by:
        raise Blocked(message, by)
    in_training = [check_id for check_id in view.failed if check_id not in EXPLAINING_CHECKS]
    if in_training and not first_forward:
        raise Blocked(message, in_training)


def unless_explained(
    view: View,
    runs: Sequence[RankTraining],
    found: Sequence[Finding],
    what: str,
    compared: Iterable[Comparison],
    tolerance: Mapping[str, float],
    fewer_forwards: bool = False,
) -> Sequence[Finding]:
    """Return what a parity check has ``found``, or what is certain of it; raise if something else explains it.

    If it found nothing, raise if that proves too little: there are no gradients, nobody knows whether the differences
    of what it ``compared`` are noise, or the model was compared in ``eval()``. ``what`` says what differs, such as "the
    gradients differ". ``fewer_forwards`` says that the reference runs fewer than the ranks.
    """
    if found:
        message = describe_difference(what, found)
        if not (_lacks(view, fewer_forwards) and any(finding.certain for finding in found)):
            require_same_forward(view, runs)
        require_no_other_cause(view, message)
        return given_or_certain(view, found, message, fewer_forwards)
    require_gradients(view)
    require_noise(view, tolerance, (comparison.relative for comparison in compared))
    require_whole_comparison(view)
    return found


def given_or_certain(
    view: View, found: Sequence[Finding], message: str, fewer_forwards: bool = False
) -> Sequence[Finding]:
    """Return the findings, or those that are certain whatever the reference lacks; raise Differs if there are none."""
    lacks = _lacks(view, fewer_forwards)
    certain = [finding for finding in found if finding.certain] if lacks else found
    if not certain:
        raise Differs(f"{message}; {lacks}")
    return certain


def require_given(view: View, message: str) -> None:
    """Raise Differs if the ranks train with something that the reference could not be given."""
    if lacks := _lacks(view):
        raise Differs(f"{message}; {lacks}")


def _lacks(view: View, fewer_forwards: bool = False) -> str:
    """Return what the reference lacks of that on which the ranks' training depends, or ""."""
    if not_given := view.reference.not_given:
        name, reason = next(iter(not_given.items()))
        return f"{name}: {reason}, so the reference could not be given it"
    if fewer_forwards and (steered := view.reference.steered_by_forward):
        return f"every forward changes {steered[0]}, and the reference runs fewer forwards"
    return ""


def describe_difference(what: str, found: Sequence[Finding]) -> str:
    return f"{what} ({found[0].tensor}: {found[0].actual})"


def require_finite(view: View, trained: Iterable[RankTraining | RankResumed], what: str, shown: str = "") -> None:
    """Raise Blocked if losses are infinite or NaN and another check reports what makes them so, else Unjudgeable."""
    losses = next((run.losses for run in trained if not all(map(math.isfinite, run.losses))), ())
    if not losses:
        return
    message = f"{what} are not finite ({shown or format_losses(losses)})"
    reference, runs = view.evidence.reference, view.evidence.training or ()
    compared = "loss_parity" in view.selection and reference is not None and reference.losses is not None
    wrong = compared and not all(math.isfinite(loss) for run in runs for loss in run.losses)
    if by := (*view.failed, *("loss_parity",) * wrong):
        raise Blocked(message, by)
    raise Unjudgeable(message)


def require_gradients(view: View) -> None:
    """Raise NotJudged if the reference's gradients are all zero: two runs that train nothing are equal."""
    trainable = any(t.requires_grad for t in view.reference_inventory.tensors)
    # "not <=" keeps NaN, which is a gradient.
    if trainable and not any(not size <= view.reference.noise for size in view.reference.gradients.values()):
        raise NotJudged(
            "the reference's gradients are all zero, so there is nothing to compare; give Subject(loss=...) a loss "
            "that depends on the parameters, and Subject(batch=...) rows that are not zero"
        )


def describe_own_changes(view: View) -> str:
    """Say that what the steps change by themselves is not compared."""
    return (
        f"train_step itself changes {first_of(view.reference.changed_by_steps)}, which the reference does not do, so "
        "these changes are not compared; to have them compared, make them in a hook of the optimizer's step, which "
        "runs there, too; a hook of an optimizer that Subject(optimizer=...) builds cannot use a mesh"
    )


def require_whole_comparison(view: View) -> None:
    """Raise PartlyJudged if the model had to be compared in eval(), or with what no check of this run compares."""
    if view.reference.changed_by_steps and "buffers_follow_training" not in view.selection:
        raise PartlyJudged(describe_own_changes(view))
    if view.reference.evaluated:
        raise PartlyJudged(f"ranks and reference are compared in eval(), because {view.reference.evaluated}")


def require_same_forward(view: View, runs: Sequence[RankTraining]) -> None:
    """Raise Blocked if loss_parity reports the first loss: a wrong forward makes all gradients and updates wrong."""
    expected, actual = view.reference.losses or (), global_losses(view.evidence)
    if "loss_parity" not in view.selection or not expected or not loss_limits(view).exceeded(actual, expected, 0):
        return
    message = f"the first loss is {actual[0]:.6g}, but should be {expected[0]:.6g}"
    if not view.reference.unstable:  # loss_parity says so
        require_no_other_cause(view, message, first_forward=True)
    raise Blocked(message, ["loss_parity"])


def format_losses(losses: Sequence[float]) -> str:
    return ", ".join(f"{loss:.6f}" for loss in losses)


def add_precision(view: View, explanation: Explanation) -> Explanation:
    """Add to a cause that the loader computes in another dtype than the reference, and why noise is unknown, if so."""
    problem = next((run.noise.problem for run in view.evidence.training or () if run.noise is not None), "")
    own = {t.dtype for t in view.reference_inventory.tensors if t.kind == "parameter" and t.dtype in LOSS_TOLERANCE}
    sharper = more = ""
    if own and (computed := [dtype for dtype in view.evidence.computes_in if dtype not in own]):
        policy = view.evidence.inventory[0].computes_in
        how = "the mixed-precision policy" if set(computed) <= set(policy) else "torch.autocast"
        sharper = f"; without {how}, this check sees smaller differences, and names their cause better"
        more = (
            f"; the loader computes in {' and '.join(computed)} ({how.removeprefix('the ')}), the reference in "
            f"{' and '.join(sorted(own))}"
        )
    if problem:
        more += f"; the noise of the reference could not be measured ({problem})"
    return extend(explanation, more, sharper)


def explain_plain_reference(view: View) -> Explanation:
    """Return the cause and remedy if the reference lacks an optimizer's hook, or what train_step unfreezes; else {}."""
    left_out = view.reference.hooks_left_out
    if not left_out:
        return _explain_unfrozen(view)
    return {
        "cause": f"the optimizer has a step hook that the reference does not run ({first_of(left_out)})",
        "remedy": "let the hook use the model, its parameters, the optimizer and meshes only, without methods of "
        "FSDP2; or declare optimizer=lambda parameters: ... and register a hook there that runs on both",
    }


def _explain_unfrozen(view: View) -> Explanation:
    theirs = view.reference.after.by_name if view.reference.after is not None else {}
    after = [run.after for run in (view.evidence.training or ())[:1] if run.after is not None]
    ours = [tensor for own in after for tensor in own.tensors if tensor.name in theirs]
    changed = [tensor.name for tensor in ours if tensor.requires_grad != theirs[tensor.name].requires_grad]
    if not changed:
        return {}
    return {
        "cause": f"train_step freezes or unfreezes {first_of(changed)}, which the reference's plain training does not",
        "remedy": "declare optimizer=lambda model: ... and do it there, in a step hook, which runs on both",
    }


def explain_uneven_backwards(view: View, last: int = 0) -> Explanation:
    """Return the cause and remedy if ranks ran different numbers of backwards up to step ``last``, else {}.

    A step whose result is right may do so: a sum of micro-batches need not have the same number of parts everywhere.
    """
    runs = view.evidence.training or ()
    for step, numbers in enumerate(zip(*(run.backwards for run in runs), strict=False)):
        held = ranks_by(enumerate(numbers))
        if step <= last and len(held) > 1:
            each = " and ".join(f"{counted(number, 'backward')} on {name_ranks(held[number])}" for number in held)
            return {
                "cause": f"Subject(train_step=...) ran {each} in step {step}, but should run the same number on every "
                "rank, or weight each micro-batch by its share of the whole batch",
                "remedy": "give every rank the same number of micro-batches, a short rank empty ones whose loss is 0 "
                "times the output; or divide by counts over all micro-batches and ranks",
            }
    return {}


def global_losses(evidence: Evidence) -> tuple[float, ...]:
    """Return the loss of the global batch at each step, as Subject(loss_over_ranks=...) combines those of the ranks."""
    runs = evidence.training or ()
    if evidence.subject.loss_over_ranks != "sum":
        return mean_losses(runs)
    places = share_places(evidence)
    shares = grouped(((run.data_parallel[0], places[rank]), run.losses) for rank, run in enumerate(runs))
    means = [[_mean(step) for step in zip(*losses, strict=True)] for losses in shares.values()]
    return tuple(_mean(step) * len(step) for step in zip(*means, strict=True))


def mean_losses(runs: Sequence[RankTraining]) -> tuple[float, ...]:
    """Return the loss of the global batch at each step: the mean over the data-parallel slices.

    Ranks that see the same slice count once.
    """
    return tuple(map(_mean, zip(*slice_losses(runs).values(), strict=True)))


def slice_losses(runs: Sequence[RankTraining]) -> dict[int, list[float]]:
    """Return the losses of each data-parallel slice of the batch, averaged over the ranks that see it."""
    slices = grouped((run.data_parallel[0], run.losses) for run in runs)
    return {index: [_mean(step) for step in zip(*losses, strict=True)] for index, losses in slices.items()}


def _mean(losses: Sequence[float]) -> float:
    # fsum raises on infinities of both signs.
    add = math.fsum if all(map(math.isfinite, losses)) else sum
    return add(losses) / len(losses)
