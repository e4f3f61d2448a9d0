"""One World for all tests."""

import bodies
import pytest
from ours_world import PRELOAD

from pytest_fsdp_meta.worlds import World, WorldSpec


@pytest.fixture(scope="session")
def world():
    with World(WorldSpec({"dp_shard": bodies.WORLD}, timeout=bodies.LIMIT), PRELOAD) as world:
        yield world


@pytest.mark.parametrize("number", range(bodies.TESTS))
def test_body(world, number):
    world.run(bodies.run, number)
