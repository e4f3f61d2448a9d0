"""Judge a loader on real ranks: a pytest plugin and conformance kit for sharded model loading."""

from pytest_fsdp_meta.markers import fsdp_conformance, fsdp_spmd
from pytest_fsdp_meta.observers.adapters import Part
from pytest_fsdp_meta.subject import Subject, SubjectError
from pytest_fsdp_meta.worlds import WorldError

__all__ = ["Part", "Subject", "SubjectError", "WorldError", "fsdp_conformance", "fsdp_spmd"]
__version__ = "0.3.0"
