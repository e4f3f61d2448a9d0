"""sentence-transformers' Trainer with FSDP2: the prepared model, its own step, losses of pairs and of all rows."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from accelerate import DistributedType, PartialState
from datasets import Dataset
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.sentence_transformer.losses import CosineSimilarityLoss, MultipleNegativesRankingLoss
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

from pytest_fsdp_meta import Subject, fsdp_conformance

SIZES = {"vocab_size": 60, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
ROWS, LENGTH = 12, 6
SAME_SEED = {
    "random_numbers_follow_the_mesh": "transformers 5.23.0: the Trainer seeds all ranks alike (trainer.py:419), and "
    "BERT has dropout"
}


@pytest.fixture(scope="session")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = str(tmp_path_factory.mktemp("bert"))
    BertModel(BertConfig(**SIZES)).save_pretrained(folder)
    words = Tokenizer(WordLevel({"a": 0}, "a"))
    PreTrainedTokenizerFast(tokenizer_object=words, pad_token="a").save_pretrained(folder)
    return folder


def read(path: str) -> SentenceTransformer:
    return SentenceTransformer(path, device="cpu")


def pairs(step: int) -> dict[str, Tensor]:
    """Return a batch as the Trainer's collator makes it; the sentences of the first rows are shorter."""
    draw = torch.Generator().manual_seed(step)
    batch: dict[str, Tensor] = {}
    for side in ("left", "right"):
        batch[f"{side}_input_ids"] = torch.randint(60, (ROWS, LENGTH), generator=draw)
        mask = batch[f"{side}_attention_mask"] = torch.ones(ROWS, LENGTH, dtype=torch.long)
        mask[: ROWS // 3, 4:] = 0
    return {**batch, "label": torch.rand(ROWS, generator=draw)}


def features_of(batch: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    sides = ("left_", "right_")
    return [{name.removeprefix(side): batch[name] for name in batch if name.startswith(side)} for side in sides]


def cosine(model: Any, batch: dict[str, Tensor]) -> Tensor:
    return CosineSimilarityLoss(model)(features_of(batch), batch["label"])


def ranking(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """Return the loss in which the other rows of the batch are what a row should not be similar to."""
    return MultipleNegativesRankingLoss(model)(features_of(batch), None)


def train_step(trainer: Any, model: Any, optimizer: Any, batch: dict[str, Any]) -> Tensor:
    """Step as ``Trainer.train()`` does."""
    [samples], tokens = trainer.get_batch_samples(iter([batch]), 1, model.device)
    trainer.current_gradient_accumulation_steps = 1
    loss = trainer.training_step(model, samples, tokens)
    trainer.accelerator.clip_grad_norm_(model.parameters(), trainer.args.max_grad_norm)
    optimizer.step()
    optimizer.zero_grad()
    return loss


def load(
    path: str,
    loss_of: Callable[[Any], Any] = CosineSimilarityLoss,
    loss: Callable[[Any, dict[str, Tensor]], Tensor] = cosine,
    batch: Callable[[int], dict[str, Tensor]] = pairs,
    **options: Any,
) -> Subject:
    cpu = not torch.cuda.is_available()
    options = {"fsdp_config": {"version": 2}, "learning_rate": 1e-3, "max_grad_norm": 0.1, **options}
    arguments = SentenceTransformerTrainingArguments("unused", fsdp=True, use_cpu=cpu, report_to=[], **options)
    if cpu:  # accelerate uses DDP on CPUs, unless it takes them for GPUs
        PartialState().distributed_type = DistributedType.MULTI_GPU
    model = read(path)
    data = Dataset.from_dict({"left": ["a"], "right": ["a"], "label": [1.0]})
    trainer = SentenceTransformerTrainer(model, arguments, train_dataset=data, loss=loss_of(model))
    trainer.create_optimizer()
    model, optimizer = trainer.accelerator.prepare(trainer.model, trainer.optimizer)
    trainer.model_wrapped = model  # as train() does: the loss gets the model that was prepared
    return Subject(
        model,
        reference=partial(read, path),
        batch=batch,
        loss=loss,
        train_step=partial(train_step, trainer),
        max_grad_norm=arguments.max_grad_norm,
        optimizer=optimizer,
        whole_while_loading=True,
    )


def without_labels(step: int) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in pairs(step).items() if name != "label"}


@fsdp_conformance(world_size=2, xfail=SAME_SEED)
def test_pairs(fsdp, path):
    return load(path)


@fsdp_conformance(world_size=3, xfail=SAME_SEED)
def test_uneven(fsdp, path):
    return load(path)


@fsdp_conformance(world_size=2, xfail=SAME_SEED)
def test_bf16(fsdp, path):
    return load(path, bf16=True)


@fsdp_conformance(world_size=2, xfail=SAME_SEED)
def test_negatives_of_all_ranks(fsdp, path):
    gathering = partial(MultipleNegativesRankingLoss, gather_across_devices=True)
    return load(path, gathering, ranking, without_labels)


def test_recipe(recipe):
    assert "failed" not in recipe("sentence_transformers")
