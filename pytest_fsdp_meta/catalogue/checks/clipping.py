"""Gradient clipping: its norm and the gradients that it leaves equal those of one device."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from pytest_fsdp_meta.catalogue.checks.gradients import excused_gradients, reduced_by_the_optimizer
from pytest_fsdp_meta.catalogue.diagnosis.limits import gradient_limits, norm_limit, relative_errors
from pytest_fsdp_meta.catalogue.diagnosis.multiples import multiple
from pytest_fsdp_meta.catalogue.diagnosis.parity import (
    EXPLAINING_CHECKS,
    comparable_training,
    require_gradients,
    require_no_other_cause,
    require_noise,
    require_same_forward,
)
from pytest_fsdp_meta.catalogue.findings import Explanation, Finding
from pytest_fsdp_meta.catalogue.registry import check
from pytest_fsdp_meta.catalogue.view import NotDeclared, NotJudged, View, ranks_by
from pytest_fsdp_meta.evidence import Comparison
from pytest_fsdp_meta.evidence.tolerances import GRADIENT_TOLERANCE
from pytest_fsdp_meta.text import first_of

EPSILON = 2e-6
"""torch's clip_grad_norm_ adds 1e-6 to the norm that it divides by, others add nothing."""
LEAST = 1e-11
"""A smaller difference of norms is rounding, if all gradients are zero but for rounding."""


@check(
    promise="the total gradient norm that clip_grad_norm_ computes equals the reference's on every rank",
    family="training",
    needs=["inventory", "reference", "training"],
    uses=["values", "verifier"],
    after=[*EXPLAINING_CHECKS, "grad_parity"],
    why="A norm over a rank's own shards is too small, so gradients are clipped too late and differently on each rank.",
    cause="the norm is taken over the rank's own shards and not reduced, or replicated parameters count more than once",
    remedy="use torch.nn.utils.clip_grad_norm_ on the sharded parameters, or sum the squares over the ranks that shard",
    references=["pytorch/pytorch#170862", "pytorch/torchtune#2420", "pytorch/pytorch#180346"],
    since="0.2",
    tolerance=GRADIENT_TOLERANCE,
)
def grad_norm_parity(view: View) -> Iterable[Finding]:
    runs, expected = comparable_training(view), view.reference.norm
    if view.on_some_ranks and "clip_grad_norm" not in view.evidence.subject.declared:
        raise NotJudged(
            f"torch cannot compute the norm of these gradients ({first_of(sorted(view.on_some_ranks))} on some ranks "
            "only); declare Subject(clip_grad_norm=<callable>) with the function that your training uses"
        )
    problem = next((run.norm_problem for run in runs if run.norm_problem), "")
    if problem:
        raise NotJudged(
            f"torch cannot compute the norm of these gradients ({problem}); declare "
            "Subject(clip_grad_norm=<callable>) with the function that your training uses"
        )
    if expected is None or any(run.norm is None for run in runs):
        raise NotJudged("nothing is trainable, so there is no gradient to take a norm of")
    limit = norm_limit(view, expected) + LEAST
    off = [(rank, run.norm) for rank, run in enumerate(runs) if not _norm_equal(run.norm, expected, limit)]
    if off:
        require_same_forward(view, runs)
        if later := reduced_by_the_optimizer(view, runs):
            raise NotJudged(f"the optimizer itself reduces gradients ({first_of(later)}), so their norm is not known")
        require_no_other_cause(view, f"the gradient norm is {off[0][1]:.6g}, but should be {expected:.6g}")
    else:
        require_gradients(view)
        differences = (abs((run.norm or 0.0) - expected) / expected for run in runs if expected)
        require_noise(view, GRADIENT_TOLERANCE, differences)
    for norm, ranks in ranks_by((rank, f"{norm:.6g}") for rank, norm in off).items():
        explanation = _WRONG_NORM[float(norm) > expected] if len(ranks) == len(runs) > 1 else {}
        yield Finding(
            None, ranks, f"gradient norm {norm}", f"{expected:.6g} within {limit / (expected or 1):.2g}", **explanation
        )


_WRONG_NORM: dict[bool, Explanation] = {
    False: {
        "cause": "all ranks agree on a norm that is too small: gradients are left out of the sum (vectors, unsharded "
        "parameters, another mesh), or the norm of one rank's shards is used on all ranks",
        "remedy": "sum the squares of all gradients that the optimizer uses, over the ranks that shard them",
    },
    True: {
        "cause": "all ranks agree on a norm that is too large: replicated parameters count once per rank, or norms are "
        "summed instead of their squares",
        "remedy": "count replicated gradients once, and sum squares over the ranks that shard",
    },
}
"""Explanation for a norm that is wrong alike on all ranks, by whether it is too large."""


def _norm_equal(actual: float | None, expected: float, limit: float) -> bool:
    return actual is not None and abs(actual - expected) <= limit


@check(
    promise="clipping to half of the norm leaves the same gradients as the reference's, on every rank",
    family="training",
    needs=["inventory", "reference", "training"],
    uses=["values", "verifier"],
    fields=["clip_grad_norm"],
    after=[*EXPLAINING_CHECKS, "grad_parity", "grad_norm_parity"],
    why="Clipping that leaves out some parameters, or replicas on some ranks, lets the model diverge slowly while its "
    "norm looks right.",
    cause="the function computes the right norm, and does not scale this gradient by it",
    remedy="scale the gradient of every parameter on every rank, those of replicated parameters as well",
    references=["NVIDIA-NeMo/Automodel#3477", "pytorch/torchtune#2420"],
    since="0.3",
    tolerance=GRADIENT_TOLERANCE,
)
def grad_clip_parity(view: View) -> Iterable[Finding]:
    runs = comparable_training(view)
    if "clip_grad_norm" not in view.evidence.subject.declared:
        raise NotDeclared("clip_grad_norm")
    clipped = [run.clipped for run in runs if run.clipped is not None]
    if len(clipped) < len(runs):
        require_gradients(view)
        raise NotJudged("nothing was clipped: nothing is trainable, or clipping was not recorded")
    limits, norm = gradient_limits(view), view.reference.norm or 0.0
    limits = replace(limits, relative=limits.relative + EPSILON / norm)
    excused = excused_gradients(view, runs)
    names = [name for name in view.names("parameter", only=view.reference.gradients) if name not in excused]
    found = []
    for name, cases in view.comparisons(tuple(one.gradients for one in clipped), names).items():
        wrong = [(rank, c) for rank, c in cases if limits.exceeded(rank, c)]
        if not wrong:
            continue
        allowed = limits.relative_to(wrong)
        actual = ((rank, _describe_clipped(c, allowed)) for rank, c in wrong)
        expected = f"half as large as before, within {limits.tolerance(wrong):.2g}"
        found += [Finding(name, ranks, text, expected) for text, ranks in ranks_by(actual).items()]
    if found:
        require_same_forward(view, runs)
        require_no_other_cause(view, f"the clipped gradients differ ({found[0].tensor}: {found[0].actual})")
        yield from found
    else:
        require_noise(view, GRADIENT_TOLERANCE, relative_errors(c for one in clipped for c in one.gradients))


def _describe_clipped(comparison: Comparison, allowed: float) -> str:
    assert comparison.measure is not None
    factor = multiple(comparison.measure, allowed)
    if factor == "2":
        return "gradient is as large as before clipping"
    return f"clipped gradient is {factor} times the reference's" if factor else "clipped gradient differs"
