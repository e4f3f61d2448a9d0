# A model that deepspeed.initialize partitions with ZeRO-3. Not supported: stages 1 and 2, with whole parameters.
# Set DS_ACCELERATOR=cpu if DeepSpeed looks for a GPU that the machine lacks. The first run compiles an operator: 30 s.
import deepspeed
import pytest
from torch.optim import AdamW
from transformers import AutoModelForCausalLM

from pytest_fsdp_meta import fsdp_conformance
from pytest_fsdp_meta.transformers import subject, tiny_checkpoint

CONFIG = {"train_micro_batch_size_per_gpu": 4, "gradient_clipping": 1.0, "zero_optimization": {"stage": 3}}


@pytest.fixture(scope="session")
def path(tmp_path_factory):
    return tiny_checkpoint("llama", tmp_path_factory.mktemp("llama"))  # random weights, which stand for yours


# Only the engine can run the backward and the step; without train_step, what needs training is skipped. Gradients are
# compared as ZeRO-3 steps with them: summed over the ranks, scaled and clipped.
def train_step(engine, optimizer, batch):
    loss = engine(**batch).loss
    engine.backward(loss)
    engine.step()
    return loss.detach()


@fsdp_conformance(world_size=2)
def test_zero3(fsdp, path):
    model = AutoModelForCausalLM.from_pretrained(path)
    engine, optimizer, *_ = deepspeed.initialize(model=model, optimizer=AdamW(model.parameters()), config=CONFIG)
    # This optimizer is judged as one over the model's parameters: its groups, settings, and this rank's part of states.
    # DeepSpeed clips to a norm of 1.0 by default; with "gradient_clipping": 0.0, leave out max_grad_norm.
    # Every rank has the whole model here; if it is built in deepspeed.zero.Init(), leave out whole_while_loading.
    # bf16: give the reference this dtype: reference=lambda: AutoModelForCausalLM.from_pretrained(path, dtype=...).
    # Own checkpoints: results/frameworks/deepspeed.md.
    declared = {"optimizer": optimizer, "train_step": train_step, "max_grad_norm": 1.0, "whole_while_loading": True}
    return subject(engine, path, **declared)
