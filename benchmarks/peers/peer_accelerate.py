"""accelerate's debug_launcher: forks the pytest process, which has imported torch."""

import bodies
import pytest
from accelerate import PartialState, debug_launcher


def work(number: int) -> None:
    PartialState(cpu=True)
    bodies.run(number)


@pytest.mark.parametrize("number", range(bodies.TESTS))
def test_body(number):
    debug_launcher(work, (number,), num_processes=bodies.WORLD)
