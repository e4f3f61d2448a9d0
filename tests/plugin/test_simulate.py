"""Loaders in worlds that do not run: ``simulate`` of the marker, ``--fsdp-simulate``, and what they may not ask for."""

from __future__ import annotations

import pytest
from safetensors.torch import save
from torch import nn

from pytest_fsdp_meta.catalogue import built_in
from tests.conftest import Project, errors

pytestmark = pytest.mark.slow

LOADER = """
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from pytest_fsdp_meta import Subject, fsdp_conformance


def build():
    return nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))


def load(fsdp, mesh=None):
    mesh = mesh or fsdp.mesh
    with torch.device("meta"):
        model = build()
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model.to_empty(device=fsdp.device)


def batch(step):
    return {"x": torch.ones(8, 64)}


def loss(model, batch):
    return model(batch["x"]).pow(2).mean()
"""
STRUCTURE = ["names_match_reference", "shards_tile_the_tensor", "memory_falls_with_ranks", "communication_scales"]
ONLY = f"only={STRUCTURE}"


def test_a_loader_is_judged_at_a_size_that_does_not_run(project: Project) -> None:
    project.write(
        "test_it.py",
        f"""{LOADER}
@fsdp_conformance(simulate=64, {ONLY})
def test_loader(fsdp):
    assert fsdp.simulated and fsdp.device.type == "meta"
    assert int(os.environ["WORLD_SIZE"]) == fsdp.world_size == dist.get_world_size()
    assert (fsdp.rank, fsdp.world_size) in [(0, 64), (63, 64), (0, 8), (7, 8)]
    assert int(os.environ["RANK"]) == fsdp.rank == dist.get_rank()
    return Subject(load(fsdp), reference=build, batch=batch, loss=loss, optimizer=torch.optim.AdamW)
""",
    )
    result = project.run("--fsdp-report=report")
    result.assert_outcomes(passed=4)
    result.stdout.fnmatch_lines(["*::test_loader, world of 64, simulated by 2 of its ranks: 4 passed*"])
    page = (project.path / "report" / "index.html").read_text()
    assert "rank 0: dim 0: 0 of 64; rank 63: dim 0: 63 of 64" in page
    assert "Memory and traffic by world size" in page
    assert "does not have it" not in page  # ranks that did not run
    assert 'class="meta"' not in page
    table = page[page.index("What one rank of 64 sends for each module in a step") :]
    assert "<code>*</code>" in table
    assert "<code>0</code>" not in table


def test_several_sizes_are_several_worlds(project: Project) -> None:
    project.write(
        "test_it.py",
        f"""{LOADER}
@fsdp_conformance(simulate=(16, 64), only=["shards_tile_the_tensor"])
def test_loader(fsdp):
    return load(fsdp)
""",
    )
    result = project.run("-v")
    result.assert_outcomes(passed=2)
    result.stdout.fnmatch_lines(["*test_loader[[]simulated16-shards_tile*", "*test_loader[[]simulated64-shards_tile*"])


def test_the_author_chooses_the_ranks_that_run(project: Project) -> None:
    text = f"""{LOADER}
@fsdp_conformance(simulate=32, simulate_ranks=[5], only=["shards_tile_the_tensor"])
def test_loader(fsdp):
    assert fsdp.rank in (0, 5)
    return load(fsdp)
"""
    project.write("test_it.py", text)
    project.run().assert_outcomes(passed=1)
    for wrong, message in (
        ("[32]", "simulate_ranks: there is no rank 32 in a world of 32"),
        ("-1", "simulate_ranks=-1 should be a list of ranks such as [1, 511]"),
    ):
        project.write("test_it.py", text.replace("[5]", wrong))
        assert errors(project.run()) == [f"test_it.py::test_loader: @fsdp_conformance: {message}"]


def test_the_option_simulates_the_loaders_that_it_can(project: Project) -> None:
    project.write(
        "test_it.py",
        f"""{LOADER}
@fsdp_conformance(world_size=2, only=["shards_tile_the_tensor", "no_uninitialized_memory"])
def test_loader(fsdp):
    return load(fsdp)

@fsdp_conformance(mesh={{"dp_replicate": 2, "dp_shard": 2}}, only=["shards_tile_the_tensor"])
def test_hybrid(fsdp):
    assert tuple(fsdp.mesh.shape) == (2, 16)
    return load(fsdp)

@fsdp_conformance(world_size=2, simulate=False, only=["shards_tile_the_tensor"])
def test_real(fsdp):
    assert fsdp.world_size == 2 and not fsdp.simulated
    return load(fsdp)

@fsdp_conformance(mesh={{"tp": 2}}, only=["shards_tile_the_tensor"])
def test_tp(fsdp):
    return load(fsdp)
""",
    )
    result = project.run("--fsdp-simulate=32", "-rs", "-p", "no:randomly")
    result.assert_outcomes(passed=3, skipped=2)
    checks = len(built_in().ids_for(simulated=True))
    result.stdout.fnmatch_lines([f"fsdp: *, {checks} checks"])
    result.stdout.fnmatch_lines(["*simulated: the ranks have no values, and send nothing*"])
    result.stdout.fnmatch_lines(["*--fsdp-simulate: mesh {'tp': 2} has no dimension that shards data and could be*"])
    (line,) = errors(project.run("--fsdp-simulate=31"))
    assert "--fsdp-simulate=31: mesh " in line
    assert line.endswith(" does not fit a world of 31, which is not a multiple of 2")


def test_a_loader_may_make_its_own_groups(project: Project) -> None:
    project.write(
        "test_it.py",
        f"""{LOADER}
from torch.distributed import init_device_mesh, init_process_group

@fsdp_conformance(process_group="loader", {ONLY})
def test_own_group(fsdp):
    init_process_group("cpu:gloo,cuda:nccl")
    assert (dist.get_rank(), dist.get_world_size()) == (fsdp.rank, fsdp.world_size)
    mesh = init_device_mesh("cpu", (2, fsdp.world_size // 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    return Subject(load(fsdp, mesh), reference=build, batch=batch, loss=loss)

@fsdp_conformance({ONLY})
def test_further_groups(fsdp):
    dist.barrier(dist.new_group(backend="gloo"))
    dist.destroy_process_group()
    init_process_group("gloo", init_method="env://")
    mesh = init_device_mesh("cuda", (fsdp.world_size,), mesh_dim_names=("dp_shard",))
    assert mesh == init_device_mesh("cpu", (fsdp.world_size,), mesh_dim_names=("dp_shard",))
    return Subject(load(fsdp, mesh["dp_shard"]), reference=build, batch=batch, loss=loss)

@fsdp_conformance(process_group="loader", {ONLY})
def test_too_large(fsdp):
    init_process_group("gloo", rank=fsdp.rank, world_size=65)
""",
    )
    result = project.run("--fsdp-simulate=64", "-p", "no:randomly")
    result.assert_outcomes(passed=8, errors=1)
    result.stdout.fnmatch_lines([
        "*ValueError: init_process_group(world_size=65) in a world of 64: leave rank and world_size out*",
        "* 64 ranks: * of parameters on every rank* and sends * over dp_shard, * over dp_replicate",
        "* peaks at * in backward*",
    ])  # fmt: skip


def test_stages_of_a_pipeline_and_what_ranks_write(project: Project) -> None:
    project.write(
        "test_it.py",
        f"""{LOADER}
@fsdp_conformance(mesh={{"pp": 2, "dp_shard": 16}}, simulate=True, only=["shards_tile_the_tensor",
                  "same_manifest_on_every_rank", "optimizer_owns_parameters", "memory_falls_with_ranks"])
def test_loader(fsdp):
    print("stage", fsdp.mesh["pp"].get_local_rank())
    with torch.device("meta"):
        model = build()
    model[1 - fsdp.mesh["pp"].get_local_rank()] = nn.Identity()
    fully_shard(model, mesh=fsdp.mesh["dp_shard"])
    model.to_empty(device=fsdp.device)
    held = [*model.parameters()][1:] if fsdp.rank == 31 else model.parameters()
    return Subject(model, reference=build, optimizer=torch.optim.AdamW(held))
""",
    )
    result = project.run()
    result.assert_outcomes(passed=3, failed=1)
    result.stdout.fnmatch_lines(["*1.weight*", "*rank 31*"])
    result.stdout.fnmatch_lines(["*rank 31*", "stage 1"])
    project.run("-s").stdout.fnmatch_lines(["[[]rank 31[]] stage 1"])


def test_a_smaller_world_that_fails_leaves_the_rest_judged(project: Project) -> None:
    project.write(
        "test_it.py",
        f"""{LOADER}
@fsdp_conformance(simulate=64, {ONLY})
def test_loader(fsdp):
    if fsdp.world_size < 64:
        raise RuntimeError("too few ranks")
    return Subject(load(fsdp), reference=build, batch=batch, loss=loss)
""",
    )
    result = project.run("-rs")
    result.assert_outcomes(passed=2, skipped=2)
    result.stdout.fnmatch_lines([
        "* 8 ranks: not simulated (*RuntimeError: too few ranks)",
        "*64 ranks: * of parameters on every rank*",
        "*no world of 8 could be simulated: *RuntimeError: too few ranks [[]*]",
    ])  # fmt: skip


def test_each_rank_has_the_same_rows_in_every_world(project: Project) -> None:
    project.write(
        "test_it.py",
        f"""{LOADER}
def rows(step):
    return {{"x": torch.ones(2 * dist.get_world_size(), 64)}}

def gathering(model, batch):
    out = model(batch["x"])
    assert len(out) == 2
    return out.pow(2).mean()

@fsdp_conformance(simulate=64, only=["communication_scales"])
def test_loader(fsdp):
    return Subject(load(fsdp), batch=rows, loss=gathering)
""",
    )
    project.run("-rs").assert_outcomes(passed=1)


SHAPES = """
from safetensors.torch import load_file


def filled(fsdp, path):
    model = load(fsdp)
    stored = load_file(path / "model.safetensors")
    assert {tensor.device.type for tensor in stored.values()} == {"meta"}
    stored = {name: distribute_tensor(tensor.cpu(), fsdp.mesh, [Shard(0)]) for name, tensor in stored.items()}
    model.load_state_dict(stored, assign=True)
    return Subject(model, reference=build)
"""


def test_a_checkpoint_of_shapes_is_read_as_one_with_values(project: Project) -> None:
    project.write(
        "test_it.py",
        f"""{LOADER}
from pathlib import Path
from torch.distributed.tensor import Shard, distribute_tensor
{SHAPES}
@fsdp_conformance(simulate=16, {ONLY})
def test_of_a_model(fsdp):
    return filled(fsdp, fsdp.checkpoint_of_shapes(build()))

@fsdp_conformance(simulate=16, {ONLY})
def test_of_a_folder(fsdp):
    path = fsdp.checkpoint_of_shapes(Path("headers"))
    assert (path / "config.json").read_text() == "config"
    return filled(fsdp, path)

@fsdp_conformance(simulate=16, {ONLY})
def test_value(fsdp):
    stored = load_file(fsdp.checkpoint_of_shapes(build()) / "model.safetensors")
    return load(fsdp) if stored["0.weight"].max() > 0 else None

@fsdp_conformance(world_size=2, {ONLY})
def test_real(fsdp):
    assert fsdp.checkpoint_of_shapes("headers") == Path("headers")
    fsdp.checkpoint_of_shapes(build())

@fsdp_conformance(simulate=16, only=["shards_tile_the_tensor"])
def test_nothing_there(fsdp):
    fsdp.checkpoint_of_shapes("nowhere")
""",
    )
    (project.path / "headers").mkdir()
    (project.path / "headers" / "config.json").write_text("config")
    whole = save({name: tensor.contiguous() for name, tensor in nn.Sequential(linear(), linear()).state_dict().items()})
    (project.path / "headers" / "model.safetensors").write_bytes(whole[: 8 + int.from_bytes(whole[:8], "little")])
    result = project.run("-p", "no:randomly")
    result.assert_outcomes(passed=6, skipped=2, errors=3)
    result.stdout.fnmatch_lines([
        "*: the loader asks for a value of a tensor, which simulated ranks do not have (test_it.py:*): *",
        "*: checkpoint_of_shapes(model) has no values, which ranks that run need; give a checkpoint",
        "*: checkpoint_of_shapes('nowhere'): the folder has no .safetensors file",
    ])  # fmt: skip


def linear() -> nn.Linear:
    return nn.Linear(64, 64)


ASKING = {
    "value": (
        "model = load(fsdp); print(model[0].weight.to_local().sum().item())",
        "the loader asks for a value of a tensor, which simulated ranks do not have (test_it.py:*): *",
    ),
    "array": (
        "model = load(fsdp); print(model[0].weight.to_local().numpy())",
        "the loader asks for a value of a tensor, which simulated ranks do not have (test_it.py:*): *numpy*",
    ),
    "list": (
        "print(torch.zeros(3, device=fsdp.device).tolist())",
        "the loader asks for a value of a tensor, which simulated ranks do not have (test_it.py:*): *tolist*",
    ),
    "indices": (
        "print(torch.zeros(3, device=fsdp.device).nonzero())",
        "the loader asks for a value of a tensor, which simulated ranks do not have (test_it.py:*): *nonzero*",
    ),
    "comparison": (
        "one = torch.zeros(3, device=fsdp.device); print(torch.equal(one, one.clone()))",
        "the loader asks for a value of a tensor, which simulated ranks do not have (test_it.py:*): *equal*",
    ),
    "object": (
        "objects = [None]; dist.broadcast_object_list(objects); model = objects[0]",
        "the loader calls torch.distributed.broadcast_object_list (test_it.py:*), which sends objects from rank to "
        "rank, but a simulated rank has no partner: compute them on each rank where fsdp.simulated is true",
    ),
    "object of any size": (  # what torch.empty() holds says how long the object is that no rank has sent
        "torch.empty = lambda size, **kw: torch.full((size,), 2**60, **kw); dist.broadcast_object_list([None], src=1)",
        "the loader calls torch.distributed.broadcast_object_list (test_it.py:*), which sends objects from rank to *",
    ),
    "object by name": (
        "from torch.distributed import all_gather_object; found = [None] * 16; all_gather_object(found, fsdp.rank)",
        "the loader calls torch.distributed.all_gather_object (test_it.py:*), which sends objects from rank to rank, *",
    ),
    "sum": (
        "count = torch.ones(1); dist.all_reduce(count); model = load(fsdp) if count == 64 else None",
        "the loader calls all_reduce with values (test_it.py:*), but a simulated rank has no partner: leave it out "
        "where fsdp.simulated is true",
    ),
    "value that was sent": (
        "count = torch.zeros(1); dist.broadcast(count, 0); model = load(fsdp) if count * 2 > 64 else None",
        "the loader reads (test_it.py:*) what broadcast (test_it.py:*) gets from other ranks, but a simulated "
        "rank has no partner: leave it out where fsdp.simulated is true",
    ),
    "value of each rank": (
        "count = torch.zeros(16); dist.all_to_all_single(count, torch.ones(16)); count.sum().item()",
        "the loader reads (test_it.py:*) what all_to_all (test_it.py:*) gets from other ranks, but *",
    ),
    "store": (
        'dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=False).get("ready")',
        "the loader calls get() of a store (test_it.py:*), which waits for other ranks, but a simulated rank has no "
        "partner: leave it out where fsdp.simulated is true",
    ),
    "store of the group": (
        "dist.distributed_c10d._get_default_store().add('ready', 1)",
        "the loader calls add() of a store (test_it.py:*), which waits for other ranks, *",
    ),
    "barrier with a timeout": (
        "dist.monitored_barrier()",
        "the loader calls what torch's fake process group cannot do (test_it.py:*): monitored_barrier is only * GLOO*",
    ),
    "CUDA": (
        "torch.cuda.synchronize()",
        "the loader asks CUDA for something (test_it.py:*), and simulated ranks have no GPU; use fsdp.device, or leave "
        "it out where fsdp.simulated is true",
    ),
    "device of CUDA": ("torch.cuda.set_device(0)", "the loader asks CUDA for something (test_it.py:*), *"),
    "memory": (
        "model = nn.Linear(100_000, 100_000)",
        "the loader allocates 37.3 GiB (test_it.py:*), and simulated ranks have no memory for values; build the model "
        "with torch.device('meta') and materialise its shards on fsdp.device",
    ),
    "memory of numpy": (
        "import numpy; print(numpy.ones((100_000, 100_000)))",
        "the loader allocates more than 2 GiB (test_it.py:*), and simulated ranks have no memory for values; build *",
    ),
}


def test_loaders_that_ask_for_what_is_not_there_are_told_where(project: Project) -> None:
    loaders = [
        f"""
@fsdp_conformance(simulate=16, only=["shards_tile_the_tensor"])
def test_{number}(fsdp):
    {line}
    return model
"""
        for number, (line, _) in enumerate(ASKING.values())
    ]
    project.write("test_it.py", LOADER + "".join(loaders))
    result = project.run("-p", "no:randomly")
    result.assert_outcomes(errors=len(ASKING))
    for number, (_, message) in enumerate(ASKING.values()):
        result.stdout.fnmatch_lines([f"test_{number}: {message}"])
    assert "Traceback" not in result.stdout.str()


def test_a_memory_error_of_the_author_is_kept(project: Project) -> None:
    project.write(
        "test_it.py",
        f"""{LOADER}
@fsdp_conformance(simulate=16, only=["shards_tile_the_tensor"])
def test_loader(fsdp):
    raise MemoryError("the pool of pinned buffers is empty")
""",
    )
    result = project.run()
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["test_loader: ranks 0, 15 raised MemoryError: the pool of pinned buffers is empty"])
