"""Process groups on a rank: those that loaders make, fake ones of a simulated rank, and gloo on the memory of GPUs.

What torch lacks public functions for is replaced under its private names; tests/worlds/test_process_groups.py fails
when one of them moves.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import wraps
from importlib import import_module
from itertools import count
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, urlsplit

if TYPE_CHECKING:
    import torch
    from torch import Tensor

FAKE = "fake"
HELPER = "_new_process_group_helper"
"""The private function of torch in which all public ones that make groups end, however they were imported."""
HANDLERS = "_rendezvous_handlers"
"""torch's private table of how ranks meet; the public function that adds to it refuses to replace an entry."""
RENDEZVOUS = "torch.distributed.rendezvous"
"""The module of that table, by name, because the attribute torch.distributed.rendezvous is a function that hides it."""
SCHEMES = ("env", "tcp")
"""URL schemes of ``init_process_group`` that can lead to the store of the world."""
OPERATORS = (
    "all_gather_into_tensor",
    "all_gather_into_tensor_coalesced",
    "reduce_scatter_tensor",
    "reduce_scatter_tensor_coalesced",
    "all_to_all_single",
)
"""Those that gloo runs by a coalesced call, or not at all, on tensors of a device."""


def watch_groups(address: str, port: int, own_rank: int, world_size: int) -> None:
    """Let a loader make, destroy and make a process group again through the store at this address.

    With another rank, or more ranks than the world has, they would wait for each other until the time is up; that is
    an error at once. torch leaves keys of the first group in the store, and ranks of the second would read them. So
    each group after the first gets a prefix.
    """
    handlers = getattr(import_module(RENDEZVOUS), HANDLERS, {})
    groups = count()

    def with_prefix(handler: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
        def meet(url: str, *args: Any, **kwargs: Any) -> Iterator[Any]:
            import torch.distributed as dist

            through_our_store = _address_of(url) == (address, port)
            for store, rank, size in handler(url, *args, **kwargs):
                if through_our_store:
                    _check_group(own_rank, rank, world_size, size)
                earlier = next(groups) if through_our_store else 0
                yield (dist.PrefixStore(f"again{earlier}", store) if earlier else store), rank, size

        return meet

    for scheme in SCHEMES:
        if scheme in handlers:
            handlers[scheme] = with_prefix(handlers[scheme])


def _check_group(own: int, rank: int, world_size: int, size: int) -> None:
    """Raise ValueError if no group can have this rank and size. A group of one rank waits for none."""
    if size > 1 and (rank != own or size > world_size):
        given = [f"rank={rank}"] * (rank != own) + [f"world_size={size}"] * (size > world_size)
        where = f"on rank {own} of" if rank != own else "in"
        raise ValueError(
            f"init_process_group({', '.join(given)}) {where} a world of {world_size}: leave rank and world_size out, "
            "or take them from the environment (RANK, WORLD_SIZE)"
        )


def _address_of(url: str) -> tuple[str, int]:
    parts = urlsplit(url)
    if parts.scheme == "env":
        return os.environ.get("MASTER_ADDR", ""), int(os.environ.get("MASTER_PORT", "0"))
    return parts.hostname or "", parts.port or 0


def make_all_groups_fake(own_rank: int, world_size: int) -> None:
    """Let every later process group of this process be fake.

    Ranks do not meet: the store of a group is this process's own. Raises RuntimeError where torch lacks ``HELPER`` or
    ``HANDLERS``.
    """
    import torch
    import torch.distributed as dist

    c10d = import_module("torch.distributed.distributed_c10d")
    meeting = import_module(RENDEZVOUS)
    for module, name in ((c10d, HELPER), (meeting, HANDLERS)):
        if not hasattr(module, name):
            raise RuntimeError(
                f"worlds cannot be simulated: torch {torch.__version__} has no {module.__name__}.{name}; please "
                "report it to pytest-fsdp-meta"
            )
    make = getattr(c10d, HELPER)

    @wraps(make)
    def make_fake(size: int, rank: int, ranks: list[int], backend: Any, *args: Any, **options: Any) -> Any:
        # Options and devices are those of the backend that was asked for.
        options.update(backend_options=None, device_id=None)
        return make(size, rank, ranks, dist.Backend(FAKE), *args, **options)

    def meet_alone(url: str, *args: Any, **kwargs: Any) -> Iterator[Any]:
        given = dict(parse_qsl(urlsplit(url).query))
        rank, size = (int(given.get(name.lower(), os.environ[name])) for name in ("RANK", "WORLD_SIZE"))
        _check_group(own_rank, rank, world_size, size)
        yield dist.HashStore(), rank, size

    setattr(c10d, HELPER, make_fake)
    handlers = getattr(meeting, HANDLERS)
    handlers.update(dict.fromkeys(handlers, meet_alone))


def put_all_meshes_on_cpu() -> None:
    """Let every later mesh of this process be of CPUs: a loader may name the devices for which it was written.

    A mesh asks its devices to be there, and which one this rank has. Tensors on meta lie on a mesh of any type.
    """
    from torch.distributed.device_mesh import DeviceMesh

    make = DeviceMesh.__init__

    @wraps(make)
    def make_on_cpu(self: DeviceMesh, device_type: str, *args: Any, **options: Any) -> None:
        make(self, "cpu", *args, **options)

    DeviceMesh.__init__ = make_on_cpu


def use_host() -> torch.library.Library:
    """Let functional collectives of CUDA tensors run on copies in host memory, while the returned library lives.

    Otherwise gloo would take a GPU's memory for the host's. DTensors are gathered by these collectives. gloo's
    coalesced all-gather has no variant for CUDA (pytorch#132471), and ranks that share a GPU have no other backend. A
    collective ends before it returns, so that there is nothing to wait for.
    """
    import torch

    library = torch.library.Library("_c10d_functional", "IMPL")
    for name in OPERATORS:
        library.impl(name, through_host(name), "CUDA")
    return library


def through_host(name: str) -> Callable[..., Any]:
    """Return a function that copies its tensors to the host, runs the collective there, and copies the result back."""
    import torch

    functional = torch.ops._c10d_functional
    collective = getattr(functional, name)

    def run(tensors: Tensor | list[Tensor], *args: Any) -> Tensor | list[Tensor]:
        one = not isinstance(tensors, list)
        given = tensors if isinstance(tensors, list) else [tensors]
        device = given[0].device
        on_host = [tensor.cpu() for tensor in given]
        out = collective(on_host[0] if one else on_host, *args)
        done = [functional.wait_tensor(tensor).to(device) for tensor in ([out] if one else out)]
        return done[0] if one else done

    return run
