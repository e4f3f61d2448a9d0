"""Check that replicas are still equal after training steps, and that buffers follow the reference's."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from pytest_fsdp_meta.checks.training.facts import FIRST_BUFFERS, LAST_BUFFERS
from pytest_fsdp_meta.checks.training.judge.optimization import count_steps, inventories_after_steps
from pytest_fsdp_meta.checks.values.facts import UPDATE_TOLERANCE
from pytest_fsdp_meta.checks.values.judge import model_coordinates, replica_sets
from pytest_fsdp_meta.evidence import RankTraining
from pytest_fsdp_meta.judging.causes import Cases, by_label
from pytest_fsdp_meta.judging.findings import Explanation, Finding, either
from pytest_fsdp_meta.judging.gates import (
    EXPLAINING_CHECKS,
    comparable_training,
    describe_difference,
    describe_own_changes,
    explain_plain_reference,
    require_given,
    require_no_other_cause,
    require_same_forward,
)
from pytest_fsdp_meta.judging.limits import limits_of, require_noise
from pytest_fsdp_meta.judging.multiples import divides, multiple, number_of
from pytest_fsdp_meta.judging.registry import training_check
from pytest_fsdp_meta.judging.view import Blocked, Differs, NotJudged, PartlyJudged, View, majority, ranks_by
from pytest_fsdp_meta.text import counted, first_of, name_ranks

WRONG_STEPS = ("grad_parity", "optimizer_owns_parameters", "every_trainable_moves")
"""Checks whose failure may make the ranks step differently."""
SAME_FACTOR = 0.02
"""Relative: changes of a buffer by factors that differ by less have the same cause."""


@training_check(
    promise="replicated parameters and persistent buffers are bit-identical on all their ranks after training steps",
    needs=["inventory", "training"],
    uses=["reference", "values", "verifier", "training_mode"],
    after=[*EXPLAINING_CHECKS, *WRONG_STEPS],
    why="Replicas that drift apart compute different outputs for the same rows, and full_tensor() shows only one of "
    "them.",
    cause="the replicas are stepped with different gradients, or by code that depends on the rank",
    remedy="reduce gradients over every mesh dimension that replicates, and keep optimizer settings and hooks "
    "independent of the rank",
    references=["NVIDIA-NeMo/RL#3716", "NVIDIA/Megatron-LM#1446"],
)
def replicas_stay_equal(view: View) -> Iterable[Finding]:
    after, judged, unlike = inventories_after_steps(view), False, set[str]()
    changed, reference = _changed_buffers(view), view.evidence.reference
    trained = reference is not None and reference.after is not None
    # Within the noise of the reference's, each rank may round them otherwise.
    apart: Collection[str] = _moved_otherwise(view, changed, LAST_BUFFERS) if trained else changed
    for name, kind, held in _replicated(view, changed):
        odd: dict[int, int] = {}  # a rank outside of the majority -> the first rank of the majority
        for ranks in held:
            before = {view.evidence.inventory[rank].by_name[name].digest for rank in ranks}
            # Ranks that differ before the steps hold no replica, or replicas_equal reports them.
            if len(ranks) > 1 and len(before) == 1:
                judged = True
                digests = [(rank, after[rank].by_name[name].digest) for rank in ranks if name in after[rank].by_name]
                most = majority(digests)
                first = next(rank for rank, digest in digests if digest == most)
                odd |= {rank: first for rank, digest in digests if digest != most}
        unlike |= {name} if odd else set()
        if odd and (kind == "parameter" or name in apart):
            rank, usual = min(odd.items())
            actual = f"differs from its replicas after {count_steps(view)}"
            detail = f"rank {rank} differs from rank {usual}"
            if kind == "buffer" and (wrong := [id for id in WRONG_STEPS if id in view.failed]):
                raise Blocked(f"{name} {actual}: {detail}", wrong)
            explanation = _OWN_ROWS if kind == "buffer" else {}
            if by_step := tuple(r for r, run in enumerate(view.evidence.training or ()) if name in run.buffers.by_step):
                explanation = {
                    "cause": f"train_step itself changes it on {name_ranks(by_step)}, and not alike on all ranks",
                    "remedy": "change it on every rank, by values that all ranks share",
                }
            yield Finding(name, tuple(sorted(odd)), actual, "bit-identical", detail, **explanation)
    if own := _apart_in_train(view, unlike):
        raise Differs(
            f"ranks differ in {first_of(own)} after a step in train(): each probably keeps statistics of its own rows, "
            "and a checkpoint those of one rank; SyncBatchNorm, or DDP with broadcast_buffers, makes them equal"
        )
    if not judged:
        raise NotJudged("no parameter is replicated, and training changes no replicated buffer")


def _replicated(view: View, changed: Collection[str]) -> Iterator[tuple[str, str, list[tuple[int, ...]]]]:
    """Yield each parameter and each of these buffers with its kind and the ranks that hold the same part of it."""
    for name, tensors in view.tensors("parameter"):
        held = ranks_by((rank, tensor.held) for rank, tensor in tensors if tensor.digest is not None and tensor.numel)
        yield name, "parameter", list(held.values())
    for name, sets in _replicated_buffers(view, changed):
        yield name, "buffer", sets


def _replicated_buffers(view: View, names: Collection[str]) -> Iterator[tuple[str, list[tuple[int, ...]]]]:
    places = model_coordinates(view)
    for name, tensors in view.tensors("buffer", only=names):
        yield name, [tuple(rank for rank, _ in ranks) for ranks in replica_sets(view, tensors, places)]


def _apart_in_train(view: View, unlike: Collection[str]) -> list[str]:
    """Return the other persistent buffers, such as statistics, that a step in the author's modes changes unlike.

    Those that are ``unlike`` after the compared steps are known: rounding may be all in which ranks differ.
    """
    loaded, sent = view.evidence.inventory, [run.buffers.broadcast for run in view.evidence.training or ()]
    after = [step.after.by_name for step in view.evidence.training_mode or () if step.after is not None]
    if len(after) < len(loaded):
        return []
    persistent = {t.name for rank in loaded for t in rank.tensors if t.kind == "buffer" and t.persistent}
    found = []
    for name, held in _replicated_buffers(view, persistent.difference(unlike, *sent)):
        for ranks in held:
            before = {loaded[rank].by_name[name].digest for rank in ranks}
            digests = {after[rank][name].digest for rank in ranks if name in after[rank]}  # a step may replace a module
            if len(before) == 1 and len(digests) > 1 and name not in found:
                found.append(name)
    return found


_OWN_ROWS: Explanation = {
    "cause": "each rank updates it from its own rows, and a checkpoint keeps the values of one rank",
    "remedy": "reduce it over the data-parallel ranks (SyncBatchNorm for running statistics); or register it with "
    "persistent=False if it is each rank's own",
}


_IN_EVALUATION: Explanation = {
    "cause": "train_step also evaluates the model, and the forward changes it in eval() as well as in train()",
    "remedy": "change it only if self.training",
}
_OTHER_ROWS = either(
    "",
    "they are computed at another time of the step, or once more in a forward that activation checkpointing repeats",
    "they are computed from the rows of some ranks only: one rank's are sent to all, or each rank counts its own",
    "compute them from the whole batch: reduce over the data-parallel ranks and divide as the reference does",
)


@training_check(
    promise="buffers that training changes (statistics, counters, router biases) change as in the reference",
    uses=["values", "verifier"],
    after=[
        *EXPLAINING_CHECKS,
        *("forward_sees_current_weights", "grad_parity", "optimizer_owns_parameters"),
        *("frozen_weights_stay_frozen", "tied_weights_stay_tied", "every_trainable_moves", "replicas_stay_equal"),
    ],
    why="Wrong statistics change what the model computes once it is evaluated, and a router's bias which experts it "
    "picks; no gradient shows either.",
    cause=_OTHER_ROWS["cause"],
    remedy=_OTHER_ROWS["remedy"],
    references=["pytorch/torchtitan#1593", "leggedrobotics/rsl_rl#226", "NVIDIA/Megatron-LM#7081"],
    tolerance=UPDATE_TOLERANCE,
)
def buffers_follow_training(view: View) -> Iterable[Finding]:
    runs = comparable_training(view)
    changed = _changed_buffers(view)
    own = view.reference.changed_by_steps
    if not changed and not own:
        norms = view.reference.batch_norms
        kept = f"; {first_of(norms)} stayed in eval() where results are compared" if norms else ""
        raise NotJudged(f"training changes no persistent buffer, except those that DDP broadcasts from one rank{kept}")
    names = view.names("buffer", only=changed.difference(own))
    wrong, when = _moved_otherwise(view, names, FIRST_BUFFERS), "after the first step"
    if not wrong:
        wrong, when = (
            _moved_otherwise(view, names, LAST_BUFFERS),
            f"after {counted(len(view.reference.losses or ()), 'step')}",
        )
        _leave_to_updates(view, runs, wrong)
    if wrong:
        found = list(_findings(view, runs, wrong, when))
        message = describe_difference("buffers differ", found)
        require_same_forward(view, runs)
        require_no_other_cause(view, message)
        if "train_step" in view.evidence.subject.declared:
            _require_one_forward(runs, message)
        require_given(view, message)
        yield from found
    else:
        # Integers are equal here, and have no rounding that the noise would have to explain.
        compared = (c for run in runs for c in run.buffers.last if c.name in names)
        require_noise(view, UPDATE_TOLERANCE, (c.relative for c in compared if c.measure and c.measure.grain))
    if own:
        raise PartlyJudged(describe_own_changes(view))


def _leave_to_updates(view: View, runs: Sequence[RankTraining], wrong: Mapping[str, Cases]) -> None:
    """Raise Blocked if the parameters differ after the last step, and with them what later forwards computed."""
    if not wrong:
        return
    limits = limits_of(view, "updates")
    off = [c.name for rank, run in enumerate(runs) for c in run.parameters if limits.exceeded(rank, c)]
    if off:
        raise Blocked(
            f"{next(iter(wrong))} is right after the first step and differs later, as do parameters such as {off[0]}",
            ["update_parity"],
        )


def _require_one_forward(runs: Sequence[RankTraining], message: str) -> None:
    """Raise Differs if the author's steps run another number of forwards than the reference's."""
    for rank, run in enumerate(runs):
        forwards, steps = run.buffers.forwards, len(run.losses)
        if forwards != steps:
            raise Differs(
                f"{message}; train_step runs {counted(forwards, 'forward')} of the model in "
                f"{counted(steps, 'step')} on rank {rank}, and the reference {steps}; statistics depend on that"
            )


def _findings(view: View, runs: Sequence[RankTraining], wrong: Mapping[str, Cases], when: str) -> Iterator[Finding]:
    for name, cases in wrong.items():
        for factor, alike in by_label(cases, lambda measure: multiple(measure, SAME_FACTOR)).items():
            ranks = tuple(rank for rank, _ in alike)
            change = {"": "another change than the reference's", "0": "no change"}.get(
                factor, f"{factor} times the reference's change"
            )
            evaluated = any(name in run.buffers.by_evaluation for run in runs)
            explanation = _IN_EVALUATION if evaluated else _explain_factor(view, runs, name, factor)
            explanation = explanation or explain_plain_reference(view) or _OTHER_ROWS
            yield Finding(name, ranks, f"{change} {when}", "the same change", "", **explanation)


def _explain_factor(view: View, runs: Sequence[RankTraining], name: str, factor: str) -> Explanation:
    number, meaning = number_of(view, runs, factor, name)
    if meaning and divides(factor):
        return {
            "cause": f"each rank counts its own rows only: {number} is {meaning}",
            "remedy": "reduce over the data-parallel ranks; or register it with persistent=False if it is each rank's "
            "own, because a checkpoint keeps one rank's only",
        }
    causes, remedies = [], []
    if meaning:
        causes.append(f"it is summed over the ranks where the reference has a mean: {number} is {meaning}")
        remedies.append(f"divide by {number} after the reduction")
    if factor == "2":
        causes.append("it is updated twice in a step: activation checkpointing runs the forward again in backward")
        remedies.append("update it outside of the checkpointed forward, for example in a hook of the optimizer's step")
    return {"cause": "; or ".join(causes), "remedy": "; or ".join(remedies)} if causes else {}


def _changed_buffers(view: View) -> set[str]:
    """Return the persistent buffers that the training changed on any rank or in the reference.

    Those that DDP overwrites with one rank's before each forward are left out: between forwards they may be anything.
    """
    runs, reference = view.evidence.training or (), view.evidence.reference
    pairs = [(rank, run.after) for rank, run in zip(view.evidence.inventory, runs, strict=True)]
    if reference is not None:
        pairs.append((reference.inventory, reference.after))
    changed = {
        tensor.name
        for before, after in pairs
        for tensor in (after.tensors if after is not None else ())
        if tensor.kind == "buffer" and tensor.persistent and tensor.name in before.by_name
        if tensor.digest != before.by_name[tensor.name].digest
    }
    return changed.difference(*(run.buffers.broadcast for run in runs))


def _moved_otherwise(view: View, names: Collection[str], when: str) -> dict[str, Cases]:
    """Return the ranks whose buffers have moved differently from the reference's.

    ``when`` is FIRST_BUFFERS or LAST_BUFFERS.
    """
    found: dict[str, Cases] = {}
    runs = view.evidence.training or ()
    limits = replace(limits_of(view, when), roundings=2 * len(view.reference.losses or ()))
    exact = replace(limits, relative=0.0)
    for name, cases in view.comparisons(tuple(run.compared[when] for run in runs), names).items():
        apart = [
            (rank, c)
            for rank, c in cases
            if c.measure is not None and (limits if c.measure.grain else exact).too_far(rank, c)
        ]
        if apart:
            found[name] = apart
    return found


def explain_buffers(view: View, runs: Sequence[RankTraining]) -> Explanation:
    """Name the buffers, persistent or not, on which the loss depends and that the ranks change otherwise."""
    names = set(view.reference.steered_by_forward).difference(*(run.buffers.broadcast for run in runs))
    off = [*_moved_otherwise(view, names, FIRST_BUFFERS)]
    if not off:
        return {}
    return {
        "cause": "the first forward and its gradients are correct, and then the ranks change "
        f"{off[0]} otherwise than the reference does, as by their own rows alone; the loss depends on it",
        "remedy": "compute what a forward keeps from the whole batch: reduce it over the data-parallel ranks",
    }
