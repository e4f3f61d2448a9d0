"""Worlds with a GPU for each rank, which NCCL needs. Run by ``make gpu``; skipped where there are not enough GPUs."""

from __future__ import annotations

import os
import signal
import time

import pytest

from pytest_fsdp_meta.worlds import WorldError, current
from tests.conftest import Project
from tests.gpu.gpu_help import COLLECTIVES, check_collective, export, gpu_world, need, only_cuda, synchronize, train

SIZES = (2, 4, 8)


@pytest.mark.parametrize("name", COLLECTIVES)
@pytest.mark.parametrize("size", SIZES)
def test_collectives_give_the_right_result(size: int, name: str) -> None:
    need(size)
    with gpu_world(size, "nccl") as ranks:
        ranks.run(check_collective, name)


@pytest.mark.parametrize("size", SIZES)
def test_a_sharded_model_trains_and_is_exported(size: int) -> None:
    need(size)
    with gpu_world(size, "nccl") as ranks:
        losses = ranks.run(train)
        assert ranks.run(export) == [True] * size
    assert losses[0][0] > losses[0][-1]
    assert all(others == pytest.approx(losses[0]) for others in losses)


def reduce_on_the_host() -> list[float]:
    """Return the sum of tensors on the CPU, as loaders that clip offloaded gradients compute it."""
    import torch
    import torch.distributed as dist

    here = torch.ones(2)
    dist.all_reduce(here)
    return here.tolist()


def test_tensors_on_the_cpu_are_reduced_by_gloo() -> None:
    need(2)
    with gpu_world(2, "nccl") as ranks:
        assert ranks.run(reduce_on_the_host) == [[2.0, 2.0]] * 2


def reduce_without_rank_1(absent: str) -> None:
    """Let all ranks but rank 1 enter an all_reduce; rank 1 is killed, or sleeps."""
    import torch
    import torch.distributed as dist

    dist.barrier()
    if current().rank != 1:
        dist.all_reduce(torch.ones(3, device=current().device))
        synchronize()
    elif absent == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    else:
        time.sleep(1000)


@pytest.mark.parametrize("size", SIZES)
def test_a_killed_rank_is_named_while_the_others_wait_for_it(size: int) -> None:
    need(size)
    with gpu_world(size, "nccl") as ranks, pytest.raises(WorldError) as caught:
        ranks.run(reduce_without_rank_1, "killed")
    assert caught.value.summary.startswith("rank 1 was killed by")


@pytest.mark.parametrize("size", SIZES)
def test_a_collective_that_a_rank_skips_is_named(size: int) -> None:
    need(size)
    with gpu_world(size, "nccl", timeout=20.0) as ranks, pytest.raises(WorldError) as caught:
        ranks.run(reduce_without_rank_1, "asleep")
    assert caught.value.summary.startswith("rank 1 hung in reduce_without_rank_1, ")
    assert "(did not answer within 20 s while running " in str(caught.value)
    assert "all_reduce" in caught.value.view


@only_cuda
def test_workers_that_select_a_gpu_by_local_rank_do_not_meet(project: Project) -> None:
    """Two workers lease two GPUs each; ``LOCAL_RANK`` is 0 and 1 in both."""
    need(4)
    project.loaders(
        """
        import os
        import time

        import pytest

        @pytest.mark.parametrize("n", range(4))
        @fsdp_conformance(world_size=2, only=["params_on_rank_device"])
        def test_x(fsdp, n):
            device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
            torch.cuda.set_device(device)
            gpu = torch.cuda.get_device_properties(device).uuid
            note(f"in {gpu}")
            model = build().to(device)
            fully_shard(model, mesh=fsdp.mesh)
            time.sleep(1)
            note(f"out {gpu}")
            return Subject(model)
        """
    )
    project.run("-n2", "--fsdp-require-gpu").assert_outcomes(passed=4)
    used: set[str] = set()
    for step, gpu in map(str.split, project.notes):
        assert (gpu in used) == (step == "out"), "two ranks used one GPU at the same time"
        used ^= {gpu}
    assert len({line.split()[1] for line in project.notes}) >= 4
