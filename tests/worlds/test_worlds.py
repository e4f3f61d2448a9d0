"""Worlds that work: what ranks see, what calls return, how worlds start and end. All with real processes."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from pytest_fsdp_meta.worlds import (
    ForkServerEngine,
    Listener,
    Rank,
    Sources,
    World,
    WorldError,
    WorldSpec,
    current,
    note,
)
from tests.world_help import (
    ROOT,
    SOON,
    assert_gone,
    ended_at_last,
    environment,
    me,
    preload,
    run_script,
    total,
    world_of,
)

TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GROUP_RANK")


@pytest.fixture(scope="module")
def pair() -> Iterator[World]:
    """A world of two ranks, for tests that leave it intact."""
    with world_of(2) as world:
        yield world


@pytest.mark.parametrize("size", [1, 2, 4])
def test_every_rank_is_called_and_results_come_in_rank_order(size: int) -> None:
    with world_of(size) as world:
        assert world.run(me) == [(rank, size) for rank in range(size)]
        assert world.run(total, 2.0) == [2.0 * sum(range(size))] * size


def test_a_function_can_be_given_by_name(pair: World) -> None:
    assert pair.run("tests.world_help:total", 3.0) == [3.0, 3.0]
    assert pair.run("tests.world_help:total", value=3.0) == [3.0, 3.0]


def test_closures_and_lambdas_are_sent(pair: World) -> None:
    offset = 10
    assert pair.run(lambda base: base + offset + current().rank, 5) == [15, 16]


def test_state_is_kept_between_the_calls_of_one_world() -> None:
    def remember(word: str) -> None:
        current().state["word"] = f"{word}{current().rank}"

    with world_of(2) as world:
        world.run(remember, "a")
        assert world.run(lambda: current().state["word"]) == ["a0", "a1"]
    with world_of(2) as world:
        assert world.run(lambda: dict(current().state)) == [{}, {}]


def test_mesh_has_the_names_and_sizes_that_were_asked_for() -> None:
    def describe() -> tuple[object, ...]:
        mesh = current().mesh
        return mesh.mesh_dim_names, tuple(mesh.shape), mesh.get_coordinate(), str(current().device)

    with world_of(4, mesh={"dp_replicate": 2, "dp_shard": 2}) as world:
        found = [(names, shape, list(place), device) for names, shape, place, device in world.run(describe)]
    assert found == [(("dp_replicate", "dp_shard"), (2, 2), place, "cpu") for place in ([0, 0], [0, 1], [1, 0], [1, 1])]


def test_barrier_waits_for_every_rank(pair: World, tmp_path: Path) -> None:
    def meet(folder: Path) -> int:
        import time

        time.sleep(0.3 * current().rank)
        Path(folder, str(current().rank)).touch()
        current().barrier()
        return len(list(folder.iterdir()))

    assert pair.run(meet, tmp_path) == [2, 2]


def test_torchrun_environment(pair: World) -> None:
    first, second = pair.run(environment, TORCHRUN)
    port = first.pop("MASTER_PORT")
    assert port == second.pop("MASTER_PORT")
    assert 0 < int(port) < 65536
    common = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "GROUP_RANK": "0"}
    assert first == common | {"RANK": "0", "LOCAL_RANK": "0"}
    assert second == common | {"RANK": "1", "LOCAL_RANK": "1"}


def test_a_store_is_served_where_the_environment_says(pair: World) -> None:
    """As under torchrun, for code that makes a group of its own beside the process group of the world."""

    def meet() -> list[bytes]:
        import torch.distributed as dist

        store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
        store.set(str(current().rank), str(current().rank))
        return [store.get(str(rank)) for rank in range(2)]

    assert pair.run(meet) == [[b"0", b"1"]] * 2


@pytest.mark.skipif(not shutil.which("cc"), reason="needs a C compiler")
def test_a_world_starts_although_no_name_server_answers(tmp_path: Path) -> None:
    """A TCPStore asks for the name of 127.0.0.1 on each of its connections; here the answer never comes."""
    source, library = tmp_path / "silent.c", tmp_path / "silent.so"
    source.write_text("#include <unistd.h>\nint getnameinfo(void) { for (;;) pause(); }\n")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)
    script = (
        "from tests.world_help import total, world_of\n"
        "if __name__ == '__main__':\n"
        "    with world_of(4) as world:\n"
        "        print(world.run(total, 1.0))\n"
    )
    with run_script(script, tmp_path, LD_PRELOAD=str(library)) as process:
        try:
            output, _ = process.communicate(timeout=60)
        finally:
            process.kill()
    assert output.splitlines() == ["[6.0, 6.0, 6.0, 6.0]"]


def test_the_loader_may_make_the_process_group_itself() -> None:
    def initialise() -> tuple[float, str, str]:
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh

        assert not dist.is_initialized()
        with pytest.raises(ValueError) as caught:
            _ = current().mesh
        dist.init_process_group("gloo", init_method="env://")
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("mine",))
        return total(1.0), str(mesh.mesh_dim_names), str(caught.value)

    with world_of(2, process_group="loader") as world:
        message = 'fsdp.mesh does not exist with process_group="loader": the loader makes its own mesh'
        assert world.run(initialise) == [(1.0, "('mine',)", message)] * 2
        assert world.run(total, 4.0) == [4.0, 4.0], "the group lives on between calls"


def test_ranks_see_the_parents_environment_directory_and_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    preload().start()  # ranks see also what is set after the fork server has started
    monkeypatch.setenv("WORLD_TEST_SET", "here")
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "only_here.py").write_text("NAME = __name__")
    shared = ForkServerEngine(Sources((str(tmp_path), *preload().sources.path)))

    def look() -> tuple[object, ...]:
        import only_here

        return os.environ.get("WORLD_TEST_SET"), os.environ.get("HOME"), os.getcwd(), sys.path[0], only_here.NAME

    with World(WorldSpec({"dp": 2}), shared) as world:
        assert world.run(look) == [("here", None, str(tmp_path), str(tmp_path), "only_here")] * 2


def test_modules_that_only_a_file_leads_to_can_be_imported(tmp_path: Path) -> None:
    files = {
        "loose_alone": tmp_path / "some-file.py",
        "loose_parent.inner.test_it": tmp_path / "tests" / "test_it.py",
        "loose_package": tmp_path / "package" / "__init__.py",
        "xml.loose_in_real_package": tmp_path / "in_xml.py",
    }
    for name, file in files.items():
        file.parent.mkdir(exist_ok=True)
        file.write_text(f"def name():\n    return {name!r}, __name__\n")
    (tmp_path / "package" / "part.py").write_text("WORD = 'part'")
    sources = Sources(preload().sources.path, {name: str(file) for name, file in files.items()})

    def others() -> tuple[str, bool]:
        import xml.dom

        from loose_package import part

        return part.WORD, hasattr(xml.dom, "Node")

    with World(WorldSpec({"dp": 1}), ForkServerEngine(sources, test_modules=list(files))) as world:
        for name in files:
            assert world.run(f"{name}:name") == [(name, name)]
        assert world.run(others) == [("part", True)]


def test_arguments_that_cannot_be_sent(pair: World) -> None:
    message = "the arguments cannot be sent to the ranks: TypeError: cannot pickle"
    with pytest.raises(ValueError, match=message) as caught:
        pair.run(len, threading.Lock())
    assert not isinstance(caught.value, WorldError)
    assert pair.run(me) == [(0, 2), (1, 2)], "no rank was called"


def test_results_that_cannot_be_sent_back() -> None:
    def locked() -> object:
        return threading.Lock() if current().rank == 1 else None

    with pytest.raises(WorldError) as caught, world_of(2) as world:
        world.run(locked)
    assert caught.value.summary.startswith("rank 1 returned a lock that cannot be sent back: TypeError: cannot pickle")
    assert caught.value.failures[0].kind == "unsendable"


def test_results_that_cannot_be_read_here(pair: World) -> None:
    class Trap:
        def __reduce__(self) -> tuple[object, ...]:
            return int, ("no number",)

    with pytest.raises(ValueError, match="a rank's result cannot be read here: ValueError: invalid literal"):
        pair.run(lambda make: make(), Trap)


def test_large_results_and_arguments(pair: World) -> None:
    size = 50 * 2**20
    results = pair.run(lambda data: bytes([current().rank]) * size + data[:1], b"x" * size)
    assert [(len(one), one[0], one[-1:]) for one in results] == [(size + 1, 0, b"x"), (size + 1, 1, b"x")]


def test_output_is_captured_per_rank() -> None:
    def chatter() -> None:
        print(f"hello from {current().rank}")
        os.write(2, b"straight to the descriptor\n")
        subprocess.run(["echo", "from a child"], check=True)
        print("unfinished", end="")

    with world_of(2) as world:
        world.run(chatter)
        assert world.outputs() == [
            f"hello from {rank}\nstraight to the descriptor\nfrom a child\nunfinished" for rank in (0, 1)
        ]


def test_ranks_use_one_thread_and_the_same_seed(pair: World) -> None:
    def look() -> tuple[int, float]:
        import torch

        return torch.get_num_threads(), torch.rand(1).item()

    first, second = pair.run(look)
    assert first == second
    assert first[0] == 1


def test_only_ranks_have_a_current_world_and_send_notes() -> None:
    for function in (current, lambda: note("doing", "nothing")):
        with pytest.raises(RuntimeError, match="this process is not a rank of a world"):
            function()


def test_the_repr_of_a_rank_is_short(pair: World) -> None:
    assert pair.run(lambda: repr(current()))[1].startswith("Rank(rank=1, local_rank=1, world_size=2, device=device(")
    assert Rank(0, 0, 1, None).state == {}  # type: ignore[arg-type]


def test_an_attribute_that_a_rank_lacks_is_named_with_the_nearest() -> None:
    rank = Rank(0, 0, 1, None)  # type: ignore[arg-type]
    with pytest.raises(AttributeError, match=r"^fsdp has no attribute 'msh'; did you mean 'mesh'\?$"):
        rank.msh  # type: ignore[attr-defined]  # noqa: B018
    with pytest.raises(AttributeError, match=r"^fsdp has no attribute 'zzz'; it has rank, local_rank, world_size, "):
        rank.zzz  # type: ignore[attr-defined]  # noqa: B018
    assert not hasattr(rank, "__deepcopy__")
    with pytest.raises(AttributeError, match="'NoneType' object has no attribute 'type'"):
        rank.simulated  # noqa: B018


def test_closing_ends_ranks_and_removes_what_they_wrote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    world = world_of(2)
    assert not world.alive
    world.start()
    assert world.alive
    pids = world.run(os.getpid)
    with pytest.raises(RuntimeError, match="this world has already been started"):
        world.start()
    world.close()
    world.close()
    assert not world.alive
    assert_gone(pids)
    assert not list(tmp_path.glob("fsdp-world-*"))
    with pytest.raises(RuntimeError, match="this world has ended; create a new one"):
        world.run(me)


def test_two_threads_close_a_world(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread whose call fails because another closes the world closes it as well."""
    first = world_of(1)
    first.start()
    (member,) = first._members
    release, releasing, released = member.release, threading.Event(), []

    def slow() -> None:
        releasing.set()
        time.sleep(0.3)
        release()
        released.append(threading.current_thread().name)

    monkeypatch.setattr(member, "release", slow)
    thread = threading.Thread(target=first.close, name="another")
    thread.start()
    assert releasing.wait(SOON)
    first.close()
    thread.join(SOON)
    assert released == ["another"]


def test_a_closed_world_can_be_started_again() -> None:
    world = world_of(1)
    for _ in range(2):
        with world:
            assert world.run(me) == [(0, 1)]


def test_two_worlds_at_the_same_time(pair: World) -> None:
    with world_of(2) as other:
        assert other.run(total, 1.0) == pair.run(total, 1.0) == [1.0, 1.0]
        pids = other.run(os.getpid)
        assert not set(pids) & set(pair.run(os.getpid))
    assert_gone(pids)
    assert pair.run(me) == [(0, 2), (1, 2)]


def test_worlds_in_threads() -> None:
    results: list[list[float]] = []

    def use() -> None:
        with world_of(2) as world:
            results.append(world.run(total, 1.0))

    threads = [threading.Thread(target=use) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert results == [[1.0, 1.0]] * 3


PARENTS = {
    "imports no torch": (
        """
import sys
from tests.world_help import me, world_of
with world_of(1) as world:
    assert world.run("tests.world_help:total", 1.0) == [0.0]
print("torch" in sys.modules)
""",
        "False\n",
    ),
    "is a script that is not run again on ranks": (
        """
print("once", flush=True)
from tests.world_help import world_of
class Mine:
    word = "sent by value"
with world_of(2) as world:
    print(*world.run(lambda: Mine.word), sep=", ", flush=True)
""",
        "once\nsent by value, sent by value\n",
    ),
    "uses multiprocessing": (
        """
import multiprocessing, sys
def has_torch(pipe):
    pipe.send("torch" in sys.modules)
def ask():
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("forkserver").Process(target=has_torch, args=(there,))
    process.start()
    print(here.recv(), flush=True)
    process.join()
if __name__ == "__main__":
    from tests.world_help import preload, world_of
    ask()
    with world_of(1) as world:
        print(world.run(lambda: "torch" in sys.modules)[0], flush=True)
        ask()
""",
        "False\nTrue\nFalse\n",
    ),
}


@pytest.mark.parametrize(("text", "output"), PARENTS.values(), ids=PARENTS)
def test_a_parent_that(tmp_path: Path, text: str, output: str) -> None:
    with ended_at_last(run_script(text, tmp_path)) as process:
        assert process.communicate(timeout=60)[0] == output


def test_a_world_that_is_never_closed_does_not_keep_the_parent_alive(tmp_path: Path) -> None:
    text = """
import os
from tests.world_help import world_of
world = world_of(2)
world.start()
print(*world.run(os.getpid), flush=True)
"""
    with ended_at_last(run_script(text, tmp_path, TMPDIR=str(tmp_path))) as process:
        pids = [int(word) for word in process.communicate(timeout=60)[0].split()]
        assert process.returncode == 0
    assert len(pids) == 2
    assert_gone(pids)
    assert not list(tmp_path.glob("fsdp-*"))


def test_preloading_gives_ranks_what_it_imports(tmp_path: Path) -> None:
    (tmp_path / "preloaded.py").write_text("import os\nfrom pytest_fsdp_meta import Subject\nBORN = os.getpid()")
    with World(WorldSpec({"dp": 2}), _preload(tmp_path, "preloaded")) as world:
        first, second = world.run(lambda: __import__("preloaded").BORN)
        assert first == second
        assert first not in {os.getpid(), *world.run(os.getpid)}, "imported in the fork server"


def test_ranks_do_not_copy_what_was_preloaded() -> None:
    def look() -> tuple[bool, bool, int]:
        import gc

        gc.collect()
        rollup = Path("/proc/self/smaps_rollup").read_text().splitlines()
        own = sum(int(line.split()[1]) for line in rollup if line.startswith("Private_"))
        return gc.isenabled(), gc.get_freeze_count() > 100_000, own // 1024

    with world_of(2) as world:
        for enabled, frozen, own in world.run(look):
            assert enabled
            assert frozen
            assert own < 60, "MiB; importing torch allocates about 200"


def test_forking_works_despite_modules_that_cannot_be_preloaded(tmp_path: Path) -> None:
    modules = {
        "raises": "raise RuntimeError('not today')",
        "skips": "import pytest; pytest.skip('not here', allow_module_level=True)",
        "exits": "import sys; sys.exit(3)",
        "misses": "import no_such_module",
        "garbled": "def broken(:",
        "lucky": "",
    }
    for name, text in modules.items():
        (tmp_path / f"{name}.py").write_text(text)
    shared = _preload(tmp_path, *modules, "not_even_there")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with World(WorldSpec({"dp": 2}), shared) as world:
            assert world.run(total, 1.0) == [1.0, 1.0]
            assert world.run(lambda: [name for name in modules if name in sys.modules]) == [["lucky"]] * 2
    assert shared.method == "forkserver"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (
            "import threading, time\n"
            "threading.Thread(target=time.sleep, args=(1000,), name='ticker', daemon=True).start()",
            "importing the test modules started threads (ticker)",
        ),
        ("import os\nos._exit(1)", "importing the test modules ended the process that does it"),
        (
            "import ctypes\n"
            "libc, thread = ctypes.CDLL(None), ctypes.c_ulong()\n"
            "libc.pthread_create(ctypes.byref(thread), None, libc.pause, None)\n"
            "libc.pthread_setname_np(thread, b'pt_autograd_0')",
            "importing the test modules started threads (pt_autograd_0)",
        ),
        pytest.param(
            "import ctypes, subprocess, tempfile\n"
            "library = tempfile.mkdtemp() + '/libcuda.so.1'\n"
            "command = ['cc', '-shared', '-Wl,-soname,libcuda.so.1', '-x', 'c', '-', '-o', library]\n"
            "subprocess.run(command, input=b'int cuDeviceGetCount(int *n) { return 0; }', check=True)\n"
            "ctypes.CDLL(library)",
            "importing the test modules initialised CUDA",
            id="a driver that somebody has initialised",
            marks=pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler"),
        ),
    ],
)
def test_ranks_are_spawned_where_forking_is_unsafe(tmp_path: Path, text: str, reason: str) -> None:
    (tmp_path / "unsafe.py").write_text(text)
    shared = _preload(tmp_path, "unsafe")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            with World(WorldSpec({"dp": 2}), shared) as world:
                assert world.run(total, 1.0) == [1.0, 1.0]
                pids = world.run(os.getpid)
            assert_gone(pids)
    (warning,) = [one for one in caught if "pytest-fsdp-meta" in str(one.message)]
    assert str(warning.message).startswith(f"pytest-fsdp-meta: {reason}")
    assert str(warning.message).endswith(", so ranks are spawned, which is slower")
    assert shared.method == "bare"


@pytest.mark.parametrize("name", ["jemalloc_bg_thd", "cuda00001800007"])
def test_forking_works_despite_threads_that_a_fork_may_lose(tmp_path: Path, name: str) -> None:
    (tmp_path / "allocator.py").write_text(
        "import ctypes\n"
        "libc, thread = ctypes.CDLL(None), ctypes.c_ulong()\n"
        "libc.pthread_create(ctypes.byref(thread), None, libc.pause, None)\n"
        f"libc.pthread_setname_np(thread, b'{name}')"
    )
    shared = _preload(tmp_path, "allocator")
    with World(WorldSpec({"dp": 2}), shared) as world:
        assert world.run(total, 1.0) == [1.0, 1.0]
    assert shared.method == "forkserver"


def test_ranks_see_the_gpus_of_their_world_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU here: what a world of leased GPUs gets in its environment."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3,GPU-8932f937,5")
    monkeypatch.delenv("PYTORCH_NVML_BASED_CUDA_CHECK", raising=False)
    with World(WorldSpec({"dp": 2}, visible=("GPU-8932f937", "5")), preload()) as world:
        assert world.run(os.getenv, "CUDA_VISIBLE_DEVICES") == ["GPU-8932f937,5"] * 2
    with World(WorldSpec({"dp": 2}), preload()) as world:
        assert world.run(os.getenv, "CUDA_VISIBLE_DEVICES") == ["2,3,GPU-8932f937,5"] * 2
        assert world.run(os.getenv, "PYTORCH_NVML_BASED_CUDA_CHECK") == ["1"] * 2, "asking for CUDA does not start it"


def test_waiting_for_slow_imports_has_a_limit(tmp_path: Path) -> None:
    (tmp_path / "endless.py").write_text("import time\ntime.sleep(1000)")
    shared, deadline = _preload(tmp_path, "endless"), time.monotonic() + 60.0
    shared.patience = 1.0
    shared.start()
    while shared.importing() != "endless" and time.monotonic() < deadline:
        time.sleep(0.1)
    with pytest.warns(UserWarning, match=r"took longer than 1 s, and endless is not done, so ranks are spawned"):
        shared.ready()
    with World(WorldSpec({"dp": 1}), shared) as world:
        assert world.run(me) == [(0, 1)]


def test_a_required_module_that_cannot_be_preloaded_warns_once(tmp_path: Path) -> None:
    shared = ForkServerEngine(Sources((str(tmp_path), str(ROOT), *sys.path)), modules=["no_such_module"])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            with World(WorldSpec({"dp": 1}), shared) as world:
                assert world.run(me) == [(0, 1)]
    (message,) = [str(one.message) for one in caught if "pytest-fsdp-meta" in str(one.message)]
    assert message == (
        "pytest-fsdp-meta: no_such_module cannot be preloaded: ModuleNotFoundError: No module named 'no_such_module'"
    )


def test_a_fork_server_that_was_killed_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "preloaded.py").write_text("import os\nBORN = os.getpid()")
    shared = _preload(tmp_path, "preloaded")
    born = []
    for _ in range(2):
        with World(WorldSpec({"dp": 1}), shared) as world:
            born += world.run(lambda: __import__("sys").modules["preloaded"].BORN)
        os.kill(born[-1], signal.SIGKILL)
        assert_gone(born)
    assert born[0] != born[1]


def _preload(folder: Path, *modules: str) -> ForkServerEngine:
    return ForkServerEngine(Sources((str(folder), str(ROOT), *sys.path)), test_modules=modules)


def test_notes_arrive_in_order_and_before_the_answer() -> None:
    def speak() -> int:
        for step in range(3):
            note("doing", f"step {step}")
        return current().rank

    notes: list[tuple[int, str, object]] = []

    class Recorder(Listener):
        def on_note(self, world: World, rank: int, kind: str, what: object) -> None:
            notes.append((rank, kind, what))

    with world_of(2, listener=Recorder()) as world:
        assert world.run(speak) == [0, 1]
    assert [what for rank, kind, what in notes if (rank, kind) == (1, "doing")] == ["step 0", "step 1", "step 2"]
    assert len(notes) == 6
