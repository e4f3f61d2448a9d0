"""The steps of ``benchmarks.gpu``: first those whose result decides most, those that need more GPUs last.

By default, the plugin uses NCCL where it can.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

TESTS = ("-m", "pytest", "-q", "--tb=short", "-p", "no:cacheprovider")
FAST = ("-m", "not slow and not nightly")
MANY = ("-n", "logical", "--maxprocesses", "12")
"""Run tests in parallel on the GPU that they share: they mostly use the CPU."""
SHARED = ("--fsdp-device=cuda", "--fsdp-backend=gloo")
OWN = "--fsdp-require-gpu"
ON_GPU, ON_GPUS = (*TESTS, "tests/gpu/test_gpu.py"), (*TESTS, "tests/gpu/test_nccl.py")
CONFORMING = (*TESTS, "conformance/test_conforming.py")
NCCL_ONLY = "what passed with gloo fails with NCCL: a collective that only NCCL refuses, or sums in another order"
MORE = "what passed with fewer GPUs fails: compare with torch alone, under torchrun"


@dataclass(frozen=True)
class Step:
    """Arguments of Python, the seconds that it may take, and what is wrong if it alone fails."""

    name: str
    seconds: int
    red: str
    arguments: tuple[str, ...]
    gpus: int = 1

    @property
    def file(self) -> str:
        """The name of its files, without a suffix."""
        return re.sub(r"\W+", "-", self.name)


STEPS = (
    Step("torch alone", 120, "torch, the driver or NCCL, and nothing of this project", ("-m", "benchmarks.gpu_alone")),
    Step(
        "devices and NCCL, one rank",
        90,
        "ranks do not reach their GPU, or NCCL does not start: see worlds/rank/rendezvous.py; 'no socket interface': "
        "set NCCL_SOCKET_IFNAME=lo; all skipped: worlds/local/gpus.py finds no GPU",
        (*ON_GPU, "-k", "1-nccl"),
    ),
    Step(
        "preloaded modules and memory",
        75,
        "the fork server was refused (worlds/rank/preload.py; 'initialised CUDA': NVML was not found, see "
        "LD_LIBRARY_PATH), or GPU memory is not measured as torch does (checks/memory/observe.py)",
        (*ON_GPU, "-k", "preloaded or memory"),
    ),
    Step(
        "README's loader, right and broken",
        75,
        "the checks find nothing on a GPU, or cry wolf",
        (*ON_GPU, "-k", "readme"),
    ),
    Step(
        "conforming loader, one rank with NCCL",
        90,
        "'does not reproduce itself' is a kernel that is not deterministic (ranks/generators.py); "
        "buffers that differ by 1e-7 are computed on the GPU by the loader and on the CPU by the reference",
        (*CONFORMING, OWN, "-k", "test_sharded and llama-world1"),
    ),
    Step(
        "gloo: ranks that share a GPU",
        90,
        "if only the export crashes, gloo reads memory of the GPU: worlds/rank/process_groups.py lacks an operator",
        (*ON_GPU, "-k", "gloo"),
    ),
    Step(
        "conforming loaders, gloo on GPUs",
        150,
        "ranks that share a GPU differ from those with their own in the group, and in the memory left for each",
        (*CONFORMING, *SHARED, *MANY, "-m", "not nightly", "-k", "test_sharded"),
    ),
    Step(
        "a defect of each check, gloo",
        200,
        "a check is blind on GPUs, or its text differs there",
        (*TESTS, "conformance/test_defects.py", *SHARED, *MANY, "-m", "not nightly"),
    ),
    Step(
        "right loaders of every form, gloo",
        200,
        "a check fails a correct loader: random numbers or rounding differ on GPUs (ranks/generators.py)",
        (*TESTS, "conformance/test_forms.py", *SHARED, *MANY),
    ),
    Step(
        "the same in bfloat16 with 2048 tokens",
        75,
        "if only this fails, an attention kernel adds up gradients in an order that varies (ranks/generators.py)",
        (*CONFORMING, OWN, "-k", "test_long_batches and world1"),
    ),
    Step(
        "failing ranks, leases",
        75,
        "ranks that fail, or workers that share GPUs, do so otherwise than on CPUs: see worlds/rank/main.py, "
        "worlds/leases.py",
        (*ON_GPU, "-k", "failing or few_gpus or lease"),
    ),
    Step(
        "draws on DTensors",
        45,
        "drawn_weights_are_one_draw expects other random numbers than torch draws",
        (*ON_GPU, "-k", "draw"),
    ),
    Step(
        "HSDP, uneven shards, frozen weights, gloo",
        120,
        "as for conforming loaders, gloo on GPUs",
        (*CONFORMING, *SHARED, *MANY, *FAST, "-k", "hsdp or uneven or frozen"),
    ),
    Step(
        "transformers' loader, gloo",
        120,
        "transformers loads otherwise onto GPUs",
        (*TESTS, "conformance/test_transformers_loader.py", *SHARED, *MANY, *FAST),
    ),
    Step(
        "worlds on CPUs, on this machine",
        120,
        "the process group of a CPU world is made otherwise where torch sees a GPU (worlds/rank/rendezvous.py)",
        (*TESTS, *MANY, "tests/worlds/test_worlds.py", "tests/worlds/test_faults.py"),
    ),
    Step(
        "the other defects, gloo",
        200,
        "a check is blind on GPUs, or its text differs there",
        (*TESTS, "conformance/test_defects.py", *SHARED, *MANY, "-m", "nightly"),
    ),
    Step("times", 120, "worlds start otherwise than in the tests above", ("-m", "benchmarks.gpu_times")),
    Step(
        "NCCL, two ranks",
        300,
        "NCCL does not connect two GPUs: compare with torch alone, under torchrun",
        (*ON_GPUS, "-k", "[2 or 2] or on_the_cpu"),
        2,
    ),
    Step("conforming loaders, NCCL, two", 300, NCCL_ONLY, (*CONFORMING, OWN, "-k", "test_sharded[ or frozen"), 2),
    Step("NCCL, four ranks", 300, MORE, (*ON_GPUS, "-k", "[4 or 4] or local_rank"), 4),
    Step(
        "conforming loaders, NCCL, four, HSDP, uneven",
        300,
        NCCL_ONLY,
        (*CONFORMING, OWN, "-k", "world4 or test_hsdp[ or uneven or three"),
        4,
    ),
    Step("NCCL, eight ranks", 300, MORE, (*ON_GPUS, "-k", "[8 or 8]"), 8),
    Step("conforming loaders, NCCL, eight", 300, NCCL_ONLY, (*CONFORMING, OWN, "-k", "eight"), 8),
)
