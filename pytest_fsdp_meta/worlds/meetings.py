"""On a rank whose loader makes the process group itself: each time it does, ranks meet at a place of its own.

The store of a world lives on when a loader destroys its group, and so do the addresses that ranks have left in it,
under the same names as those of the next group: a rank that comes early to a second ``init_process_group`` takes the
first one's address of a rank that comes late, and nobody answers there. torchrun has the same race; here it would be
a loader that fails now and then. torch has no public way to change how an address is met at: it refuses to register a
second handler for a scheme. Without the private name everything is as under torchrun.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from importlib import import_module
from itertools import count
from typing import Any
from urllib.parse import urlsplit

SCHEMES = ("env", "tcp")


def number(address: str, port: int) -> None:
    """From now on the second group that is made by way of this store does not see what the first has left there."""
    # By its name: torch.distributed.rendezvous is the function of this name, which hides the module.
    handlers = getattr(import_module("torch.distributed.rendezvous"), "_rendezvous_handlers", {})
    met = count()

    def numbered(handler: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
        def meet(url: str, *given: Any, **named: Any) -> Iterator[Any]:
            import torch.distributed as dist

            ours = _place(url) == (address, port)
            for store, rank, size in handler(url, *given, **named):
                before = next(met) if ours else 0
                yield (dist.PrefixStore(f"again{before}", store) if before else store), rank, size

        return meet

    for scheme in SCHEMES:
        if scheme in handlers:
            handlers[scheme] = numbered(handlers[scheme])


def _place(url: str) -> tuple[str, int]:
    """(address, port) that a URL stands for."""
    parts = urlsplit(url)
    if parts.scheme == "env":
        return os.environ.get("MASTER_ADDR", ""), int(os.environ.get("MASTER_PORT", "0"))
    return parts.hostname or "", parts.port or 0
