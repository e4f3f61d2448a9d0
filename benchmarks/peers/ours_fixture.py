"""``fsdp_world``: calls from a test to the ranks of a fresh world, or of a session-scoped one."""

import os

import bodies
import pytest


@pytest.mark.fsdp_world(world_size=bodies.WORLD, scope=os.environ.get("BENCH_SCOPE", "function"), timeout=bodies.LIMIT)
@pytest.mark.parametrize("number", range(bodies.TESTS))
def test_body(fsdp_world, number):
    fsdp_world.run(bodies.run, number)
