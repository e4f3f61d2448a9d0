"""Evidence: plain data that describes what was observed on the ranks and in the reference.

Nothing here holds a live tensor or imports torch, so evidence can be pickled, stored, and judged again after the ranks
have ended. Shapes are in elements, and sequences over ranks are in rank order.
"""

from pytest_fsdp_meta.checks.checkpoint.facts import Export, Resharded
from pytest_fsdp_meta.checks.data.facts import Epoch, RankBatches
from pytest_fsdp_meta.checks.drawn.facts import DrawnTensor, RankDraws, Spread
from pytest_fsdp_meta.checks.sharding.facts import (
    replicates,
    sharded_dim,
    shards_data,
    splits_experts,
    splits_model,
    splits_sequence,
    splits_stages,
)
from pytest_fsdp_meta.checks.structure.facts import (
    MeshFacts,
    OptimizerFacts,
    PartFacts,
    RankInventory,
    Region,
    TensorFacts,
)
from pytest_fsdp_meta.checks.training.facts import Accumulation, Clipping, Movement, Noise, RankTraining, TensorNoise
from pytest_fsdp_meta.checks.values.facts import Comparison, Measure
from pytest_fsdp_meta.evidence.records import (
    VALUES_CHECKS,
    Evidence,
    ReferenceFacts,
    SmallerWorld,
    SubjectFacts,
    Unavailable,
    WorldFacts,
    autocast_of_ranks_only,
    combine_subjects,
    frozen_sources,
    not_declared,
    partly_held,
)

__all__ = [
    "VALUES_CHECKS",
    "Accumulation",
    "Clipping",
    "Comparison",
    "DrawnTensor",
    "Epoch",
    "Evidence",
    "Export",
    "Measure",
    "MeshFacts",
    "Movement",
    "Noise",
    "OptimizerFacts",
    "PartFacts",
    "RankBatches",
    "RankDraws",
    "RankInventory",
    "RankTraining",
    "ReferenceFacts",
    "Region",
    "Resharded",
    "SmallerWorld",
    "Spread",
    "SubjectFacts",
    "TensorFacts",
    "TensorNoise",
    "Unavailable",
    "WorldFacts",
    "autocast_of_ranks_only",
    "combine_subjects",
    "frozen_sources",
    "not_declared",
    "partly_held",
    "replicates",
    "sharded_dim",
    "shards_data",
    "splits_experts",
    "splits_model",
    "splits_sequence",
    "splits_stages",
]
