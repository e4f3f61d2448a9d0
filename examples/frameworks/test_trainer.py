# What transformers' Trainer prepares through accelerate.
import pytest
from accelerate import DistributedType, PartialState
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from pytest_fsdp_meta import fsdp_conformance
from pytest_fsdp_meta.transformers import subject, tiny_checkpoint


@pytest.fixture(scope="session")
def path(tmp_path_factory):
    return tiny_checkpoint("llama", tmp_path_factory.mktemp("llama"))  # random weights, which stand for yours


@fsdp_conformance(world_size=2)
def test_trainer(fsdp, path):
    arguments = TrainingArguments(
        "out", fsdp=True, fsdp_config={"version": 2}, use_cpu=fsdp.device.type == "cpu", report_to=[]
    )
    if arguments.use_cpu:  # otherwise accelerate uses DDP on CPUs, and the test passes without having seen FSDP
        PartialState().distributed_type = DistributedType.MULTI_GPU
    trainer = Trainer(AutoModelForCausalLM.from_pretrained(path), arguments)
    trainer.create_optimizer()
    model, optimizer = trainer.accelerator.prepare(trainer.model, trainer.optimizer)
    # The plugin trains with the model's loss. To have accumulation, the number of tokens and clipping judged as the
    # Trainer does them, declare its own step: results/frameworks/trainer.md.
    # optimizer and whole_while_loading: as in test_accelerate.py.
    return subject(model, path, optimizer=optimizer, whole_while_loading=True)
