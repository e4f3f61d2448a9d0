"""TODO."""

from __future__ import annotations

import re

DATA_WORDS = frozenset({"dp", "ddp", "fsdp", "hsdp", "edp", "data", "shard", "replicate"})


EXPERT_DIMS = frozenset({"ep", "etp", "expert"})


SEQUENCE_DIMS = frozenset({"cp", "context", "sp"})


MODEL_DIMS = (
    frozenset({"tp", "tensor", "tensor_parallel", "model", "mp", "pp", "pipe", "pipeline"})
    | EXPERT_DIMS
    | SEQUENCE_DIMS
)


def splits_model(dim: str | None) -> bool:
    """Whether a mesh dimension, by its name, splits the model and not the batch.

    Its ranks see the same rows, and a plan decides how each parameter lies on it.
    """
    return dim is not None and (dim.lower() in MODEL_DIMS or _ends(dim, "tp", "cp", "pp", "ep"))


def splits_experts(dim: str | None) -> bool:
    """Whether a mesh dimension splits experts: they cut up the ranks in a way of their own."""
    return dim is not None and (dim.lower() in EXPERT_DIMS or _ends(dim, "ep"))


def splits_sequence(dim: str) -> bool:
    """Whether ranks along a mesh dimension see other parts of the same rows."""
    return dim.lower() in SEQUENCE_DIMS or _ends(dim, "cp")


def replicates(dim: str | None) -> bool:
    """Whether ranks along a mesh dimension, by its name, are to hold the same."""
    return dim is not None and ("replica" in dim.lower() or dim.lower() == "ddp")


def _ends(dim: str, *endings: str) -> bool:
    """``my_tp`` ends in ``tp``; what is named for data parallelism (dp_shard_cp, dp_shard_mod_ep) splits the batch."""
    words = dim.lower().split("_")
    return len(words) > 1 and words[-1] in endings and not DATA_WORDS & set(words)


def sharded_dim(placement: str) -> int | None:
    """The dim that a placement shards: 0 for ``S(0)`` and for ``_S(0, 2)``; None where it shards none."""
    found = re.match(r"_?S\((\d+)", placement)
    return int(found[1]) if found else None
