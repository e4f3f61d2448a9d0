# A model that parallelize_model of OLMo-core shards and initialises, as its train module does.
# ai2-olmo-core 3.0.0 requires a torch below 2.14.
import torch
from olmo_core.distributed.parallel import DataParallelType, build_world_mesh
from olmo_core.nn.transformer import TransformerConfig
from olmo_core.train.train_module.transformer import TransformerDataParallelConfig
from olmo_core.train.train_module.transformer.common import parallelize_model

from pytest_fsdp_meta import Subject, fsdp_conformance

CONFIG = TransformerConfig.olmo2_1M(vocab_size=64)


def build():
    model = CONFIG.build(init_device="cpu")
    model.init_weights(device=torch.device("cpu"))
    return model


@fsdp_conformance(world_size=2)
def test_parallelize(fsdp):
    sharding = TransformerDataParallelConfig(name=DataParallelType.fsdp)
    # For replicas and tensor parallelism, give it their configs, and the marker the mesh: mesh={"dp": 2, "tp": 2}.
    mesh = build_world_mesh(dp=sharding, device_type=fsdp.device.type)
    model = CONFIG.build(init_device="meta")
    model = parallelize_model(model, world_mesh=mesh, device=fsdp.device, dp_config=sharding)
    # drawn: parallelize_model ends with init_weights, and ranks draw other numbers than one device. Weights have to be
    # written, finite, equal on replicas and of one draw. To have values compared, load a checkpoint of the reference
    # with load_model_and_optim_state.
    # batch, loss and optimizer let the training be judged. The model returns its loss if the batch has labels:
    # loss=lambda model, batch: model(**batch).loss; the optimizer is AdamWConfig(...).build(model).
    # For OLMo-core's checkpoints: save=lambda model, optimizer, folder: save_model_and_optim_state(str(folder), model,
    # optimizer), and resume with load_model_and_optim_state.
    return Subject(model, reference=build, drawn="*")
