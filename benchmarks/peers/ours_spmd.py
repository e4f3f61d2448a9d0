"""``@fsdp_spmd``: the body on every rank, in a fresh world for each test, or in a session-scoped one."""

import os

import bodies
import pytest

from pytest_fsdp_meta import fsdp_spmd


@fsdp_spmd(world_size=bodies.WORLD, scope=os.environ.get("BENCH_SCOPE", "function"), timeout=bodies.LIMIT)
@pytest.mark.parametrize("number", range(bodies.TESTS))
def test_body(number):
    bodies.run(number)
