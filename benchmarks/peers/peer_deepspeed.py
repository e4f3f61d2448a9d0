"""DeepSpeed's DistributedTest, part of DeepSpeed's own tests: a pool of processes for each test."""

import bodies
import pytest
from deepspeed_unit import DistributedTest


class TestBodies(DistributedTest):
    world_size = bodies.WORLD
    backend = "gloo"
    requires_cuda_env = False

    @pytest.mark.parametrize("number", range(bodies.TESTS))
    def test_body(self, number):
        bodies.run(number)
