"""What the tests of clusters share: small clusters on this machine, and the engine that runs in them."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from pytest_fsdp_meta.worlds import RayEngine, Sources
from tests.world_help import ROOT

NODE = {"num_cpus": 2, "object_store_memory": 80 * 2**20}


@contextmanager
def cluster_of(nodes: int) -> Iterator[Any]:
    """A Ray cluster whose nodes are all on this machine, but know nothing of that."""
    from ray.cluster_utils import Cluster

    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    cluster = Cluster(initialize_head=True, head_node_args={**NODE, "include_dashboard": False})
    try:
        for _ in range(nodes - 1):
            cluster.add_node(**NODE)
        yield cluster
    finally:
        cluster.shutdown()


@contextmanager
def engine_of(cluster: Any) -> Iterator[RayEngine]:
    engine = RayEngine(cluster.address, Sources(tuple(dict.fromkeys((str(ROOT), *sys.path)))))
    try:
        yield engine
    finally:
        engine.close()
