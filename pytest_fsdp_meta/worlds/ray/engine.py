"""Ranks on the machines of a Ray cluster: one actor for each, spread over the nodes by placement groups.

Ray decides where ranks are and counts what they use. An actor keeps one seat, of a CPU and perhaps a GPU, for the whole
session, and starts in it the ranks of all worlds, so that only the first world waits for Ray and for imports. What is
said while a world lives goes over connections to the actors' hosts, not through Ray.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby
from pathlib import Path

from pytest_fsdp_meta.worlds.failures import WorldError
from pytest_fsdp_meta.worlds.local.engine import ForkServerEngine
from pytest_fsdp_meta.worlds.rank.main import Assignment
from pytest_fsdp_meta.worlds.ray import cluster, wire
from pytest_fsdp_meta.worlds.ray.cluster import Cluster, Group, Seat, Wish
from pytest_fsdp_meta.worlds.ray.host import LaunchRequest
from pytest_fsdp_meta.worlds.ray.member import RemoteMember
from pytest_fsdp_meta.worlds.spec import Place, Sources, WorldSpec

HOLD = 30.0
"""Seconds for which seats are kept though another session waits for some: to take new ones costs as many."""
GIVE_WAY = 10.0
"""Seconds in which those that wait may take the seats that were given back for them."""


@dataclass
class RayEngine:
    """The engine of a cluster. ``address`` is Ray's; empty means RAY_ADDRESS, else a cluster of this machine alone."""

    address: str = ""
    sources: Sources = field(default_factory=Sources)
    modules: Sequence[str] = ()
    test_modules: Sequence[str] = ()
    method: str = "forkserver"
    """As that of Preload, on every node."""
    patience: float = 120.0
    """Seconds that importing may take on a node; apart from the timeout of a world, which may be short."""
    _cluster: Cluster | None = field(default=None, repr=False)
    _groups: list[Group] = field(default_factory=list, repr=False)
    _members: list[RemoteMember] = field(default_factory=list, repr=False)
    """All that have been launched and may still live."""
    _since: float = 0.0
    """When the first seats were taken."""

    def start(self) -> None:
        """Connects. Raises ValueError, in one line, where there is no such cluster."""
        if self._cluster is None:
            self._cluster = cluster.connect(self.address)

    def count_gpus(self) -> int:
        self.start()
        return int(self._running.total("GPU"))

    def launch(self, spec: WorldSpec, folder: Path, leftovers: Sequence[str]) -> Iterator[RemoteMember]:
        self.start()
        shared = [left for left in leftovers if left != str(folder)]
        seats = self._seats(spec, time.monotonic() + spec.timeout)
        members: list[RemoteMember] = []
        try:
            for seat, task in zip(seats, self._tasks(spec, seats), strict=True):
                connect = partial(wire.connect, seat.address, seat.port, self._running.key)
                lost = partial(self._running.describe_loss, seat)
                member = RemoteMember(task.place.rank, lost, connect, connect())
                members.append(member)
                member.begin(LaunchRequest(task, shared, (*leftovers, *filter(None, [self._running.folder]))))
            for member in members:  # all are starting by now
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
        """What the session has of the cluster."""
        return [seat for group in self._groups for seat in group.seats]

    def give_back(self) -> None:
        """Leaves all seats to others; the ranks in them end."""
        for group in self._groups:
            self._running.give_back(group)
        self._groups = []

    def close(self) -> None:
        if self._cluster is not None:
            self.give_back()
            self._cluster.leave()
            self._cluster = None

    @property
    def _running(self) -> Cluster:
        assert self._cluster is not None, "the engine has not been started"
        return self._cluster

    def _seats(self, spec: WorldSpec, deadline: float) -> list[Seat]:
        """One for each rank, in the order of ranks; asked for where there are not enough yet. All of them answer."""
        gpu = self._gpus_for_a_rank(spec)
        for group in [group for group in self._groups if not all(map(_answers, group.seats))]:
            self._groups.remove(group)
            self._running.give_back(group)
        missing = spec.size - len(self._fitting(gpu))
        # Who waits for seats has none, or two sessions would wait for each other; ranks that live are waited for.
        if self._groups and not self._in_use and self._others_first(missing, gpu):
            self.give_back()
            missing = spec.size
            # Ray looks at who waits now and then only, and whoever asks just then comes first.
            patience = min(deadline, time.monotonic() + GIVE_WAY)
            while self._running.is_wanted() and time.monotonic() < patience:
                time.sleep(0.1)
        if missing > 0:
            # A copy without its fork server, which every host has of its own.
            preload = ForkServerEngine(self.sources, self.modules, self.test_modules, self.method, self.patience)
            if not self._groups:
                self._since = time.monotonic()
            self._groups.append(self._running.grant(Wish(spec.size, missing, gpu, preload, deadline)))
        return choose(self._fitting(gpu), spec.size)

    def _fitting(self, gpu: float) -> list[Seat]:
        return [seat for group in self._groups if group.gpu == gpu for seat in group.seats]

    @property
    def _in_use(self) -> bool:
        self._members = [member for member in self._members if not member.is_released]
        return bool(self._members)

    def _others_first(self, missing: int, gpu: float) -> bool:
        if missing > 0:
            return not self._running.has_free(missing, gpu)
        return time.monotonic() - self._since > HOLD and self._running.is_wanted()

    def _gpus_for_a_rank(self, spec: WorldSpec) -> float:
        if spec.device_type == "cpu":
            return 0.0
        gpus = self.count_gpus()
        # Ray counts in steps of 0.0001; rounded up, as many as share a GPU would not fit into it.
        return 1.0 if spec.size <= gpus else math.floor(10_000 / math.ceil(spec.size / max(gpus, 1))) / 10_000

    def _tasks(self, spec: WorldSpec, seats: Sequence[Seat]) -> list[Assignment]:
        places = places_of(seats)
        devices = [gpus.index(seat.gpus[0]) for seat in seats if (gpus := _gpus_beside(seat, seats))]
        spec = replace(spec, devices=tuple(devices))
        tasks = []
        for seat, place in zip(seats, places, strict=True):
            environ = dict(os.environ)
            if gpus := _gpus_beside(seat, seats):
                environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
            # Folder and leftovers are the host's to fill in.
            tasks.append(Assignment(place, spec, self.sources, "", (), environ, os.getcwd()))
        return tasks


def _answers(seat: Seat) -> bool:
    return wire.answers(seat.address, seat.port)


def _gpus_beside(seat: Seat, seats: Sequence[Seat]) -> list[str]:
    """The GPUs of all ranks on the node: each rank sees them all, and by its local rank its own, as under torchrun."""
    return list(dict.fromkeys(gpu for other in seats if other.node == seat.node for gpu in other.gpus))


def choose(seats: Sequence[Seat], size: int) -> list[Seat]:
    """``size`` of them, as evenly from all nodes as can be; those of a node together, as torchrun numbers ranks."""
    nodes: dict[str, list[Seat]] = {}
    for seat in seats:
        nodes.setdefault(seat.node, []).append(seat)
    taken = dict.fromkeys(nodes, 0)
    for _ in range(size):
        emptiest = min((node for node in nodes if taken[node] < len(nodes[node])), key=taken.__getitem__)
        taken[emptiest] += 1
    return [seat for node, there in nodes.items() for seat in there[: taken[node]]]


def places_of(seats: Sequence[Seat]) -> list[Place]:
    nodes = [list(there) for _, there in groupby(seats, key=lambda seat: seat.node)]
    places: list[Place] = []
    for number, there in enumerate(nodes):
        for local_rank, seat in enumerate(there):
            place = Place(len(places), local_rank, len(there), number, len(nodes))
            # On one machine ranks meet where they always do, whatever its network is.
            places.append(place if len(nodes) == 1 else replace(place, address=seat.address, interface=seat.interface))
    return places
