# A model that accelerate shards as axolotl has patched it: rank 0 has the weights and sends them to the others.
import pytest
import torch
from accelerate import Accelerator, DistributedType, FullyShardedDataParallelPlugin, PartialState
from axolotl.monkeypatch.accelerate.fsdp2 import patch_accelerate_fsdp2
from transformers import AutoModelForCausalLM

from pytest_fsdp_meta import fsdp_conformance
from pytest_fsdp_meta.transformers import subject, tiny_checkpoint


@pytest.fixture(scope="session")
def path(tmp_path_factory):
    return tiny_checkpoint("llama", tmp_path_factory.mktemp("llama"))  # random weights, which stand for yours


@fsdp_conformance(world_size=2)
def test_prepare(fsdp, path):
    cpu = fsdp.device.type == "cpu"
    if cpu:  # otherwise accelerate uses DDP on CPUs, and the test passes without having seen FSDP
        PartialState(cpu=True).distributed_type = DistributedType.MULTI_GPU
    patch_accelerate_fsdp2()  # as axolotl does for `fsdp_version: 2`
    options = {"auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "cpu_ram_efficient_loading": True}
    accelerator = Accelerator(cpu=cpu, fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2, **options))
    model = AutoModelForCausalLM.from_pretrained(path)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-4))
    # whole_while_loading: rank 0 reads the checkpoint, and transformers 5.16.1 fills the others' models with zeros.
    # A model with persistent buffers needs a GPU: axolotl sends them through "cuda".
    # axolotl trains with a Trainer of transformers. To have its step judged: results/frameworks/trainer.md.
    return subject(model, path, optimizer=optimizer, whole_while_loading=True)
