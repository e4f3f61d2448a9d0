"""How much a model makes of a small difference of its parameters."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from pytest_fsdp_meta.evidence import Measure
from pytest_fsdp_meta.worlds import SEED

NUDGE = 1e-4
"""Relative to each element. Small enough that gradients follow in proportion, and well above rounding in float32."""


def sensitivity(parameters: Iterable[Tensor], gradients_apart: Callable[[], Iterable[Measure | None]]) -> float:
    """How many times larger the relative change of the gradients is than that of the parameters, which stay changed.

    ``gradients_apart`` measures the gradients at the changed parameters beside those before. Normalisation of what
    is nearly zero makes it hundreds, and then parameters that rounding alone has driven apart have other gradients.
    """
    nudge = NUDGE
    torch.manual_seed(SEED)
    with torch.no_grad():
        for parameter in parameters:
            if parameter.is_floating_point():
                # A nudge below the grain of a dtype would be rounded away.
                nudge = max(nudge, 4 * torch.finfo(parameter.dtype).eps)
                noise = torch.randn(parameter.shape, dtype=torch.float32, device=parameter.device)
                parameter.copy_(parameter.float() * (1 + nudge * noise))
    found = [one for one in gradients_apart() if one is not None and math.isfinite(one.apart)]
    total = sum(one.elements for one in found)
    typical = math.sqrt(sum(one.truth**2 for one in found) / total) if total else 0.0
    scales = [(one.apart, one.truth + typical * math.sqrt(one.elements)) for one in found]
    return max([apart / scale / nudge for apart, scale in scales if scale], default=1.0)
