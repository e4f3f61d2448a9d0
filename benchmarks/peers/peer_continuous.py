"""torch's MultiProcContinuousTest: one spawned world for the tests of a class."""

from datetime import timedelta

import bodies
from torch.testing._internal.common_distributed import MultiProcContinuousTest


class TestBodies(MultiProcContinuousTest):
    world_size = bodies.WORLD
    timeout = timedelta(seconds=bodies.LIMIT)

    @classmethod
    def backend_str(cls) -> str:
        return "gloo"


for number in range(bodies.TESTS):
    setattr(TestBodies, f"test_{number:02d}", lambda self, number=number: bodies.run(number))
