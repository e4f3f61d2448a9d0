"""torch's MultiProcessTestCase: spawns a world for each test."""

import bodies
import torch.distributed as dist
from torch.testing._internal.common_distributed import MultiProcessTestCase


class TestBodies(MultiProcessTestCase):
    world_size = bodies.WORLD

    def setUp(self) -> None:
        super().setUp()
        self._spawn_processes()

    def _run_one(self, number: int) -> None:
        bodies.join(self.rank, dist.FileStore(self.file_name, self.world_size))
        bodies.run(number)
        dist.destroy_process_group()


for number in range(bodies.TESTS):
    setattr(TestBodies, f"test_{number:02d}", lambda self, number=number: self._run_one(number))
