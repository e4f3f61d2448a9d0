"""Run the trainer on synthetic rows: ``torchrun --nproc-per-node 4 moe_run.py``. A second run resumes the first."""

import os
from pathlib import Path

import torch
import torch.distributed as dist
from moe_model import Decoder
from moe_trainer import ROWS, STEPS, Trainer
from safetensors.torch import save_file
from torch.distributed.device_mesh import init_device_mesh

FOLDER, SAVE_EVERY = Path("moe-run"), 20
VOCAB, LENGTH, BATCH = 61, 12, 16


def batch(step):
    """Return the rows of all ranks: each token is 1 to 3 more than the one before. Prompts have no labels."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(1, 4, (BATCH, LENGTH + 1), generator=generator)
    tokens[:, 0] = torch.randint(VOCAB, (BATCH,), generator=generator)
    tokens = tokens.cumsum(1) % VOCAB
    prompt = torch.arange(LENGTH) < torch.arange(BATCH)[:, None] // 2  # of 0 to 7 tokens
    return {"tokens": tokens[:, :-1], "labels": tokens[:, 1:].masked_fill(prompt, -100)}


def own_rows(step, device):
    """Return the rows of this rank; every rank has others."""
    return {name: rows.chunk(dist.get_world_size())[dist.get_rank()].to(device) for name, rows in batch(step).items()}


def main():
    device = torch.accelerator.current_accelerator() or torch.device("cpu")
    if device.type != "cpu":
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group()
    ranks = dist.get_world_size()
    if BATCH % (ROWS * ranks):
        raise ValueError(f"{ranks} ranks would run different numbers of micro-batches, and wait for each other forever")
    replicas = 2 if ranks % 2 == 0 else 1
    mesh = init_device_mesh(device.type, (replicas, ranks // replicas), mesh_dim_names=("dp_replicate", "dp_shard"))
    initial, last = FOLDER / "initial.safetensors", FOLDER / "last"
    if dist.get_rank() == 0 and not initial.exists():
        FOLDER.mkdir(exist_ok=True)
        save_file(Decoder().state_dict(), initial)
    dist.barrier()
    trainer = Trainer(initial, mesh, device, torch.bfloat16)
    if last.exists():
        trainer.resume(last)
    for step in range(trainer.scheduler.last_epoch, STEPS):
        loss = trainer.train_step(own_rows(step, device))
        if dist.get_rank() == 0:
            print(f"step {step}: loss {loss.item():.3f}")
        if (step + 1) % SAVE_EVERY == 0:
            trainer.save(last)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
