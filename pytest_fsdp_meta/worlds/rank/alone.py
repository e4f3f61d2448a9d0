"""Process groups of a simulated rank: torch's fake one, whichever backend the loader names, without other ranks."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import wraps
from importlib import import_module
from typing import Any
from urllib.parse import parse_qsl, urlsplit

FAKE = "fake"
HELPER = "_new_process_group_helper"
"""The private function of torch in which all public ones that make groups end, however they were imported."""


def make_all_groups_fake(check_group: Callable[[int, int], None]) -> None:
    """Let every later process group of this process be fake. ``check_group`` raises for a rank and size that is none.

    Ranks do not meet: the store of a group is this process's own. Private: ``HELPER``, and ``_rendezvous_handlers``.
    """
    import torch.distributed as dist

    c10d = import_module("torch.distributed.distributed_c10d")
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
    # By name, because the attribute torch.distributed.rendezvous is a function that hides the module.
    handlers = import_module("torch.distributed.rendezvous")._rendezvous_handlers
    handlers.update(dict.fromkeys(handlers, meet_alone))
