"""Train a mixture of experts: FSDP shards and replicates its weights (HSDP), except for the experts."""

import math

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from moe_model import Decoder, Experts, Router
from safetensors.torch import load_file
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.functional import cross_entropy

ROWS, MAX_NORM, WARMUP, STEPS = 2, 0.5, 2, 100  # ROWS is the size of a micro-batch
BALANCE_RATE = 0.02  # DeepSeek-V3 has 0.001; a small model's scores are further apart


def load_unsharded(checkpoint):
    model = Decoder()
    model.load_state_dict(load_file(checkpoint))
    return model


def load_sharded(checkpoint, mesh, device, dtype):
    with torch.device("meta"):
        model = Decoder()
    for module in find(model, Experts):
        module.distribute(mesh)
    experts = set(expert_parameters(model))
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for layer in model.layers:
        fully_shard(layer.moe.router, mesh=mesh)  # without the policy: rounded scores choose other experts
        fully_shard(layer, mesh=mesh, mp_policy=policy, ignored_params=experts)
    fully_shard(model, mesh=mesh, mp_policy=policy, ignored_params=experts)
    model.to_empty(device=device)
    set_model_state_dict(model, load_file(checkpoint), options=StateDictOptions(full_state_dict=True))
    for router in find(model, Router):
        router.load.zero_()  # no checkpoint has it
    return model


def find(model, kind):
    return [module for module in model.modules() if isinstance(module, kind)]


def expert_parameters(model):
    return [parameter for module in find(model, Experts) for parameter in module.parameters()]


def average_expert_gradients(model):
    """Average the gradients of experts over all ranks, as FSDP does with all others.

    The ranks of dp_shard have sent their tokens to the expert, so their gradients are summed already.
    """
    for parameter in expert_parameters(model):
        mesh, gradient = parameter.device_mesh, parameter.grad.to_local()
        dist.all_reduce(gradient, group=mesh.get_group("dp_replicate"))
        gradient /= mesh.size()


@torch.no_grad()
def balance_experts(model):
    """Make experts that got fewer tokens than the mean in this step more likely to be chosen, and others less."""
    routers = find(model, Router)
    loads = torch.stack([router.load for router in routers])
    if dist.is_initialized():
        dist.all_reduce(loads)  # over all ranks, because each has other tokens
    for router, load in zip(routers, loads.float(), strict=True):
        router.bias += BALANCE_RATE * torch.sign(load.mean() - load)
        router.load.zero_()


def warm_up_and_decay(step):
    """Return the factor of the learning rate: linear warmup, then half a cosine."""
    return min((step + 1) / WARMUP, 0.5 + 0.5 * math.cos(math.pi * max(0, step - WARMUP) / (STEPS - WARMUP)))


def sum_of_losses(model, tokens, labels):
    return cross_entropy(model(tokens).float().flatten(0, 1), labels.flatten(), reduction="sum")


def count_tokens(labels):
    return (labels != -100).sum()


class Trainer:
    def __init__(self, checkpoint, mesh, device, dtype):
        self.model = model = load_sharded(checkpoint, mesh, device, dtype)
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1)
        self.optimizer.register_step_post_hook(lambda *_: balance_experts(model))
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, warm_up_and_decay)

    def train_step(self, batch):
        """Train on this rank's rows. Return the mean loss over the tokens of all ranks."""
        count = count_tokens(batch["labels"])
        dist.all_reduce(count)
        total = torch.zeros((), device=count.device)
        micro_batches = list(zip(batch["tokens"].split(ROWS), batch["labels"].split(ROWS), strict=True))
        for number, (tokens, labels) in enumerate(micro_batches):
            self.model.set_requires_gradient_sync(number == len(micro_batches) - 1)
            loss = sum_of_losses(self.model, tokens, labels) / count
            (loss * dist.get_world_size()).backward()  # gradients are averaged over the ranks
            total += loss.detach()
        average_expert_gradients(self.model)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), MAX_NORM)
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        dist.all_reduce(total)
        return total

    def state(self):
        weights, moments = get_state_dict(self.model, self.optimizer)
        return {"model": weights, "optimizer": moments, "scheduler": self.scheduler.state_dict()}

    def save(self, folder):
        dcp.save(self.state(), checkpoint_id=folder)

    def resume(self, folder):
        state = self.state()
        dcp.load(state, checkpoint_id=folder)
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])
