"""A rule of this repository's own as a check, and the tiny checkpoints that the loader is judged on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from pytest_fsdp_meta.catalogue import Finding, check
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

SIZES = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
SHARED = {"num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64}


@check(
    promise="every rank holds an equal share of every parameter",
    family="shardload",
    needs=["inventory"],
    why="The rank with the largest shard decides how much memory all must have.",
    cause="the first dim of the parameter is no multiple of the ranks that share it",
    remedy="pad the vocabulary when the checkpoint is converted",
)
def shards_are_even(view):
    for name, facts in view.tensors("parameter"):
        sizes = {tensor.numel for _, tensor in facts}
        if len(sizes) > 1:
            yield Finding(name, tuple(rank for rank, _ in facts), f"shards of {sorted(sizes)}", "shards of one size")


def pytest_fsdp_checks():
    return [shards_are_even]


def pytest_fsdp_preload():
    return ["transformers.models.llama.modeling_llama", "transformers.models.qwen3.modeling_qwen3"]


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory) -> Callable[..., Path]:
    """``checkpoint("llama", vocab_size=97)``: the folder of a tiny checkpoint."""

    def make(kind: str, **sizes: object) -> Path:
        torch.manual_seed(0)
        folder = tmp_path_factory.mktemp(kind)
        AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**SIZES | SHARED | sizes)).save_pretrained(folder)
        return folder

    return make


@pytest.fixture(scope="session")
def llama(checkpoint) -> Path:
    return checkpoint("llama")


@pytest.fixture(scope="session")
def tied_qwen3(checkpoint) -> Path:
    return checkpoint("qwen3", tie_word_embeddings=True)


@pytest.fixture(scope="session")
def odd_llama(checkpoint) -> Path:
    return checkpoint("llama", vocab_size=97)
