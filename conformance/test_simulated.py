"""Simulated worlds against real ones of the same size: what their ranks hold and send, and what the checks find."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path
from statistics import median_low

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from conformance.judging import require
from fixtures.conforming import blocks, build_on_meta, checkpointed, load_conforming, load_sharded, materialise, shard
from fixtures.defects import DEFECTS
from fixtures.defects import simulated as defects
from fixtures.forms_sharding import sharded_and_tensor_parallel
from pytest_fsdp_meta.catalogue import built_in
from pytest_fsdp_meta.checks.memory.observe import Meter, noting_resizes
from pytest_fsdp_meta.checks.simulation.facts import (
    BACKWARD,
    BACKWARD_PASS,
    FORWARD,
    REDUCTION,
    STEPPING,
    BytesOfRanks,
)
from pytest_fsdp_meta.evidence import TensorFacts
from pytest_fsdp_meta.ranks.adapters.dtensor import local_part
from pytest_fsdp_meta.ranks.batches import own_rows
from pytest_fsdp_meta.ranks.watching import tensors_in, watching
from pytest_fsdp_meta.transformers import subject
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
NOTHING_TRAINED = "Subject(optimizer=...) is a callable, and nothing was trained"
UNSEEN = {
    "optimizer_that_goes_by_the_size_of_a_shard": NOTHING_TRAINED,
    "groups_by_the_names_of_a_wrapped_model": NOTHING_TRAINED,
    # to_empty() re-creates no parameter that stays on meta, so it keeps the attributes.
    "whole_modules_sharded_defective": "",
    "every_rank_with_the_first_experts": "the parts of model.layers.0.mlp.experts.gate_up_proj and 3 more have "
    "no placements, so those of other ranks are unknown",
}
MESHES = [{"dp_shard": 2}, {"dp_shard": 4}, {"dp_replicate": 2, "dp_shard": 2}]
LARGER = [{"dp_shard": 8}, {"dp_replicate": 2, "dp_shard": 8}]
TRUTH = [(name, mesh) for name in ("llama", "llama-prime-tied", "qwen3-moe", "gpt2") for mesh in MESHES]
TRUTH += [("llama-prime-tied", mesh) for mesh in LARGER]


def described(tensor: TensorFacts) -> dict[str, object]:
    return {name: getattr(tensor, name) for name in SAME}


def load_with_rows_for_all(fsdp, path):
    tokens = torch.arange(4).repeat(16, 1)
    return replace(load_conforming(fsdp, path), batch=lambda step: {"input_ids": tokens, "labels": tokens})


@pytest.mark.nightly
@pytest.mark.parametrize(("architecture", "mesh"), TRUTH, ids=str)
def test_a_simulated_rank_holds_and_sends_what_a_real_one_does(architecture, mesh, checkpoint, loader_judge):
    path, checks = checkpoint(architecture), ["dtensor_placements", "collectives_match_on_every_rank"]
    real = loader_judge.observe(load_with_rows_for_all, mesh, checks, path=path)
    simulated = loader_judge.observe(load_with_rows_for_all, mesh, SIMULATED, simulated=True, path=path)
    for rank in simulated.inventory:
        own = real.inventory[rank.rank]
        assert {t.name: described(t) for t in rank.tensors} == {t.name: described(t) for t in own.tensors}
        assert rank.ties() == own.ties()
    held = {rank.rank: parameter_bytes(rank) for rank in real.inventory}
    known = simulated.simulation[0].parameters
    assert known == BytesOfRanks(min(held.values()), median_low(held.values()), max(held.values()))
    for rank in simulated.simulation[0].ranks:
        assert rank.parameters == held[rank.rank]
        if rank.step is not None:
            assert rank.step.problem == ""
            assert sent_by(rank.step) == sent_in_a_step(real.collectives[rank.rank].step)
    assert simulated.simulation[0].step is not None


def load_with_pictures(fsdp, path, size):
    def loss(model, batch):
        return batch["pictures"].mean() + model(**few_tokens(0)).loss

    return replace(load_conforming(fsdp, path), loss=loss, batch=lambda step: {"pictures": torch.ones(16, size)})


@pytest.mark.slow
def test_a_simulated_rank_holds_no_rows_of_others(loader_judge, checkpoint):
    """A row of pictures takes megabytes, and a view of the batch holds those of all ranks."""

    def peak(size):
        observe = partial(loader_judge.observe, mesh=SIXTEEN, checks=["memory_falls_with_ranks"], simulated=True)
        step = observe(partial(load_with_pictures, size=size), path=checkpoint("llama")).simulation[0].step
        return {peak.phase: peak.nbytes for peak in step.peaks}[FORWARD]

    assert peak(1_000_001) - peak(1) == 4_000_000


def parameter_bytes(inventory):
    distinct = {tensor.identity: tensor for tensor in inventory.tensors if tensor.kind == "parameter"}
    return sum(tensor.numel * tensor.width for tensor in distinct.values())


@pytest.mark.slow
def test_what_is_sent_is_known_by_module(loader_judge, checkpoint):
    """Two layers are gathered in the forward and again in the backward; the root stays gathered."""
    sizes = loader_judge.observe(
        load_with_a_head_for_tp,
        {"dp_shard": 4, "tp": 2},
        ["communication_scales"],
        simulated=True,
        path=checkpoint("llama"),
    )
    parts = {
        (part.op, part.where, one.module): one.count
        for part in sizes.simulation[0].step.traffic
        for one in part.modules
    }
    assert parts == {
        ("all_gather", "dp_shard", ""): 1,
        ("all_gather", "dp_shard", "model.layers.*"): 4,
        ("reduce_scatter", "dp_shard", "model.layers.*"): 2,
        ("reduce_scatter", "dp_shard", ""): 1,
        ("all_gather", "tp", ""): 1,  # a hook on the head's output, which runs in the module around it
        ("all_reduce", "tp", BACKWARD): 1,
    }


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


def few_tokens(step):
    tokens = torch.arange(60).repeat(16, 1)
    return {"input_ids": tokens, "labels": tokens}


def load_and_measure(fsdp, path, folder, load):
    """On ranks that run, write down the peaks of forward, backward, and the optimizer's step."""
    loaded = replace(load(fsdp, path), batch=few_tokens, optimizer=torch.optim.AdamW)
    if fsdp.simulated:
        return loaded
    model, optimizer, meter = loaded.model, torch.optim.AdamW(loaded.model.parameters(), foreach=True), Measure()
    sliced = own_rows(few_tokens(0), 0, loaded.data_parallel or place_on_mesh(fsdp), fsdp.device)
    rows = {key: tensor.clone() for key, tensor in sliced.items()}  # a view would hold the rows of all ranks
    meter.after(None, (), [local_part(t) for t in (*model.parameters(), *model.buffers(), *rows.values())])
    ends = []
    with watching(meter), noting_resizes(meter):
        for _ in range(REAL_STEPS):
            loss = model(**rows).loss
            ends.append(len(meter.changes))
            loss.backward()
            del loss
            ends.append(len(meter.changes))
            optimizer.step()
            ends.append(len(meter.changes))
            optimizer.zero_grad()
    sizes = list(accumulate(change.after - change.before for change in meter.changes))
    # The least of the steps: a thread of gloo may hold what it has sent until the next collective is done.
    first_of_all = (0, ends[0])
    spans = [first_of_all, *pairwise(ends)]
    phases = ([max(sizes[max(start - 1, 0) : end]) for start, end in spans[number::3][1:]] for number in range(3))
    Path(folder, str(fsdp.rank)).write_text(json.dumps([min(phase) for phase in phases]))
    return replace(load(fsdp, path), batch=None)


def place_on_mesh(fsdp):
    """Return the index and number of this rank's part of the rows."""
    sharing = [dim for dim in fsdp.mesh.mesh_dim_names if dim.startswith("dp_")]
    index, size = 0, 1
    for dim in sharing:
        index = index * fsdp.mesh[dim].size() + fsdp.mesh[dim].get_local_rank()
        size *= fsdp.mesh[dim].size()
    return index, size


REAL_STEPS = 6
"""The first one is left out: it creates the state of the optimizer. ``foreach`` is the default on GPUs."""


class Measure(Meter):
    def before(self, func, args, kwargs):
        """Count what is gathered as well: here it is not part of loading."""

    def after(self, func, args, out):
        for tensor in tensors_in(out):
            self._track(tensor, maybe_mapped=False)


REAL = [
    *((load_conforming, name, {"dp_shard": size}) for name in ("llama-prime-tied", "gpt2") for size in (2, 8, 16)),
    (load_conforming, "llama", {"dp_replicate": 2, "dp_shard": 2}),
    (load_conforming, "llama-prime-tied", {"dp_replicate": 2, "dp_shard": 4}),
    (sharded_and_tensor_parallel, "llama", {"dp_shard": 2, "tp": 2}),
    (sharded_and_tensor_parallel, "llama", {"dp_shard": 4, "tp": 2}),
]
"""Not experts over ``ep``: where tokens are sent to them by values, no step can be simulated."""


@pytest.mark.nightly
@pytest.mark.parametrize(("load", "architecture", "mesh"), REAL, ids=lambda one: getattr(one, "__name__", str(one)))
def test_the_peak_of_each_phase_is_that_of_a_real_run(load, architecture, mesh, checkpoint, loader_judge, tmp_path):
    observe = partial(loader_judge.observe, path=checkpoint(architecture), folder=str(tmp_path), load=load)
    observe(load_and_measure, mesh, ["dtensor_placements"])
    simulated = observe(load_and_measure, mesh, ["memory_falls_with_ranks"], simulated=True)
    step, real = simulated.simulation[0].step, json.loads((tmp_path / "0").read_text())
    peaks = {peak.phase: peak.nbytes for peak in step.peaks}
    backward = max(peaks[BACKWARD_PASS], peaks.get(REDUCTION, 0))
    assert [peaks[FORWARD], backward, peaks[STEPPING]] == pytest.approx(real, rel=0.02)


@pytest.mark.slow
@pytest.mark.parametrize("name", OWN_MODELS)
def test_a_simulated_world_shows_the_defects_that_need_no_values(name, checkpoint, judge_loader):
    defect = DEFECTS[name]
    require(defect.needs)
    if name in RUN_THE_MODEL:
        with pytest.raises(LoaderFailed, match="the loader asks for a value of a tensor"):
            judge_loader(defect.load, defect.mesh, simulated=True, path=checkpoint(defect.architecture))
        return
    verdicts = judge_loader(defect.load, defect.mesh, simulated=True, path=checkpoint(defect.architecture))
    failed = [id for id, verdict in verdicts.items() if verdict.status == "failed"]
    assert failed == ([] if name in UNSEEN else [defect.caught_by])
    if name in UNSEEN:
        assert UNSEEN[name] in ("", verdicts[defect.caught_by].reason)


def load_in_another_order(fsdp, path):
    """The loader's own mesh, with the world's dimensions in another order."""
    mesh = init_device_mesh("cpu", (2, fsdp.world_size // 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    return subject(load_sharded(path, mesh, fsdp.device), path)


def load_in_another_numbering(fsdp, path):
    """The loader's own mesh, in which nodes were paired as the network connects them: right, but not regular."""
    nodes = torch.arange(fsdp.world_size).view(4, -1)
    ranks = nodes[[0, 3, 1, 2]].view(2, -1)
    mesh = DeviceMesh("cpu", ranks, mesh_dim_names=("dp_replicate", "dp_shard"))
    return subject(load_sharded(path, mesh, fsdp.device), path)


def load_first_everywhere(fsdp, path):
    """Each rank puts itself first in its own mesh."""
    ranks = [fsdp.rank, *(rank for rank in range(fsdp.world_size) if rank != fsdp.rank)]
    mesh = DeviceMesh("cpu", torch.tensor(ranks).view(2, -1), mesh_dim_names=("dp_replicate", "dp_shard"))
    return subject(load_sharded(path, mesh, fsdp.device), path)


def load_with_a_head_for_tp(fsdp, path):
    """A head that tensor parallelism divides and FSDP leaves alone, as declared."""
    model = build_on_meta(path)
    tp, dp = fsdp.mesh["tp"], fsdp.mesh["dp_shard"]
    parallelize_module(model, tp, {"lm_head": ColwiseParallel(output_layouts=Replicate())})
    for block in blocks(model):
        fully_shard(block, mesh=dp)
    fully_shard(model, mesh=dp, ignored_params={model.lm_head.weight})
    materialise(model, fsdp.device)
    return subject(model, path, placements={"lm_head.weight": (Shard(0),)})


def load_within_nodes(fsdp, path):
    """HSDP on the loader's own mesh: replicated over nodes of two ranks, however many there are."""
    mesh = init_device_mesh("cpu", (fsdp.world_size // 2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    return subject(load_sharded(path, mesh, fsdp.device), path)


TILING = "shards_tile_the_tensor"
REASONS = {
    load_in_another_numbering: "on a mesh of the loader's own, in which the places of other ranks are unknown",
}
OWN_MESHES = {
    load_in_another_order: "passed",
    load_with_a_head_for_tp: "passed",
    load_within_nodes: "passed",
    load_in_another_numbering: "skipped",
    load_first_everywhere: "failed",
}


@pytest.mark.slow
@pytest.mark.parametrize("load", OWN_MESHES, ids=lambda load: load.__name__)
def test_meshes_of_the_loader(load, checkpoint, judge_loader):
    mesh = {"dp_shard": 16, "tp" if load is load_with_a_head_for_tp else "dp_replicate": 2}
    verdicts = judge_loader(load, mesh, simulated=True, path=checkpoint("llama"))
    failed = OWN_MESHES[load] == "failed"
    assert {id for id, verdict in verdicts.items() if verdict.status == "failed"} == ({TILING} if failed else set())
    assert verdicts[TILING].status == OWN_MESHES[load]
    assert verdicts[TILING].reason.endswith(REASONS.get(load, ""))
    assert verdicts["memory_falls_with_ranks"].status == "passed"
    if failed:
        assert verdicts[TILING].findings[1].actual == ("4 ranks are at (0, 0) of the mesh dp_replicate=2 x dp_shard=16")


@pytest.mark.parametrize("mesh", [{"dp_shard": 16}, {"dp_replicate": 4, "dp_shard": 16}], ids=str)
def test_a_conforming_loader_has_no_findings(mesh, checkpoint, judge_loader):
    verdicts = judge_loader(load_conforming, mesh, simulated=True, path=checkpoint("llama"))
    assert {id: verdict.reason for id, verdict in verdicts.items() if verdict.status in ("failed", "error")} == {}
    judged = {id for id, verdict in verdicts.items() if verdict.status == "passed"}
    assert judged <= {*SIMULATED}
    assert {"shards_tile_the_tensor", "memory_falls_with_ranks", "communication_scales"} <= judged


def load_experts_by_their_rows(fsdp, path):
    model = build_on_meta(path)
    placement = {"shard_placement_fn": lambda parameter: Shard(1 if parameter.ndim == 3 else 0)}
    shard(model, fsdp.mesh, **placement)
    materialise(model, fsdp.device)
    return subject(model, path, placements={"*.experts.*": Shard(1)})


def load_with_a_mean_over_ranks(fsdp, path):
    def loss(model, batch):
        output = model(**batch)
        dist.all_reduce(mean := output.logits.detach().mean())
        return output.loss + 0 * mean

    return subject(load_sharded(path, fsdp.mesh, fsdp.device), path, loss=loss)


def load_checkpointed(fsdp, path):
    model = checkpointed(build_on_meta(path))
    shard(model, fsdp.mesh)
    materialise(model, fsdp.device)
    return subject(model, path, reference=lambda: defects.checkpointed_reference(path))


def load_with_a_few_rows(fsdp, path):
    model = load_sharded(path, fsdp.mesh, fsdp.device)
    return subject(model, path, batch=lambda step: defects.rows_for_each(8))


SIXTEEN = {"dp_shard": 16}
TWINS = {
    "experts_sharded_by_their_number": (load_experts_by_their_rows, SIXTEEN),
    "sharded_within_a_pair": (load_conforming, SIXTEEN),
    "experts_whole_on_the_ranks_of_ep": (load_experts_by_their_rows, SIXTEEN),
    "outputs_gathered_from_every_rank": (load_with_a_mean_over_ranks, SIXTEEN),
    "activations_gathered_by_a_hook": (load_with_a_mean_over_ranks, SIXTEEN),
    "more_rows_than_fit": (load_with_a_few_rows, SIXTEEN),
    "state_that_does_not_fit": (DEFECTS["state_that_does_not_fit"].load, SIXTEEN),
    "blocks_gathered_with_the_root": (load_conforming, SIXTEEN),
    "half_of_the_blocks_gathered_with_the_root": (partial(defects.load_deep, alone=8), SIXTEEN),
    "checkpointing_of_the_reference_only": (load_checkpointed, SIXTEEN),
}
"""The defects that simulated worlds alone show, each with a loader and a mesh without it."""


def test_every_defect_of_scale_has_a_twin():
    assert TWINS.keys() == {name for name, defect in DEFECTS.items() if defect.simulated}


@pytest.mark.nightly
@pytest.mark.parametrize("name", TWINS)
def test_the_twin_of_a_defect_of_scale_has_no_finding(name, checkpoint, judge_loader):
    load, mesh = TWINS[name]
    verdicts = judge_loader(load, mesh, simulated=True, path=checkpoint(DEFECTS[name].architecture))
    assert {id: verdict.reason for id, verdict in verdicts.items() if verdict.status in ("failed", "error")} == {}
    assert verdicts[DEFECTS[name].caught_by].status == "passed"
