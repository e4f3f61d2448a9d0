# Muon of muon-fsdp2 for the matrices of a model's blocks; its own Adam for the embedding, the head and the norms.
import muon_fsdp2
import pytest
import torch
from muon_fsdp2 import apply_momentum, apply_scaling
from muon_fsdp2 import zeropower_via_newtonschulz5 as orthogonalize
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM

from pytest_fsdp_meta import fsdp_conformance
from pytest_fsdp_meta.transformers import subject, tiny_checkpoint

# The package compiles with fullgraph=True, which raises under the mode in which a check watches random numbers.
torch.compiler.set_stance("force_eager")
# On one device, as for the reference, 0.3.0 calls a function that it lacks. It has the parts of it for its ranks.
muon_fsdp2.muon_update = lambda *args: apply_scaling(orthogonalize(apply_momentum(*args[:4]), args[4]), args[5])


@pytest.fixture(scope="session")
def path(tmp_path_factory):
    return tiny_checkpoint("llama", tmp_path_factory.mktemp("llama"))  # random weights, which stand for yours


def optimizer(model):  # called for the reference as well
    matrices = [parameter for parameter in model.model.layers.parameters() if parameter.ndim == 2]
    rest = [parameter for parameter in model.parameters() if all(parameter is not matrix for matrix in matrices)]
    return muon_fsdp2.Muon([{"params": matrices, "use_muon": True}, {"params": rest, "use_muon": False}])


@fsdp_conformance(world_size=2)  # a number that divides the rows of all matrices: otherwise a rank is aborted
def test_muon(fsdp, path):
    model = AutoModelForCausalLM.from_pretrained(path)
    for module in [*model.model.layers, model]:
        fully_shard(module, mesh=fsdp.mesh)
    return subject(model, path, optimizer=optimizer, whole_while_loading=True)
