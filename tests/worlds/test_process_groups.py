"""Loaders that call init_process_group themselves, with torchrun's environment: on this machine and on two nodes."""

from __future__ import annotations

import inspect
import os
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec

import pytest

from pytest_fsdp_meta.worlds import Engine, ForkServerEngine, World, WorldError, WorldSpec, current
from pytest_fsdp_meta.worlds.local.member import LocalMember
from pytest_fsdp_meta.worlds.rank.main import Assignment
from pytest_fsdp_meta.worlds.rank.process_groups import OPERATORS, SCHEMES, through_host
from pytest_fsdp_meta.worlds.spec import Location
from tests.conftest import Project
from tests.ray.ray_help import cluster_of, engine_of
from tests.world_help import listening, preload, total

RAY = pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed here; make ray has it")


@pytest.fixture(scope="module", params=["local", pytest.param("ray", marks=RAY)])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    with ExitStack() as stack:
        if request.param == "local":
            yield preload()
        else:
            yield stack.enter_context(engine_of(stack.enter_context(cluster_of(2))))


class TwoNodes(ForkServerEngine):
    """Starts each rank as if it were alone on a node that the others reach at ``address``."""

    def __init__(self, address: str) -> None:
        super().__init__(preload().sources)
        self._address = address

    def start(self) -> None:
        preload().start()

    def ready(self) -> None:
        preload().ready()

    def launch_rank(self, task: Assignment) -> LocalMember:
        rank = task.place.rank
        place = Location(rank, 0, 1, group_rank=rank, group_size=task.spec.size, address=self._address)
        return preload().launch_rank(replace(task, place=place))


def world(engine: Engine, size: int = 2, timeout: float = 60.0) -> World:
    return World(WorldSpec({"dp": size}, timeout=timeout, process_group="loader"), engine)


def join(method: str, **given: int) -> None:
    """Make a process group as loaders do: from the environment, or with an address made from it."""
    import torch.distributed as dist

    if method == "tcp":
        method = f"tcp://{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        given = {"rank": int(os.environ["RANK"]), "world_size": int(os.environ["WORLD_SIZE"])} | given
    dist.init_process_group("gloo", init_method=method, **given)


def test_ranks_on_one_machine_listen_on_loopback_alone() -> None:
    """Rank 0 serves the store; each rank of gloo listens for the others."""

    def make_group() -> None:
        import torch.distributed as dist

        dist.init_process_group("gloo")

    for made_by in ("plugin", "loader"):
        with World(WorldSpec({"dp": 2}, process_group=made_by), preload()) as ranks:
            if made_by == "loader":
                assert ranks.run(listening) == [["127.0.0.1"], []]
                ranks.run(make_group)
            ranks.run(total, 1.0)
            assert ranks.run(listening) == [["127.0.0.1"] * 2, ["127.0.0.1"]]
    with World(WorldSpec({"dp": 16}, simulated=(0, 15)), preload()) as ranks:
        assert ranks.run(listening) == [["127.0.0.1"], []]


def _ipv6_loopback() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


@pytest.mark.parametrize(
    "address",
    [
        pytest.param("127.0.0.2", marks=pytest.mark.skipif(sys.platform != "linux", reason="only Linux has it")),
        pytest.param("::1", marks=pytest.mark.skipif(not _ipv6_loopback(), reason="no IPv6 here")),
    ],
)
def test_the_store_of_several_nodes_listens_at_their_address_alone(address: str) -> None:
    """The nodes are one machine here, at an address that is not the usual one."""
    with World(WorldSpec({"dp": 2}), TwoNodes(address)) as ranks:
        assert ranks.run(total, 1.0) == [1.0, 1.0]
        at_work = ranks.run(listening)
        assert (at_work[0].count(address), at_work[1].count(address)) == (1, 0)
        assert {one for rank in at_work for one in rank} == {address, "127.0.0.1"}


@pytest.mark.parametrize("method", ["env://", "tcp"])
def test_groups_made_in_turn_meet_through_the_environment(engine: Engine, method: str) -> None:
    def meet() -> list[object]:
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh

        seen: list[object] = []
        for name in ("first", "second"):
            join(method)
            mesh = init_device_mesh("cpu", (current().world_size,), mesh_dim_names=(name,))
            seen += [dist.get_rank() == current().rank, total(1.0), mesh.mesh_dim_names]
            if name == "first" and current().rank == 1:
                time.sleep(0.5)  # so that rank 0 is back first, and would read what rank 1 has left in the store
            dist.destroy_process_group()
        return seen

    with world(engine) as ranks:
        assert ranks.run(meet) == [[True, 1.0, ("first",), True, 1.0, ("second",)]] * 2
        assert ranks.run(meet) == [[True, 1.0, ("first",), True, 1.0, ("second",)]] * 2, "and in another call"


def test_a_loader_may_serve_a_store_of_its_own_as_well(engine: Engine) -> None:
    """Rank 0 serves it on a free port, and sends the port to the others through the process group."""

    def meet() -> list[bytes]:
        from datetime import timedelta

        import torch.distributed as dist

        join("env://")
        mine = dist.TCPStore(os.environ["MASTER_ADDR"], 0, is_master=True) if current().rank == 0 else None
        port: list[object] = [mine and mine.port]
        dist.broadcast_object_list(port)
        store = mine or dist.TCPStore(os.environ["MASTER_ADDR"], port[0], timeout=timedelta(seconds=30))
        store.set(str(current().rank), str(current().rank))
        found = [store.get(str(rank)) for rank in range(2)]
        dist.barrier()
        return found

    with world(engine) as ranks:
        assert ranks.run(meet) == [[b"0", b"1"]] * 2


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"world_size": 3}, "ranks 0, 1 raised ValueError: init_process_group(world_size=3) in a world of 2"),
        ({"rank": 0}, "rank 1 raised ValueError: init_process_group(rank=0) on rank 1 of a world of 2"),
        ({"rank": 2, "world_size": 4}, "init_process_group(rank=2, world_size=4) on rank "),
    ],
)
@pytest.mark.parametrize("method", ["env://", "tcp"])
def test_a_group_that_no_rank_could_form_is_an_error_at_once(
    engine: Engine, method: str, given: dict[str, int], says: str
) -> None:
    """They would wait for each other until the time is up."""
    with pytest.raises(WorldError) as caught, world(engine, timeout=300.0) as ranks:
        ranks.run(join, method, **given)
    assert says in caught.value.summary
    assert caught.value.summary.endswith("or take them from the environment (RANK, WORLD_SIZE)")


def test_a_group_of_one_rank_waits_for_no_other(engine: Engine) -> None:
    def meet() -> tuple[int, float]:
        import torch.distributed as dist

        join("env://", rank=0, world_size=1)
        return dist.get_world_size(), total(1.0)

    with world(engine) as ranks:
        assert ranks.run(meet) == [(1, 0.0)] * 2


def test_a_collective_without_a_group_is_an_error(engine: Engine) -> None:
    def meet() -> None:
        current().barrier()

    with pytest.raises(WorldError) as caught, world(engine) as ranks:
        ranks.run(meet)
    assert caught.value.summary.startswith("ranks 0, 1 raised ValueError: Default process group has not been init")


def test_an_address_of_the_loaders_own(engine: Engine) -> None:
    """A loader may ignore the environment and serve a store of its own on a port of its choice."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]

    def meet(port: int) -> float:
        import torch.distributed as dist

        os.environ.pop("TORCHELASTIC_USE_AGENT_STORE")
        dist.init_process_group(
            "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=current().rank, world_size=current().world_size
        )
        return total(1.0)

    with world(engine) as ranks:
        assert ranks.run(meet, port) == [1.0, 1.0]


def test_torch_still_has_the_private_names_that_process_groups_need() -> None:
    from torch.distributed import ProcessGroup

    assert set(SCHEMES) <= set(import_module("torch.distributed.rendezvous")._rendezvous_handlers)
    assert callable(ProcessGroup._get_sequence_number_for_group)
    helper = import_module("torch.distributed.distributed_c10d")._new_process_group_helper
    named = list(inspect.signature(helper).parameters)
    assert named[:5] == ["group_size", "group_rank", "global_ranks_in_group", "backend", "store"]
    assert {"backend_options", "device_id"} <= set(named[6:])


AGAIN = """
import torch.distributed as dist

@fsdp_conformance(process_group="loader", only=["no_meta_params", "params_equal_reference", "dcp_round_trip"])
def test_again(fsdp):
    dist.init_process_group("gloo")
    dist.barrier()
    dist.destroy_process_group()
    dist.init_process_group("gloo")
    model = build()
    fully_shard(model)
    return Subject(model, reference=build)
"""

MISUSED = """
import torch.distributed as dist


@fsdp_conformance(process_group="loader", only=["no_meta_params"])
def test_ends_it(fsdp):
    dist.init_process_group("gloo")
    model = build()
    fully_shard(model)
    dist.destroy_process_group()
    return model


@fsdp_conformance(process_group="loader", only=["no_meta_params"])
def test_makes_it_twice(fsdp):
    dist.init_process_group("gloo")
    dist.init_process_group("gloo")


@fsdp_conformance(only=["no_meta_params"])
def test_has_one_already(fsdp):
    dist.init_process_group("gloo")
"""


def test_a_loader_that_makes_the_group_passes_the_checks(project: Project) -> None:
    project.loaders(AGAIN)
    project.run().assert_outcomes(passed=3)


def test_errors_about_a_misused_process_group(project: Project) -> None:
    project.loaders(MISUSED)
    result = project.run()
    result.assert_outcomes(errors=3)
    tests = ("test_ends_it", "test_makes_it_twice", "test_has_one_already")
    messages = {line for line in result.outlines if line.startswith(tuple(f"{test}: " for test in tests))}
    assert messages == {
        "test_ends_it: the loader destroyed the process group (destroy_process_group) that its model is sharded over, "
        "and the checks train and save the model; leave the group to the plugin, which destroys it with the ranks",
        "test_makes_it_twice: ranks 0, 1 raised ValueError: trying to initialize the default process group twice!",
        "test_has_one_already: the loader calls init_process_group, but the plugin has already created the process "
        "group; call it only if torch.distributed.is_initialized() is false, or set "
        '@fsdp_conformance(process_group="loader")',
    }


def gather_and_reduce_through_the_host() -> list[bool]:
    """Run each collective as torch does and through the host, which on a CPU is the same memory."""
    import torch
    import torch.distributed as dist

    functional, group = torch.ops._c10d_functional, dist.group.WORLD.group_name
    tensor = torch.arange(8.0).reshape(4, 2) * (1 + current().rank)
    calls = {
        "all_gather_into_tensor": (tensor, 2, group),
        "all_gather_into_tensor_coalesced": ([tensor, tensor[:2]], 2, group),
        "reduce_scatter_tensor": (tensor, "sum", 2, group),
        "reduce_scatter_tensor_coalesced": ([tensor, tensor[:2]], "sum", 2, group),
        "all_to_all_single": (tensor, [2, 2], [2, 2], group),
    }
    assert calls.keys() == set(OPERATORS)
    same = []
    for name, args in calls.items():
        expected, found = getattr(functional, name)(*args), through_host(name)(*args)
        lists = (expected, found) if isinstance(expected, list) else ([expected], [found])
        same.append(all(map(torch.equal, (functional.wait_tensor(one) for one in lists[0]), lists[1])))
    return same


def test_collectives_through_the_host_give_the_same() -> None:
    """Where GPUs share a gloo group, DTensors are gathered like this; no GPU is needed to compare the results."""
    with World(WorldSpec({"dp": 2}), preload()) as ranks:
        assert ranks.run(gather_and_reduce_through_the_host) == [[True] * len(OPERATORS)] * 2
