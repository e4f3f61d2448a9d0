"""Run the same tests under this plugin and other tools, and find all processes that a run starts by a marker."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).parent / "peers"
ROOT = Path(__file__).parents[1]
PYTEST = ("-m", "pytest", "-c", str(HERE / "pytest.ini"), "--rootdir", str(HERE), "-p", "no:cacheprovider", "-v")
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node={world}")
MPIEXEC = ("{bin}/mpiexec", "--oversubscribe", "--allow-run-as-root", "-n", "{world}", "{bin}/python")
MPI = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
}


@dataclass(frozen=True)
class Peer:
    name: str
    file: str
    fresh: bool
    """Whether every test has a fresh world."""
    needs: str = "torch"
    """The module that the tool requires."""
    plugins: tuple[str, ...] = ()
    before: tuple[str, ...] = ()
    """Arguments between the interpreter and ``-m pytest``; a leading command replaces the interpreter."""
    after: tuple[str, ...] = ()
    environ: Mapping[str, str] = field(default_factory=dict)
    ours: bool = False
    threads: bool = False

    def command(self, python: str, world: int) -> list[str]:
        values = {"world": world, "bin": str(Path(python).parent)}
        before = [word.format(**values) for word in self.before]
        if not before or before[0].startswith("-"):
            before.insert(0, python)
        plugins = [word for name in self.plugins for word in ("-p", name)]
        return [*before, *PYTEST, *plugins, *[w.format(**values) for w in self.after], str(HERE / self.file)]


PLUGIN = ("pytest_fsdp_meta.plugin",)
SESSION_SCOPE = {"BENCH_SCOPE": "session"}
OURS = [
    Peer("World", "ours_world.py", fresh=True, ours=True),
    Peer("@fsdp_spmd", "ours_spmd.py", fresh=True, ours=True, plugins=PLUGIN),
    Peer("fsdp_world", "ours_fixture.py", fresh=True, ours=True, plugins=PLUGIN),
    Peer("World, reused", "ours_warm.py", fresh=False, ours=True),
    Peer("@fsdp_spmd(scope=session)", "ours_spmd.py", fresh=False, ours=True, plugins=PLUGIN, environ=SESSION_SCOPE),
    Peer("fsdp_world(scope=session)", "ours_fixture.py", fresh=False, ours=True, plugins=PLUGIN, environ=SESSION_SCOPE),
]
DEEPSPEED = {"needs": "deepspeed_unit", "plugins": ("deepspeed_unit",)}
MPI_PYTEST = {"needs": "pytest_mpi", "environ": MPI}
ISOLATE = {"needs": "pytest_isolate_mpi", "environ": MPI, "plugins": ("pytest_isolate_mpi._plugin",)}
EACH = ("-n{world}", "--dist=each")
PEERS = [
    Peer("MultiProcessTestCase", "peer_testcase.py", fresh=True),
    Peer("mp.spawn", "peer_spawn.py", fresh=True),
    Peer("torchrun per test", "peer_torchrun.py", fresh=True),
    Peer("accelerate debug_launcher (fork)", "peer_accelerate.py", fresh=True, needs="accelerate"),
    Peer("dtest", "peer_dtest.py", fresh=True, needs="dtest", plugins=("dtest._entry",)),
    Peer("DeepSpeed DistributedTest", "peer_deepspeed.py", fresh=True, **DEEPSPEED),
    Peer("mpi-pytest, forking", "peer_mpi.py", fresh=True, plugins=("pytest_mpi.plugin",), **MPI_PYTEST),
    Peer("pytest-isolate-mpi", "peer_isolate_mpi.py", fresh=True, **ISOLATE),
    Peer("MultiProcContinuousTest", "peer_continuous.py", fresh=False),
    Peer("MultiThreadedTestCase", "peer_threaded.py", fresh=False, threads=True),
    Peer("torchrun -m pytest", "peer_per_rank.py", fresh=False, before=TORCHRUN),
    Peer("xdist --dist=each", "peer_per_rank.py", fresh=False, needs="xdist", plugins=("xdist.plugin",), after=EACH),
    Peer("DeepSpeed, reuse_dist_env", "peer_deepspeed_reuse.py", fresh=False, **DEEPSPEED),
    Peer(
        "mpi-pytest in mpiexec",
        "peer_mpi.py",
        fresh=False,
        plugins=("xdist.plugin", "pytest_mpi.plugin"),  # mpi-pytest reads xdist's options if xdist is installed
        before=MPIEXEC,
        **MPI_PYTEST,
    ),
]


@dataclass
class Run:
    """The results of one run: times, outcomes, output, markers, remaining processes and memory."""

    wall: float = 0.0
    tests: list[float] = field(default_factory=list)
    outcomes: list[str] = field(default_factory=list)
    code: int | None = None
    output: str = ""
    marks: dict[str, float] = field(default_factory=dict)
    ended: float = 0.0
    left: list[int] = field(default_factory=list)
    peak_pss: int = 0


class Started:
    """A running tool. All its processes have a unique variable in their environment."""

    def __init__(self, peer: Peer, python: str, body: str, world: int, tests: int, limit: float, folder: Path) -> None:
        self.marker = f"BENCH_{uuid.uuid4().hex}"
        self.marks = folder
        self.output = folder / "output"
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "BENCH_"))}
        environ = inherited | dict(peer.environ) | {
            self.marker: "1",
            "BENCH_BODY": body,
            "BENCH_WORLD": str(world),
            "BENCH_TESTS": str(tests),
            "BENCH_LIMIT": str(limit),
            "BENCH_MARKS": str(folder),
            "DISTRIBUTED_TESTS_DEFAULT_TIMEOUT": str(int(limit)),
            "DS_UNITTEST_TIMEOUT": str(int(limit)),
            "DS_ACCELERATOR": "cpu",
            "OMP_NUM_THREADS": "1",
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(HERE), os.environ.get("BENCH_EXTRA", "")]),
            "PATH": os.pathsep.join([str(Path(python).parent), os.environ.get("PATH", "")]),
            "TMPDIR": str(folder),
        }  # fmt: skip
        self.began = time.perf_counter()
        with self.output.open("w") as output:
            self.process = subprocess.Popen(
                peer.command(python, world), env=environ, cwd=HERE, stdout=output, stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip

    def pids(self) -> list[int]:
        """Return all live processes of the run, including those that have left its process tree."""
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                running = (entry / "stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
                if running and self.marker.encode() in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
        return found

    def pss(self) -> int:
        """Return the memory in bytes, with shared pages divided among the processes that share them (PSS)."""
        total = 0
        for pid in self.pids():
            with suppress(OSError):
                lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
                total += sum(1024 * int(line.split()[1]) for line in lines if line.startswith("Pss:"))
        return total

    def kill_all(self) -> None:
        for _ in range(50):
            if not (left := self.pids()):
                break
            for pid in left:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self.process.poll()
            time.sleep(0.02)
        self.process.wait(10)

    def read_results(self) -> Run:
        run = Run(code=self.process.poll(), output=self.output.read_text(errors="replace"))
        files = sorted(self.marks.glob("times.*"), key=lambda file: (file.suffix not in (".main", ".Pgw0"), file.name))
        for line in files[0].read_text().splitlines() if files else []:
            test = json.loads(line)
            run.tests.append(test["seconds"])
            run.outcomes.append(test["outcome"])
        for file in [*self.marks.glob("fault.*"), *self.marks.glob("out.*"), *self.marks.glob("held.*")]:
            run.marks[file.name] = float(file.read_text() or 0)
        return run


@contextmanager
def started(peer: Peer, python: str, body: str, world: int, tests: int = 1, limit: float = 300.0) -> Iterator[Started]:
    """Start a tool, and kill all its processes in the end."""
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        at_work = Started(peer, python, body, world, tests, limit, Path(folder))
        try:
            yield at_work
        finally:
            at_work.kill_all()


def timed(peer: Peer, python: str, body: str, world: int, tests: int, most: float = 240.0) -> Run:
    """Run to the end and return the results with the wall time."""
    with started(peer, python, body, world, tests) as at_work:
        with suppress(subprocess.TimeoutExpired):
            at_work.process.wait(most)
        wall = time.perf_counter() - at_work.began
        run = at_work.read_results()
        run.wall = wall
        return run


def weighed(peer: Peer, python: str, world: int, most: float = 120.0) -> Run:
    """Run one test in which all ranks wait, and return the results with the peak memory."""
    with started(peer, python, "hold", world, tests=1) as at_work:
        peak, deadline = 0, time.monotonic() + most
        while at_work.process.poll() is None and time.monotonic() < deadline:
            peak = max(peak, at_work.pss())
            time.sleep(0.2)
        run = at_work.read_results()
        run.peak_pss = peak
        return run


def available(python: str, peers: list[Peer]) -> tuple[list[Peer], list[Peer]]:
    """Return the tools that are installed, and those that are not."""
    names = sorted({peer.needs for peer in peers})
    code = f"from importlib.util import find_spec; print(*[name for name in {names!r} if find_spec(name)])"
    path = os.pathsep.join([str(HERE), os.environ.get("BENCH_EXTRA", "")])
    environ = os.environ | {"PYTHONPATH": path}
    installed = subprocess.run(
        [python, "-c", code], env=environ, capture_output=True, text=True, check=True
    ).stdout.split()
    return [peer for peer in peers if peer.needs in installed], [peer for peer in peers if peer.needs not in installed]


def versions(python: str) -> str:
    names = ["torch", "pytest", "accelerate", "deepspeed", "mpi-pytest", "pytest-isolate-mpi", "mpi4py", "openmpi"]
    code = (
        "import importlib.metadata as m, sys\n"
        "print('Python', sys.version.split()[0], end='')\n"
        f"for name in {names!r}:\n"
        "    try: print(f', {name} {m.version(name)}', end='')\n"
        "    except m.PackageNotFoundError: pass"
    )
    return subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout


def default_python() -> str:
    peers = ROOT / ".venv-peers/bin/python"
    return str(peers) if peers.exists() else sys.executable
