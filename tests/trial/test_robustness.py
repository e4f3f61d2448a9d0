"""Test trials of loaders and models that do odd things, on real ranks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from pytest_fsdp_meta import Part, Subject
from pytest_fsdp_meta.trial import LoaderFailed
from pytest_fsdp_meta.worlds import World, WorldSpec
from tests.trial import test_reloading
from tests.trial.test_trial import PARITY, judged, observed, subject
from tests.trial_help import batch, build, loss

UNINITIALISED, BUFFERS = "no_uninitialized_memory", "buffers_equal_reference"


def never_written(fsdp) -> nn.Module:
    with torch.device("meta"):
        model = nn.Linear(4, 2)
    fully_shard(model, mesh=fsdp.mesh)
    return model.to_empty(device=fsdp.device)


@pytest.mark.parametrize("warn_only", [True, False])
def test_seeding_helpers_cannot_switch_the_poison_off(warn_only):
    def loader(fsdp):
        torch.use_deterministic_algorithms(False, warn_only=warn_only)
        model = never_written(fsdp)
        torch.use_deterministic_algorithms(True)
        return model

    assert [finding.tensor for finding in judged(loader)[UNINITIALISED].findings] == ["weight", "bias"]


def without_poison(fsdp) -> nn.Module:
    torch.utils.deterministic.fill_uninitialized_memory = False
    model = never_written(fsdp)
    for parameter in model.parameters():
        nn.init.zeros_(parameter)  # reused memory may still hold poison from before the switch
    return model


def test_switching_the_poison_off_is_an_error():
    found = judged(without_poison)[UNINITIALISED]
    assert found.status == "error"
    assert found.reason == (
        "on ranks 0, 1 the loader switched off deterministic mode, without which uninitialised memory cannot be "
        "detected; leave torch.utils.deterministic alone while loading"
    )


@pytest.mark.parametrize(("field", "hinted"), [("fsdp_size", True), ("fdsp_size", False)])
def test_an_old_transformers_is_said(field, hinted):
    def loader(fsdp):
        raise TypeError(f"DistributedConfig.__init__() got an unexpected keyword argument '{field}'")

    with pytest.raises(LoaderFailed) as failed:
        observed(loader)
    assert ("from transformers 5.13 on" in failed.value.summary) == hinted
    assert str(failed.value).startswith(failed.value.summary)


def with_buffer(value: Tensor) -> nn.Module:
    model = build()
    model.register_buffer("odd", value)
    return model


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "value",
    [
        lambda scale: torch.quantize_per_tensor(torch.eye(4) * scale, 0.1, 0, torch.quint8),
        lambda scale: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged) * scale,
        lambda scale: (torch.eye(4) * scale).to_sparse(),
    ],
    ids=["quantized", "nested", "sparse"],
)
def test_tensors_that_cannot_be_compared_do_not_pass(value):
    def loader(fsdp):
        return Subject(with_buffer(value(2)), reference=lambda: with_buffer(value(1)), unsharded="*")

    verdicts = judged(loader)
    assert verdicts[BUFFERS].status == "skipped"
    assert "odd could not be compared: torch cannot slice it (quantized, sparse, nested" in verdicts[BUFFERS].reason
    assert verdicts["params_equal_reference"].status == "passed"
    assert verdicts["no_meta_buffers"].status == "passed"


@pytest.mark.filterwarnings("ignore")
def test_a_frozen_sparse_weight_is_no_error():
    def model() -> nn.Module:
        found = build()
        found.sparse = nn.Parameter(torch.eye(4).to_sparse(), requires_grad=False)
        return found

    verdicts = test_reloading.judged(
        lambda fsdp: Subject(model(), reference=model, unsharded="*"),
        ["frozen_weights_equal_verifier", "load_is_repeatable"],
    )
    assert {id: v.reason for id, v in verdicts.items() if v.status == "error"} == {}
    assert "sparse could not be compared" in verdicts["frozen_weights_equal_verifier"].reason


def test_a_nested_tensor_without_a_shape_is_named():
    def loader(fsdp):
        return with_buffer(torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]))

    with pytest.raises(LoaderFailed, match=r"Subject\(model=...\): 'odd' is a nested tensor without a shape"):
        observed(loader)


def test_the_default_dtype_is_reset_after_the_reference():
    def careless() -> nn.Module:
        model = build()
        torch.set_default_dtype(torch.float64)
        return model

    def loader(fsdp):
        return Subject(subject(fsdp, freeze=False).model, reference=careless, batch=batch, loss=loss)

    assert judged(loader)[PARITY].status == "passed"


def test_a_batch_with_keys_of_several_types():
    def mixed(step: int) -> dict:
        return {**batch(step), 1: torch.ones(4), "note": "not a tensor"}

    def unmixed(model: nn.Module, rows: dict) -> Tensor:
        return loss(model, {"input": rows["input"]}) * rows[1].mean()

    def loader(fsdp):
        return Subject(subject(fsdp, freeze=False).model, reference=build, batch=mixed, loss=unmixed)

    assert judged(loader)[PARITY].status == "passed"


def test_a_lazy_parameter_is_named():
    with pytest.raises(LoaderFailed) as caught:
        observed(lambda fsdp: nn.Sequential(nn.LazyLinear(3)))
    assert str(caught.value) == (
        "Subject(model=...): '0.weight' is a lazy parameter without a shape; run a forward before sharding"
    )


def zero_3(fsdp, **declared) -> Subject:
    """Return a model as ZeRO-3 leaves it on a disk: neither the parameter nor its shard has elements."""
    model = nn.Linear(4, 4, bias=False)
    whole = model.weight.detach()
    model.weight = nn.Parameter(torch.empty(0))
    model.weight.ds_id, model.weight.ds_shape = 0, whole.shape
    model.weight.read_back = whole.view(-1).chunk(2)[fsdp.rank].clone()
    model.weight.ds_tensor = torch.empty(0)
    model.weight.ds_tensor.ds_numel = 8
    return Subject(model, **declared)


def test_a_placeholder_is_no_parameter():
    with pytest.raises(LoaderFailed) as caught:
        observed(zero_3)
    assert str(caught.value) == (
        "Subject(model=...): 'weight' is a placeholder without elements, which DeepSpeed's ZeRO-3 leaves outside of "
        "the forward; describe what the ranks hold with Subject(adapter=...)"
    )


def test_an_adapter_finds_the_elements_of_a_placeholder():
    def loader(fsdp):
        def adapter(name, tensor):
            return Part.run(tensor.read_back, tensor.ds_shape, start=8 * fsdp.rank)

        return zero_3(fsdp, adapter=adapter)

    assert judged(loader)["nothing_left_unsharded"].status == "passed"
    assert [rank.tensors[0].shape for rank in observed(loader).inventory] == [(4, 4), (4, 4)]


def test_zero_3_trains_by_its_engine():
    def loader(fsdp):
        subject = zero_3(
            fsdp, batch=lambda step: {"x": torch.ones(4, 4)}, reference=lambda: nn.Linear(4, 4, bias=False)
        )
        weight = subject.model.weight
        weight.ds_tensor, weight.ds_numel, weight.ds_process_group = weight.read_back, 16, torch.distributed.group.WORLD
        weight.ds_tensor.ds_numel = 8
        return subject

    found = judged(loader)
    assert found["nothing_left_unsharded"].status == "passed"
    assert found["loss_parity"].status == "skipped"
    assert found["loss_parity"].reason == (
        "DeepSpeed's engine runs the backward and the optimizer's step itself; declare Subject(train_step=...)"
    )


def test_a_long_message_has_a_short_summary():
    def loader(fsdp):
        raise ValueError("missing keys: " + ", ".join(f"layers.{number}.weight" for number in range(5000)))

    with pytest.raises(LoaderFailed) as caught:
        observed(loader)
    assert caught.value.summary.startswith("ranks 0, 1 raised ValueError: missing keys: layers.0.weight")
    assert len(caught.value.summary) < 500
    assert len(str(caught.value)) < 30_000


def test_a_forked_child_of_a_loader_is_not_a_rank():
    def loader(fsdp):
        os.fork()
        return subject(fsdp, freeze=False)

    assert judged(loader)["no_meta_params"].status == "passed"


@pytest.mark.parametrize("value", ["", "abc", "0", "2,1"])
def test_invalid_thread_counts_in_the_environment(monkeypatch, value):
    monkeypatch.setenv("OMP_NUM_THREADS", value)
    with World(WorldSpec({"dp": 1})) as world:
        assert world.run(torch.get_num_threads) == [2 if value == "2,1" else 1]


def test_a_temporary_folder_with_a_long_name(monkeypatch, tmp_path: Path):
    long = tmp_path / ("x" * 120)
    long.mkdir()
    monkeypatch.setenv("TMPDIR", str(long))
    code = (
        "import warnings; warnings.simplefilter('error')\n"
        "from pytest_fsdp_meta.worlds import ForkServerEngine, World, WorldSpec\n"
        "if __name__ == '__main__':\n"
        "    engine = ForkServerEngine()\n"
        "    with World(WorldSpec({'dp': 1}), engine) as world:\n"
        "        print(world.run('os:getpid') != [], engine.method)\n"
    )
    script = tmp_path / "script.py"
    script.write_text(code)
    result = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False)
    assert (result.stdout, result.stderr) == ("True forkserver\n", "")
    assert [one.name for one in long.iterdir() if not one.name.startswith("torchinductor_")] == []
