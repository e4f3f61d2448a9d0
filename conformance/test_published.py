"""Published models at the size at which they are trained: plain FSDP2 and transformers' own loader."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

from conformance.contract import judge_all
from fixtures.published import build, tokens
from fixtures.releases import needs_fsdp_size
from pytest_fsdp_meta import Subject
from pytest_fsdp_meta.reports.sizes import describe_sizes
from pytest_fsdp_meta.trial import LoaderFailed


def load_sharded(fsdp, name, placement=None):
    with torch.device("meta"):
        model = build(name)
    for block in model.model.layers:
        fully_shard(block, mesh=fsdp.mesh, shard_placement_fn=placement)
    fully_shard(model, mesh=fsdp.mesh, shard_placement_fn=placement)
    model.to_empty(device=fsdp.device)
    return Subject(model, reference=partial(build, name), batch=tokens, optimizer=torch.optim.AdamW)


def on_the_longest_dim(parameter):
    return Shard(max(range(parameter.ndim), key=lambda dim: parameter.shape[dim]))


def load_from_transformers(fsdp, name):
    with torch.device("meta"):
        path = fsdp.checkpoint_of_shapes(build(name))
    sizes = DistributedConfig(fsdp_size=fsdp.world_size // 8, tp_size=8)
    model = AutoModelForCausalLM.from_pretrained(path, distributed_config=sizes)
    return Subject(model, reference=partial(build, name), batch=tokens, optimizer=torch.optim.AdamW)


GIB = 2**30
LLAMA_8B, LLAMA_70B = "meta-llama/Llama-3.1-8B", "meta-llama/Llama-3.1-70B"
QWEN, DEEPSEEK = "Qwen/Qwen3-30B-A3B", "deepseek-ai/DeepSeek-V3"
EMPTY, FITS = "no_rank_is_empty_handed", "step_fits"
RUNS = {
    "Llama-8B": (partial(load_sharded, name=LLAMA_8B), {"dp_shard": 1024}, ()),
    "Llama-70B": (partial(load_sharded, name=LLAMA_70B), {"dp_replicate": 4, "dp_shard": 256}, (FITS,)),
    "Qwen3": (partial(load_sharded, name=QWEN, placement=on_the_longest_dim), {"dp_shard": 1024}, ()),
    "Qwen3-by-experts": (partial(load_sharded, name=QWEN), {"dp_shard": 1024}, (EMPTY,)),
    "DeepSeek": (partial(load_sharded, name=DEEPSEEK, placement=on_the_longest_dim), {"dp_shard": 1024}, (FITS,)),
    "Llama-8B-transformers": (partial(load_from_transformers, name=LLAMA_8B), {"dp_shard": 128, "tp": 8}, (FITS,)),
}
"""Run -> the loader, the mesh, and the checks with findings. Nothing is checkpointed: some steps take over 80 GiB."""
JUDGED = {"names_match_reference", "shapes_match_reference", "nothing_left_unsharded", "dtensor_placements"}


@pytest.mark.nightly
@pytest.mark.parametrize(
    "run", [pytest.param(run, marks=needs_fsdp_size) if run.endswith("-transformers") else run for run in RUNS]
)
def test_a_published_model_on_1024_ranks(run, loader_judge):
    load, mesh, failing = RUNS[run]
    observed = loader_judge.observe(load, mesh, simulated=True, timeout=600)
    evidence = replace(observed, world=replace(observed.world, device_memory=80 * GIB))
    verdicts = judge_all(evidence)
    assert {id: verdict.reason for id, verdict in verdicts.items() if verdict.status == "error"} == {}
    assert tuple(id for id, verdict in verdicts.items() if verdict.status == "failed") == failing
    judged = {"shards_tile_the_tensor", "memory_falls_with_ranks", "communication_scales"}
    passed = {id for id, verdict in verdicts.items() if verdict.status == "passed"}
    assert passed >= {*JUDGED, *(() if EMPTY in failing else judged)}
    print("\n".join(describe_sizes(evidence.simulation, evidence.world)))


@pytest.mark.nightly
@needs_fsdp_size
def test_transformers_cannot_load_an_empty_shard(loader_judge):
    """Of 4 heads for keys, 128 x 8 ranks leave nothing to some; the same with 4 x 2 ranks that run."""
    with pytest.raises(LoaderFailed, match="IndexError: list index out of range"):
        loader_judge.observe(partial(load_from_transformers, name=QWEN), {"dp_shard": 128, "tp": 8}, simulated=True)
