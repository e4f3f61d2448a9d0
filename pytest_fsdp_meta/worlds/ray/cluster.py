"""All uses of Ray's API: the cluster, its placement groups, and the actors that host ranks."""

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

NAME_PREFIX = "pytest-fsdp-meta-"
"""How the names of this plugin's placement groups begin, in all sessions."""
ATTEMPTS = 3
"""Attempts to start actors; one may fail because a node is lost."""
PAUSE = 1.0
"""Seconds between two attempts, and between two looks at a placement group that is not ready."""
SHARED_CPU = 0.001
"""CPUs that a rank reserves in an embedded cluster, whose ranks share the CPUs as they do without Ray."""
TOKEN_VARIABLES = ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
_TOKEN = secrets.token_hex(32)
"""The token of all clusters that this process starts: Ray reads it only once."""
SOCKET_SUFFIX = 70
"""Characters that Ray appends to its folder for the path of a socket, which may have 107."""


@dataclass(frozen=True)
class Seat:
    """What one actor holds: a place for one rank on a node, and how to reach the actor's host."""

    node: str
    address: str
    port: int
    interface: str
    gpus: tuple[str, ...]
    raylet_port: int
    """The port of Ray's own process on the node."""


@dataclass
class Reservation:
    """Seats that were requested together."""

    gpu: float
    """GPUs of each seat."""
    placement: Any
    """Ray's placement group."""
    actors: list[Any] = field(default_factory=list)
    seats: list[Seat] = field(default_factory=list)


@dataclass(frozen=True)
class SeatRequest:
    """A request for ``seats`` more seats, for a world of ``size``."""

    size: int
    seats: int
    gpu: float
    """GPUs of each seat."""
    engine: ForkServerEngine
    """The engine that each host uses to start ranks."""
    deadline: float


class SeatActor:
    """The Ray actor of one seat. Its fork server ends with it, and so do its ranks."""

    def __init__(self, engine: ForkServerEngine, key: bytes) -> None:
        import ray

        self._host = Host(engine, ray.util.get_node_ip_address(), key)

    def describe_seat(self) -> dict[str, Any]:
        """Return the fields of ``Seat`` that the actor knows, and the version of this package on its node."""
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
    """CPUs of each seat."""
    ours: bool
    """Whether this plugin made the connection and has to close it."""
    folder: str = ""
    """Ray's folder, if this plugin started the cluster."""
    key: bytes = field(default_factory=lambda: secrets.token_bytes(wire.KEY_BYTES), repr=False)

    def total(self, resource: str) -> float:
        """Return how much of a resource ("CPU", "GPU") the nodes that respond have."""
        return float(sum(node["Resources"].get(resource, 0.0) for node in _nodes().values()))

    def reserve(self, request: SeatRequest) -> Reservation:
        """Wait for seats. Raises WorldError if the cluster is too small, or has no room before the deadline."""
        import ray
        from ray.util import placement_group

        for attempts_left in reversed(range(ATTEMPTS)):
            self._refuse_too_large(request)
            bundle = {"CPU": self.cpu} | ({"GPU": request.gpu} if request.gpu else {})
            name = NAME_PREFIX + secrets.token_hex(4)
            group = Reservation(request.gpu, placement_group([bundle] * request.seats, strategy="SPREAD", name=name))
            try:
                self._await_placement(group, request)
                self._start_actors(group, request)
                return group
            except BaseException as error:
                self.release(group)
                if not isinstance(error, ray.exceptions.RayError):
                    raise
                if isinstance(error, ray.exceptions.GetTimeoutError) or not attempts_left:
                    raise _refusal(f"cannot start ranks on the Ray cluster: {first_line(error)}") from error
                time.sleep(PAUSE)
        raise AssertionError("the last attempt returns or raises")

    def is_wanted(self) -> bool:
        """Return whether a session of this plugin waits for seats."""
        from ray.util import placement_group_table

        return any(
            group["name"].startswith(NAME_PREFIX) and group["state"] == "PENDING"
            for group in placement_group_table().values()
        )

    def has_free(self, seats: int, gpu: float) -> bool:
        """Return whether the cluster has room for this many seats now."""
        import ray

        free = ray.available_resources()
        return all(free.get(name, 0.0) >= seats * each for name, each in (("CPU", self.cpu), ("GPU", gpu)))

    def release(self, group: Reservation) -> None:
        """End the actors of a group, and their ranks, and return its resources to the cluster."""
        import ray
        from ray.util import remove_placement_group

        for actor in group.actors:
            with suppress(ray.exceptions.RayError):
                ray.kill(actor)
        remove_placement_group(group.placement)

    def describe_loss(self, seat: Seat) -> str:
        """Describe why the connection to a seat's host was lost: its node or only its actor has ended.

        When a node is lost, its raylet stops responding too, but perhaps a moment later.
        """
        node = f"node {seat.address} ({seat.node[:8]})"
        deadline = time.monotonic() + PAUSE
        while wire.is_listening(seat.address, seat.raylet_port):
            if time.monotonic() > deadline:
                return f"was lost with its actor on {node}; Ray's logs there may say why it ended"
            time.sleep(0.1)
        return f"was lost with its {node}"

    def disconnect(self) -> None:
        """Close the connection, and remove what was started for it."""
        import ray

        if self.ours:
            ray.shutdown()
        if self.folder:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _refuse_too_large(self, request: SeatRequest) -> None:
        for resource, each in (("CPU", self.cpu), ("GPU", request.gpu)):
            total = self.total(resource)
            if request.size * each > total + 1e-6:
                needed = counted(round(request.size * each), resource)
                raise _refusal(f"a world of {request.size} needs {needed}, but the Ray cluster has {total:g}")

    def _await_placement(self, group: Reservation, request: SeatRequest) -> None:
        began = time.monotonic()
        while not group.placement.wait(PAUSE):
            self._refuse_too_large(request)
            if time.monotonic() > request.deadline:
                import ray

                resource = "GPU" if request.gpu else "CPU"
                free = ray.available_resources().get(resource, 0.0)
                raise _refusal(
                    f"a world of {request.size} waited {time.monotonic() - began:.0f} s for room for "
                    f"{counted(request.seats, 'rank')} in the Ray cluster (free {resource}s: {free:g})"
                )

    def _start_actors(self, group: Reservation, request: SeatRequest) -> None:
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        actor_class = ray.remote(SeatActor)
        for index in range(request.seats):
            strategy = PlacementGroupSchedulingStrategy(group.placement, placement_group_bundle_index=index)
            options = {"num_cpus": self.cpu, "num_gpus": request.gpu, "scheduling_strategy": strategy}
            group.actors.append(actor_class.options(**options).remote(request.engine, self.key))
        seconds = max(10.0, request.deadline - time.monotonic())
        descriptions = ray.get([actor.describe_seat.remote() for actor in group.actors], timeout=seconds)
        nodes = _nodes()
        ours = version("pytest-fsdp-meta")
        for description in descriptions:
            if (theirs := description.pop("version")) != ours:
                raise _refusal(
                    f"node {description['address']} has pytest-fsdp-meta {theirs}, but pytest runs with {ours}; "
                    "install the same version on every node"
                )
            node = description["node"]
            raylet_port = nodes[node]["NodeManagerPort"] if node in nodes else 0
            group.seats.append(Seat(**description, raylet_port=raylet_port))


def connect(address: str) -> Cluster:
    """Connect to a cluster, or start one. Raises ValueError, with a message of one line, if that is not possible."""
    import ray

    if ray.is_initialized():  # by the user's code, which also closes the connection
        return Cluster(cpu=1.0, ours=False)
    address = address or os.environ.get("RAY_ADDRESS", "")
    if address in ("", "local"):
        return _start_embedded()
    _require_reachable(address)
    try:
        ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    except Exception as error:
        raise ValueError(f"cannot join the Ray cluster at {address}: {first_line(error)}") from error
    return Cluster(cpu=1.0, ours=True)


def _require_reachable(address: str) -> None:
    """Raise ValueError if nothing listens at the address. Ray itself would try for a minute and print a screenful."""
    host, _, port = address.rpartition(":")
    if address == "auto":
        return
    if not (host and port.isdecimal() and "/" not in host):
        raise ValueError(
            f"invalid RAY_ADDRESS={address} (choose HOST:PORT, auto or local; Ray's client protocol, ray://, cannot "
            "run ranks)"
        )
    if not wire.is_listening(host, int(port), seconds=5.0):
        raise ValueError(f"no Ray cluster answers at {address}; check RAY_ADDRESS")


def _start_embedded() -> Cluster:
    """Start a cluster of this machine alone, which ends with this process."""
    import ray

    short = len(tempfile.gettempdir()) + len("/fsdp-ray-12345678") + SOCKET_SUFFIX < 107
    folder = tempfile.mkdtemp(prefix="fsdp-ray-", dir=None if short else "/tmp")
    try:
        with _restored_environment():
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
        raise ValueError(f"--fsdp-engine=ray: Ray cannot start on this machine: {first_line(error)}") from error
    return Cluster(cpu=SHARED_CPU, ours=True, folder=folder)


@contextmanager
def _restored_environment() -> Iterator[None]:
    """Keep Ray, while it starts, from leaving a token in the home directory and a variable in our environment.

    Without a token in the environment, Ray would store one in the home directory for good. It also sets RAY_AUTH_MODE
    in our environment, which every rank would inherit.
    """
    mode = "RAY_AUTH_MODE"
    has_mode = mode in os.environ
    has_token = any(name in os.environ for name in TOKEN_VARIABLES) or Path("~/.ray/auth_token").expanduser().exists()
    token = {} if has_mode or has_token else {TOKEN_VARIABLES[0]: _TOKEN}
    with environment({"RAY_USAGE_STATS_ENABLED": "0"} | token):
        try:
            yield
        finally:
            if not has_mode:
                os.environ.pop(mode, None)


def _nodes() -> Mapping[str, Any]:
    """Return the nodes that respond, by id. Ray itself notices later that a node is gone."""
    import ray

    nodes = [node for node in ray.nodes() if node["Alive"]]
    return {n["NodeID"]: n for n in nodes if wire.is_listening(n["NodeManagerAddress"], n["NodeManagerPort"])}


def _refusal(why: str) -> WorldError:
    return WorldError([RankFailure(0, "refused", why, user=True)], "starting")
