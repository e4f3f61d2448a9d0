"""Choose the device type and backend of a world, and count GPUs without initialising CUDA in this process."""

from __future__ import annotations

from glob import glob
from multiprocessing.connection import Connection, Pipe

from pytest_fsdp_meta.worlds.failures import describe_exit
from pytest_fsdp_meta.worlds.local.engine import ForkServerEngine

DEVICE_FILES = ("/dev/nvidia[0-9]*", "/dev/kfd", "/dev/dxg")
"""Glob patterns; a machine with a GPU has one of these files."""
PATIENCE = 120.0
"""Seconds for a process to import torch and count."""
ASK_TORCH = "to see why, run: python -c 'import torch; print(torch.cuda.device_count())'"


def choose(
    size: int, device: str, backend: str, gpus: int, require_gpu: bool = False, here: str = "this machine"
) -> tuple[str, str]:
    """Return (device type, backend) for a world of ``size`` ranks on a machine, called ``here``, with ``gpus`` GPUs.

    Raises ValueError if the machine cannot do what the options ask for; never falls back to something else silently.
    """
    if backend == "nccl" and device == "cpu":
        raise ValueError("--fsdp-backend=nccl runs on cuda only; use --fsdp-backend=gloo with --fsdp-device=cpu")
    if device == "cuda" and not gpus:
        raise ValueError(f"--fsdp-device=cuda: {here} has no GPU that torch can use; use cpu or auto")
    if backend == "nccl" and not gpus:
        raise ValueError(f"--fsdp-backend=nccl: {here} has no GPU that torch can use; use gloo or auto")
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


def count_gpus(preload: ForkServerEngine) -> int:
    """Return how many GPUs torch can use, counted in a short-lived process; without any device file, return 0 at once.

    Raises ValueError if that process fails.
    """
    if not any(glob(pattern) for pattern in DEVICE_FILES):
        return 0
    here, there = Pipe(duplex=False)
    with here:
        with there:
            process = preload.launch_process(_count, (there,), name="count-gpus")
        try:
            if not here.poll(PATIENCE):
                raise ValueError(f"counting the GPUs took longer than {PATIENCE:g} s; {ASK_TORCH}")
            return int(here.recv())
        except EOFError:
            process.join(5)
            _, summary = describe_exit(process.exitcode)
            raise ValueError(f"counting the GPUs failed: its process {summary}; {ASK_TORCH}") from None
        finally:
            process.kill()
            process.join()


def _count(pipe: Connection) -> None:
    import torch

    pipe.send(torch.cuda.device_count())
