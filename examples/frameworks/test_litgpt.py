# The LoRA model that litgpt's parallelize_fn shards, set up by Fabric as finetune_lora does on several devices.
# finetune_full and pretrain use Fabric's FSDPStrategy, which is FSDP1 and needs GPUs.
import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies import ModelParallelStrategy
from litgpt.finetune.lora import parallelize_fn
from litgpt.lora import GPT, Config, mark_only_lora_as_trainable

from pytest_fsdp_meta import Subject, fsdp_conformance

SIZES = {"block_size": 32, "padded_vocab_size": 64, "n_layer": 2, "n_head": 4, "n_embd": 32}


def build():
    torch.manual_seed(0)
    model = GPT(Config(lora_r=4, lora_query=True, lora_value=True, **SIZES))
    mark_only_lora_as_trainable(model)
    return model


@fsdp_conformance(world_size=2)
def test_lora(fsdp):
    strategy = ModelParallelStrategy(parallelize_fn, data_parallel_size=fsdp.world_size, tensor_parallel_size=1)
    fabric = Fabric(accelerator=fsdp.device.type, strategy=strategy, devices=fsdp.world_size)
    fabric.launch()
    model = fabric.setup_module(build())
    # build() makes the whole model on every rank. finetune_lora builds it in fabric.init_module(empty_init=True) and
    # calls load_checkpoint after setup_module; then declare drawn=["*lora_A"] instead: fresh adapters are drawn.
    # batch, loss and optimizer let the training be judged: results/frameworks/litgpt.md.
    return Subject(model, reference=build, whole_while_loading=True)
