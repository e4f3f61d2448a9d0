"""Every operator that torch registers for communication is known to the recorder, as a collective or as none."""

from __future__ import annotations

import torch
import torch.distributed.fsdp  # registers the operators of FSDP2

from pytest_fsdp_meta.checks.collectives.observe import FSDP_BUFFERS, FSDP_OTHERS, NAMESPACES, OPS, OTHERS


def test_every_operator_of_this_torch_is_known():
    registered = {tuple(name.split(".")[0].split("::")) for name in torch._C._dispatch_get_all_op_names()}
    names = {name for namespace, name in registered if namespace in NAMESPACES}
    assert "allreduce_" in names
    assert names - OTHERS - set(OPS) == set()
    assert {name for namespace, name in registered if namespace == "fsdp"} - FSDP_OTHERS - set(FSDP_BUFFERS) == set()
