"""Evidence: plain data that describes what was observed on the ranks and in the reference.

Nothing here holds a live tensor or imports torch, so evidence can be pickled, stored, and judged again after the ranks
have ended. Shapes are in elements, and sequences over ranks are in rank order.
"""

from pytest_fsdp_meta.evidence.batches import Epoch, RankBatches
from pytest_fsdp_meta.evidence.checkpoint import Export, Resharded
from pytest_fsdp_meta.evidence.draws import DrawnTensor, RankDraws, Spread
from pytest_fsdp_meta.evidence.mesh_dims import (
    replicates,
    sharded_dim,
    shards_data,
    splits_experts,
    splits_model,
    splits_sequence,
    splits_stages,
)
from pytest_fsdp_meta.evidence.records import (
    VALUES_CHECKS,
    Evidence,
    ReferenceFacts,
    SubjectFacts,
    Unavailable,
    WorldFacts,
    combine_subjects,
    frozen_sources,
    not_declared,
    partly_held,
)
from pytest_fsdp_meta.evidence.stages import holding_stages
from pytest_fsdp_meta.evidence.tensors import MeshFacts, OptimizerFacts, PartFacts, RankInventory, Region, TensorFacts
from pytest_fsdp_meta.evidence.training import (
    Accumulation,
    Clipping,
    Comparison,
    ForwardWeights,
    Measure,
    Movement,
    Noise,
    OwnClipping,
    RankTraining,
    SecondStep,
    StaleWeight,
    TensorNoise,
    TrainedBuffers,
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
    "Spread",
    "StaleWeight",
    "SubjectFacts",
    "TensorFacts",
    "TensorNoise",
    "TrainedBuffers",
    "Unavailable",
    "WorldFacts",
    "combine_subjects",
    "frozen_sources",
    "holding_stages",
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
