# A model that Composer shards for FSDP2, as its Trainer does.
import pytest
import torch
from composer.distributed.prepare_distributed import parallelize_composer_model
from composer.models import HuggingFaceModel
from composer.utils.parallelism import FSDP2Config
from transformers import AutoModelForCausalLM

from pytest_fsdp_meta import fsdp_conformance
from pytest_fsdp_meta.transformers import subject, tiny_checkpoint


@pytest.fixture(scope="session")
def path(tmp_path_factory):
    return tiny_checkpoint("llama", tmp_path_factory.mktemp("llama"))  # random weights, which stand for yours


@fsdp_conformance(world_size=2)
def test_parallelize(fsdp, path):
    model = AutoModelForCausalLM.from_pretrained(path)
    # With parallelize_model, mark the root as well: lambda module: module is model or ...
    model.fsdp_wrap_fn = lambda module: module in list(model.model.layers)
    optimizer = torch.optim.AdamW(model.parameters())
    # Composer shards the model inside HuggingFaceModel, so that is what is returned. It puts the sharded parameters
    # into the groups of this optimizer. Every rank reads the whole checkpoint.
    parallelize_composer_model(HuggingFaceModel(model, None), optimizer, FSDP2Config(fsdp.mesh))
    return subject(model, path, optimizer=optimizer, whole_while_loading=True)
