"""Everything that is Ray's: the cluster, its placement groups, and the actors that keep ranks."""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from pytest_fsdp_meta.text import counted, first_line
from pytest_fsdp_meta.worlds.failures import RankFailure, WorldError
from pytest_fsdp_meta.worlds.local.engine import ForkServerEngine
from pytest_fsdp_meta.worlds.local.forkserver import environment
from pytest_fsdp_meta.worlds.ray import wire
from pytest_fsdp_meta.worlds.ray.host import Host

OURS = "pytest-fsdp-meta-"
"""How the names of all our placement groups begin, in all sessions."""
TRIES = 3
"""How often a node may be lost while its actors start."""
PAUSE = 1.0
SHARED_CPU = 0.001
"""What a rank takes of a CPU in a cluster of our own, whose ranks share the CPUs as they do without Ray."""
TOKENS = ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
_TOKEN = secrets.token_hex(32)
"""One for all clusters of this process: Ray reads it once."""
SOCKET_NAME = 70
"""Letters that Ray adds to its folder for the name of a socket, which may have 107."""


@dataclass(frozen=True)
class Seat:
    """What one actor keeps: a place on a node, and where its host is reached."""

    node: str
    address: str
    port: int
    interface: str
    gpus: tuple[str, ...]
    raylet: int
    """The port of the node itself."""


@dataclass
class Group:
    """Seats that were asked for together."""

    gpu: float
    placement: Any
    actors: list[Any] = field(default_factory=list)
    seats: list[Seat] = field(default_factory=list)


@dataclass(frozen=True)
class Wish:
    """``seats`` more, for a world of ``size``."""

    size: int
    seats: int
    gpu: float
    preload: ForkServerEngine
    deadline: float


class SeatActor:
    """The actor. Its end is that of its fork server, and so of its ranks."""

    def __init__(self, preload: ForkServerEngine, key: bytes) -> None:
        import ray

        self._host = Host(preload, ray.util.get_node_ip_address(), key)

    def where(self) -> dict[str, Any]:
        import ray

        context = ray.get_runtime_context()
        return {
            "node": context.get_node_id(),
            "address": self._host.address,
            "port": self._host.port,
            "interface": wire.interface_of(self._host.address),
            "gpus": tuple(map(str, context.get_accelerator_ids().get("GPU", ()))),
            "version": version("pytest-fsdp-meta"),
        }


@dataclass
class Cluster:
    """A Ray cluster that this process is connected to."""

    cpu: float
    """What a rank takes."""
    ours: bool
    """Whether we have connected, and have to disconnect."""
    folder: str = ""
    """Ray's own, where the cluster is our own as well."""
    key: bytes = field(default_factory=lambda: secrets.token_bytes(wire.KEY_BYTES), repr=False)

    def total(self, resource: str) -> float:
        return float(sum(node["Resources"].get(resource, 0.0) for node in _nodes().values()))

    def grant(self, wish: Wish) -> Group:
        """Waits for the seats. Raises WorldError where the cluster never has them, or not in time."""
        import ray
        from ray.util import placement_group

        for left in reversed(range(TRIES)):
            self._refuse_too_large(wish)
            bundle = {"CPU": self.cpu} | ({"GPU": wish.gpu} if wish.gpu else {})
            name = OURS + secrets.token_hex(4)
            group = Group(wish.gpu, placement_group([bundle] * wish.seats, strategy="SPREAD", name=name))
            try:
                self._wait(group, wish)
                self._occupy(group, wish)
                return group
            except BaseException as error:
                self.give_back(group)
                if not isinstance(error, ray.exceptions.RayError):
                    raise
                if isinstance(error, ray.exceptions.GetTimeoutError) or not left:
                    raise _no_world(f"the ranks of the cluster do not start: {first_line(error)}") from error
                time.sleep(PAUSE)
        raise AssertionError("the last try returns or raises")

    def is_wanted(self) -> bool:
        """Whether a session of ours waits for seats."""
        from ray.util import placement_group_table

        return any(
            one["name"].startswith(OURS) and one["state"] == "PENDING" for one in placement_group_table().values()
        )

    def has_free(self, seats: int, gpu: float) -> bool:
        import ray

        free = ray.available_resources()
        return all(free.get(name, 0.0) >= seats * each for name, each in (("CPU", self.cpu), ("GPU", gpu)))

    def give_back(self, group: Group) -> None:
        import ray
        from ray.util import remove_placement_group

        for actor in group.actors:
            with suppress(ray.exceptions.RayError):
                ray.kill(actor)
        remove_placement_group(group.placement)

    def describe_loss(self, seat: Seat) -> str:
        """Of a rank whose host has hung up. A node that goes takes its raylet along, if not at the same moment."""
        node = f"node {seat.address} ({seat.node[:8]})"
        deadline = time.monotonic() + PAUSE
        while wire.answers(seat.address, seat.raylet):
            if time.monotonic() > deadline:
                return f"was lost with its actor on {node}, where Ray's logs may say why it ended"
            time.sleep(0.1)
        return f"was lost with its {node}"

    def leave(self) -> None:
        import ray

        if self.ours:
            ray.shutdown()
        if self.folder:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _refuse_too_large(self, wish: Wish) -> None:
        for resource, each in (("CPU", self.cpu), ("GPU", wish.gpu)):
            total = self.total(resource)
            if wish.size * each > total + 1e-6:
                needed = counted(round(wish.size * each), resource)
                raise _no_world(f"a world of {wish.size} needs {needed}, the cluster has {total:g}")

    def _wait(self, group: Group, wish: Wish) -> None:
        began = time.monotonic()
        while not group.placement.wait(PAUSE):
            self._refuse_too_large(wish)
            if time.monotonic() > wish.deadline:
                import ray

                free = ray.available_resources().get("GPU" if wish.gpu else "CPU", 0.0)
                raise _no_world(
                    f"a world of {wish.size} waited {time.monotonic() - began:.0f} s for {counted(wish.seats, 'seat')} "
                    f"in the cluster, where {free:g} {'GPU' if wish.gpu else 'CPU'}s are free"
                )

    def _occupy(self, group: Group, wish: Wish) -> None:
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        actor = ray.remote(SeatActor)
        for index in range(wish.seats):
            strategy = PlacementGroupSchedulingStrategy(group.placement, placement_group_bundle_index=index)
            options = {"num_cpus": self.cpu, "num_gpus": wish.gpu, "scheduling_strategy": strategy}
            group.actors.append(actor.options(**options).remote(wish.preload, self.key))
        seconds = max(10.0, wish.deadline - time.monotonic())
        told = ray.get([one.where.remote() for one in group.actors], timeout=seconds)
        nodes = _nodes()
        for place in told:
            _require_our_version(place)
            raylet = nodes[place["node"]]["NodeManagerPort"] if place["node"] in nodes else 0
            group.seats.append(Seat(**place, raylet=raylet))


def _require_our_version(place: dict[str, Any]) -> None:
    here, there = version("pytest-fsdp-meta"), place.pop("version")
    if there != here:
        raise _no_world(f"node {place['address']} has pytest-fsdp-meta {there}, and here is {here}; install the same")


def connect(address: str) -> Cluster:
    """Raises ValueError, in one line, where there is no such cluster."""
    import ray

    if ray.is_initialized():  # by the user's own code, who will also end it
        return Cluster(cpu=1.0, ours=False)
    address = address or os.environ.get("RAY_ADDRESS", "")
    if address in ("", "local"):
        return _embedded()
    _require_reachable(address)
    try:
        ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    except Exception as error:
        raise ValueError(f"the Ray cluster at {address} cannot be joined: {first_line(error)}") from error
    return Cluster(cpu=1.0, ours=True)


def _require_reachable(address: str) -> None:
    """Ray itself would try for a minute, and fill a screen."""
    host, _, port = address.rpartition(":")
    if address == "auto":
        return
    if not (host and port.isdecimal() and "/" not in host):  # it comes from RAY_ADDRESS
        raise ValueError(f"RAY_ADDRESS={address} names no place for ranks; it should be HOST:PORT or auto")
    if not wire.answers(host, int(port), seconds=5.0):
        raise ValueError(f"no Ray cluster answers at {address}; see --fsdp-ray-address and RAY_ADDRESS")


def _embedded() -> Cluster:
    """A cluster of this machine alone, which ends with this process."""
    import ray

    short = len(tempfile.gettempdir()) + len("/fsdp-ray-12345678") + SOCKET_NAME < 107
    folder = tempfile.mkdtemp(prefix="fsdp-ray-", dir=None if short else "/tmp")
    try:
        with _own_environment():
            ray.init(
                address="local",
                include_dashboard=False,
                log_to_driver=False,
                logging_level="ERROR",
                object_store_memory=100 * 2**20,
                _temp_dir=folder,
            )
    except Exception as error:
        shutil.rmtree(folder, ignore_errors=True)
        raise ValueError(f"--fsdp-engine=ray: Ray cannot start here: {first_line(error)}") from error
    return Cluster(cpu=SHARED_CPU, ours=True, folder=folder)


@contextmanager
def _own_environment() -> Iterator[None]:
    """While Ray starts. It makes a token for its clusters, and would leave it in the home directory, for ever.

    It also switches the use of tokens on in our environment, where it would be told to every rank.
    """
    mode = "RAY_AUTH_MODE"
    asked = mode in os.environ
    has_token = any(name in os.environ for name in TOKENS) or Path("~/.ray/auth_token").expanduser().exists()
    token = {} if asked or has_token else {TOKENS[0]: _TOKEN}
    with environment({"RAY_USAGE_STATS_ENABLED": "0"} | token):
        try:
            yield
        finally:
            if not asked:
                os.environ.pop(mode, None)


def _nodes() -> Mapping[str, Any]:
    """Those that answer: Ray itself notices later that a node is gone."""
    import ray

    listed = [node for node in ray.nodes() if node["Alive"]]
    return {n["NodeID"]: n for n in listed if wire.answers(n["NodeManagerAddress"], n["NodeManagerPort"])}


def _no_world(why: str) -> WorldError:
    return WorldError([RankFailure(0, "refused", why, user=True)], "starting")
