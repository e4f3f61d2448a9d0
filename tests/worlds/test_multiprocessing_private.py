"""The private names of multiprocessing that ``multiprocessing_private.py`` uses: these tests fail when one moves."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from multiprocessing import forkserver

import pytest

from pytest_fsdp_meta.worlds.system import processes
from pytest_fsdp_meta.worlds.system.multiprocessing_private import ForkServer
from tests.world_help import assert_gone, preload, world_of


@pytest.fixture
def server() -> Iterator[ForkServer]:
    server = ForkServer()
    server.ensure_running()
    yield server
    server.kill()


def test_a_second_fork_server(server: ForkServer) -> None:
    pid, usual = server.pid, forkserver.connect_to_new_process
    assert pid is not None
    with server.serving():
        process = multiprocessing.get_context("forkserver").Process(target=time.sleep, args=(1000,))
        process.start()
    assert process.pid in processes.children(pid)
    assert forkserver.connect_to_new_process == usual
    process.kill()
    process.join()
    server.kill()
    assert_gone([pid])
    assert server.pid is None


@pytest.mark.parametrize("waits", [False, True])
def test_a_server_that_has_ended_has_no_number(server: ForkServer, waits: bool) -> None:
    """Not even if other code has waited for it, after which another process may be given the number."""
    pid = server.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    if waits:
        os.waitpid(pid, 0)
    else:
        assert_gone([pid])
    assert server.pid is None
    server.kill()


def test_ranks_do_not_keep_the_server_alive() -> None:
    def descriptor() -> object:
        return forkserver._forkserver._forkserver_alive_fd  # type: ignore[attr-defined]

    assert preload().method == "forkserver"
    with world_of(1) as ranks:
        assert ranks.run(descriptor) == [None]
