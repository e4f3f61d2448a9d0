"""speculators' trainer on an Eagle-3 draft of a tiny verifier: ``Trainer.setup_model`` shards and broadcasts it.

vllm-project/speculators#314; results/systems.md has the findings.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from speculators.models.eagle3 import Eagle3DraftModel
from speculators.train.trainer import Trainer, TrainerConfig
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedModel

from fixtures.tiny import SHAPE, VOCABULARY, save_tiny
from pytest_fsdp_meta import Subject, fsdp_conformance
from pytest_fsdp_meta.transformers import reference_model

try:
    from speculators.losses import resolve_loss_config

    LOSSES = resolve_loss_config("kl_div", "eager")  # the default ones are Triton's
except ModuleNotFoundError:  # before 0.8
    from speculators.models.metrics import resolve_loss_config

    LOSSES = resolve_loss_config("kl_div")

HIDDEN: int = SHAPE["hidden_size"]
TAPPED = [0, 1, 2]  # the hidden states of the verifier that the draft sees
TTT_STEPS = 2  # how far a training step lets the draft run ahead
FROM_THE_VERIFIER = {
    "embed_tokens.weight": "model.embed_tokens.weight",
    "lm_head.weight": "lm_head.weight",
    "verifier_lm_head.weight": "lm_head.weight",
    "verifier_norm.weight": "model.norm.weight",
}


@pytest.fixture(scope="session")
def verifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny("qwen3", tmp_path_factory.mktemp("verifier"))


def draft(verifier: Path, vocabulary: int, seed: int) -> Eagle3DraftModel:
    """Return a draft with one layer, initialised from ``seed``, and the verifier's embedding, norm and reduced head."""
    torch.manual_seed(seed)
    config = AutoConfig.from_pretrained(verifier)
    config.num_hidden_layers = 1
    kept = reduced(vocabulary)
    return Eagle3DraftModel.from_training_args(
        config,
        t2d=kept,
        d2t=kept.nonzero().flatten() - torch.arange(vocabulary),
        verifier_name_or_path=str(verifier),
        draft_vocab_size=vocabulary,
        norm_before_residual=True,
        ttt_steps=TTT_STEPS,
        target_layer_ids=TAPPED,
        draft_attn_impl="eager",
    )


def reduced(vocabulary: int) -> Tensor:
    """Return a mask of the verifier's tokens that the draft has, spread evenly over the vocabulary."""
    kept = torch.zeros(VOCABULARY, dtype=torch.bool)
    kept[torch.arange(vocabulary) * VOCABULARY // vocabulary] = True
    return kept


def batch(step: int) -> dict[str, Tensor]:
    """Return eight documents with random hidden states in place of the verifier's."""
    generator = torch.Generator().manual_seed(step)
    rows, length = 8, 12
    return {
        "hidden_states": torch.randn(rows, length, len(TAPPED) * HIDDEN, generator=generator),
        "verifier_last_hidden_states": torch.randn(rows, length, HIDDEN, generator=generator),
        "input_ids": torch.randint(VOCABULARY, (rows, length), generator=generator),
        "document_ids": torch.zeros(rows, length, dtype=torch.long),
        "loss_mask": torch.ones(rows, length, dtype=torch.bool),
    }


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Average over rows, because the draft takes one row at a time."""
    rows = [{name: value[row : row + 1] for name, value in batch.items()} for row in range(len(batch["input_ids"]))]
    return torch.stack([model(**row, ttt_steps=TTT_STEPS, loss_config=LOSSES)[1] for row in rows]).mean()


def set_up(model: nn.Module) -> Trainer:
    """Build the trainer like the package's own tests: its constructor needs an accelerator and a data loader."""
    trainer = Trainer.__new__(Trainer)
    trainer.model = model
    trainer.config = TrainerConfig(
        lr=1e-3, num_epochs=1, save_path="", scheduler_type="none", fsdp_shard=True, hidden_states_dtype=torch.float32
    )
    trainer.is_distributed = True
    trainer.resume_from_checkpoint = False
    trainer.setup_model()
    trainer.setup_optimizer()
    return trainer


def reduced_verifier(path: Path, vocabulary: int) -> PreTrainedModel:
    whole = reference_model(path)
    whole.lm_head.weight = nn.Parameter(whole.lm_head.weight.detach()[reduced(vocabulary)])
    return whole


ALL_PARAMETERS = "speculators 0.9.0: setup_optimizer gives AdamW all parameters, including the verifier's frozen ones"


@pytest.mark.parametrize("vocabulary", [VOCABULARY, 64])
@fsdp_conformance(world_size=(2, 4), xfail={"optimizer_owns_parameters": ALL_PARAMETERS})
def test_setup_model(fsdp, verifier, vocabulary):
    trainer = set_up(draft(verifier, vocabulary, seed=fsdp.rank))  # only rank 0's initialisation may count
    return Subject(
        trainer.model,
        reference=lambda: draft(verifier, vocabulary, seed=0),
        frozen=FROM_THE_VERIFIER,
        verifier=verifier if vocabulary == VOCABULARY else lambda: reduced_verifier(verifier, vocabulary),
        batch=batch,
        loss=loss,
        optimizer=trainer.optimizers[0],
        whole_while_loading=True,  # since #333 by design: every rank builds the draft, then shards it
    )
