"""What lets megatron-fsdp run where there is no GPU: the device handles that it holds, by what torch has for the CPU.

It orders its copies and collectives by CUDA streams and events. On a CPU everything is in order anyway, and
``torch.cpu`` has streams and events that say so. No collective, no tensor and no arithmetic is replaced.
"""

from __future__ import annotations

import torch


class Stream(torch.cpu.Stream):
    def record_event(self) -> torch.cpu.Event:  # torch.cpu's gives none, and the package waits for it
        return torch.cpu.Event()


def stand_in_for_cuda(device: torch.device) -> None:
    """For this rank. A check of the package moves a tensor of flags by ``Tensor.cuda`` (uneven_dtensor.py)."""
    if device.type == "cuda":
        return
    stream = Stream()
    torch.cuda.current_device = lambda: 0
    torch.cuda.Stream = Stream
    torch.cuda.stream = torch.cpu.stream
    torch.cuda.current_stream = lambda device=None: stream
    torch.Tensor.cuda = lambda tensor, *where, **how: tensor
