"""Which device type and backend a world gets."""

from __future__ import annotations

from pytest_fsdp_meta import standin

MOST_RANKS = 1024
"""The largest world: each rank is a process of some 50 MB, and a mistyped size should not take machines down."""


def choose(
    size: int, device: str, backend: str, gpus: int, require_gpu: bool = False, here: str = "this machine"
) -> tuple[str, str]:
    """Return (device type, backend) for a world of ``size`` ranks on a machine, called ``here``, with ``gpus`` GPUs.

    Raises ValueError if the machine cannot do what the options ask for; never falls back to something else silently.
    """
    if size > MOST_RANKS:
        raise ValueError(f"a world of {size} is too large; use at most {MOST_RANKS} ranks")
    if backend == "nccl" and device == "cpu":
        raise ValueError("--fsdp-backend=nccl runs on cuda only; use --fsdp-backend=gloo with --fsdp-device=cpu")
    if device == "cuda" and not gpus:
        raise ValueError(f"--fsdp-device=cuda: {here} has no GPU that torch can use; use cpu or auto")
    if backend == "nccl" and not gpus and device != standin.NAME:
        raise ValueError(f"--fsdp-backend=nccl: {here} has no GPU that torch can use; use gloo or auto")
    if device == standin.NAME:
        if backend == "nccl" or require_gpu:
            option = "--fsdp-backend=nccl" if backend == "nccl" else "--fsdp-require-gpu"
            raise ValueError(f"{option}: --fsdp-device={device} needs no GPU, and uses gloo; leave one of them out")
        return device, "gloo"
    shares = backend == "gloo" and device == "cuda"
    if (device == "cuda" or backend == "nccl") and not shares and size > gpus:
        raise ValueError(
            f"a world of {size} on cuda with nccl needs {size} GPUs, {here} has {gpus}; use a smaller world, "
            "or --fsdp-device=cuda --fsdp-backend=gloo, which lets ranks share a GPU"
        )
    on_gpu = device == "cuda" or backend == "nccl" or (device == "auto" and backend == "auto" and 0 < size <= gpus)
    if require_gpu and not on_gpu:
        raise ValueError(f"--fsdp-require-gpu: a world of {size} would run on the CPU, {here} has {gpus} GPUs")
    if not on_gpu:
        return "cpu", "gloo"
    return "cuda", "nccl" if backend == "auto" else backend
