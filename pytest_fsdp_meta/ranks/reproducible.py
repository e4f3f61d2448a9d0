"""Compute so that a second run gives the same bits, and that ranks and reference round alike.

Deterministic mode with warnings leaves two fused attentions of CUDA as they are, which add up gradients in an order
that changes from run to run. And a loader may let float32 be computed as TensorFloat-32 or bfloat16: on the ranks,
while the reference never runs that line. Both are set for the time of a judged step only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import torch
from torch import backends

from pytest_fsdp_meta.ranks.poison import deterministic

FULL_PRECISION = "ieee"
FUSED_ATTENTIONS: tuple[tuple[Callable[[], bool], Callable[[bool], None]], ...] = (
    (backends.cuda.flash_sdp_enabled, backends.cuda.enable_flash_sdp),
    (backends.cuda.mem_efficient_sdp_enabled, backends.cuda.enable_mem_efficient_sdp),
    (backends.cuda.cudnn_sdp_enabled, backends.cuda.enable_cudnn_sdp),
)
"""How to read and set whether an attention without deterministic gradients may be chosen. A model that asks for one of
them by ``torch.nn.attention.sdpa_kernel`` still gets it."""


@contextmanager
def reproducible(device: torch.device) -> Iterator[None]:
    """Compute float32 as such, and on CUDA let attention choose only what is deterministic; restore all afterwards."""
    with deterministic(), ExitStack() as stack:
        _compute_float32(stack)
        if device.type == "cuda":
            stack.callback(setattr, backends.cudnn, "benchmark", backends.cudnn.benchmark)
            backends.cudnn.benchmark = False  # what it picks depends on what else runs
            for enabled, enable in FUSED_ATTENTIONS:
                stack.callback(enable, enabled())
                enable(False)
        yield


def _compute_float32(stack: ExitStack) -> None:
    """Set what a loader may have set by either of torch's two interfaces, and let ``stack`` restore it.

    The older one is set too, because torch refuses to read it where the two disagree; its value may be unreadable then.
    """
    newer = [(place, place.fp32_precision) for place in _precisions()]
    # Restored in the reverse order: the older interface overwrites the newer one.
    for place, before in newer:
        stack.callback(setattr, place, "fp32_precision", before)
    with suppress(RuntimeError):
        stack.callback(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision())
    with suppress(RuntimeError):
        stack.callback(setattr, backends.cudnn, "allow_tf32", backends.cudnn.allow_tf32)
    torch.set_float32_matmul_precision("highest")
    backends.cudnn.allow_tf32 = False
    for place, _ in newer:
        place.fp32_precision = FULL_PRECISION


def _precisions() -> list[Any]:
    """Return where torch has a precision of float32: from version 2.9 on, for each library and kind of operation."""
    kinds = {backends.cuda: ("matmul",), backends.cudnn: ("conv", "rnn"), backends.mkldnn: ("matmul", "conv", "rnn")}
    places = [getattr(library, kind, None) for library, names in kinds.items() for kind in names]
    return [place for place in places if isinstance(getattr(place, "fp32_precision", None), str)]
