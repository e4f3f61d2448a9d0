# A model that get_model of ibm-fms splits by tensor parallelism. Ranks register plain tensors of a part of their size.
import pytest
import torch
from fms.models import get_model

from pytest_fsdp_meta import Part, Subject, fsdp_conformance


@pytest.fixture(scope="session")
def path(tmp_path_factory):
    path = str(tmp_path_factory.mktemp("llama") / "model.pth")
    torch.save(get_model("llama", "micro", fused_weights=False).state_dict(), path)
    return path


@fsdp_conformance(mesh={"tp": 2})
def test_tp(fsdp, path):
    # Name the strategy: without it, get_model splits by tensor parallelism wherever a process group exists.
    options = {"device_type": fsdp.device.type, "distributed_strategy": "tp", "group": fsdp.mesh["tp"].get_group()}
    model = get_model("llama", "micro", path, fused_weights=False, **options)
    shapes = {name: tensor.shape for name, tensor in torch.load(path, mmap=True).items()}

    # ibm-fms splits rows or columns, and nothing in the tensor says which: compare its shape with the checkpoint's.
    # qkv_fused and wg1_fused, the default, are several weights one below the other, and each is split: use Part.blocks.
    def adapter(name, tensor):
        sizes = [(own, whole) for own, whole in zip(tensor.shape, shapes.get(name, tensor.shape), strict=True)]
        start = [own * fsdp.rank if own < whole else 0 for own, whole in sizes]
        return Part.block(tensor, [whole for _, whole in sizes], start)

    return Subject(model, reference=lambda: get_model("llama", "micro", path, fused_weights=False), adapter=adapter)
