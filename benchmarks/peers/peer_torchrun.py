"""torchrun in each test."""

import subprocess
import sys

import bodies
import pytest

TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={bodies.WORLD}")


@pytest.mark.parametrize("number", range(bodies.TESTS))
def test_body(number):
    subprocess.run([*TORCHRUN, bodies.__file__, str(number)], check=True)
