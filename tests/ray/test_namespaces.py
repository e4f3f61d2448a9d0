"""A Ray cluster of two nodes in separate network namespaces, connected by a veth pair only.

So ranks on the two nodes cannot use loopback to reach each other, as they could on one machine. The second node cannot
see the temporary folder of the first either. Creating namespaces needs the rights of root.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

pytest.importorskip("ray", reason="Ray is not installed here; make ray has it")

from tests.conftest import TINY
from tests.world_help import ROOT, SOON, assert_gone

FIRST, SECOND = "10.213.7.1", "10.213.7.2"
PORT = 6379
PATIENCE = 120
"""Seconds for one command."""
RAY = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "12" * 32}


@dataclass
class Cable:
    """Two connected namespaces with a Ray cluster; only the first sees the folder ``private``."""

    names: tuple[str, str]
    private: Path

    def run(self, command: list[str], side: int = 0, **environ: str) -> subprocess.Popen[str]:
        path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        return subprocess.Popen(
            ["ip", "netns", "exec", self.names[side], *command],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=os.environ | {"PYTHONPATH": path} | RAY | environ,
        )

    def cut(self) -> None:
        ip("-n", self.names[1], "link", "set", "cable", "down")

    def pids(self, side: int) -> list[int]:
        listing = subprocess.run(["ip", "netns", "pids", self.names[side]], capture_output=True, text=True, check=False)
        return [int(pid) for pid in listing.stdout.split()]


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


@pytest.fixture
def cable() -> Iterator[Cable]:
    """Recreated for each test, because one test cuts it."""
    if shutil.which("ip") is None:
        pytest.skip("the command ip (iproute2) is not installed")
    names = f"fsdp-a{os.getpid()}", f"fsdp-b{os.getpid()}"
    folder = Path(tempfile.mkdtemp(prefix="fsdp-ns-", dir="/tmp"))  # short, because socket paths are limited
    created = Cable(names, folder / "private")
    created.private.mkdir()
    try:
        try:
            for name in names:
                ip("netns", "add", name)
            ip("link", "add", "cable", "netns", names[0], "type", "veth", "peer", "name", "cable", "netns", names[1])
        except subprocess.CalledProcessError as error:
            pytest.skip(f"network namespaces are not permitted: {error.stderr.strip()}")
        for name, address in zip(names, (FIRST, SECOND), strict=True):
            ip("-n", name, "address", "add", f"{address}/24", "dev", "cable")
            ip("-n", name, "link", "set", "cable", "up")
            ip("-n", name, "link", "set", "lo", "up")
        _start_ray(created, folder)
        yield created
    finally:
        for side in (0, 1):
            for pid in created.pids(side):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            subprocess.run(["ip", "netns", "del", names[side]], check=False, capture_output=True)
        shutil.rmtree(folder, ignore_errors=True)


def _start_ray(cable: Cable, folder: Path) -> None:
    ray = [sys.executable, "-m", "ray.scripts.scripts", "start", "--num-cpus=1", "--object-store-memory=80000000"]
    head = ["--head", f"--port={PORT}", "--include-dashboard=false", f"--temp-dir={folder}/ray"]
    _wait_for(cable.run([*ray, f"--node-ip-address={FIRST}", *head]))
    # An empty file system mounted over the folder hides it from this node.
    hidden = f'mount -t tmpfs none "{cable.private}" && exec "$@"'
    isolated = ["unshare", "--mount", "--propagation=private", "sh", "-c", hidden, "sh"]
    _wait_for(cable.run([*isolated, *ray, f"--node-ip-address={SECOND}", f"--address={FIRST}:{PORT}"], side=1))


def _wait_for(process: subprocess.Popen[str]) -> None:
    output, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, output


WORLDS = f"""
import json, os, sys, time
from pytest_fsdp_meta.worlds import RayEngine, Sources, World, WorldError, WorldSpec
from tests.world_help import environment, total

PLACE = ["RANK", "LOCAL_RANK", "GROUP_RANK", "LOCAL_WORLD_SIZE", "GLOO_SOCKET_IFNAME"]
engine = RayEngine("{FIRST}:{PORT}", Sources(tuple(sys.path)))
results = {{}}

def join():
    import torch.distributed as dist
    dist.init_process_group("gloo")
    return total(2.0)

with World(WorldSpec({{"dp": 2}}, timeout=60), engine) as world:
    results["sums"] = world.run(total, 1.0)
    results["networks"] = len(set(world.run(os.readlink, "/proc/self/ns/net")))
    results["places"] = [list(place.values()) for place in world.run(environment, PLACE)]
    results["master"] = sorted({{place["MASTER_ADDR"] for place in world.run(environment, ["MASTER_ADDR"])}})
    results["large"] = [len(data) for data in world.run(lambda data: data, b"x" * 3_000_000)]
    world.run(print, "written there")
    results["outputs"] = [output.endswith("written there\\n") for output in world.outputs()]
with World(WorldSpec({{"dp": 2}}, timeout=60, process_group="loader"), engine) as world:
    results["loader"] = world.run(join)
try:
    with World(WorldSpec({{"dp": 2}}, timeout=3), engine) as world:
        world.run(time.sleep, 1000)
except WorldError as error:
    results["hang"] = error.summary, "stack of rank" in str(error)
engine.close()
print(json.dumps(results))
"""


def test_a_world_over_two_networks(cable: Cable, tmp_path: Path) -> None:
    script = tmp_path / "worlds.py"
    script.write_text(WORLDS)
    process = cable.run([sys.executable, str(script)])
    output, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, output
    results = json.loads(output.splitlines()[-1])
    assert results.pop("master") in ([FIRST], [SECOND])
    assert results == {
        "sums": [1.0, 1.0],
        "networks": 2,
        "places": [["0", "0", "0", "1", "cable"], ["1", "0", "1", "1", "cable"]],
        "large": [3_000_000, 3_000_000],
        "outputs": [True, True],
        "loader": [2.0, 2.0],
        "hang": ["ranks 0, 1 hung outside of Python code", True],
    }


CUT = f"""
import os, sys, time
from pytest_fsdp_meta.worlds import RayEngine, Sources, World, WorldError, WorldSpec

engine = RayEngine("{FIRST}:{PORT}", Sources(tuple(sys.path)))
try:
    with World(WorldSpec({{"dp": 2}}, timeout=100), engine) as world:
        print("addresses", *[seat.address for seat in engine.seats], flush=True)
        print("pids", *world.run(os.getpid), flush=True)
        world.run(time.sleep, 1000)
except WorldError as error:
    print("lost", error.summary, flush=True)
os._exit(0)  # Ray's own shutdown is slow after half of its cluster was lost
"""


def test_a_node_that_loses_its_network(cable: Cable, tmp_path: Path) -> None:
    script = tmp_path / "cut.py"
    script.write_text(CUT)
    process = cable.run([sys.executable, str(script)])
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("pids "):
            break
    pids = [int(word) for word in line.split()[1:]]
    cable.cut()
    began = time.monotonic()
    line = next(line for line in process.stdout if line.startswith("lost "))
    assert time.monotonic() - began < SOON, "TCP alone would wait for a quarter of an hour"
    process.kill()
    process.wait()
    assert re.fullmatch(rf"lost rank [01] was lost with its node {re.escape(SECOND)} \(\w{{8}}\)\n", line)
    assert_gone(pids, SOON)


LOADER = """
@fsdp_conformance(world_size=2, only=["no_meta_params", "params_equal_reference"])
def test_loader(fsdp):
    return load(fsdp, reference=build)


@fsdp_spmd(world_size=2)
def test_body(fsdp):
    import torch.distributed as dist
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == 3, "two ranks"
"""


def test_a_temporary_folder_that_the_nodes_do_not_share(cable: Cable, tmp_path: Path) -> None:
    text = TINY.format(folder=str(tmp_path)).replace("import Subject", "import Subject, fsdp_spmd")
    (tmp_path / "test_it.py").write_text(text + LOADER)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--rootdir", str(tmp_path), str(tmp_path)]
    command.append("--fsdp-engine=ray")
    address = f"{FIRST}:{PORT}"
    output, _ = cable.run(command, TMPDIR=str(cable.private), RAY_ADDRESS=address).communicate(timeout=PATIENCE)
    assert re.search(
        rf": node {SECOND} cannot see {cable.private}/fsdp-trial-[\w-]+, where the reference is "
        "stored; set TMPDIR to a folder that all nodes share",
        output,
    ), output
    assert "assert 2.0 == 3" in output, "@fsdp_spmd needs no shared folder, and its asserts are rewritten on every node"
    shared = cable.private.parent / "shared"
    shared.mkdir()
    output, _ = cable.run(command, TMPDIR=str(shared), RAY_ADDRESS=address).communicate(timeout=PATIENCE)
    assert "1 failed, 2 passed" in output, output
