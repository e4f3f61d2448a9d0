"""A fresh World for each test, without the rest of the plugin."""

import sys

import bodies
import pytest

from pytest_fsdp_meta.worlds import ForkServerEngine, Sources, World, WorldSpec

PRELOAD = ForkServerEngine(Sources(tuple(sys.path)), test_modules=["bodies"])
PRELOAD.start()


@pytest.mark.parametrize("number", range(bodies.TESTS))
def test_body(number):
    with World(WorldSpec({"dp_shard": bodies.WORLD}, timeout=bodies.LIMIT), PRELOAD) as world:
        world.run("bodies:run", number)
