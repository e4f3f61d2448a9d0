"""garrett361/dtest: spawns a world for each test. It is not on PyPI; install it from its repository."""

import bodies
import pytest
from dtest import DTest


class TestBodies(DTest):
    requires_cuda_env = False
    default_world_size = bodies.WORLD
    _init_timeout_sec = int(bodies.LIMIT)

    @pytest.mark.parametrize("number", range(bodies.TESTS))
    def test_body(self, number):
        bodies.run(number)
