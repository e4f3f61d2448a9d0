"""Helpers for tests with Ray: small clusters on this machine, and engines that use them."""

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
    """Start a Ray cluster whose nodes all run on this machine, as if they were separate machines."""
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
