# A model that fully_shard shards and create_supervised_trainer of pytorch-ignite trains: auto_model uses DDP.
import torch
from ignite.engine import create_supervised_trainer
from torch import nn
from torch.distributed.fsdp import fully_shard

from pytest_fsdp_meta import Subject, fsdp_conformance


def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))


def batch(step):
    return {"x": torch.randn(8, 16, generator=torch.Generator().manual_seed(step))}


@fsdp_conformance(world_size=2)
def test_trainer(fsdp):
    model, loss = fully_shard(build(), mesh=fsdp.mesh), nn.functional.mse_loss
    trainer = create_supervised_trainer(model, optimizer := torch.optim.AdamW(model.parameters()), loss)
    # The trainer steps the model and the optimizer that it was built with; a run of one batch is one step.
    step = {"train_step": lambda model, optimizer, batch: trainer.run([(batch["x"], batch["x"])]).output}
    same = {"loss": lambda model, batch: loss(model(batch["x"]), batch["x"]), "optimizer": optimizer}
    # Every rank builds the whole model. Checkpoint saves rank 0's shards only: results/frameworks/ignite.md.
    return Subject(model, reference=build, batch=batch, whole_while_loading=True, **step, **same)
