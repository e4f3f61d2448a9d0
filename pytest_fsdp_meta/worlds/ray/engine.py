"""Ranks on the machines of a Ray cluster: one actor for each rank, spread over the nodes by placement groups.

Ray decides where ranks run and accounts for their resources. An actor holds one seat, which is a CPU and perhaps a GPU,
for the whole session, and starts the ranks of all worlds in it; so only the first world waits for Ray and for imports.
Messages of a running world go through connections to the actors' hosts, not through Ray.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby
from pathlib import Path

from pytest_fsdp_meta.text import grouped
from pytest_fsdp_meta.worlds.failures import WorldError
from pytest_fsdp_meta.worlds.local.engine import ForkServerEngine
from pytest_fsdp_meta.worlds.rank.main import Assignment
from pytest_fsdp_meta.worlds.ray import cluster, wire
from pytest_fsdp_meta.worlds.ray.cluster import Cluster, Reservation, Seat, SeatRequest
from pytest_fsdp_meta.worlds.ray.host import LaunchRequest
from pytest_fsdp_meta.worlds.ray.member import RemoteMember
from pytest_fsdp_meta.worlds.spec import VISIBLE, Location, Sources, WorldSpec

HOLD = 30.0
"""Seconds that a session keeps its seats although another session waits; reserving new ones takes as long."""
YIELD_TIMEOUT = 10.0
"""Seconds that waiting sessions have to reserve the seats that were released for them."""


@dataclass
class RayEngine:
    """The engine of a Ray cluster.

    ``address`` is Ray's; if it is empty, RAY_ADDRESS is used, else a cluster of this machine alone.
    """

    address: str = ""
    sources: Sources = field(default_factory=Sources)
    modules: Sequence[str] = ()
    test_modules: Sequence[str] = ()
    method: str = "forkserver"
    """The method of the ``ForkServerEngine`` on every node."""
    patience: float = 120.0
    """Seconds that imports may take on a node; separate from the timeout of a world, which may be short."""
    worlds: int | None = None
    _cluster: Cluster | None = field(default=None, repr=False)
    _groups: list[Reservation] = field(default_factory=list, repr=False)
    _members: list[RemoteMember] = field(default_factory=list, repr=False)
    """All launched members that may still run."""
    _reserved_at: float = 0.0
    """When the first seats were reserved."""

    def start(self) -> None:
        """Connect to the cluster. Raises ValueError, with a message of one line, if that is not possible."""
        if self._cluster is None:
            self._cluster = cluster.connect(self.address)

    def start_early(self, modules: Mapping[str, Sequence[str]], path: Sequence[str]) -> None:
        """Do nothing: each rank imports on its own machine."""

    def importing(self) -> str:
        return ""

    def count_gpus(self) -> int:
        """Return the number of GPUs in the cluster."""
        self.start()
        return int(self._running.total("GPU"))

    def launch(self, spec: WorldSpec, folder: Path, leftovers: Sequence[str]) -> Iterator[RemoteMember]:
        self.start()
        shared = [leftover for leftover in leftovers if leftover != str(folder)]
        seats = self._reserve_seats(spec, time.monotonic() + spec.timeout)
        members: list[RemoteMember] = []
        try:
            for seat, task in zip(seats, self._tasks(spec, seats), strict=True):
                connect = partial(wire.connect, seat.address, seat.port, self._running.key)
                describe_loss = partial(self._running.describe_loss, seat)
                member = RemoteMember(task.place.rank, describe_loss, connect, connect())
                members.append(member)
                member.start(LaunchRequest(task, shared, (*leftovers, *filter(None, [self._running.folder]))))
            for member in members:  # they start in parallel
                failure = member.await_start(self.patience + spec.timeout)
                if failure is not None:
                    raise WorldError([failure], "starting")
        except BaseException:
            for member in members:
                member.kill()
                member.release()
            raise
        self._members += members
        yield from members

    @property
    def seats(self) -> list[Seat]:
        """The seats that this session holds."""
        return [seat for group in self._groups for seat in group.seats]

    def release_seats(self) -> None:
        """Release all seats to other sessions; the ranks in them end."""
        for group in self._groups:
            self._running.release(group)
        self._groups = []

    def close(self) -> None:
        if self._cluster is not None:
            self.release_seats()
            self._cluster.disconnect()
            self._cluster = None

    @property
    def _running(self) -> Cluster:
        assert self._cluster is not None, "the engine has not been started"
        return self._cluster

    def _reserve_seats(self, spec: WorldSpec, deadline: float) -> list[Seat]:
        """Return one seat for each rank, in rank order, and reserve those that are missing. Their hosts respond."""
        gpu = self._gpus_per_rank(spec)
        for group in list(self._groups):
            if all(wire.is_listening(seat.address, seat.port) for seat in group.seats):
                continue
            self._groups.remove(group)
            self._running.release(group)
        missing = spec.size - len(self._fitting_seats(gpu))
        # A session that waits for seats must hold none, or two sessions could wait for each other. Seats with live
        # ranks are not released: their world ends first.
        self._members = [member for member in self._members if not member.is_released]
        if self._groups and not self._members and self._should_yield(missing, gpu):
            self.release_seats()
            missing = spec.size
            # Ray serves waiting sessions only now and then, and a new request would be served before them.
            patience = min(deadline, time.monotonic() + YIELD_TIMEOUT)
            while self._running.is_wanted() and time.monotonic() < patience:
                time.sleep(0.1)
        if missing > 0:
            # A copy without the fork server: every host starts its own.
            local = ForkServerEngine(self.sources, self.modules, self.test_modules, self.method, self.patience)
            if not self._groups:
                self._reserved_at = time.monotonic()
            self._groups.append(self._running.reserve(SeatRequest(spec.size, missing, gpu, local, deadline)))
        return choose_seats(self._fitting_seats(gpu), spec.size)

    def _fitting_seats(self, gpu: float) -> list[Seat]:
        return [seat for group in self._groups if group.gpu == gpu for seat in group.seats]

    def _should_yield(self, missing: int, gpu: float) -> bool:
        """Return whether to release all seats: to wait for missing ones, or because another session has waited long."""
        if missing > 0:
            return not self._running.has_free(missing, gpu)
        return time.monotonic() - self._reserved_at > HOLD and self._running.is_wanted()

    def _gpus_per_rank(self, spec: WorldSpec) -> float:
        if not spec.on_gpus:
            return 0.0
        gpus = self.count_gpus()
        # Ray counts in steps of 0.0001. Rounded down, because otherwise the ranks that share a GPU would not fit on it.
        return 1.0 if spec.size <= gpus else math.floor(10_000 / math.ceil(spec.size / max(gpus, 1))) / 10_000

    def _tasks(self, spec: WorldSpec, seats: Sequence[Seat]) -> list[Assignment]:
        places = places_of(seats)
        devices = [gpus.index(seat.gpus[0]) for seat in seats if (gpus := _gpus_of_node(seat, seats))]
        spec = replace(spec, devices=tuple(devices))
        tasks = []
        for seat, place in zip(seats, places, strict=True):
            environ = dict(os.environ)
            if gpus := _gpus_of_node(seat, seats):
                environ[VISIBLE] = ",".join(gpus)
            # The host fills in the folder and the leftovers.
            tasks.append(Assignment(place, spec, self.sources, "", (), environ, os.getcwd()))
        return tasks


def _gpus_of_node(seat: Seat, seats: Sequence[Seat]) -> list[str]:
    """Return the GPUs of all seats on the node. A rank sees them all and uses its local rank's, as under torchrun."""
    return list(dict.fromkeys(gpu for other in seats if other.node == seat.node for gpu in other.gpus))


def choose_seats(seats: Sequence[Seat], size: int) -> list[Seat]:
    """Choose ``size`` seats, as evenly from all nodes as possible, grouped by node as torchrun numbers ranks."""
    nodes = grouped((seat.node, seat) for seat in seats)
    chosen = dict.fromkeys(nodes, 0)
    for _ in range(size):
        emptiest = min((node for node in nodes if chosen[node] < len(nodes[node])), key=chosen.__getitem__)
        chosen[emptiest] += 1
    return [seat for node, on_node in nodes.items() for seat in on_node[: chosen[node]]]


def places_of(seats: Sequence[Seat]) -> list[Location]:
    """Return torchrun's numbers (rank, local rank, group rank, sizes) for seats that are grouped by node."""
    nodes = [list(on_node) for _, on_node in groupby(seats, key=lambda seat: seat.node)]
    places: list[Location] = []
    for number, on_node in enumerate(nodes):
        for local_rank, seat in enumerate(on_node):
            place = Location(len(places), local_rank, len(on_node), number, len(nodes))
            # On a single node, ranks use the loopback address as local worlds do, whatever the node's network is.
            places.append(place if len(nodes) == 1 else replace(place, address=seat.address, interface=seat.interface))
    return places
