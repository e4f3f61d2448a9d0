# A model that shard_model of torchtune shards, built and loaded as the recipe full_finetune_distributed does.
import torch
from torchtune import training
from torchtune.models.llama3_2 import llama3_2

from pytest_fsdp_meta import Subject, fsdp_conformance


def build():
    torch.manual_seed(0)
    return llama3_2(vocab_size=128, num_layers=2, num_heads=8, num_kv_heads=4, embed_dim=64, max_seq_len=32)


@fsdp_conformance(world_size=2)
def test_shard_model(fsdp):
    with torch.device("meta"):
        model = build()
    training.shard_model(model, [training.get_shard_conditions], cpu_offload=False)
    for module in model.modules():
        if hasattr(module, "rope_init"):
            with fsdp.device:
                module.rope_init()
    training.load_from_full_model_state_dict(model, build().state_dict(), fsdp.device)
    # build().state_dict() stands for your checkpoint. With torch.load(path, mmap=True), as torchtune reads it,
    # whole_while_loading is not needed, and the reference loads the same file.
    # batch, loss and optimizer let the training be judged, and train_step the recipe's own, which sums the loss over
    # tokens, counts those of all ranks after the backward and scales the gradients with scale_grads. It returns the
    # loss of all ranks: loss_over_ranks="same".
    # LoRA and DoRA: drawn=["*lora_a*"]; lora_b begins with zeros and is compared. QLoRA: the reference builds the same
    # NF4 weights, which are compared by the values that they stand for.
    # Tensor parallelism by base_llama_tp_plan: @fsdp_conformance(mesh={"dp": 2, "tp": 2}).
    # Own checkpoints: results/frameworks/torchtune.md.
    return Subject(model, reference=build, whole_while_loading=True)
