# The model that SentenceTransformerTrainer trains, prepared by accelerate with FSDP2.
import pytest
from accelerate import DistributedType, PartialState
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

from pytest_fsdp_meta import Subject, fsdp_conformance

SIZES = {"vocab_size": 60, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}


@pytest.fixture(scope="session")
def path(tmp_path_factory):
    # Random weights, which stand for your checkpoint.
    BertModel(BertConfig(**SIZES)).save_pretrained(path := str(tmp_path_factory.mktemp("bert")))
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"a": 0}, "a")), pad_token="a").save_pretrained(path)
    return path


@fsdp_conformance(world_size=2)
def test_encoder(fsdp, path):
    options = {"fsdp": True, "fsdp_config": {"version": 2}, "use_cpu": fsdp.device.type == "cpu", "report_to": []}
    arguments = SentenceTransformerTrainingArguments("out", **options)
    if arguments.use_cpu:  # otherwise accelerate uses DDP on CPUs, and the test passes without having seen FSDP
        PartialState().distributed_type = DistributedType.MULTI_GPU
    trainer = SentenceTransformerTrainer(SentenceTransformer(path, device="cpu"), arguments)
    model, optimizer = trainer.accelerator.prepare(trainer.model, trainer.create_optimizer())
    # optimizer and whole_while_loading: as in test_accelerate.py. batch and loss, or the Trainer's own train_step, let
    # the training be judged: results/frameworks/sentence_transformers.md.
    return Subject(model, reference=lambda: SentenceTransformer(path), optimizer=optimizer, whole_while_loading=True)
