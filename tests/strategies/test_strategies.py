"""The strategies draw valid, plain and shrinkable plans, which can be built and used to judge loaders."""

from __future__ import annotations

import pickle
import re
import subprocess
import sys
from math import prod

import pytest
import torch
from hypothesis import find, given, settings
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM

from pytest_fsdp_meta.strategies import configs, layers, meshes, models, plans, wrappings
from pytest_fsdp_meta.strategies import plan as data_module
from pytest_fsdp_meta.strategies.build import batch, build, loss, save, scalars
from pytest_fsdp_meta.strategies.plan import Block, Layer, Model, Plan
from tests.conftest import Project
from tests.plugin.test_outcomes import outcomes, story

REPEATABLE = settings(max_examples=60, deadline=None, derandomize=True, database=None)
SMALLEST = Model(1, Block((Layer(),)))


@REPEATABLE
@given(size=st.integers(1, 12), data=st.data())
def test_the_dimensions_of_a_mesh_multiply_to_the_world_size(size, data):
    names, sizes = zip(*data.draw(meshes(size, ("dp_replicate", "dp_shard", "tp"))), strict=True)
    assert prod(sizes) == size
    assert list(names) == [name for name in ("dp_replicate", "dp_shard", "tp") if name in names]
    assert names[-1] == "tp"


def test_every_mesh_can_be_drawn():
    found = {find(meshes(4), lambda mesh, size=size: mesh[-1][1] == size, settings=REPEATABLE) for size in (4, 2, 1)}
    assert found == {
        (("dp_shard", 4),),
        (("dp_replicate", 2), ("dp_shard", 2)),
        (("dp_replicate", 4), ("dp_shard", 1)),
    }


@pytest.mark.parametrize(("size", "dims"), [(0, ("dp",)), (2, ()), (2, ("dp", "dp"))])
def test_an_impossible_mesh_is_an_error(size, dims):
    with pytest.raises(ValueError, match="a mesh needs ranks and distinct dimension names"):
        meshes(size, dims)


@REPEATABLE
@given(plan=plans(meshes(4)))
def test_a_plan_can_be_built(plan):
    model = build(plan.model)
    modules = dict(model.named_modules())
    assert 1 <= len(plan.model.layers) <= 4
    assert list(plan.model.layers) == [name for name, module in modules.items() if module in model.layers()]
    assert set(plan.wrapped) <= set(plan.model.modules) <= set(modules)
    for number, name in enumerate(plan.wrapped):
        assert not any(name.startswith(f"{outer}.") for outer in plan.wrapped[:number]), "inner modules come first"
    first_batch = batch(plan.model, 0)
    assert model(first_batch["x"]).shape == first_batch["y"].shape
    assert loss(model, first_batch).isfinite()
    assert (model.layers()[0].weight is model.layers()[-1].weight) == (plan.model.tied or len(plan.model.layers) == 1)
    assert len(scalars(model)) == sum(layer.scalar for layer in plan.model.layers.values())


@REPEATABLE
@given(plan=plans(meshes(2)))
def test_a_plan_pickles_and_its_repr_creates_it(plan):
    assert pickle.loads(pickle.dumps(plan)) == plan
    assert eval(repr(plan), vars(data_module)) == plan


@REPEATABLE
@given(model=models())
def test_a_model_has_the_same_values_each_time_and_none_on_meta(model):
    state = torch.get_rng_state()
    first, second = build(model).state_dict(), build(model).state_dict()
    assert torch.equal(torch.get_rng_state(), state), "building a model changes no random state"
    assert all(torch.equal(first[name], second[name]) for name in first)
    with torch.device("meta"):
        assert {tensor.device.type for tensor in build(model).state_dict().values()} == {"meta"}


def test_a_checkpoint_has_all_names(tmp_path):
    from safetensors import safe_open

    model = Model(2, Block((Layer(3), Block((Layer(2, bias=True, buffers=(("int", True), ("bool", False))),)))))
    with safe_open(save(model, tmp_path / "it.safetensors"), framework="pt") as file:
        assert sorted(file.keys()) == [
            "parts.0.weight",
            "parts.1.parts.0.bias",
            "parts.1.parts.0.int_0",
            "parts.1.parts.0.weight",
        ]


def test_tied_layers_must_have_the_same_shape_and_stay_in_one_group():
    fits = Model(3, Block((Layer(2), Block((Layer(3), Layer(2))))), tied=True)
    assert [name for name in fits.modules if fits.can_wrap(name)] == ["parts.1.parts.0"]
    for last in (Layer(4), Layer(2, frozen=True)):
        with pytest.raises(ValueError, match="does not fit"):
            Model(3, Block((Layer(2), Layer(3), last)), tied=True)
    with pytest.raises(ValueError, match="does not fit"):
        Model(3, Block((Layer(3),)), tied=True)


def test_failures_shrink_to_the_smallest_plan():
    thorough = settings(REPEATABLE, max_examples=2000)
    assert find(models(), lambda _: True, settings=thorough) == SMALLEST
    assert find(plans(meshes(4)), lambda _: True, settings=thorough) == Plan(SMALLEST, (), (("dp_shard", 4),))
    assert find(models(), lambda model: model.tied, settings=thorough) == Model(1, Block((Layer(), Layer())), tied=True)
    assert find(layers(), lambda layer: layer.width > 4, settings=thorough) == Layer(5)
    wrapped = find(models().flatmap(wrappings), bool, settings=thorough)
    assert wrapped == ("parts.0",)
    smallest = find(configs(), lambda config: config["tie_word_embeddings"], settings=thorough)
    assert (smallest["model_type"], smallest["num_hidden_layers"], smallest["hidden_size"]) == ("llama", 1, 4)


@settings(REPEATABLE, max_examples=15)
@given(config=configs())
def test_a_drawn_configuration_gives_a_model_that_runs(config):
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    assert len(model.model.layers) == config["num_hidden_layers"]
    tokens = torch.arange(4).reshape(1, 4) % config["vocab_size"]
    assert model(input_ids=tokens, labels=tokens).loss.isfinite()
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == config["tie_word_embeddings"]


def test_planned_can_be_imported_from_the_package():
    from pytest_fsdp_meta import planned

    assert planned.build is build
    with pytest.raises(ImportError, match="cannot import name 'plannned'"):
        from pytest_fsdp_meta import plannned  # noqa: F401


def test_importing_strategies_imports_no_torch():
    code = "import sys, pytest_fsdp_meta.strategies; raise SystemExit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


LOADER = """
import torch
from hypothesis import given, settings
from torch.distributed.tensor import DTensor

from pytest_fsdp_meta import Subject, fsdp_conformance, planned
from pytest_fsdp_meta.strategies import meshes, models, plans

def load(plan, fsdp, forgets=()):
    with torch.device("meta"):
        model = planned.build(plan.model)
    planned.shard(model, plan, planned.make_mesh(plan, fsdp.device))
    model.to_empty(device=fsdp.device)
    model.tie()
    reference = planned.build(plan.model)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if name.rpartition(".")[2] not in forgets:
                is_parameter = isinstance(tensor, torch.nn.Parameter)
                whole = reference.get_parameter(name) if is_parameter else reference.get_buffer(name)
                if isinstance(tensor, DTensor):
                    whole = torch.distributed.tensor.distribute_tensor(whole, tensor.device_mesh, tensor.placements)
                tensor.copy_(whole)
    return Subject(
        model,
        reference=lambda: planned.build(plan.model),
        batch=lambda step: planned.batch(plan.model, step),
        loss=planned.loss,
        unsharded=["*.scalar"] if any(layer.scalar for layer in plan.model.layers.values()) else (),
    )

@fsdp_conformance(world_size=2, only=["params_equal_reference", "buffers_equal_reference", "grad_parity"])
@given(plan=plans(meshes(2)))
@settings(max_examples=5, database=None, derandomize=True)
def test_good(fsdp, plan):
    return load(plan, fsdp)

@fsdp_conformance(world_size=2, only=["no_uninitialized_memory"])
@given(plan=plans(meshes(2), models(max_layers=1, max_width=2)))
@settings(max_examples=30, database=None, derandomize=True)
def test_bad(fsdp, plan):
    return load(plan, fsdp, forgets=["float_0"])
"""


def normalise(text: str) -> str:
    """Remove line breaks and what depends on them, and the comments that Hypothesis adds."""
    return re.sub(r"#[^\n]*|\s+|,\s*(?=\))", "", text)


@pytest.mark.nightly
def test_a_loader_is_judged_on_drawn_plans(project: Project) -> None:
    project.write("test_it.py", LOADER)
    result = project.run("-v")
    found = outcomes(result)
    assert {found[name] for name in found if name.startswith("test_good")} == {"passed"}
    assert found["test_bad[no_uninitialized_memory]"] == "failed"
    lines = story(result, "test_bad[no_uninitialized_memory]")
    smallest = Plan(Model(1, Block((Layer(buffers=(("float", False),)),))))
    assert normalise(repr(smallest)) in normalise("\n".join(lines))
    assert not any("pytest_fsdp_meta" in line for line in lines), "tracebacks leave out the frames of this package"
