"""The life of one rank: join the world, answer calls, end at once when told to or when the parent is gone."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import pickle
import random
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import import_module
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_fsdp_meta.worlds import (
    debugging,
    disk,
    flight,
    measured,
    meetings,
    preload,
    processes,
    tracebacks,
    warned,
    written,
)
from pytest_fsdp_meta.worlds.channel import Channel
from pytest_fsdp_meta.worlds.failures import CallFailed, Misuse, RankFailure
from pytest_fsdp_meta.worlds.listening import DOING, POST_MORTEM
from pytest_fsdp_meta.worlds.spec import Place, Sources, WorldSpec

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh

SEED = 20240229
OUTSIDE = "this process is not a rank of a world of pytest-fsdp-meta"


@dataclass
class Rank:
    """What a rank knows of its world: the ``fsdp`` fixture of a loader."""

    rank: int
    local_rank: int
    world_size: int
    device: torch.device
    """With its index: ``cuda:3``."""
    state: dict[str, Any] = field(default_factory=dict, repr=False)
    """Kept between the calls of one world."""
    _mesh: DeviceMesh | None = field(default=None, repr=False)
    _store: object = field(default=None, repr=False)
    """Served on rank 0 for as long as it is held; the loader's own process group meets there."""

    @property
    def mesh(self) -> DeviceMesh:
        """The mesh of the marker. Raises ValueError where the loader makes the process group itself."""
        if self._mesh is None:
            raise ValueError('fsdp.mesh does not exist with process_group="loader": the loader makes its own mesh')
        return self._mesh

    @property
    def has_mesh(self) -> bool:
        return self._mesh is not None

    def barrier(self) -> None:
        """Waits until every rank is here."""
        import torch.distributed as dist

        dist.barrier()


_CURRENT: Rank | None = None
_CHANNEL: Channel | None = None
_TELLER: warned.Teller | None = None
_MEASUREMENT: measured.Measurement | None = None
_RAISED: BaseException | None = None
"""What the last call raised, for a debugger."""


def note(kind: str, what: Any) -> None:
    """Tells the parent something beside the answer that it waits for: what this rank is doing, a warning.

    Not from a process that a rank has forked, where it does nothing. Raises RuntimeError outside a world.
    """
    if _CHANNEL is None:
        raise RuntimeError(OUTSIDE)
    if _CHANNEL.is_own:
        _CHANNEL.send("note", kind, what)


def doing(what: str) -> None:
    """Says what this rank does from now on: "training step 2 of 3". For whoever waits, and for the error it may become.

    Outside of a world it does nothing.
    """
    if _CHANNEL is not None:
        note(DOING, what)


@contextmanager
def telling(unless: str = "") -> Iterator[None]:
    """Within it, warnings are the parent's to show, but those that match the pattern ``unless``, which are dropped.

    ``World.run`` puts it around a function that it is given; one that is only named does so itself, where it calls
    what the user wrote. Outside of a world it does nothing.
    """
    with nullcontext() if _TELLER is None else _TELLER.telling(unless):
        yield


def current() -> Rank:
    """The rank that this process is. Raises RuntimeError outside a world."""
    if _CURRENT is None:
        raise RuntimeError(OUTSIDE)
    return _CURRENT


@dataclass(frozen=True)
class Assignment:
    """Everything a new rank is told."""

    place: Place
    spec: WorldSpec
    sources: Sources
    folder: str
    """For its messages, its output and its stacks."""
    leftovers: tuple[str, ...]
    """The folders that go when the parent is killed; its own is one of them."""
    environ: dict[str, str]
    cwd: str
    measuring: measured.Measuring | None = field(default_factory=measured.wanted)
    """As the parent measures coverage."""

    @property
    def output(self) -> Path:
        return Path(self.folder, f"rank{self.place.rank}.out")

    @property
    def stacks(self) -> Path:
        return Path(self.folder, f"rank{self.place.rank}.stacks")


def main(connection: Connection, task: Assignment, dies_with_parent: bool) -> None:
    """The target of a rank's process; does not return, because interpreters with a process group end badly.

    ``dies_with_parent``: the system shall kill it when its parent ends, which is a thread where ranks are spawned.
    """
    global _CHANNEL, _TELLER
    try:
        _isolate(dies_with_parent)
        _CHANNEL = channel = Channel(connection, task.output, task.leftovers)
        warned.hear_all()
        _TELLER = warned.Teller(partial(note, warned.KIND))
        debugging.borrow_by(channel)
        try:
            _redirect(task)
            _adopt(task)
            _join(channel, task)
        except BaseException as error:
            _report(channel, _failure(task, error))
            threading.Event().wait()  # for its end, so that it is not mistaken for a rank that vanished
        channel.send("ready")
        while True:
            message = channel.receive()
            if message[0] == POST_MORTEM:
                assert _RAISED is not None
                channel.send(POST_MORTEM, debugging.post_mortem(_RAISED, *message[1:]))
            else:
                _answer(channel, task, message)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


def _isolate(dies_with_parent: bool) -> None:
    """Own process group (no Ctrl-C from the terminal), death with the parent."""
    os.setpgid(0, 0)
    processes.heed_signals()
    # The fork server's children inherit "forkserver"; a loader's own workers get what they get under torchrun.
    multiprocessing.set_start_method(None, force=True)
    if dies_with_parent:
        processes.die_with_parent()
    # So that what the children of this rank leave behind is not taken for what a rank has left that has ended.
    processes.adopt_orphans()
    _leave_server_alone()


def _redirect(task: Assignment) -> None:
    """Own output file, stacks on demand."""
    written.redirect(task.output)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, file=open(task.stacks, "w"), all_threads=True)  # noqa: SIM115


def _leave_server_alone() -> None:
    """Lets the fork server end with the parent: it lives as long as anybody holds this descriptor.

    Its end is what the system's signal waits for, the last resort for a rank whose threads are all stuck.
    """
    server: Any = forkserver._forkserver
    if server._forkserver_alive_fd is not None:
        os.close(server._forkserver_alive_fd)
        server._forkserver_alive_fd = None


def _adopt(task: Assignment) -> None:
    """The parent's working directory, environment and modules."""
    os.chdir(task.cwd)
    os.environ.clear()
    os.environ.update(task.environ)
    preload.share(task.sources)
    if task.measuring is not None:
        global _MEASUREMENT
        _MEASUREMENT = measured.Measurement(task.measuring)
        if task.place.rank == 0 and (before := measured.before_the_fork()):
            note(measured.KIND, ("imports", before))


def _join(channel: Channel, task: Assignment) -> None:
    global _CURRENT
    import torch
    import torch.distributed as dist

    spec, place = task.spec, task.place
    # An OpenMP pool does not survive the fork; torchrun gives each rank one thread too.
    threads = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    os.environ["OMP_NUM_THREADS"] = threads = threads if threads.isdecimal() and int(threads) else "1"
    torch.set_num_threads(int(threads))
    seed(spec.device_type)
    index = spec.devices[place.rank] if spec.devices else place.local_rank
    device = torch.device(spec.device_type, index) if spec.device_type != "cpu" else torch.device("cpu")
    if device.type == "cuda":
        # Before CUDA starts: without it cuBLAS may give other bits for the same product.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.cuda.set_device(device)
    store = None
    if place.rank == 0:
        # Port 0: the system picks a free one, so two runs on one machine never meet.
        store = dist.TCPStore(place.address, 0, is_master=True, wait_for_workers=False)
        channel.send("store", place.address, store.port)
    _, address, port = channel.receive()
    os.environ.update(torchrun_environment(place, spec.size, address, port))
    flight.switch_on()
    if place.interface and not (place.group_size > 1 and os.environ.get("GLOO_SOCKET_IFNAME")):
        # Without it gloo looks the host name up, which fails or hangs on machines that cannot resolve their own; and
        # what a cluster sets is for its network, while the ranks of one machine meet on 127.0.0.1.
        os.environ["GLOO_SOCKET_IFNAME"] = place.interface
    if spec.process_group == "loader":
        meetings.number(address, port)
    me = Rank(place.rank, place.local_rank, spec.size, device, _store=store)
    if spec.process_group == "plugin":
        from datetime import timedelta

        dist.init_process_group(
            spec.backend,
            store=store or dist.TCPStore(address, port, is_master=False),
            rank=place.rank,
            world_size=spec.size,
            # Later than the parent's own deadline: the parent shows the stacks of all ranks, torch only an error.
            timeout=timedelta(seconds=2 * spec.timeout + 60),
            device_id=device if spec.backend == "nccl" else None,
        )
        me._mesh = dist.device_mesh.init_device_mesh(
            device.type, tuple(spec.mesh.values()), mesh_dim_names=tuple(spec.mesh)
        )
    _CURRENT = me


def seed(device_type: str) -> None:
    """The state of random numbers that every rank and every test begins with."""
    import torch

    random.seed(SEED)
    if device_type == "cpu":
        # torch.manual_seed keeps a traceback for each kind of device that is not there: 2 ms in a new rank.
        torch.default_generator.manual_seed(SEED)
    else:
        torch.manual_seed(SEED)


def torchrun_environment(place: Place, size: int, address: str, port: int) -> dict[str, str]:
    """What torchrun sets. The store behind the port is already served, so nothing has to bind it."""
    return {
        "RANK": str(place.rank),
        "LOCAL_RANK": str(place.local_rank),
        "GROUP_RANK": str(place.group_rank),
        "ROLE_RANK": str(place.rank),
        "ROLE_NAME": "default",
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(place.local_size),
        "GROUP_WORLD_SIZE": str(place.group_size),
        "ROLE_WORLD_SIZE": str(size),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
    }


def _answer(channel: Channel, task: Assignment, message: tuple[Any, ...]) -> None:
    _, call, target, payload = message
    if _TELLER is not None:
        _TELLER.forget()
    try:
        function, args, kwargs = _unpack(target, payload)
        with nullcontext() if target else telling():
            result = function(*args, **kwargs)
    except BaseException as error:
        global _RAISED
        _RAISED = error
        _tell_coverage()
        _report(channel, _failure(task, error))
        return
    _tell_coverage()
    try:
        channel.send("result", call, _pack(result))
    except Exception as error:
        why = disk.hint(task.folder, error) or f"{type(error).__name__}: {error}"
        summary = f"returned a {type(result).__name__} that cannot be sent back: {why}"
        _report(channel, RankFailure(task.place.rank, "unsendable", summary, when=time.monotonic()))


def _report(channel: Channel, failure: RankFailure) -> None:
    try:
        channel.send("failure", failure)
    except OSError:  # there is no room on the disk for a long one, and the pipe takes a short one
        short = replace(failure, detail=_shortened(failure.detail, 1500), message=_shortened(failure.message, 1500))
        channel.send("failure", short)


def _tell_coverage() -> None:
    """With every answer, because a rank is killed in the end."""
    if _MEASUREMENT is not None and (news := _MEASUREMENT.news()):
        note(measured.KIND, ("calls", news))


def _pack(result: Any) -> bytes:
    import cloudpickle

    packed = cloudpickle.dumps(result)
    assert isinstance(packed, bytes)
    return packed


def _unpack(target: str, payload: bytes) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    function, args, kwargs = pickle.loads(payload)
    if target:
        module, _, name = target.partition(":")
        function = getattr(import_module(module), name)
    return function, args, kwargs


def _failure(task: Assignment, error: BaseException) -> RankFailure:
    where = detail = ""
    if isinstance(error, CallFailed) and error.__cause__ is not None:
        where, detail, error = f" in {error.where}" if error.where else "", error.detail, error.__cause__
    kind = type(error)
    try:
        text = str(error)
    except Exception:
        text = "(its text cannot be made)"
    first = _shortened(text.strip().splitlines()[0], 300) if text.strip() else ""
    said = ": ".join(filter(None, (f"raised {kind.__name__}{where}", first, disk.hint(task.folder, error, text))))
    return RankFailure(
        task.place.rank,
        "raised",
        text if isinstance(error, Misuse) else said,
        detail=_shortened(detail or tracebacks.tell(error, hide=Path(__file__).parents[1]), 20_000),
        when=time.monotonic(),
        user=isinstance(error, Misuse),
        exception=f"{kind.__module__}.{kind.__qualname__}",
        message=_shortened(text, 20_000),
    )


def _shortened(text: str, limit: int) -> str:
    """The beginning and the end: a loader may list three thousand missing keys in one line."""
    half = limit // 2
    return text if len(text) <= limit else f"{text[:half]} ... ({len(text) - limit} characters) ... {text[-half:]}"
