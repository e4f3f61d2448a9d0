"""Worlds on one GPU: NCCL with one rank, gloo with ranks that share it. Run by ``make gpu``; skipped without a GPU."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from pytest_fsdp_meta.worlds import ForkServerEngine, World, WorldError, WorldSpec, current
from tests.conftest import Project
from tests.gpu.gpu_help import (
    COLLECTIVES,
    DEVICE,
    SHARED,
    check_collective,
    export,
    gpu_world,
    gpus,
    need,
    only_cuda,
    synchronize,
    train,
)
from tests.world_help import ROOT, preload


@pytest.fixture(autouse=True)
def _needs_a_gpu() -> None:
    need(1)


def describe_devices() -> tuple[str, int, bool]:
    import torch

    rank = current()
    return str(rank.device), torch.cuda.current_device(), rank.mesh.device_type == "cuda"


WORLDS = [(1, "nccl"), (2, "gloo"), (4, "gloo")]


@only_cuda
@pytest.mark.parametrize(("size", "backend"), WORLDS)
def test_ranks_run_on_their_device(size: int, backend: str) -> None:
    with gpu_world(size, backend) as ranks:
        indices = [rank % gpus() for rank in range(size)]
        assert ranks.run(describe_devices) == [(f"cuda:{index}", index, True) for index in indices]


@pytest.mark.parametrize("name", COLLECTIVES)
@pytest.mark.parametrize(("size", "backend"), WORLDS)
def test_collectives_give_the_right_result(size: int, backend: str, name: str) -> None:
    with gpu_world(size, backend) as ranks:
        ranks.run(check_collective, name)


@pytest.mark.parametrize(("size", "backend"), WORLDS)
def test_a_sharded_model_trains(size: int, backend: str) -> None:
    with gpu_world(size, backend) as ranks:
        losses = ranks.run(train)
    assert losses[0][0] > losses[0][-1]
    assert all(others == pytest.approx(losses[0]) for others in losses)


@pytest.mark.parametrize(("size", "backend"), WORLDS)
def test_a_sharded_model_is_exported(size: int, backend: str) -> None:
    """The gathering of DTensors has no path for CUDA in gloo: it crashed unless it took the way through the host."""
    with gpu_world(size, backend) as ranks:
        assert ranks.run(export) == [True] * size


def raise_on_rank_0() -> None:
    if current().rank == 0:
        raise RuntimeError("boom")
    synchronize()
    time.sleep(60)


def kill_rank_0() -> None:
    if current().rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def hold_memory() -> int:
    """Allocate 1 GiB on the GPU and return the bytes that are still free."""
    import torch

    current().state["held"] = torch.empty(2**30, dtype=torch.uint8, device=current().device)
    return int(torch.cuda.mem_get_info(current().device)[0])


@pytest.mark.parametrize(
    ("fault", "message"), [(raise_on_rank_0, "rank 0 raised RuntimeError: boom"), (kill_rank_0, "rank 0 was killed by")]
)
def test_a_failing_rank_is_reported(fault: Callable[[], None], message: str) -> None:
    with gpu_world(2, "gloo") as ranks, pytest.raises(WorldError) as caught:
        ranks.run(fault)
    assert caught.value.summary.startswith(message)


@only_cuda
def test_memory_is_free_after_a_world_has_ended() -> None:
    with gpu_world(1, "nccl") as ranks:
        during = ranks.run(hold_memory)[0]
    with gpu_world(1, "nccl") as ranks:
        after = ranks.run(hold_memory)[0]
    assert after > during - 2**29, "the first world still holds its memory"


def memory_after_a_reference() -> tuple[int, int]:
    """Return the bytes that torch holds of the GPU with a model in a reference cycle, and after it was given back."""
    import torch
    from torch import nn

    from pytest_fsdp_meta.checks.memory.observe import return_freed_memory

    device = current().device
    model = nn.Linear(2**13, 2**13, device=device)
    model.itself = [model]  # type: ignore[assignment]
    del model
    held = torch.cuda.memory_reserved(device)
    return_freed_memory(device)
    return held, torch.cuda.memory_reserved(device)


@only_cuda
def test_memory_of_the_reference_is_given_back() -> None:
    """Rank 0 trains the whole reference on its GPU, where another rank may have its shard."""
    with gpu_world(1, "nccl") as ranks:
        held, kept = ranks.run(memory_after_a_reference)[0]
    assert held >= 2**28
    assert kept < 2**24


ASKS_CUDA = """
import torch

AVAILABLE = torch.cuda.is_available()
"""


@only_cuda
def test_a_module_that_calls_is_available_is_preloaded(project: Project) -> None:
    """Calling ``is_available`` at import time neither disables the fork server nor keeps ranks from using CUDA."""
    project.loaders(
        ASKS_CUDA
        + """
@fsdp_conformance(world_size=1, only=["no_meta_params"])
def test_x(fsdp):
    assert AVAILABLE
    assert fsdp.device.type == "cuda"
    return load(fsdp)
"""
    )
    result = project.run("--fsdp-require-gpu", "-rs")
    assert "ranks are spawned" not in result.stdout.str()
    assert result.ret == 0


@only_cuda
def test_a_world_with_too_few_gpus_is_a_usage_error(project: Project) -> None:
    project.loaders(f"@fsdp_conformance(world_size={gpus() + 1})\ndef test_x(fsdp): ...\n")
    result = project.run("--fsdp-backend=nccl")
    result.stderr.fnmatch_lines([f"*a world of {gpus() + 1} on cuda with nccl needs {gpus() + 1} GPUs*"])
    assert result.ret == pytest.ExitCode.USAGE_ERROR


@only_cuda
def test_workers_lease_the_gpus(project: Project) -> None:
    """Two workers that each need all GPUs take turns."""
    project.loaders(
        f"""
        import time
        import pytest

        @pytest.mark.parametrize("n", range(4))
        @fsdp_conformance(world_size={gpus()}, only=["no_meta_params"])
        def test_x(fsdp, n):
            if fsdp.rank == 0:
                note("in")
                time.sleep(0.3)
                note("out")
            return load(fsdp)
        """
    )
    project.run("-n2", "--fsdp-require-gpu").assert_outcomes(passed=4)
    assert project.notes == ["in", "out"] * 4


@only_cuda
def test_peak_memory_is_measured(tmp_path: Path) -> None:
    from pytest_fsdp_meta.trial import ON_RANKS

    engine = ForkServerEngine(preload().sources, ON_RANKS)
    spec = WorldSpec({"dp_shard": 1}, "cuda", "nccl", devices=(0,))
    with World(spec, engine) as ranks:
        peak = ranks.run(measure_peak)[0]
    assert peak >= 2**24


def measure_peak() -> int:
    """Allocate 16 MiB while measuring and return the measured peak in bytes."""
    import torch
    from torch import nn

    from pytest_fsdp_meta.checks.memory.observe import Peak

    model = nn.Linear(4, 4, device=current().device)
    peak = Peak(current().device)
    with peak.measured():
        torch.empty(2**24, dtype=torch.uint8, device=current().device)
    device_bytes = peak.facts(model).device
    assert device_bytes is not None
    return device_bytes


def readme_loader(without: str = "") -> str:
    """Return README's example, without the lines that contain these words."""
    lines = (ROOT / "examples" / "test_llama.py").read_text("utf-8").splitlines(keepends=True)
    return "".join(line for line in lines if not without or without not in line)


def test_the_readmes_loader_passes(project: Project) -> None:
    project.write("test_llama.py", readme_loader())
    result = project.run(*SHARED)
    result.assert_outcomes(passed=result.parseoutcomes()["passed"], skipped=result.parseoutcomes()["skipped"])
    result.stdout.fnmatch_lines([f"*world of 2 (gloo on {DEVICE})*"])


def test_the_readmes_broken_loader_is_found(project: Project) -> None:
    project.write("test_llama.py", readme_loader(without="rotary_emb = "))
    result = project.run(*SHARED)
    assert result.ret == 1
    result.stdout.fnmatch_lines(["*model.rotary_emb.inv_freq, ranks 0, 1: never written*"])


def draw_on_a_dtensor() -> list[float]:
    """Return this rank's shard of a weight that torch draws as a whole, with the same seed on every rank."""
    import torch
    from torch import nn
    from torch.distributed.fsdp import fully_shard

    with torch.device("meta"):
        linear = nn.Linear(8, 8, bias=False)
    fully_shard(linear, mesh=current().mesh)
    linear.to_empty(device=current().device)
    torch.manual_seed(7)
    linear.reset_parameters()
    return linear.weight.detach().to_local().flatten().tolist()  # type: ignore[no-any-return]


@only_cuda
def test_a_draw_on_a_dtensor_is_one_draw_on_gpus():
    """On the CPU, both ranks draw the same numbers: there, drawn_weights_are_one_draw does not judge such loaders."""
    with gpu_world(2, "gloo") as ranks:
        first, second = ranks.run(draw_on_a_dtensor)
    assert first != second
