# A model that apply_fsdp2 of verl shards and fsdp2_load_full_state_dict fills, as its FSDP engine does.
import pytest
from transformers import AutoModelForCausalLM
from verl.utils import fsdp_utils

from pytest_fsdp_meta import fsdp_conformance
from pytest_fsdp_meta.transformers import subject, tiny_checkpoint


@pytest.fixture(scope="session")
def path(tmp_path_factory):
    return tiny_checkpoint("llama", tmp_path_factory.mktemp("llama"))  # random weights, which stand for yours


@fsdp_conformance(world_size=2)
def test_apply_fsdp2(fsdp, path, monkeypatch):
    monkeypatch.setattr(fsdp_utils, "get_device_id", lambda: fsdp.device)  # verl has no platform for CPUs
    with fsdp_utils.get_init_weight_context_manager(mesh=fsdp.mesh)():
        model = AutoModelForCausalLM.from_pretrained(path)
    state = model.state_dict()
    fsdp_utils.apply_fsdp2(model, {"mesh": fsdp.mesh}, {})
    fsdp_utils.fsdp2_load_full_state_dict(model, state, fsdp.mesh)
    # Rank 0 reads the whole checkpoint and sends it to the others.
    # The engine of verl's trainers can be judged as a whole, with its training step: results/frameworks/verl.md.
    return subject(model, path, whole_while_loading=True)
