"""Measure how much a small change of a model's parameters changes its gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from pytest_fsdp_meta.evidence import Measure
from pytest_fsdp_meta.worlds import SEED

NUDGE = 1e-4
"""Change relative to each element: small enough for a proportional response, and far above rounding in float32."""


def sensitivity(parameters: Iterable[Tensor], measure_gradients: Callable[[], Iterable[Measure | None]]) -> float:
    """Return how many times larger the relative change of the gradients is than that of the parameters.

    The parameters stay changed. ``measure_gradients`` compares the gradients at the changed parameters with those
    before. Where a layer normalises values near zero the result can be in the hundreds; rounding errors in such
    parameters alone change the gradients visibly.
    """
    nudge = NUDGE
    torch.manual_seed(SEED)
    with torch.no_grad():
        for parameter in parameters:
            if parameter.is_floating_point():
                # A change below the resolution of the dtype would be rounded away.
                nudge = max(nudge, 4 * torch.finfo(parameter.dtype).eps)
                noise = torch.randn(parameter.shape, dtype=torch.float32, device=parameter.device)
                parameter.copy_(parameter.float() * (1 + nudge * noise))
    measures = [measure for measure in measure_gradients() if measure is not None and math.isfinite(measure.apart)]
    total = sum(measure.elements for measure in measures)
    typical = math.sqrt(sum(measure.truth**2 for measure in measures) / total) if total else 0.0
    scales = [(measure.apart, measure.truth + typical * math.sqrt(measure.elements)) for measure in measures]
    return max([distance / scale / nudge for distance, scale in scales if scale], default=1.0)
