"""The tests of failing worlds, repeated on a Ray cluster of two nodes: the same messages, and nothing left behind."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.importorskip("ray", reason="Ray is not installed here; make ray has it")

from pytest_fsdp_meta.worlds import RayEngine
from tests import world_help
from tests.ray.ray_help import cluster_of, engine_of
from tests.worlds.test_ends import *  # noqa: F403
from tests.worlds.test_faults import *  # noqa: F403
from tests.worlds.test_hangs import *  # noqa: F403
from tests.worlds.test_output import *  # noqa: F403
from tests.worlds.test_resources import *  # noqa: F403

DIFFERENT = {
    "test_a_device_that_does_not_exist": "the request for GPUs is refused first, because the cluster has none",
    "test_ranks_do_not_ignore_the_signals_that_the_fork_server_ignores": "Ray takes SIGTERM in the pytest process",
    "test_the_fork_server_is_killed": "every node has a fork server of its own",
    "test_running_out_of_file_descriptors": "the request for CPUs is refused first, because the cluster has too few",
    "test_ranks_end_when_their_parent_is_killed": "that parent uses no cluster; test_ray.py tests one that does",
    "test_a_parent_killed_while_it_starts_leaves_nothing": "that parent uses no cluster",
}
"""Tests that behave differently on a cluster, with the reason."""
assert DIFFERENT.keys() <= globals().keys(), "a test named here was renamed"


@pytest.fixture(scope="module")
def ray_engine() -> Iterator[RayEngine]:
    with cluster_of(2) as cluster, engine_of(cluster) as engine:
        yield engine


@pytest.fixture(autouse=True)
def _on_the_cluster(request: pytest.FixtureRequest, ray_engine: RayEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    name = request.node.originalname
    if name in DIFFERENT:
        pytest.skip(DIFFERENT[name])
    monkeypatch.setattr(world_help, "preload", lambda: ray_engine)
