"""Ranks that a host starts, as on the machines of a Ray cluster, but tested without Ray.

Host and parent run in this process; the connections between them are the same as between machines.
"""

from __future__ import annotations

import os
import pickle
import re
import secrets
import signal
import socket
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from pytest_fsdp_meta.worlds import ForkServerEngine, Sources, World, WorldError, WorldSpec
from pytest_fsdp_meta.worlds.rank.main import Assignment
from pytest_fsdp_meta.worlds.ray import wire
from pytest_fsdp_meta.worlds.ray.cluster import Seat
from pytest_fsdp_meta.worlds.ray.engine import choose_seats, places_of
from pytest_fsdp_meta.worlds.ray.host import Host, LaunchRequest, localize
from pytest_fsdp_meta.worlds.ray.member import RemoteMember
from pytest_fsdp_meta.worlds.spec import Location
from tests.world_help import SOON, assert_gone, environment, is_running, me, preload, total
from tests.worlds.test_faults import on_rank

KEY = secrets.token_bytes(wire.KEY_BYTES)
LOCALHOST = "127.0.0.1"


@dataclass
class OneHost:
    """An engine that starts all ranks on one host."""

    host: Host
    cwd: str = ""
    shared: tuple[str, ...] = ()
    members: list[RemoteMember] = field(default_factory=list)
    sources: Sources = field(default_factory=Sources)
    modules: Sequence[str] = ()
    test_modules: Sequence[str] = ()
    worlds: int | None = None

    def start(self) -> None: ...

    def close(self) -> None: ...

    def launch(self, spec: WorldSpec, folder: Path, leftovers: Sequence[str]) -> Iterator[RemoteMember]:
        self.members = []
        for rank in range(spec.size):
            connect = lambda: wire.connect(LOCALHOST, self.host.port, KEY)  # noqa: E731
            member = RemoteMember(rank, lambda: "was lost with its host", connect, connect())
            environ = os.environ | {"ORIGIN": "parent", "TMPDIR": "/of/the/parent"}
            task = Assignment(
                Location(rank, rank, spec.size), spec, preload().sources, "", (), environ, self.cwd or os.getcwd()
            )
            member.start(LaunchRequest(task, self.shared, (*leftovers, *self.shared)))
            failure = member.await_start(60)
            if failure is not None:
                member.release()
                raise WorldError([failure], "starting")
            self.members.append(member)
            yield member


@pytest.fixture(scope="module")
def host() -> Host:
    return Host(ForkServerEngine(preload().sources), LOCALHOST, KEY)


@pytest.fixture
def engine(host: Host) -> OneHost:
    return OneHost(host)


def pair(engine: OneHost, timeout: float = 60.0) -> World:
    return World(WorldSpec({"dp": 2}, timeout=timeout), engine)


def test_calls_large_messages_and_output(engine: OneHost) -> None:
    size = 20 * 2**20
    with pair(engine) as world:
        assert world.run(total, 1.0) == [1.0, 1.0]
        results = world.run(lambda data: data + b"!", b"x" * size)
        assert [(len(one), one[-1:]) for one in results] == [(size + 1, b"!")] * 2
        world.run(print, "so far")
        assert world.outputs() == ["so far\n"] * 2
        assert world.run(me) == [(0, 2), (1, 2)], "reading the output leaves no message behind"
        pids = world.run(os.getpid)
    assert world.outputs() == ["so far\n"] * 2
    assert_gone(pids)


def test_some_environment_variables_come_from_the_node(engine: OneHost, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "of-the-node")
    monkeypatch.delenv("TMPDIR", raising=False)
    names = ("ORIGIN", "TMPDIR", "NCCL_SOCKET_IFNAME", "MASTER_ADDR")
    with pair(engine) as world:
        assert world.run(environment, names)[0] == {
            "ORIGIN": "parent",
            "TMPDIR": None,
            "NCCL_SOCKET_IFNAME": "of-the-node",
            "MASTER_ADDR": LOCALHOST,
        }


@pytest.mark.parametrize(
    ("act", "summary"),
    [
        (lambda: os._exit(7), "rank 1 exited with code 7 before it answered"),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "rank 1 was killed by SIGKILL"),
        (lambda: 1 // 0, "rank 1 raised ZeroDivisionError: integer division or modulo by zero"),
    ],
)
def test_failures_reach_the_parent(engine: OneHost, act: object, summary: str) -> None:
    world = pair(engine)
    world.start()
    pids = world.run(os.getpid)
    with pytest.raises(WorldError) as caught:
        world.run(on_rank(1, act))  # type: ignore[arg-type]
    assert caught.value.summary == summary
    assert_gone(pids)


def test_stacks_reach_the_parent(engine: OneHost) -> None:
    def oversleep() -> None:
        time.sleep(1000)

    with pytest.raises(WorldError) as caught, pair(engine, timeout=2.0) as world:
        world.run(on_rank(1, oversleep))
    assert re.fullmatch(
        r"rank 1 hung in oversleep, test_hosted_ranks.py:\d+; rank 0 waits in all_reduce, world_help.py:\d+",
        caught.value.summary,
    )
    assert "in oversleep" in str(caught.value)
    assert "in all_reduce" in str(caught.value)


def test_a_lost_connection_ends_the_rank_and_removes_the_shared_folders(host: Host, tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    engine = OneHost(host, shared=(str(shared),))
    world = pair(engine)
    world.start()
    pids = world.run(os.getpid)
    assert all(map(is_running, pids))
    for member in engine.members:
        member.release()  # closes the connection, as the system does when the parent is killed
    assert_gone(pids)
    deadline = time.monotonic() + SOON
    while shared.exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    world.close()


def test_shared_folders_remain_when_the_parent_ends_the_world(host: Host, tmp_path: Path) -> None:
    engine = OneHost(host, shared=(str(tmp_path),))
    with pair(engine) as world:
        pids = world.run(os.getpid)
    assert_gone(pids)
    with pair(engine) as world, pytest.raises(WorldError):
        world.run(os._exit, 1)
    assert tmp_path.exists()


def test_a_node_without_the_project_folder(host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(WorldError) as caught:
        pair(OneHost(host, cwd="/not/here")).start()
    assert str(caught.value) == (
        "node 127.0.0.1 has no folder /not/here, where pytest runs; every node needs the project at this path"
    )
    assert not list(tmp_path.glob("fsdp-world-*"))


def test_a_node_that_cannot_see_the_folder_of_the_trial(host: Host) -> None:
    with pytest.raises(WorldError) as caught:
        pair(OneHost(host, shared=("/not/shared",))).start()
    assert str(caught.value) == (
        "node 127.0.0.1 cannot see /not/shared, where the reference is stored; set TMPDIR to a folder that all nodes "
        "share"
    )


def test_a_node_that_cannot_start_a_rank() -> None:
    class Broken(ForkServerEngine):
        def ready(self) -> None:
            raise EOFError("the server is gone")

    with pytest.raises(WorldError) as caught:
        pair(OneHost(Host(Broken(preload().sources), LOCALHOST, KEY))).start()
    assert str(caught.value) == "node 127.0.0.1 could not start a rank: EOFError: the server is gone"


def test_localize_merges_the_environments_of_parent_and_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/of/the/node")
    monkeypatch.setenv("ONLY_ON_THE_NODE", "1")
    environ = {"HOME": "/home/of/the/parent", "PATH": "/parent", "ORIGIN": "parent", "GLOO_SOCKET_IFNAME": "parent0"}
    task = Assignment(Location(0, 0, 1), WorldSpec({"dp": 1}), Sources(), "", (), environ, str(tmp_path))
    localized = localize(LaunchRequest(task), tmp_path, LOCALHOST)
    assert localized.environ["HOME"] == "/home/of/the/node"
    assert localized.environ["PATH"] == os.environ["PATH"]
    assert localized.environ["ORIGIN"] == "parent"
    assert "ONLY_ON_THE_NODE" not in localized.environ
    assert localized.folder == str(tmp_path)


def test_a_client_with_another_key_is_rejected_and_blocks_nobody(engine: OneHost) -> None:
    with socket.create_connection((LOCALHOST, engine.host.port)) as silent:
        with pytest.raises(OSError):
            wire.connect(LOCALHOST, engine.host.port, b"0" * wire.KEY_BYTES)
        with socket.create_connection((LOCALHOST, engine.host.port)) as replaying:
            # Send the host's challenge back as our own, and then its answer back as our proof.
            replaying.settimeout(SOON)
            challenge = replaying.recv(wire.KEY_BYTES)
            replaying.sendall(challenge)
            replaying.sendall(replaying.recv(32))
            replaying.sendall(pickle.dumps(os.getpid))
            assert _rest(replaying) == b""
        with pair(engine) as world:
            assert world.run(me) == [(0, 2), (1, 2)]
        assert silent.recv(wire.KEY_BYTES), "the host still waits for the proof of this client"


def _rest(connection: socket.socket) -> bytes:
    try:
        return connection.recv(1)
    except ConnectionResetError:
        return b""


def test_seats_are_chosen_evenly_and_grouped_by_node() -> None:
    def seat(node: str, port: int, gpus: tuple[str, ...] = ()) -> Seat:
        return Seat(node, f"10.0.0.{node}", port, f"eth{node}", gpus, 1)

    seats = [seat("1", 1), seat("2", 2), seat("1", 3), seat("1", 4), seat("2", 5)]
    assert [one.port for one in choose_seats(seats, 1)] == [1]
    assert [one.port for one in choose_seats(seats, 2)] == [1, 2]
    assert [one.port for one in choose_seats(seats, 3)] == [1, 3, 2]
    assert [one.port for one in choose_seats(seats, 5)] == [1, 3, 4, 2, 5]
    assert places_of(choose_seats(seats, 3)) == [
        Location(0, 0, 2, 0, 2, "10.0.0.1", "eth1"),
        Location(1, 1, 2, 0, 2, "10.0.0.1", "eth1"),
        Location(2, 0, 1, 1, 2, "10.0.0.2", "eth2"),
    ]
    assert places_of([seats[0], seats[2]]) == [Location(0, 0, 2), Location(1, 1, 2)], "on one node as in a local world"
    assert replace(places_of([seats[0]])[0]).interface == "lo"


def test_the_interface_of_an_address() -> None:
    assert wire.interface_of("127.0.0.1") == "lo"
    assert wire.interface_of("203.0.113.77") == ""
