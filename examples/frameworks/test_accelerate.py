# A model that Accelerator.prepare shards with FSDP2.
import pytest
import torch
from accelerate import Accelerator, DistributedType, FullyShardedDataParallelPlugin, PartialState
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
    sharding = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="TRANSFORMER_BASED_WRAP")
    accelerator = Accelerator(cpu=cpu, fsdp_plugin=sharding)
    model = AutoModelForCausalLM.from_pretrained(path)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-4))
    # prepare() wraps the optimizer; what is judged is the one inside the wrapper.
    # from_pretrained builds the whole model on every rank. With cpu_ram_efficient_loading=True only rank 0 does:
    # whole_while_loading=(0,).
    # Accumulation and clipping: declare train_step. A new head: drawn=["classifier.*"]; the reference needs it, too.
    # Own checkpoints: save=lambda model, optimizer, folder: accelerator.save_state(str(folder)); resume: load_state.
    return subject(model, path, optimizer=optimizer, whole_while_loading=True)
