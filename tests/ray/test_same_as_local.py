"""The faults of worlds over again, on a Ray cluster of two nodes: each told in the same words, nothing left behind."""

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

OTHERWISE = {
    "test_a_device_that_does_not_exist": "the cluster is asked for GPUs first, which it has not",
    "test_ranks_do_not_ignore_the_signals_that_the_fork_server_ignores": "Ray takes SIGTERM in the pytest process",
    "test_the_fork_server_is_killed": "there is one on every node",
    "test_running_out_of_file_descriptors": "the cluster is asked for CPUs first, of which it has not as many",
    "test_ranks_end_when_their_parent_is_killed": "the parent uses its own machine; test_ray.py has one that does not",
    "test_a_parent_killed_while_it_starts_leaves_nothing": "the parent uses its own machine",
}


@pytest.fixture(scope="module")
def ray_engine() -> Iterator[RayEngine]:
    with cluster_of(2) as cluster, engine_of(cluster) as engine:
        yield engine


@pytest.fixture(autouse=True)
def _on_the_cluster(request: pytest.FixtureRequest, ray_engine: RayEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    name = request.node.originalname
    if name in OTHERWISE:
        pytest.skip(OTHERWISE[name])
    monkeypatch.setattr(world_help, "preload", lambda: ray_engine)
