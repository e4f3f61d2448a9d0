"""A small decoder with mixtures of experts (MoE), balanced without an auxiliary loss, as in DeepSeek-V3."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint


class Router(nn.Module):
    """Choose ``active`` experts for each token, and count the tokens of each expert."""

    def __init__(self, width, experts, active):
        super().__init__()
        self.active = active
        self.gate = nn.Linear(width, experts, bias=False)
        self.register_buffer("bias", torch.zeros(experts))  # moved by the trainer
        self.register_buffer("load", torch.zeros(experts, dtype=torch.int64), persistent=False)  # since the last step

    def forward(self, tokens):
        scores = torch.sigmoid(self.gate(tokens.float()))
        chosen = (scores + self.bias).topk(self.active).indices  # the bias must not scale the outputs
        if self.training:
            self.load += torch.bincount(chosen.flatten(), minlength=len(self.load))
        weights = scores.gather(-1, chosen)
        return chosen, weights / weights.sum(-1, keepdim=True)


class Exchange(torch.autograd.Function):
    """Send rows to the ranks of a group, as all_to_all_single does; backward sends their gradients back."""

    @staticmethod
    def forward(ctx, rows, sent, received, group):
        ctx.sent, ctx.received, ctx.group = sent, received, group
        output = rows.new_empty(sum(received), *rows.shape[1:])
        dist.all_to_all_single(output, rows.contiguous(), received, sent, group=group)
        return output

    @staticmethod
    def backward(ctx, gradient):
        return Exchange.apply(gradient, ctx.received, ctx.sent, ctx.group), None, None, None


class Experts(nn.Module):
    """Stacked feed-forward networks. After ``distribute``, each rank has some of them, and gets the rows for them."""

    def __init__(self, experts, width, hidden):
        super().__init__()
        self.up = nn.Parameter(torch.randn(experts, width, hidden) * width**-0.5)
        self.down = nn.Parameter(torch.randn(experts, hidden, width) * hidden**-0.5)
        self.group = None

    def distribute(self, mesh):
        """Split the experts over dp_shard, and copy them over dp_replicate.

        FSDP places its weights in the same way, so clipping and checkpoints treat both alike. But FSDP gathers weights
        for the tokens of its rank, while experts stay where they are.
        """
        self.group = mesh.get_group("dp_shard")
        if len(self.up) % dist.get_world_size(self.group):
            raise ValueError(f"{len(self.up)} experts cannot be split evenly over the ranks of dp_shard")
        placements = [Replicate(), Shard(0)]
        self.up = nn.Parameter(distribute_tensor(self.up, mesh, placements))
        self.down = nn.Parameter(distribute_tensor(self.down, mesh, placements))

    def forward(self, tokens, chosen):
        """Return the output of each chosen expert, of shape (tokens, active, width)."""
        experts, order = chosen.flatten().sort(stable=True)
        rows = tokens[order // chosen.shape[-1]]
        outputs = self.compute(rows, experts) if self.group is None else self.compute_remotely(rows, experts)
        return outputs[order.argsort()].unflatten(0, chosen.shape)

    def compute_remotely(self, rows, experts):
        """Send each row to the rank of its expert, and return what comes back. The rows are sorted by expert."""
        counts = torch.bincount(experts, minlength=len(self.up)).view(dist.get_world_size(self.group), -1)
        arriving = torch.empty_like(counts)  # from each rank, for each expert of this rank
        dist.all_to_all_single(arriving, counts, group=self.group)
        sent, received = counts.sum(1).tolist(), arriving.sum(1).tolist()
        numbers = torch.arange(arriving.shape[1], device=rows.device).expand_as(arriving)  # of experts, on this rank
        local_experts = numbers.flatten().repeat_interleave(arriving.flatten())
        outputs = self.compute(Exchange.apply(rows, sent, received, self.group), local_experts)
        return Exchange.apply(outputs, received, sent, self.group)

    def compute(self, rows, experts):
        """Return the output of the expert of each row; the experts are numbered as on this rank."""
        own = [weight.to_local() if isinstance(weight, DTensor) else weight for weight in (self.up, self.down)]
        up, down = (weight.to(rows.dtype) for weight in own)  # as the policy of FSDP does with its weights
        order = experts.argsort(stable=True)
        parts = rows[order].split(torch.bincount(experts, minlength=len(up)).tolist())
        outputs = [torch.relu(part @ up[number]) @ down[number] for number, part in enumerate(parts)]
        return torch.cat(outputs)[order.argsort()]


class MixtureOfExperts(nn.Module):
    def __init__(self, width, hidden, experts, active):
        super().__init__()
        self.router = Router(width, experts, active)
        self.experts = Experts(experts, width, hidden)

    def forward(self, hidden):
        tokens = hidden.flatten(0, 1)
        chosen, weights = self.router(tokens)
        # The router stays outside of what backward recomputes, or it would count each token twice.
        outputs = checkpoint(self.experts, tokens, chosen, use_reentrant=False)
        return (weights.unsqueeze(-1) * outputs).sum(1).view_as(hidden).to(hidden.dtype)


class Block(nn.Module):
    def __init__(self, width, hidden, experts, active):
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.moe = MixtureOfExperts(width, hidden, experts, active)

    def forward(self, hidden):
        return hidden + self.moe(self.norm(hidden))


class Decoder(nn.Module):
    def __init__(self, vocab=61, width=32, hidden=24, experts=6, active=2, layers=2):
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.layers = nn.ModuleList(Block(width, hidden, experts, active) for _ in range(layers))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)

    def forward(self, tokens):
        hidden = self.embed(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(self.norm(hidden))
