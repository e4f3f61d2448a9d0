"""Compare what a simulated step needs with what other estimators print: ``python -m benchmarks.estimators``.

Llama 3.1 8B on 16 ranks (2 nodes), one row of 4,096 tokens, AdamW, float32 weights and computation in bfloat16:
torch's FSDPMemTracker, as torchtitan's ``scripts/estimate`` runs it; DeepSpeed's and accelerate's estimates of states.
Each runs in a process of its own. DeepSpeed is left out if it is not installed.
"""

from __future__ import annotations

import argparse
import importlib.util
import subprocess
import sys
from collections.abc import Callable
from typing import Any

GIB = 2**30
RANKS, TOKENS = 16, 4096


def build() -> Any:
    from fixtures.published import build

    return build("meta-llama/Llama-3.1-8B")


def shard(model: Any, mesh: Any) -> Any:
    import torch
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.model.layers:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    return fully_shard(model, mesh=mesh, mp_policy=policy)


def load(fsdp: Any) -> Any:
    """The loader that is simulated."""
    import torch

    from pytest_fsdp_meta import Subject

    with torch.device("meta"):
        model = shard(build(), fsdp.mesh)
    model.to_empty(device=fsdp.device)
    tokens = torch.zeros(1, TOKENS, dtype=torch.long)
    batch = {"input_ids": tokens, "labels": tokens}
    return Subject(model, reference=build, batch=lambda step: batch, optimizer=torch.optim.AdamW)


def simulate() -> None:
    import cloudpickle

    from pytest_fsdp_meta.catalogue import built_in
    from pytest_fsdp_meta.loader.call import Call
    from pytest_fsdp_meta.trial import ON_RANKS, Trial
    from pytest_fsdp_meta.worlds import ForkServerEngine, Sources, WorldSpec

    engine = ForkServerEngine(Sources(tuple(sys.path)), [*ON_RANKS, "benchmarks.estimators"])
    trial = Trial(WorldSpec({"dp_shard": RANKS}, timeout=600, simulated=(0, RANKS - 1)), engine, 3, {})
    loader, catalogue = Call(cloudpickle.dumps(load), {}, "fsdp"), built_in()
    evidence = trial.observe(loader, catalogue.observations(["step_fits"]))
    assert evidence.simulation is not None
    step = evidence.simulation[0].step
    assert step is not None
    for peak in step.peaks:
        print(f"{peak.phase}: {peak.nbytes / GIB:.1f} GiB ({peak.composition})")


def track() -> None:
    """Track a step of fake tensors."""
    import torch
    import torch.distributed as dist
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=RANKS, store=FakeStore())
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("dp_shard",))
    with FakeTensorMode():
        model = shard(build(), mesh)
        optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
        tokens = torch.zeros(1, TOKENS, dtype=torch.long)
        tracker = FSDPMemTracker(model, optimizer)
        tracker.track_inputs((tokens,))
        with tracker:
            model(input_ids=tokens, labels=tokens).loss.backward()
            describe_peak("forward and backward, before there is a state", tracker)
            optimizer.step()
        describe_peak("with the optimizer's step", tracker)


def describe_peak(what: str, tracker: Any) -> None:
    [(_, peak)] = tracker.get_tracker_snapshot("peak").items()
    parts = {getattr(kind, "name", kind): nbytes for kind, nbytes in peak.items() if nbytes > 0.01 * GIB}
    print(f"{what}: {', '.join(f'{kind} {nbytes / GIB:.1f} GiB' for kind, nbytes in parts.items())}")


def estimate_by_deepspeed() -> None:
    import torch
    from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs_all_cold

    with torch.device("meta"):
        model = build()
    # Its other function takes all tensors on meta for one, because their data_ptr() is 0.
    total, largest = (size(p.numel() for p in model.parameters()) for size in (sum, max))
    estimate_zero3_model_states_mem_needs_all_cold(total, largest, num_gpus_per_node=RANKS // 2, num_nodes=2)


def estimate_by_accelerate() -> None:
    import torch
    from accelerate.commands.estimate import estimate_training_usage
    from accelerate.utils import calculate_maximum_sizes

    with torch.device("meta"):
        model = build()
    total, (largest, _) = calculate_maximum_sizes(model)
    print(f"total {total / GIB:.1f} GiB, largest layer {largest / GIB:.1f} GiB; Adam in mixed precision, no sharding:")
    print({name: f"{nbytes / GIB:.1f} GiB" for name, nbytes in estimate_training_usage(total, "float16").items()})


ESTIMATORS: dict[str, Callable[[], None]] = {
    "simulated": simulate,
    "torch": track,
    "deepspeed": estimate_by_deepspeed,
    "accelerate": estimate_by_accelerate,
}


def main() -> None:
    parser = argparse.ArgumentParser(description="estimates of the memory of one step, side by side")
    parser.add_argument("--one", choices=ESTIMATORS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        ESTIMATORS[options.one]()
        return
    for name in ESTIMATORS:
        print(f"# {name}", flush=True)
        if name in ("deepspeed", "accelerate") and importlib.util.find_spec(name) is None:
            print("not installed", flush=True)
            continue
        subprocess.run([sys.executable, "-m", "benchmarks.estimators", "--one", name], check=True)


if __name__ == "__main__":
    main()
