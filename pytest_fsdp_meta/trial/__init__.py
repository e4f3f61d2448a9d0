"""A trial runs one loader in one world, takes each observation once, and returns the evidence that all checks read."""

from pytest_fsdp_meta.trial.giving import largest_world_size
from pytest_fsdp_meta.trial.on_ranks import ON_RANKS
from pytest_fsdp_meta.trial.trial import LoaderFailed, Trial, judge_smaller_worlds, world_facts

__all__ = ["ON_RANKS", "LoaderFailed", "Trial", "judge_smaller_worlds", "largest_world_size", "world_facts"]
