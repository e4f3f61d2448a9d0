"""Process groups and meshes of a simulated rank, whichever backend and device the loader names: fake, and of CPUs."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import wraps
from importlib import import_module
from typing import Any
from urllib.parse import parse_qsl, urlsplit

FAKE = "fake"
CPU = "cpu"
HELPER = "_new_process_group_helper"
"""The private function of torch in which all public ones that make groups end, however they were imported."""
HANDLERS = "_rendezvous_handlers"
"""torch's private table of how ranks meet; the public function that adds to it refuses to replace an entry."""


def make_all_groups_fake(check_group: Callable[[int, int], None]) -> None:
    """Let every later process group of this process be fake. ``check_group`` raises for a rank and size that is none.

    Ranks do not meet: the store of a group is this process's own. Raises RuntimeError where torch lacks ``HELPER`` or
    ``HANDLERS``.
    """
    import torch
    import torch.distributed as dist

    c10d = import_module("torch.distributed.distributed_c10d")
    # By name, because the attribute torch.distributed.rendezvous is a function that hides the module.
    meeting = import_module("torch.distributed.rendezvous")
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
        check_group(rank, size)
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
        make(self, CPU, *args, **options)

    DeviceMesh.__init__ = make_on_cpu
