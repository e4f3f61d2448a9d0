"""The choice of device and backend, and counting GPUs without initialising CUDA."""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path

import pytest

from pytest_fsdp_meta.worlds import ForkServerEngine, Sources, World, WorldError, WorldSpec, choose
from pytest_fsdp_meta.worlds.local.engine import count_gpus
from pytest_fsdp_meta.worlds.rank import preload as preloading
from tests.world_help import ROOT

NO_GPU = "--fsdp-device=cuda: this machine has no GPU that torch can use; use cpu or auto"
NO_GPU_NCCL = "--fsdp-backend=nccl: this machine has no GPU that torch can use; use gloo or auto"
NCCL_ON_CPU = "--fsdp-backend=nccl runs on cuda only; use --fsdp-backend=gloo with --fsdp-device=cpu"
TORCH = """
class cuda:
    device_count = staticmethod(lambda: 3)
    is_initialized = staticmethod(lambda: False)
    _is_in_bad_fork = staticmethod(lambda: {bad_fork})

class backends:
    class cuda:
        is_built = staticmethod(lambda: True)

from pytest_fsdp_meta.worlds.rank import preload

preload.DEVICE_FILES = ({device_file!r},)
"""
"""A torch with only the names that are used, on a machine where the driver's files are this one."""
GPU, NO_GPU_FILE = "/dev/null", "/dev/no-such-device*"
TOO_FEW = (
    "a world of 4 on cuda with nccl needs 4 GPUs, this machine has 2; use a smaller world, "
    "or --fsdp-device=cuda --fsdp-backend=gloo, which lets ranks share a GPU"
)
CPU, NCCL, SHARED = ("cpu", "gloo"), ("cuda", "nccl"), ("cuda", "gloo")


@pytest.mark.parametrize(
    ("device", "backend", "none", "few", "enough"),
    [
        # a world of 4 on a machine with 0, 2 and 4 GPUs
        ("auto", "auto", CPU, CPU, NCCL),
        ("auto", "gloo", CPU, CPU, CPU),
        ("auto", "nccl", NO_GPU_NCCL, TOO_FEW, NCCL),
        ("cpu", "auto", CPU, CPU, CPU),
        ("cpu", "gloo", CPU, CPU, CPU),
        ("cpu", "nccl", NCCL_ON_CPU, NCCL_ON_CPU, NCCL_ON_CPU),
        ("cuda", "auto", NO_GPU, TOO_FEW, NCCL),
        ("cuda", "gloo", NO_GPU, SHARED, SHARED),
        ("cuda", "nccl", NO_GPU, TOO_FEW, NCCL),
    ],
)
def test_choice(
    device: str, backend: str, none: str | tuple[str, str], few: str | tuple[str, str], enough: str | tuple[str, str]
) -> None:
    for gpus, expected in ((0, none), (2, few), (4, enough), (8, enough)):
        assert _chosen(4, device, backend, gpus) == expected, f"{gpus} GPUs"


@pytest.mark.parametrize("device", ["auto", "cpu", "cuda"])
@pytest.mark.parametrize("backend", ["auto", "gloo", "nccl"])
@pytest.mark.parametrize("gpus", [0, 2, 4])
def test_a_required_gpu_makes_the_cpu_an_error_and_changes_nothing_else(device: str, backend: str, gpus: int) -> None:
    free = _chosen(4, device, backend, gpus)
    required = _chosen(4, device, backend, gpus, require_gpu=True)
    on_cpu = f"--fsdp-require-gpu: a world of 4 would run on the CPU, this machine has {gpus} GPUs"
    assert required == (on_cpu if free == CPU else free)


def test_a_world_of_one_rank_uses_the_only_gpu() -> None:
    assert choose(1, "auto", "auto", gpus=1) == NCCL


def test_no_gpu_is_counted_without_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preloading, "DEVICE_FILES", (NO_GPU_FILE,))
    engine = ForkServerEngine()
    assert engine.count_gpus() == 0
    assert engine._server is None


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_the_gpus_that_torch_can_use_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    engine = _with_torch(TORCH.format(bad_fork=False, device_file=GPU), tmp_path, monkeypatch, method)
    assert count_gpus(engine.launch_process) == 3


@pytest.mark.parametrize(("device_file", "method"), [(GPU, "bare"), (NO_GPU_FILE, "forkserver")])
def test_a_server_that_has_asked_cuda_for_devices_is_not_forked_where_there_are_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device_file: str, method: str
) -> None:
    """CUDA then refuses to start in forked processes, and only those can find out."""
    torch = TORCH.format(bad_fork=True, device_file=device_file)
    engine = _with_torch(torch, tmp_path, monkeypatch, "forkserver")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        engine.ready()
    asked = "importing the test modules asked CUDA for its devices, so ranks are spawned"
    assert [asked in str(one.message) for one in caught] == ([True] if method == "bare" else [])
    assert engine.method == method


ASKS = "torch.cuda.is_available(), torch.cuda.device_count(), torch.accelerator.is_available()"
TRIES = """
try:
    torch.cuda.init()
except (AssertionError, RuntimeError):
    pass
"""


def look_for_cuda() -> tuple[bool, str | None]:
    import torch

    return torch.cuda._is_in_bad_fork(), os.environ.get("CUDA_VISIBLE_DEVICES")


def use_cuda() -> None:
    import torch

    if torch.backends.cuda.is_built():
        torch.zeros(1).cuda()
    raise RuntimeError("Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing, you must ...")


@pytest.mark.parametrize(("text", "bad_fork"), [(ASKS, False), (TRIES, True)], ids=["asks", "tries"])
def test_ranks_fork_from_a_module_that_looks_for_cuda(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, bad_fork: bool
) -> None:
    """On a rank torch then works as in a spawned process; only a CUDA build that tried to start CUDA errs otherwise."""
    import torch

    if preloading.has_gpu_files():
        pytest.skip("this machine has a GPU")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    (tmp_path / "looks_for_cuda.py").write_text(f"import torch\n{text}\n")
    engine = ForkServerEngine(Sources((str(tmp_path), str(ROOT), *sys.path)), test_modules=["looks_for_cuda"])
    with World(WorldSpec({"dp": 1}), engine) as world:
        assert engine.method == "forkserver"
        assert world.run(look_for_cuda) == [(bad_fork and torch.backends.cuda.is_built(), None)]
        if bad_fork:
            with pytest.raises(WorldError) as caught:
                world.run(use_cuda)
            assert caught.value.summary.startswith("rank 0 raised RuntimeError: Cannot re-initialize CUDA in forked")
            assert caught.value.summary.endswith(": this machine has no GPU, so spawned ranks cannot use cuda either")


def test_torchs_advice_to_spawn_is_left_alone_on_a_machine_with_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preloading, "DEVICE_FILES", (GPU,))
    assert preloading.hint(f"{preloading.TORCH_ON_FORK}. To use CUDA ...") == ""


def test_torch_still_says_whether_cuda_can_start_in_a_forked_process() -> None:
    import torch

    assert torch.cuda._is_in_bad_fork() is False
    assert torch.backends.cuda.is_built() in (True, False)


@pytest.mark.parametrize(
    ("torch", "reason"),
    [
        ("import os; os._exit(3)", "its process exited with code 3"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "its process was killed by SIGSEGV"),
        ("raise ImportError('libcudart')", "its process exited with code 1"),
    ],
)
def test_a_count_that_fails_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, torch: str, reason: str
) -> None:
    with pytest.raises(ValueError, match=f"counting the GPUs failed: {reason}.*; to see why, run: python -c"):
        _with_torch(torch, tmp_path, monkeypatch, "spawn").count_gpus()


def test_a_count_that_hangs_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pytest_fsdp_meta.worlds.local.engine.COUNT_TIMEOUT", 0.5)
    with pytest.raises(ValueError, match=r"counting the GPUs took longer than 0\.5 s; to see why, run"):
        _with_torch("import time; time.sleep(100)", tmp_path, monkeypatch, "spawn").count_gpus()


def _chosen(size: int, device: str, backend: str, gpus: int, require_gpu: bool = False) -> tuple[str, str] | str:
    try:
        return choose(size, device, backend, gpus, require_gpu)
    except ValueError as error:
        return str(error)


def _with_torch(text: str, folder: Path, monkeypatch: pytest.MonkeyPatch, method: str) -> ForkServerEngine:
    """Return an engine on a machine with a device file, whose torch consists of this text."""
    monkeypatch.setattr(preloading, "DEVICE_FILES", (GPU,))
    (folder / "torch.py").write_text(text, encoding="utf-8")
    monkeypatch.syspath_prepend(folder)
    return ForkServerEngine(Sources((str(folder), *sys.path)), method=method)
