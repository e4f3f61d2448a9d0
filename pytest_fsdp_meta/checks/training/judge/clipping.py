"""Gradient clipping: its norm and the gradients that it leaves equal those of one device.

The reference clips with the author's function as well, if it runs in a world of one rank. Ranks that clip as torch's
function does are right in any case: on one device a function may miss what it counts ranks for.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from pytest_fsdp_meta.checks.training.judge.gradients import excused_gradients, reduced_by_the_optimizer
from pytest_fsdp_meta.checks.values.facts import GRADIENT_TOLERANCE
from pytest_fsdp_meta.evidence import Clipping, Comparison, RankTraining
from pytest_fsdp_meta.judging.causes import Cases
from pytest_fsdp_meta.judging.findings import Explanation, Finding, extend
from pytest_fsdp_meta.judging.gates import (
    EXPLAINING_CHECKS,
    comparable_training,
    require_gradients,
    require_no_other_cause,
    require_same_forward,
    unless_explained,
)
from pytest_fsdp_meta.judging.limits import Limits, limits_of, norm_limit, require_noise
from pytest_fsdp_meta.judging.multiples import multiple
from pytest_fsdp_meta.judging.registry import training_check
from pytest_fsdp_meta.judging.view import Differs, NotDeclared, NotJudged, View, ranks_by
from pytest_fsdp_meta.text import first_of

EPSILON = 2e-6
"""torch's clip_grad_norm_ adds 1e-6 to the norm that it divides by, others add nothing."""
LEAST = 1e-11
"""A smaller difference of norms is rounding, if all gradients are zero but for rounding."""
SCALING = 1e-3
"""Relative; a factor that clipping above the norm applies is displayed as whole within this."""
HALF = "half as large as before"
NORM: Explanation = {
    "cause": "the norm is that of the rank's own shards and not reduced, or replicas count more than once",
    "remedy": "use torch.nn.utils.clip_grad_norm_ on all parameters, or sum the squares over the ranks that shard",
}
_ALIKE = (
    "all ranks leave the same gradients out of the norm (vectors, another mesh), or have that of one rank's shards",
    "all ranks count replicas more than once, or add up norms instead of their squares",
)
"""The cause of a norm that is wrong alike on all ranks, by whether it is too large."""
CLIP: Explanation = {
    "cause": "the function computes the right norm, and does not scale this gradient by it",
    "remedy": "scale the gradient of every parameter on every rank, those of replicated parameters as well",
}


@training_check(
    promise="the total gradient norm that clip_grad_norm_ computes equals the reference's on every rank",
    uses=["values", "verifier"],
    after=[*EXPLAINING_CHECKS, "grad_parity"],
    why="A norm over a rank's own shards is too small, so gradients are clipped too late and differently on each rank.",
    cause=NORM["cause"],
    remedy=NORM["remedy"],
    references=["pytorch/pytorch#170862", "pytorch/torchtune#2420", "pytorch/pytorch#180346"],
    tolerance=GRADIENT_TOLERANCE,
)
def grad_norm_parity(view: View) -> Iterable[Finding]:
    runs = comparable_training(view)
    problem = next((run.norm_problem for run in runs if run.norm_problem), "")
    if view.on_some_ranks and "clip_grad_norm" not in view.evidence.subject.declared:
        problem = f"{first_of(sorted(view.on_some_ranks))} on some ranks only"
    if problem:
        raise NotJudged(
            f"torch cannot compute the norm of these gradients ({problem}); declare Subject(clip_grad_norm=<callable>) "
            "with the function that your training uses, if there is one"
        )
    if view.reference.norm is None or any(run.norm is None for run in runs):
        raise NotJudged("nothing is trainable, so there is no gradient to take a norm of")
    expected, limit, off = _compare_norms(view, runs, view.reference.norm)
    if off:
        require_same_forward(view, runs)
        if later := reduced_by_the_optimizer(view, runs):
            message = f"the gradient norm is {off[0][1]:.6g}, but should be {expected:.6g}"
            raise Differs(f"{message}; the optimizer itself reduces the gradients of {first_of(later)} after that")
        require_no_other_cause(view, f"the gradient norm is {off[0][1]:.6g}, but should be {expected:.6g}")
    else:
        require_gradients(view)
        differences = (abs((run.norm or 0.0) - expected) / expected for run in runs if expected)
        require_noise(view, GRADIENT_TOLERANCE, differences)
    should_be = f"{expected:.6g} within {limit:.2g}"
    if view.reference.own_clipping is not None:
        should_be += ", as the same function returns on one device"
    for norm, ranks in ranks_by((rank, f"{norm:.6g}") for rank, norm in off).items():
        alike = "" if len(ranks) < len(runs) or len(runs) == 1 else _ALIKE[float(norm) > expected]
        explanation: Explanation = {**NORM, "cause": alike or NORM["cause"]}
        yield Finding(None, ranks, f"gradient norm {norm}", should_be, **_with_problem(view, explanation))


def _compare_norms(
    view: View, runs: Sequence[RankTraining], by_torch: float
) -> tuple[float, float, list[tuple[int, float]]]:
    """Return (expected norm, largest difference, ranks with another norm): those of the norm that the ranks have."""
    known, norms = [(by_torch, False)], [(rank, run.norm) for rank, run in enumerate(runs) if run.norm is not None]
    if own := view.reference.own_clipping:
        known.append((own.norm, True))
    for expected, by_author in known:
        limit = norm_limit(view, expected, by_author) + LEAST
        off = [(rank, norm) for rank, norm in norms if not abs(norm - expected) <= limit]
        if not off:
            break
    return expected, limit, off


def _with_problem(view: View, explanation: Explanation) -> Explanation:
    """Add to the causes and the remedy why the reference could not use the author's function, if so."""
    if not (problem := view.reference.clip_problem):
        return explanation
    more = f"; the reference clips with torch's function, because yours {problem}"
    remedy = "; if it clips by another norm or by groups, let it run on one device too"
    return extend(explanation, more, remedy)


@training_check(
    promise="on every rank, clipping to half of the norm gives the same gradients as on one device, and "
    "clipping to a bound above the norm changes none",
    uses=["values", "verifier"],
    fields=["clip_grad_norm"],
    after=[*EXPLAINING_CHECKS, "grad_parity", "grad_norm_parity"],
    why="Clipping that leaves out some parameters, or replicas on some ranks, lets the model diverge slowly while its "
    "norm looks right.",
    cause=CLIP["cause"],
    remedy=CLIP["remedy"],
    references=["NVIDIA-NeMo/Automodel#3477", "pytorch/torchtune#2420"],
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
    names = view.names("parameter", only=view.reference.gradients)
    yield from _changed_above_the_norm(view, clipped, names)
    excused = excused_gradients(view, runs)
    found, compared = _wrongly_clipped(view, clipped, [name for name in names if name not in excused])
    if found:
        yield from unless_explained(view, runs, found, "the clipped gradients differ", compared, GRADIENT_TOLERANCE)
    else:  # gradients that are only rounding are clipped as others are
        require_noise(view, GRADIENT_TOLERANCE, (c.relative for c in compared))


def _changed_above_the_norm(view: View, clipped: Sequence[Clipping], names: Sequence[str]) -> Iterator[Finding]:
    """Report gradients that a bound above the norm changes, whatever the reference and the ranks agree on."""
    for name, cases in view.comparisons(tuple(one.changed for one in clipped), names).items():
        factors = ((rank, multiple(c.measure, SCALING)) for rank, c in cases if c.measure is not None)
        for factor, ranks in ranks_by(factors).items():
            size = f"is {factor} times as large" if factor else "differs"
            explanation = _CHANGED["1/" not in factor and float(factor or 0) > 1]
            actual = f"gradient {size} after clipping to a bound above the norm"
            yield Finding(name, ranks, actual, "unchanged", **explanation)


_CHANGED: dict[bool, Explanation] = {
    True: {
        "cause": "the factor is not limited to 1, so gradients with a norm below the bound are scaled up",
        "remedy": "scale by min(1, max_norm / (norm + 1e-6)), as torch.nn.utils.clip_grad_norm_ does",
    },
    False: {
        "cause": "the function changes gradients whose norm is below the bound",
        "remedy": "leave the gradients as they are unless their norm exceeds the bound",
    },
}
"""Explanation for gradients that a bound above the norm changes, by whether they become larger."""


def _wrongly_clipped(
    view: View, clipped: Sequence[Clipping], names: Sequence[str]
) -> tuple[list[Finding], list[Comparison]]:
    """Return the gradients that are neither half of the reference's nor what the same function leaves there.

    Return the comparisons as well that say so.
    """
    reference, limits = view.reference, limits_of(view, "gradients")
    halved = replace(limits, relative=limits.relative + EPSILON / (reference.norm or 0.0))
    gradients = view.comparisons(tuple(one.gradients for one in clipped), names)
    found = _differing(view, gradients, halved, HALF)
    own = reference.own_clipping
    if not found or own is None or own.bound is None:
        return found, [c for cases in gradients.values() for _, c in cases]
    of_norm = (EPSILON + norm_limit(view, own.norm, own=True)) / own.norm
    gradients = view.comparisons(tuple(one.own for one in clipped), names)
    limits = replace(limits, relative=limits.relative + of_norm)
    found = _differing(view, gradients, limits, "as the same function leaves it on one device")
    return found, [c for cases in gradients.values() for _, c in cases]


def _differing(view: View, gradients: Mapping[str, Cases], limits: Limits, should_be: str) -> list[Finding]:
    found = []
    for name, cases in gradients.items():
        wrong = [(rank, c) for rank, c in cases if limits.exceeded(rank, c)]
        if not wrong:
            continue
        allowed = limits.relative_to(wrong)
        actual = ((rank, _describe_clipped(c, allowed, should_be)) for rank, c in wrong)
        expected, explanation = f"{should_be}, within {limits.tolerance(wrong):.2g}", _with_problem(view, CLIP)
        found += [Finding(name, ranks, text, expected, **explanation) for text, ranks in ranks_by(actual).items()]
    return found


def _describe_clipped(comparison: Comparison, allowed: float, should_be: str) -> str:
    assert comparison.measure is not None
    factor = multiple(comparison.measure, allowed)
    if factor == "2" and should_be == HALF:
        return "gradient is as large as before clipping"
    return f"clipped gradient is {factor} times the reference's" if factor else "clipped gradient differs"
