"""Worlds on a Ray cluster: the places of ranks, lost nodes, and whole pytest runs."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray", reason="Ray is not installed here; make ray has it")

from pytest_fsdp_meta.worlds import RayEngine, World, WorldError, WorldSpec, current
from pytest_fsdp_meta.worlds.ray import engine as ray_engine
from pytest_fsdp_meta.worlds.ray.engine import choose_seats
from tests.conftest import Project
from tests.plugin.test_outcomes import WORDS
from tests.ray.ray_help import NODE, cluster_of, engine_of
from tests.world_help import SOON, assert_gone, ended_at_last, environment, is_running, run_script, total
from tests.worlds.test_faults import on_rank

PLACES = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "WORLD_SIZE", "ROLE_RANK")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    with cluster_of(2) as started:
        yield started


@pytest.fixture(scope="module")
def engine(cluster: Any) -> Iterator[RayEngine]:
    with engine_of(cluster) as connected:
        yield connected


def world_of(engine: RayEngine, size: int, timeout: float = 60.0) -> World:
    return World(WorldSpec({"dp": size}, timeout=timeout), engine)


def test_ranks_are_spread_over_the_nodes_and_numbered_like_torchrun(engine: RayEngine) -> None:
    with world_of(engine, 4) as world:
        environments = world.run(environment, (*PLACES, "MASTER_ADDR", "MASTER_PORT", "GLOO_SOCKET_IFNAME"))
        assert world.run(total, 1.0) == [6.0] * 4
        assert world.run(lambda: (current().rank, current().local_rank)) == [(0, 0), (1, 1), (2, 0), (3, 1)]
    assert [[environ[name] for name in PLACES] for environ in environments] == [
        ["0", "0", "2", "0", "2", "4", "0"],
        ["1", "1", "2", "0", "2", "4", "1"],
        ["2", "0", "2", "1", "2", "4", "2"],
        ["3", "1", "2", "1", "2", "4", "3"],
    ]
    import ray

    node = ray.util.get_node_ip_address()
    addresses = {(environ["MASTER_ADDR"], environ["GLOO_SOCKET_IFNAME"] != "lo") for environ in environments}
    assert addresses == {(node, node != "127.0.0.1")}
    assert len({environ["MASTER_PORT"] for environ in environments}) == 1


def test_two_ranks_use_two_nodes_and_one_rank_uses_loopback(engine: RayEngine) -> None:
    with world_of(engine, 2) as world, world_of(engine, 1) as alone:
        assert [environ["GROUP_RANK"] for environ in world.run(environment, ["GROUP_RANK"])] == ["0", "1"]
        assert alone.run(environment, ["MASTER_ADDR", "GLOO_SOCKET_IFNAME"]) == [
            {"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}
        ]
        assert world.run(total, 1.0) == [1.0, 1.0], "both worlds run at the same time, in the same seats"
    assert len(engine.seats) <= 4


def test_a_world_larger_than_the_cluster(engine: RayEngine) -> None:
    began = time.monotonic()
    with pytest.raises(WorldError) as caught:
        world_of(engine, 5).start()
    assert str(caught.value) == "a world of 5 needs 5 CPUs, but the Ray cluster has 4"
    assert time.monotonic() - began < SOON
    with world_of(engine, 4) as world:
        assert world.run(total, 1.0) == [6.0] * 4, "the refused world changed nothing"


def test_waiting_for_reserved_seats_fails_after_the_timeout(cluster: Any, engine: RayEngine) -> None:
    import ray
    from ray.util import placement_group, remove_placement_group

    engine.release_seats()
    taken = placement_group([{"CPU": 1}] * 3)
    ray.get(taken.ready(), timeout=60)
    with pytest.raises(WorldError) as caught:
        world_of(engine, 2, timeout=2.0).start()
    assert re.fullmatch(
        r"a world of 2 waited [23] s for room for 2 ranks in the Ray cluster \(free CPUs: 1\)", str(caught.value)
    )
    remove_placement_group(taken)
    with world_of(engine, 2) as world:
        assert world.run(total, 1.0) == [1.0, 1.0]


def test_seats_are_released_for_a_waiting_session(
    cluster: Any, engine: RayEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_engine, "HOLD", 0.0)
    with world_of(engine, 4) as world:
        assert world.run(total, 1.0) == [6.0] * 4
    results: list[list[float]] = []

    def use(other: RayEngine) -> None:
        with world_of(other, 2) as world:
            results.append(world.run(total, 1.0))
        other.release_seats()

    with engine_of(cluster) as other:
        other.start()
        waiting = threading.Thread(target=use, args=(other,))
        waiting.start()
        deadline = time.monotonic() + SOON
        while not engine._running.is_wanted():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        with world_of(engine, 4) as world:  # releases its seats, then waits for all four of them
            assert results == [[1.0, 1.0]]
            assert world.run(total, 1.0) == [6.0] * 4
        waiting.join(SOON)


def actor_of(engine: RayEngine, rank: int) -> Any:
    """Return the actor of one rank of a world of two."""
    seat = choose_seats(engine.seats, 2)[rank]
    return next(
        actor for group in engine._groups for actor, own in zip(group.actors, group.seats, strict=True) if own == seat
    )


def test_a_killed_host(engine: RayEngine) -> None:
    import ray

    world = world_of(engine, 2)
    world.start()
    pids = world.run(os.getpid)
    ray.kill(actor_of(engine, 1))
    with pytest.raises(WorldError) as caught:
        world.run(total, 1.0)
    assert re.fullmatch(
        r"rank 1 was lost with its actor on node \S+ \(\w{8}\); Ray's logs there may say why it ended",
        caught.value.summary,
    )
    assert_gone(pids)
    with world_of(engine, 2) as world:
        assert world.run(total, 1.0) == [1.0, 1.0]


def test_a_node_killed_during_a_test(cluster: Any, engine: RayEngine) -> None:
    engine.release_seats()
    node = cluster.add_node(**NODE)
    world = world_of(engine, 3)
    world.start()
    pids = world.run(os.getpid)
    lost = [seat.node for seat in choose_seats(engine.seats, 3)].index(node.node_id)
    threading.Timer(1.0, cluster.remove_node, (node,), {"allow_graceful": False}).start()
    began = time.monotonic()
    with pytest.raises(WorldError) as caught:
        world.run(on_rank(lost, lambda: time.sleep(1000)))
    assert time.monotonic() - began < SOON
    address = re.escape(engine.seats[0].address)
    assert re.fullmatch(rf"rank {lost} was lost with its node {address} \({node.node_id[:8]}\)", caught.value.summary)
    assert all(one.lost_peer for one in caught.value.failures[1:])
    assert_gone(pids)
    with pytest.raises(WorldError) as caught:
        world_of(engine, 6).start()
    assert str(caught.value) == "a world of 6 needs 6 CPUs, but the Ray cluster has 4"
    with world_of(engine, 3) as smaller:
        assert smaller.run(total, 1.0) == [3.0] * 3
        places = [one["GROUP_RANK"] for one in smaller.run(environment, ["GROUP_RANK"])]
        assert places in (["0", "0", "1"], ["0", "1", "1"]), "on the two remaining nodes"


PARENT = """
import os, sys, time
from pytest_fsdp_meta.worlds import RayEngine, Sources, World, WorldSpec
engine = RayEngine("{address}", Sources(tuple(sys.path)))
world = World(WorldSpec({{"dp": 2}}), engine)
world.start()
print(*world.run(os.getpid), flush=True)
world.run(time.sleep, 1000)
"""


@pytest.mark.parametrize("embedded", [False, True], ids=["cluster", "embedded"])
def test_ranks_end_when_their_parent_is_killed(cluster: Any, engine: RayEngine, tmp_path: Path, embedded: bool) -> None:
    engine.release_seats()
    text = PARENT.format(address="local" if embedded else cluster.address)
    with ended_at_last(run_script(text, tmp_path)) as process:
        assert process.stdout is not None
        # Skip Ray's messages about nodes that were lost before.
        line = next(line for line in process.stdout if re.fullmatch(r"\d+ \d+\n", line))
        pids = [int(word) for word in line.split()]
        assert len(pids) == 2
        assert all(map(is_running, pids))
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert_gone(pids)


LOADERS = """
@fsdp_conformance(world_size=2)
def test_good(fsdp):
    return load(fsdp, reference=build, batch=batch, loss=loss)


@fsdp_conformance(world_size=2)
def test_broken(fsdp):
    model = build()
    fully_shard(model, mesh=fsdp.mesh)
    with torch.no_grad():
        model.weight.mul_(1 + fsdp.rank)
    return Subject(model, reference=build, batch=batch, loss=loss)


def batch(step):
    return {"x": torch.ones(4, 4) * step}


def loss(model, batch):
    return model(batch["x"]).square().mean()
"""


def verdicts(project: Project, *args: str) -> dict[str, str]:
    result = project.run("-v", *args)
    return dict(re.findall(rf"^(\S+::\S+) ({WORDS})", result.stdout.str(), re.MULTILINE))


def test_a_loader_gets_the_same_outcomes_on_two_nodes_as_on_one_machine(
    cluster: Any, engine: RayEngine, project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.release_seats()
    project.loaders(LOADERS)
    local = verdicts(project)
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    remote = verdicts(project, "--fsdp-engine=ray")
    assert remote == local
    assert len(local) > 80
    assert local["test_it.py::test_good[params_equal_reference]"] == "PASSED"
    assert local["test_it.py::test_broken[params_equal_reference]"] == "FAILED"


def test_an_embedded_cluster_ends_with_the_run(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("HOME", str(project.path))
    project.loaders(
        """
        import os, time

        @fsdp_conformance(world_size=4, only=["no_meta_params"])
        def test_it(fsdp):
            note(f"{os.getpid()}")
            return load(fsdp)

        @fsdp_conformance(world_size=2, only=["no_meta_params"])
        def test_raises(fsdp):
            raise ValueError("not today")
        """
    )
    result = project.run("--fsdp-engine=ray")
    result.assert_outcomes(passed=1, errors=1)
    assert "ranks 0, 1 raised ValueError: not today" in result.stdout.str()
    assert "--fsdp-engine=ray" in result.stdout.str(), "the rerun command has the option"
    assert_gone(map(int, project.notes))
    assert_gone(_processes_in(project.path))
    assert not (project.path / ".ray").exists(), "Ray would store a token there"


def _processes_in(folder: Path) -> list[int]:
    """Return the processes that run in this folder, without this one; some may be about to end."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if os.readlink(entry / "cwd") == str(folder) and int(entry.name) != os.getpid():
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def test_an_address_without_a_cluster(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    project.loaders("@fsdp_conformance(world_size=2)\ndef test_it(fsdp): return load(fsdp)")
    result = project.run("--fsdp-engine=ray")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    text = result.stdout.str() + result.stderr.str()
    assert "no Ray cluster answers at 127.0.0.1:1; check RAY_ADDRESS" in text
    assert "Traceback" not in text


def test_the_pytest_process_imports_no_torch(cluster: Any, engine: RayEngine, tmp_path: Path) -> None:
    engine.release_seats()
    text = f"""
import sys
from pytest_fsdp_meta.worlds import RayEngine, Sources, World, WorldSpec
engine = RayEngine("{cluster.address}", Sources(tuple(sys.path)))
with World(WorldSpec({{"dp": 2}}), engine) as world:
    print(world.run("tests.world_help:total", 1.0), "torch" in sys.modules)
engine.close()
"""
    with ended_at_last(run_script(text, tmp_path)) as process:
        assert process.communicate(timeout=120)[0].endswith("[1.0, 1.0] False\n")
