"""Process groups as a service: a world is a set of ranks that run the functions they are sent, until it is closed.

This package knows nothing of models, checks or pytest items. ``World`` lives in the parent process and imports no
torch. On a rank, ``current()`` returns its number, device and mesh.
"""

from pytest_fsdp_meta.worlds.engine import Engine
from pytest_fsdp_meta.worlds.failures import CallFailed, Misuse, RankFailure, WorldError, cause_of
from pytest_fsdp_meta.worlds.leases import Lease, LeaseError
from pytest_fsdp_meta.worlds.local.engine import ForkServerEngine
from pytest_fsdp_meta.worlds.pool import Pool
from pytest_fsdp_meta.worlds.rank.main import current, doing, forward_warnings, note
from pytest_fsdp_meta.worlds.rank.rendezvous import SEED, Rank
from pytest_fsdp_meta.worlds.ray.engine import RayEngine
from pytest_fsdp_meta.worlds.spec import (
    DEFAULT_MESH_DIM,
    SCOPES,
    Sources,
    WorldSpec,
    choose,
    choose_simulated,
    resolve_mesh,
)
from pytest_fsdp_meta.worlds.world import Listener, ObservedWorld, World

__all__ = [
    "DEFAULT_MESH_DIM",
    "SCOPES",
    "SEED",
    "CallFailed",
    "Engine",
    "ForkServerEngine",
    "Lease",
    "LeaseError",
    "Listener",
    "Misuse",
    "ObservedWorld",
    "Pool",
    "Rank",
    "RankFailure",
    "RayEngine",
    "Sources",
    "World",
    "WorldError",
    "WorldSpec",
    "cause_of",
    "choose",
    "choose_simulated",
    "current",
    "doing",
    "forward_warnings",
    "note",
    "resolve_mesh",
]
