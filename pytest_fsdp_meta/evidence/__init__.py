"""Evidence: plain data that describes what was observed on the ranks and in the reference.

Nothing here holds a live tensor or imports torch, so evidence can be pickled, stored, and judged again after the ranks
have ended. Shapes are in elements, and sequences over ranks are in rank order.
"""

from pytest_fsdp_meta.checks.checkpoint.facts import Export, Resharded
from pytest_fsdp_meta.checks.data.facts import Epoch, RankBatches
from pytest_fsdp_meta.checks.drawn.facts import DrawnTensor, RankDraws, Spread
from pytest_fsdp_meta.checks.sharding.facts import (
    holding_stages,
    replicates,
    sharded_dim,
    shards_data,
    splits_batch,
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
from pytest_fsdp_meta.checks.training.facts import (
    Accumulation,
    Clipping,
    ForwardWeights,
    Movement,
    Noise,
    OwnClipping,
    RankTraining,
    SecondStep,
    StaleWeight,
    TensorNoise,
    TrainedBuffers,
)
from pytest_fsdp_meta.checks.values.facts import Comparison, Element, Measure
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
    "Element",
    "Epoch",
    "Evidence",
    "Export",
    "ForwardWeights",
    "Measure",
    "MeshFacts",
    "Movement",
    "Noise",
    "OptimizerFacts",
    "OwnClipping",
    "PartFacts",
    "RankBatches",
    "RankDraws",
    "RankInventory",
    "RankTraining",
    "ReferenceFacts",
    "Region",
    "Resharded",
    "SecondStep",
    "SmallerWorld",
    "Spread",
    "StaleWeight",
    "SubjectFacts",
    "TensorFacts",
    "TensorNoise",
    "TrainedBuffers",
    "Unavailable",
    "WorldFacts",
    "autocast_of_ranks_only",
    "combine_subjects",
    "frozen_sources",
    "holding_stages",
    "not_declared",
    "partly_held",
    "replicates",
    "sharded_dim",
    "shards_data",
    "splits_batch",
    "splits_experts",
    "splits_model",
    "splits_sequence",
    "splits_stages",
]
