"""LLaMA-Factory's v1 engine: ``ModelEngine`` builds the model, ``FSDP2Engine`` shards, materialises and loads it.

hiyouga/LLaMA-Factory#10236 added ``init_on_meta`` and #10264 ``init_on_rank0``; results/systems.md has the findings.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from llamafactory.v1.accelerator.interface import DistributedInterface
from llamafactory.v1.config.model_args import ModelArguments
from llamafactory.v1.core.model_engine import ModelEngine
from llamafactory.v1.plugins.trainer_plugins.distributed.fsdp2 import FSDP2Engine
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from fixtures.tiny import VOCABULARY, save_tiny
from pytest_fsdp_meta import Subject, fsdp_conformance
from pytest_fsdp_meta.transformers import reference_model, token_batch
from pytest_fsdp_meta.worlds import Rank, WorldSpec


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Save checkpoints with a tokenizer, which the engine reads although loading does not need it."""
    saved: dict[str, Path] = {}
    words = Tokenizer(WordLevel({f"word{index}": index for index in range(VOCABULARY)}, unk_token="word0"))

    def save(name: str) -> Path:
        if name not in saved:
            saved[name] = save_tiny(name, tmp_path_factory.mktemp("checkpoint") / name)
            PreTrainedTokenizerFast(tokenizer_object=words, eos_token="word1").save_pretrained(saved[name])
        return saved[name]

    return save


@pytest.fixture
def path(request: pytest.FixtureRequest, checkpoint: Callable[[str], Path]) -> Path:
    return checkpoint(request.param)


def load(path: Path, init: str, **mesh: int) -> Subject:
    config = {"name": "fsdp2", **mesh}
    DistributedInterface(config)
    engine = ModelEngine(ModelArguments(model=str(path), init_config={"name": init}), is_train=True)
    model = FSDP2Engine(config).shard_model(engine.model)
    return Subject(
        model,
        reference=lambda: reference_model(path),
        batch=lambda step: token_batch(step, path),
        whole_while_loading=(0,) if init == "init_on_rank0" else False,
    )


@pytest.mark.parametrize("path", ["qwen3-tied", "qwen3-moe", "gemma3"], indirect=True)
@fsdp_conformance(world_size=2, process_group="loader")
def test_init_on_meta(fsdp, path):
    return load(path, "init_on_meta")


@pytest.mark.parametrize("path", ["qwen3-tied"], indirect=True)
@fsdp_conformance(mesh={"mp_replicate": 2, "mp_shard": 2}, process_group="loader")
def test_init_on_meta_hsdp(fsdp, path):
    return load(path, "init_on_meta", mp_replicate_size=2)


def load_on_rank0(fsdp: Rank, path: Path) -> Subject:
    return load(path, "init_on_rank0")


GARBAGE = "llamafactory 0.9.5: init_on_rank0 does not restore non-persistent buffers after to_empty (fixed by #10820)"


@pytest.mark.parametrize("path", ["qwen3-tied"], indirect=True)
@fsdp_conformance(world_size=2, process_group="loader", xfail={"no_uninitialized_memory": GARBAGE})
def test_init_on_rank0(fsdp, path):
    return load_on_rank0(fsdp, path)


def test_messages_about_init_on_rank0(checkpoint, failures_of):
    world = WorldSpec({"dp_shard": 2}, timeout=120, process_group="loader")
    failures = failures_of(load_on_rank0, world, path=checkpoint("qwen3-tied"))
    assert list(failures) == ["no_uninitialized_memory"]
    for name in ("inv_freq", "original_inv_freq"):
        line = f"model.rotary_emb.{name}, ranks 0, 1: never written (poison value NaN), but should be written"
        assert line in failures["no_uninitialized_memory"]
