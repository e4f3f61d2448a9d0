import pytest
import torch
from moe_run import batch
from moe_trainer import MAX_NORM, Trainer, count_tokens, load_unsharded, sum_of_losses

from pytest_fsdp_meta import Subject, fsdp_conformance


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@fsdp_conformance(mesh={"dp_replicate": 2, "dp_shard": 2})
def test_moe(fsdp, checkpoint, dtype):
    trainer = Trainer(checkpoint, fsdp.mesh, fsdp.device, dtype)
    return Subject(
        trainer.model,
        reference=lambda: load_unsharded(checkpoint),
        batch=batch,
        loss=lambda model, batch: sum_of_losses(model, **batch) / count_tokens(batch["labels"]),
        optimizer=trainer.optimizer,
        train_step=lambda model, optimizer, batch: trainer.train_step(batch),
        loss_over_ranks="same",
        max_grad_norm=MAX_NORM,
        clip_grad_norm=torch.nn.utils.clip_grad_norm_,
        scheduler=trainer.scheduler,
        save=lambda model, optimizer, folder: trainer.save(folder),
        resume=lambda model, optimizer, folder: trainer.resume(folder),
    )
