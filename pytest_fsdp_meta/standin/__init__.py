"""A device type ``standin`` in the host's memory: without a GPU, it shows which tensors are on the wrong device.

Its tensors do not mix with the CPU's, its ranks are on ``standin:0``, ``standin:1`` and so on, and its collectives are
gloo's. ``--fsdp-device=standin`` runs worlds on it. It exists only in processes that have called ``activate``: torch
has room for one such device (``PrivateUse1``), and a user's own may have it elsewhere. It shows no GPU kernels, no
asynchronous streams and no NCCL.
"""

from pytest_fsdp_meta.standin.build import NAME, TORCH, Unavailable, prepare

__all__ = ["BACKEND", "NAME", "TORCH", "Unavailable", "activate", "prepare"]

BACKEND = f"cpu:gloo,{NAME}:gloo"
"""The process group of a world on the stand-in, for ``init_process_group``."""


def activate(devices: int) -> None:
    """Give this process the devices ``standin:0`` to ``standin:(devices - 1)``; ``prepare`` must have built them."""
    from pytest_fsdp_meta.standin import device_module

    device_module.register(devices)
