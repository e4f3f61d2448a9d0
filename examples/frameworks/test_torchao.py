# A model whose linear layers are quantised while they train: their weights are tensor subclasses.
import pytest
from torch.distributed.fsdp import fully_shard
from torch.serialization import add_safe_globals
from torchao.prototype import quantized_training as int8
from torchao.quantization import quantize_
from transformers import AutoModelForCausalLM

from pytest_fsdp_meta import fsdp_conformance
from pytest_fsdp_meta.transformers import subject, tiny_checkpoint


@pytest.fixture(scope="session")
def path(tmp_path_factory):
    return tiny_checkpoint("llama", tmp_path_factory.mktemp("llama"))  # random weights, which stand for yours


def quantised(path):
    model = AutoModelForCausalLM.from_pretrained(path)
    quantize_(model.model, int8.Int8MixedPrecisionTrainingConfig())
    return model


@fsdp_conformance(world_size=2)
def test_int8(fsdp, path):
    # Lets torch's checkpoints load these classes.
    add_safe_globals([int8.Int8MixedPrecisionTrainingConfig, int8.Int8MixedPrecisionTrainingLinearWeight])
    model = quantised(path)
    for layer in model.model.layers:
        fully_shard(layer)
    # reference: quantised in the same way. float8 scales activations by the largest element of a rank's rows, so that
    # ranks round otherwise than one device does; conformance/systems/torchao/test_torchao.py has the tolerance for it.
    return subject(fully_shard(model), path, reference=lambda: quantised(path), whole_while_loading=True)
