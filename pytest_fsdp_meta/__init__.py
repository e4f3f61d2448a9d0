"""A pytest plugin and conformance kit that judges sharded model loaders on real ranks."""

from pytest_fsdp_meta.loader.adapter import Part
from pytest_fsdp_meta.loader.subject import Subject, SubjectError
from pytest_fsdp_meta.plugin.markers import fsdp_conformance, fsdp_spmd
from pytest_fsdp_meta.worlds import WorldError

__all__ = ["Part", "Subject", "SubjectError", "WorldError", "fsdp_conformance", "fsdp_spmd"]
__version__ = "0.3.0"


def __getattr__(name: str) -> object:
    """Import ``planned``, the module ``strategies.build``, on first use, because it imports torch and Hypothesis."""
    if name == "planned":
        from pytest_fsdp_meta.strategies import build

        return build
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
