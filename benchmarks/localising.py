"""Measure what tracing a step module by module costs, beside the step itself: time, memory and disk.

``python -m benchmarks.localising`` prints one line for each size of a decoder on FSDP2 and TP. Memory is the peak of
anonymous memory beyond that before the step; the pages of records are the kernel's to drop.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import cloudpickle
import torch
from torch import Tensor, nn

from benchmarks.on_ranks import peak_memory
from fixtures import localised
from pytest_fsdp_meta import Subject
from pytest_fsdp_meta.checks.materialisation.observe import loaded_subject
from pytest_fsdp_meta.checks.memory.observe import return_freed_memory
from pytest_fsdp_meta.checks.tracing.observe.comparison import TracedReference
from pytest_fsdp_meta.checks.tracing.observe.step import trace_rank, trace_reference
from pytest_fsdp_meta.checks.training.observe.reference import declared_subject
from pytest_fsdp_meta.loader.call import Call
from pytest_fsdp_meta.ranks.batches import batch_slice, loss_of, rows_of_step
from pytest_fsdp_meta.ranks.bits import deterministic
from pytest_fsdp_meta.trial import ON_RANKS
from pytest_fsdp_meta.worlds import ForkServerEngine, Rank, Sources, World, WorldSpec, current

REPEATS = 3
SIZES = {"2 blocks, 32 wide": (2, 32, 4, 9), "8 blocks, 512 wide": (8, 512, 16, 129)}
"""Name -> blocks, width, rows and tokens."""
MESHES = {"FSDP2": localised.FSDP, "TP 2": localised.TP}


def resize(blocks: int, width: int) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        localised.WIDTH = width
        torch.manual_seed(0)
        model = localised.Decoder()
        model.layers = nn.ModuleList(localised.Block() for _ in range(blocks))
        return model

    return build


def step() -> tuple[float, int]:
    """Return the seconds of a plain forward and backward, the fastest of some, and the peak of its memory in bytes."""
    rank = current()
    return _step(loaded_subject(rank), batch_slice(loaded_subject(rank), rank))


def reference_step() -> tuple[float, int]:
    rank = current()
    return _step(declared_subject(rank.state["reference"], rank.state["recipe"]), (0, 1))


def _step(subject: Subject, slice_: tuple[int, int]) -> tuple[float, int]:
    rows = rows_of_step(subject, 0, slice_, current().device)
    subject.model.eval()

    def run() -> None:
        loss_of(subject, rows).backward()
        subject.model.zero_grad(set_to_none=True)

    seconds = min(timed(run) for _ in range(REPEATS))
    return_freed_memory(current().device)
    return seconds, peak_memory(run)


def timed(act: Callable[[], object]) -> float:
    with deterministic():
        began = time.perf_counter()
        act()
        return time.perf_counter() - began


def traced_reference(recipe: Any, folder: str, size: int) -> tuple[TracedReference, float, int]:
    current().state["recipe"] = recipe
    traced: list[TracedReference] = []
    seconds, peak = _measured(lambda: traced.append(trace_reference(recipe, folder, size, ["float32"], 0, True)))
    assert not traced[0].problem, traced[0].problem
    return traced[0], seconds, peak


def traced_rank(traced: TracedReference, folder: str) -> tuple[float, int]:
    return _measured(lambda: trace_rank(traced, (), folder))


def _measured(act: Callable[[], object]) -> tuple[float, int]:
    return_freed_memory(current().device)  # otherwise what an earlier run has freed hides what this one takes
    began = time.perf_counter()
    peak = peak_memory(act)
    return time.perf_counter() - began, peak


def measure(engine: ForkServerEngine, blocks: int, width: int, rows: int, tokens: int, mesh: dict[str, int]) -> str:
    build = resize(blocks, width)

    def batch(number: int) -> dict[str, Tensor]:
        return {"ids": torch.randint(0, localised.VOCABULARY, (rows, tokens))}

    def load(fsdp: Rank) -> Subject:
        model = build()
        localised.shard(model, fsdp.mesh)  # type: ignore[arg-type]
        return Subject(model, reference=build, batch=batch, loss=localised.loss)

    with TemporaryDirectory() as folder:
        world = World(WorldSpec(mesh), engine)
        alone = World(WorldSpec({"dp_shard": 1}), engine, "the reference")
        try:
            world.start()
            alone.start()
            call = Call(cloudpickle.dumps(load), wants_rank="fsdp")
            loaded = world.call("pytest_fsdp_meta.checks.materialisation.observe:load", (call, ()))
            recipe, (_, size) = loaded[0].recipe, loaded[0].data_parallel
            record = str(Path(folder, "values.safetensors"))
            alone.run("pytest_fsdp_meta.checks.training.observe.reference:record_reference", recipe, (), (), record)
            plain, plain_peak = map(max, zip(*world.run(step), strict=True))
            traced, reference, reference_peak = alone.run(traced_reference, recipe, folder, size)[0]
            [(alone_plain, alone_peak)] = alone.run(reference_step)
            slowest, peak = map(max, zip(*world.run(partial(traced_rank, traced, folder)), strict=True))
            disk = sum(file.stat().st_size for file in Path(traced.folder).iterdir())
            parameters = sum(p.numel() * p.element_size() for p in build().parameters())
        finally:
            alone.close()
            world.close()
    return "; ".join(
        [
            f"model {mib(parameters)}, activations and gradients {mib(disk)} on disk",
            f"reference: {beside((alone_plain, alone_peak), (reference, reference_peak))}",
            f"ranks: {beside((plain, plain_peak), (slowest, peak))}",
        ]
    )


def beside(plain: tuple[float, int], traced: tuple[float, int]) -> str:
    (seconds, peak), (longer, more) = plain, traced
    return f"step {seconds:.3f} s and {mib(peak)}, traced {longer:.3f} s ({longer / seconds:.1f} steps) and {mib(more)}"


def mib(size: int) -> str:
    return f"{size / 2**20:.1f} MiB"


def main() -> None:
    engine = ForkServerEngine(Sources(tuple(sys.path)), [*ON_RANKS, "benchmarks.localising"])
    for name, (blocks, width, rows, tokens) in SIZES.items():
        for kind, mesh in MESHES.items():
            print(f"{name}, {kind}: {measure(engine, blocks, width, rows, tokens, mesh)}", flush=True)


if __name__ == "__main__":
    from benchmarks.localising import main as run  # ranks import the functions by the name of this module

    run()
