"""speculators 0.4.0: the trainer that vllm-project/speculators#314 is about.

results/systems.md has the findings.
"""

from __future__ import annotations

from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from speculators.models.eagle3 import Eagle3DraftModel
from speculators.train.trainer import Trainer, TrainerConfig
from torch import nn
from transformers import AutoConfig

from fixtures.tiny import VOCABULARY, save_tiny
from pytest_fsdp_meta import Subject, fsdp_conformance
from pytest_fsdp_meta.worlds import Rank, WorldSpec


@pytest.fixture(scope="session")
def verifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny("llama", tmp_path_factory.mktemp("verifier"))


def draft(verifier: Path, seed: int) -> Eagle3DraftModel:
    """Return a draft with one layer, initialised from ``seed``, and the verifier's embedding, norm and head."""
    torch.manual_seed(seed)
    config = AutoConfig.from_pretrained(verifier)
    config.num_hidden_layers = 1
    return Eagle3DraftModel.from_training_args(
        config,
        verifier_name_or_path=str(verifier),
        draft_vocab_size=VOCABULARY,
        norm_before_residual=True,
        ttt_steps=2,
    )


def set_up(model: nn.Module) -> nn.Module:
    """Set up the trainer like the package's own tests, on the CPU if torch has no accelerator."""
    trainer = Trainer.__new__(Trainer)
    trainer.model = model
    trainer.config = TrainerConfig(lr=1e-3, num_epochs=1, save_path="", is_distributed=True)
    trainer.is_distributed = True
    trainer.resume_from_checkpoint = False
    found = torch.accelerator.current_accelerator() or torch.device("cpu")
    with patch("torch.accelerator.current_accelerator", return_value=found):
        trainer.setup_model()
    return trainer.model


KNOWN = {
    "no_uninitialized_memory": "to_empty() on the layers, then reset_parameters() where it exists; RMSNorm has none",
    "params_equal_reference": "the layers are initialised again, so the draft's own weights are lost",
}


@fsdp_conformance(world_size=2, xfail=KNOWN)
def test_setup_model(fsdp, verifier):
    return Subject(
        set_up(draft(verifier, seed=0)),
        reference=lambda: draft(verifier, seed=0),
        frozen={
            "embed_tokens.weight": "model.embed_tokens.weight",
            "verifier_lm_head.weight": "lm_head.weight",
            "verifier_norm.weight": "model.norm.weight",
        },
        verifier=verifier,
        whole_while_loading=True,  # every rank builds the draft
    )


def load(fsdp: Rank, verifier: Path) -> Subject:
    model = set_up(draft(verifier, seed=0))
    return Subject(model, reference=lambda: draft(verifier, seed=0), whole_while_loading=True)


def test_messages(verifier, failures_of):
    failures = failures_of(load, WorldSpec({"dp_shard": 2}, timeout=120), verifier=verifier)
    assert set(failures) == set(KNOWN)
    for norm in ("input_layernorm", "post_attention_layernorm", "hidden_norm"):
        line = f"layers.0.{norm}.weight, ranks 0, 1: never written (poison value NaN), but should be written"
        assert line in failures["no_uninitialized_memory"]
    for linear in ("self_attn.q_proj", "mlp.down_proj"):
        line = f"layers.0.{linear}.weight, ranks 0, 1: values that differ from the reference's slice"
        assert line in failures["params_equal_reference"]
