"""What torch and transformers put off until the first load, step or checkpoint: done once, before ranks are forked.

Otherwise every rank of every world does it: of a tiny model's load by transformers it is the better half.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from importlib import import_module

LATE = (
    "torch.distributed.checkpoint._fsspec_filesystem",  # by dcp.save and dcp.load, with fsspec
    "torch.utils.serialization.config",
    "torch.profiler._cupti_monitor",  # by an optimizer's first step
    "numpy.ctypeslib",  # by torch.from_file, with which safetensors are mapped
)


def warm_up() -> None:
    """To be called last: transformers is of interest only where a module of downstream has imported it."""
    for name in LATE:
        with suppress(ImportError):
            import_module(name)
    if any(name.startswith("transformers.models.") for name in list(sys.modules)):
        with suppress(ImportError):  # transformers 4 converts nothing
            # Nine hundred patterns of how checkpoints name things, compiled when the first one is asked for.
            import_module("transformers.conversion_mapping").get_checkpoint_conversion_mapping("")
            import_module("transformers.modeling_utils")
