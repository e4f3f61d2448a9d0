"""Every operator that torch registers for communication is known to the recorder, as a collective or as none."""

from __future__ import annotations

import torch

from pytest_fsdp_meta.observers.collectives import NAMESPACES, OPS

TRANSFERS = {"send", "recv_", "recv_any_source_", "isend", "irecv", "batch_p2p_ops"}
LOCAL = {"wait_tensor", "wait_tensors", "_wrap_tensor_autograd", "check_for_nan", "mesh_get_process_group"}


def test_every_operator_of_this_torch_is_known():
    registered = {tuple(name.split(".")[0].split("::")) for name in torch._C._dispatch_get_all_op_names()}
    names = {name for namespace, name in registered if namespace in NAMESPACES}
    assert "allreduce_" in names
    assert names - TRANSFERS - LOCAL - set(OPS) == set()
