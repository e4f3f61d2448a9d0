# The model that SFTTrainer of trl trains, prepared by accelerate with FSDP2.
import pytest
from accelerate import DistributedType, PartialState
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

from pytest_fsdp_meta import fsdp_conformance
from pytest_fsdp_meta.transformers import subject, tiny_checkpoint


@pytest.fixture(scope="session")
def path(tmp_path_factory):
    return tiny_checkpoint("llama", tmp_path_factory.mktemp("llama"))  # random weights, which stand for yours


@fsdp_conformance(world_size=2)
def test_sft(fsdp, path):
    cpu = fsdp.device.type == "cpu"
    arguments = SFTConfig("out", fsdp=True, fsdp_config={"version": 2}, use_cpu=cpu, report_to=[])
    if cpu:  # otherwise accelerate uses DDP on CPUs, and the test passes without having seen FSDP
        PartialState().distributed_type = DistributedType.MULTI_GPU
    # Stand for your tokenizer and your data.
    tokens = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"a": 0}, "a")), pad_token="a", eos_token="a")
    data = {"train_dataset": Dataset.from_dict({"input_ids": [[1]]}), "processing_class": tokens}
    trainer = SFTTrainer(AutoModelForCausalLM.from_pretrained(path), arguments, **data)
    trainer.create_optimizer()
    model, optimizer = trainer.accelerator.prepare(trainer.model, trainer.optimizer)
    # optimizer and whole_while_loading: as in test_accelerate.py. The plugin trains with the model's loss. To have
    # SFTTrainer's own step judged, declare train_step and batch: results/frameworks/trl.md.
    # For experts, SFTTrainer adds the loss that balances them, which the reference's loss is without: set
    # router_aux_loss_coef=0.0. Fresh adapters of LoRA are drawn: drawn=["*lora_A*"].
    return subject(model, path, optimizer=optimizer, whole_while_loading=True)
