# A model that FSDPStrategy of mmengine wraps into torch's FullyShardedDataParallel, with its optimizer.
import pytest
from mmengine._strategy import FSDPStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from transformers import AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from pytest_fsdp_meta import fsdp_conformance
from pytest_fsdp_meta.transformers import subject, tiny_checkpoint


@pytest.fixture(scope="session")
def path(tmp_path_factory):
    return tiny_checkpoint("llama", tmp_path_factory.mktemp("llama"))  # random weights, which stand for yours


@fsdp_conformance(world_size=2)
def test_strategy(fsdp, path, tmp_path):
    # Without device_id, the strategy asks for a GPU. With device_mesh, torch can save the optimizer's state by its own
    # checkpoints; what mmengine saves cannot be resumed with this torch: results/frameworks/mmengine.md.
    options = {"device_id": fsdp.device, "device_mesh": fsdp.mesh}
    options["auto_wrap_policy"] = ModuleWrapPolicy({LlamaDecoderLayer})
    strategy = FSDPStrategy(work_dir=str(tmp_path), model_wrapper=options)
    model = AutoModelForCausalLM.from_pretrained(path)
    model, wrapper = strategy.prepare(model, optim_wrapper={"optimizer": {"type": "AdamW", "lr": 1e-3}})
    # Every rank reads the whole checkpoint. For a BaseModel, declare its train_step.
    return subject(model, path, optimizer=wrapper.optimizer, whole_while_loading=True)
