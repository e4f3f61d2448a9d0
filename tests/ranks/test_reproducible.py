"""The settings under which a step is judged. The kernels of CUDA are not here; only what torch may choose is shown."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import backends, nn

from pytest_fsdp_meta.ranks.generators import FUSED_ATTENTIONS, reproducible

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


def settings() -> dict[str, Any]:
    places = {"cuda": ("matmul",), "cudnn": ("conv", "rnn"), "mkldnn": ("matmul", "conv", "rnn")}
    return {
        **{f"{lib}.{op}": getattr(getattr(backends, lib), op).fp32_precision for lib in places for op in places[lib]},
        "matmul precision": matmul_precision(),
        "attention": [enabled() for enabled, _ in FUSED_ATTENTIONS],
        "benchmark": backends.cudnn.benchmark,
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }


def matmul_precision() -> str:
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:  # the two interfaces disagree
        return "unreadable"


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    before = backends.cudnn.benchmark, backends.cudnn.allow_tf32
    yield
    backends.cudnn.benchmark, backends.cudnn.allow_tf32 = before
    for library, operations in ((backends.cuda, ("matmul",)), (backends.mkldnn, ("matmul", "conv", "rnn"))):
        for operation in operations:
            getattr(library, operation).fp32_precision = "none"
    torch.set_float32_matmul_precision("highest")


def in_body_of_a_loader(kind: str) -> None:
    if kind == "older interface":
        torch.set_float32_matmul_precision("medium")
        backends.cudnn.benchmark = True
    elif kind == "newer interface":
        backends.cuda.matmul.fp32_precision = "tf32"
        backends.mkldnn.matmul.fp32_precision = "bf16"
        backends.cudnn.conv.fp32_precision = "ieee"
    elif kind == "both":  # torch refuses to read backends.cudnn.allow_tf32 then
        backends.cudnn.allow_tf32 = True
        backends.cudnn.conv.fp32_precision = "ieee"


@pytest.mark.parametrize("kind", ["nothing", "older interface", "newer interface", "both"])
@pytest.mark.parametrize("device", [CPU, CUDA], ids=["cpu", "cuda"])
def test_a_judged_step_computes_float32_whatever_the_loader_has_set(device: torch.device, kind: str) -> None:
    in_body_of_a_loader(kind)
    before = settings()
    with reproducible(device):
        during = settings()
        assert backends.cudnn.allow_tf32 is backends.cuda.matmul.allow_tf32 is False, "both interfaces agree"
    assert settings() == before
    precisions = [value for name, value in during.items() if "." in name]
    assert precisions == ["ieee"] * 6
    assert during["matmul precision"] == "highest"
    assert during["deterministic"]


def test_attention_on_cuda_is_deterministic_unless_the_model_names_another() -> None:
    with reproducible(CPU):
        assert all(enabled() for enabled, _ in FUSED_ATTENTIONS), "the CPU's attention is deterministic"
    with reproducible(CUDA):
        assert not any(enabled() for enabled, _ in FUSED_ATTENTIONS)
        with nn.attention.sdpa_kernel(nn.attention.SDPBackend.FLASH_ATTENTION):
            assert backends.cuda.flash_sdp_enabled()
        assert backends.cuda.math_sdp_enabled()
    assert all(enabled() for enabled, _ in FUSED_ATTENTIONS)
