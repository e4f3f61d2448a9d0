"""The conventions behind the names of mesh dimensions and the short form of placements.

A mesh does not record what its dimensions are for; only their names say that ``tp`` splits the model and ``dp_shard``
the batch.
"""

from __future__ import annotations

import re

BATCH_PARTS = frozenset({"dp", "ddp", "fsdp", "hsdp", "edp", "data", "shard", "replicate"})
"""Parts of a dimension's name that mean data parallelism, also within ``dp_shard_cp`` or ``dp_shard_mod_ep``."""
EXPERT_DIMS = frozenset({"ep", "etp", "expert"})
SEQUENCE_DIMS = frozenset({"cp", "context", "sp"})
STAGE_DIMS = frozenset({"pp", "pipe", "pipeline"})
MODEL_DIMS = frozenset({"tp", "tensor", "tensor_parallel", "model", "mp"}) | STAGE_DIMS | EXPERT_DIMS | SEQUENCE_DIMS


def splits_model(dim: str | None) -> bool:
    """Return whether a mesh dimension of this name splits the model rather than the batch.

    Its ranks see the same rows, and the author's plan decides how each parameter is placed on it.
    """
    return dim is not None and (dim.lower() in MODEL_DIMS or _ends(dim, "tp", "cp", "pp", "ep"))


def splits_stages(dim: str | None) -> bool:
    """Return whether ranks along a mesh dimension of this name hold different layers: the stages of a pipeline."""
    return dim is not None and (dim.lower() in STAGE_DIMS or _ends(dim, "pp"))


def splits_experts(dim: str | None) -> bool:
    """Return whether a mesh dimension of this name splits experts; such meshes group the ranks independently."""
    return dim is not None and (dim.lower() in EXPERT_DIMS or _ends(dim, "ep"))


def splits_sequence(dim: str) -> bool:
    """Return whether ranks along a mesh dimension of this name may see different parts of the same rows.

    That includes flattened dimensions, such as ``dp_shard_cp``.
    """
    return bool(SEQUENCE_DIMS & set(dim.lower().split("_")))


def replicates(dim: str | None) -> bool:
    """Return whether ranks along a mesh dimension of this name should hold the same values."""
    return dim is not None and ("replica" in dim.lower() or dim.lower() == "ddp")


def shards_data(dim: str | None) -> bool:
    """Return whether a mesh dimension of this name shards parameters, each of whose ranks sees other rows."""
    return not splits_model(dim) and not replicates(dim)


def _ends(dim: str, *endings: str) -> bool:
    """Return whether a name ends in one of these parts (``my_tp`` in ``tp``) and has no part of ``BATCH_PARTS``."""
    parts = dim.lower().split("_")
    return len(parts) > 1 and parts[-1] in endings and not BATCH_PARTS & set(parts)


def sharded_dim(placement: str) -> int | None:
    """Return the tensor dim that a placement shards (0 for ``S(0)`` and ``_S(0, 2)``), or None if it shards none."""
    found = re.match(r"_?S\((\d+)", placement)
    return int(found[1]) if found else None


def split_factor(placement: str) -> int:
    """Return the split factor of a placement that shards: 2 for ``_S(0, 2)``, 1 for ``S(0)``."""
    found = re.match(r"_S\(\d+, (\d+)", placement)
    return int(found[1]) if found else 1
