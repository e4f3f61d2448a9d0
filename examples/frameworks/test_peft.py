# Adapters of peft that are added before the model is sharded.
import pytest
from peft import LoraConfig, get_peft_model
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM

from pytest_fsdp_meta import fsdp_conformance
from pytest_fsdp_meta.transformers import subject, tiny_checkpoint


@pytest.fixture(scope="session")
def path(tmp_path_factory):
    return tiny_checkpoint("llama", tmp_path_factory.mktemp("llama"))  # random weights, which stand for yours


def adapted(path):
    return get_peft_model(AutoModelForCausalLM.from_pretrained(path), LoraConfig(target_modules=["q_proj", "v_proj"]))


@fsdp_conformance(world_size=2)
def test_lora(fsdp, path):
    model = adapted(path)
    for layer in model.get_base_model().model.layers:
        fully_shard(layer)
    # reference: the model with its adapters on one device. What it freezes has to stay as it is, and only the adapters
    # have to be in the optimizer.
    # drawn: ranks and reference draw other numbers for fresh adapters. lora_B begins with zeros and is compared.
    # Adapters that are loaded with PeftModel.from_pretrained(model, folder, is_trainable=True) need no drawn.
    # whole_while_loading: every rank builds the whole model.
    return subject(
        fully_shard(model), path, reference=lambda: adapted(path), drawn=["*lora_A*"], whole_while_loading=True
    )
