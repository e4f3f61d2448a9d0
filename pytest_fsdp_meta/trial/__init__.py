"""One loader in one world: each observation is taken once, and any number of checks read it."""

from pytest_fsdp_meta.trial.trial import ON_RANKS, LoaderFailed, Trial, ranks_of, world_facts

__all__ = ["ON_RANKS", "LoaderFailed", "Trial", "ranks_of", "world_facts"]
