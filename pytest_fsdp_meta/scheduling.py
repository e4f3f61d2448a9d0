"""Under pytest-xdist: the items of one loader stay on one worker, so that it is loaded once."""

from __future__ import annotations

import re
from typing import Any

from xdist.scheduler import LoadScopeScheduling

from pytest_fsdp_meta.catalogue import Catalogue
from pytest_fsdp_meta.items import loader_id


def loader_scheduling(config: Any, log: Any, catalogue: Catalogue) -> LoadScopeScheduling:
    """xdist's ``load`` distribution with every loader as one unit and every other test as its own."""

    class LoaderScheduling(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            found = re.search(r"[-\[](\w+)\]$", nodeid)
            return loader_id(nodeid, found[1]) if found and found[1] in catalogue else nodeid

    return LoaderScheduling(config, log)
