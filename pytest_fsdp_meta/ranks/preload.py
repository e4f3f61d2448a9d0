"""Import and run, before ranks are forked, what each of them would otherwise import and run on first use."""

from __future__ import annotations

import sys
from contextlib import suppress
from importlib import import_module

LATE_IMPORTS = (
    "torch.distributed.checkpoint._fsspec_filesystem",  # imported by dcp.save and dcp.load, with fsspec
    "torch.utils.serialization.config",
    "torch._dynamo",  # imported by an optimizer's first step in torch 2.9 (1.7 s), and later with FSDP2
    "torch.profiler._cupti_monitor",  # imported by an optimizer's first step
    "numpy.ctypeslib",  # imported by torch.from_file, which maps safetensors files
)


def warm_up() -> None:
    """Import what torch imports late. Call it last: it warms up transformers only if a downstream module uses it."""
    for name in LATE_IMPORTS:
        with suppress(ImportError):
            import_module(name)
    if any(name.startswith("transformers.models.") for name in list(sys.modules)):
        with suppress(ImportError):  # transformers 4 has no conversion mapping
            # The first call compiles 900 patterns that map tensor names of checkpoints.
            import_module("transformers.conversion_mapping").get_checkpoint_conversion_mapping("")
            import_module("transformers.modeling_utils")
