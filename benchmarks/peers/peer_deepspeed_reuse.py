"""DeepSpeed's DistributedTest with one pool for all tests."""

import peer_deepspeed


class TestReused(peer_deepspeed.TestBodies):
    reuse_dist_env = True
