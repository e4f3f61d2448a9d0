"""Simulated worlds against real ones of the same size: what their ranks hold and send, and what the checks find."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from fixtures.conforming import load_conforming
from fixtures.defects import DEFECTS
from pytest_fsdp_meta.catalogue import built_in
from pytest_fsdp_meta.evidence import TensorFacts
from pytest_fsdp_meta.trial import LoaderFailed

SIMULATED = [check.id for check in built_in() if check.simulated]
SAME = (
    "kind",
    "shape",
    "local_shape",
    "regions",
    "dtype",
    "requires_grad",
    "persistent",
    "placements",
    "mesh",
    "managed",
)
OWN_MODELS = [name for name, defect in DEFECTS.items() if defect.caught_by in SIMULATED and not defect.simulated]
RUN_THE_MODEL = {"parameter_recreated_after_a_forward", "parameter_of_the_root_recreated_after_a_forward"}
UNSEEN = {
    # to_empty() re-creates no parameter that stays on meta, so it keeps the attributes.
    "whole_modules_sharded_defective": "",
    "every_rank_with_the_first_experts": "passed for what could be checked; the parts of "
    "model.layers.0.mlp.experts.gate_up_proj and 3 more have no placements, so those of other ranks are unknown",
}
MESHES = [{"dp_shard": 2}, {"dp_shard": 4}, {"dp_replicate": 2, "dp_shard": 2}]


def described(tensor: TensorFacts) -> dict[str, object]:
    return {name: getattr(tensor, name) for name in SAME}


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("architecture", ["llama", "llama-prime-tied", "qwen3-moe", "gpt2"])
def test_a_simulated_rank_holds_and_sends_what_a_real_one_does(architecture, mesh, checkpoint, loader_judge):
    path, checks = checkpoint(architecture), ["dtensor_placements", "collectives_match_on_every_rank"]
    real = loader_judge.observe(load_conforming, mesh, checks, path=path)
    simulated = loader_judge.observe(load_conforming, mesh, SIMULATED, simulated=True, path=path)
    for rank in simulated.inventory:
        own = real.inventory[rank.rank]
        assert {t.name: described(t) for t in rank.tensors} == {t.name: described(t) for t in own.tensors}
        assert rank.ties() == own.ties()
    held = {rank.rank: sum(t.numel * t.width for t in rank.tensors if t.kind == "parameter") for rank in real.inventory}
    tied = sum(len(group) > 1 for group in real.inventory[0].ties())
    for rank in simulated.simulation[0].ranks:
        assert rank.parameters == held[rank.rank] or (tied and rank.parameters < held[rank.rank])
        if rank.step is not None and not rank.step.problem:
            assert sent_by(rank.step) == sent_in_a_step(real.collectives[rank.rank].step)
        else:
            assert rank.step is None or ("BF16" in rank.step.problem and architecture == "qwen3-moe")


def sent_by(step):
    return {part.op: (part.count, part.nbytes) for part in step.traffic}


def sent_in_a_step(collectives):
    """Return the same of recorded collectives: their number, and what a ring sends for their inputs."""
    count, nbytes = Counter(), Counter()
    for one in collectives:
        size = sum(torch.Size(shape).numel() for shape in one.shapes) * getattr(torch, one.dtype).itemsize
        ranks = len(one.ranks)
        count[one.op] += 1
        sent = size * (ranks - 1) if one.op == "all_gather" else size * (ranks - 1) // ranks
        nbytes[one.op] += 2 * sent if one.op == "all_reduce" else sent
    return {op: (count[op], nbytes[op]) for op in count}


@pytest.mark.slow
@pytest.mark.parametrize("name", OWN_MODELS)
def test_a_simulated_world_shows_the_defects_that_need_no_values(name, checkpoint, judge_loader):
    defect = DEFECTS[name]
    if name in RUN_THE_MODEL:
        with pytest.raises(LoaderFailed, match="the loader asks for a value of a tensor"):
            judge_loader(defect.load, defect.mesh, simulated=True, path=checkpoint(defect.architecture))
        return
    verdicts = judge_loader(defect.load, defect.mesh, simulated=True, path=checkpoint(defect.architecture))
    failed = [id for id, verdict in verdicts.items() if verdict.status == "failed"]
    assert failed == ([] if name in UNSEEN else [defect.caught_by])
    if name in UNSEEN:
        assert UNSEEN[name] in ("", verdicts[defect.caught_by].reason)


@pytest.mark.parametrize("mesh", [{"dp_shard": 16}, {"dp_replicate": 4, "dp_shard": 16}], ids=str)
def test_a_conforming_loader_has_no_findings(mesh, checkpoint, judge_loader):
    verdicts = judge_loader(load_conforming, mesh, simulated=True, path=checkpoint("llama"))
    assert {id: verdict.reason for id, verdict in verdicts.items() if verdict.status in ("failed", "error")} == {}
    judged = {id for id, verdict in verdicts.items() if verdict.status == "passed"}
    assert judged <= {*SIMULATED}
    assert {"shards_tile_the_tensor", "memory_falls_with_ranks", "communication_scales"} <= judged
