# A model that torch's FullyShardedDataParallel wraps.
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from pytest_fsdp_meta import Subject, fsdp_conformance


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(7, 13), nn.Linear(13, 7)

    def forward(self, x):
        return x + self.down(self.up(x).relu())


def build():
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block(), nn.Linear(7, 3))


def batch(step):
    return {"x": torch.randn(8, 7, generator=torch.Generator().manual_seed(step))}


def loss(model, batch):
    return model(batch["x"]).square().mean()


@fsdp_conformance(world_size=2)
def test_fsdp1(fsdp):
    # use_orig_params: otherwise one flat parameter replaces those of a module, and without their names nothing can be
    # compared with the reference: each check is an error that says so.
    # device_mesh: without it, torch saves no optimizer state of a parameter for a rank that has no element of it, and
    # optimizer_state_round_trip, resume_parity and second_save_is_current are skipped. HYBRID_SHARD takes a mesh of two
    # dimensions, or two process groups; the marker has both: mesh={"dp_replicate": 2, "dp_shard": 2}.
    # device_id: torch requires it on a CPU.
    # A model on the meta device is materialised by param_init_fn; torch supports sync_module_states=True, which sends
    # rank 0's values to the others, on accelerators only.
    options = {"use_orig_params": True, "device_mesh": fsdp.mesh, "device_id": fsdp.device}
    model = FullyShardedDataParallel(build(), auto_wrap_policy=ModuleWrapPolicy({Block}), **options)
    # build() makes the whole model on every rank; batch and loss let the training be judged.
    return Subject(model, reference=build, batch=batch, loss=loss, whole_while_loading=True)
