"""Replace CUDA streams and events with those of ``torch.cpu``, so that megatron-fsdp runs without a GPU.

The package orders its copies and collectives with CUDA streams and events. On a CPU everything runs in order anyway,
and ``torch.cpu`` has streams and events that do nothing. No collective, tensor or arithmetic is replaced.
"""

from __future__ import annotations

import torch


class Stream(torch.cpu.Stream):
    def record_event(self) -> torch.cpu.Event:  # torch.cpu's returns None, and the package waits for an event
        return torch.cpu.Event()


def stand_in_for_cuda(device: torch.device) -> None:
    """Patch this rank's torch. ``Tensor.cuda`` is included because the package moves a tensor of flags with it."""
    if device.type == "cuda":
        return
    stream = Stream()
    torch.cuda.current_device = lambda: 0
    torch.cuda.Stream = Stream
    torch.cuda.stream = torch.cpu.stream
    torch.cuda.current_stream = lambda device=None: stream
    torch.Tensor.cuda = lambda tensor, *where, **how: tensor
