"""Counting the GPUs of this machine in a process of its own: CUDA must not be initialised in the pytest process."""

from __future__ import annotations

from collections.abc import Callable
from multiprocessing.connection import Connection, Pipe
from multiprocessing.process import BaseProcess

from pytest_fsdp_meta.worlds.failures import describe_exit
from pytest_fsdp_meta.worlds.rank.preload import has_gpu_files

PATIENCE = 120.0
"""Seconds that counting may take; most of them import torch."""
ASK_TORCH = "to see why, run: python -c 'import torch; print(torch.cuda.device_count())'"


def count_gpus(launch_process: Callable[..., BaseProcess]) -> int:
    """Return the number of GPUs that torch can use, counted in a short-lived process.

    ``launch_process(target, args, name=...)`` starts it. Raises ValueError when that process fails. On a machine
    without GPUs no process is started.
    """
    if not has_gpu_files():  # so no process has to import torch to count them
        return 0
    here, there = Pipe(duplex=False)
    with here:
        with there:
            process = launch_process(_count, (there,), name="count-gpus")
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
