"""torch's MultiThreadedTestCase: ranks are threads of the pytest process."""

import bodies
from torch.testing._internal.common_distributed import MultiThreadedTestCase


class TestBodies(MultiThreadedTestCase):
    world_size = bodies.WORLD

    def setUp(self) -> None:
        super().setUp()
        self._spawn_threads()


for number in range(bodies.TESTS):
    setattr(TestBodies, f"test_{number:02d}", lambda self, number=number: bodies.run(number))
