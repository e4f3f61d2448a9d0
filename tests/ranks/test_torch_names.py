"""Private names of torch: all exist here, those that are used are declared, and without one the rest is judged."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import pytest
import torch
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

from pytest_fsdp_meta.catalogue import built_in
from pytest_fsdp_meta.checks.simulation.facts import NO_VALUES
from pytest_fsdp_meta.ranks import torch_names, torch_private
from pytest_fsdp_meta.ranks.torch_names import USES, exists

assert torch_private  # it declares the names
NAMES = sorted({name for use in USES for name in use.names})
PACKAGE = Path(torch_names.__file__).parents[1]
OBSERVERS = [file for file in PACKAGE.rglob("*.py") if {"ranks", "observe", "observe.py"} & {*file.parts}]
HIDING = Path(__file__).with_name("hidden_names")
LOADERS = """
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

from pytest_fsdp_meta import Subject, fsdp_conformance


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.last = nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 4)
        self.register_buffer("scale", torch.ones(8), persistent=False)

    def forward(self, x):
        return self.last(nn.functional.dropout(self.norm(self.first(x)) * self.scale, 0.1, self.training))


def batch(step):
    return {"x": torch.randn(8, 6, generator=torch.Generator().manual_seed(step))}


def subject(model):
    def build(parameters):
        return torch.optim.AdamW(parameters, lr=0.01)

    return Subject(
        model, reference=Net, batch=batch, loss=lambda model, batch: model(batch["x"]).square().mean(), optimizer=build
    )


@fsdp_conformance(world_size=2)
def test_fsdp2(fsdp):
    model = Net().to(fsdp.device)
    for module in (model.first, model):
        fully_shard(module, mesh=fsdp.mesh)
    return subject(model)


@fsdp_conformance(world_size=2)
def test_fsdp1(fsdp):
    return subject(FullyShardedDataParallel(Net(), use_orig_params=True, device_id=fsdp.device))


@fsdp_conformance(simulate=4)
def test_simulated(fsdp):
    with torch.device("meta"):
        model = Net()
    for module in (model.first, model):
        fully_shard(module, mesh=fsdp.mesh)
    return subject(model)
"""


@pytest.mark.parametrize("name", NAMES)
def test_torch_has_the_name(name):
    assert exists(name)


def test_what_does_not_exist():
    assert not exists("torch:Tensor._no_such_name")
    assert not exists("torch.no_such_module:anything")
    assert not exists("torch.distributed.fsdp._fully_shard._fsdp_param:FSDPParam._no_such_name")
    assert exists("torch:Tensor._no_such_name|_base")


class ReadOnly:
    """As FSDPParam of torch 2.15, where what was an attribute has become a property."""

    def __init__(self) -> None:
        self.own = 1

    @property
    def computed(self) -> int:
        return self.own


def test_what_is_written_is_no_property():
    assert exists(f"{__name__}:ReadOnly.own=")
    assert exists(f"{__name__}:ReadOnly.computed")
    assert not exists(f"{__name__}:ReadOnly.computed=")


def test_observers_use_no_other_private_name():
    declared = {part for name in NAMES for part in re.split("[.:|=]", name)}
    found = {}
    assert len(OBSERVERS) > 50
    for file in OBSERVERS:
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            names = [node.attr] if isinstance(node, ast.Attribute) else []
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
                names = [*node.module.split("."), *(alias.name for alias in node.names)]
            for name in names:
                if name.startswith("_") and not name.endswith("__"):
                    found.setdefault(name, set()).add(file.name)
    own = {node for file in OBSERVERS for node in _defined(file)}
    assert {name: files for name, files in found.items() if name not in own | declared | KNOWN} == {}


KNOWN = {
    "_replace_param_with_distributed_if_needed",  # of megatron-fsdp, whose adapter asks whether it is there
    "_getframe",  # of sys
}


def _defined(file: Path) -> set[str]:
    """Return the private names that the module gives to what it defines, and to attributes of ``self``."""
    names = set()
    for node in ast.walk(ast.parse(file.read_text("utf-8"))):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.add(node.target.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and isinstance(node.value, ast.Name):
            names |= {node.attr} & {node.attr if node.value.id == "self" else ""}
    return names


WRAPPED = {"test_fsdp1": FullyShardedDataParallel, "test_fsdp2": FSDPModule, "test_simulated": FSDPModule}
SKIPPED = ("partly checked", "not applicable")


@pytest.fixture(scope="module")
def usual(tmp_path_factory):
    """The outcomes without a hidden name, by loader and check."""
    return {}


def outcomes(project) -> dict[str, dict[str, tuple[str, str]]]:
    """Run the loaders; return (kind, reason) by loader and check."""
    project.write("test_it.py", LOADERS)
    project.run_cold("--fsdp-report=report", "-q")
    report = json.loads((project.path / "report/report.json").read_text("utf-8"))
    return {
        loader["loader"].rpartition("::")[2]: {
            check["check"]: (check["skip"] or check["status"], check["reason"]) for check in loader["checks"]
        }
        for loader in report["loaders"]
    }


@pytest.mark.nightly
@pytest.mark.parametrize("name", NAMES)
def test_the_rest_is_judged_without_the_name(name, project, monkeypatch, usual):
    if not usual:
        usual |= outcomes(project)
    monkeypatch.setenv("HIDE", name)
    monkeypatch.setenv("PYTHONPATH", str(HIDING))
    found = outcomes(project)
    shown = name.partition(":")[2].rstrip("=").replace("|", " or ")
    reason = f"torch {torch.__version__.partition('+')[0]} has no {shown}; please report it"
    catalogue, uses = built_in(), [use for use in USES if name in use.names]
    for loader, checks in found.items():
        spoilt = {spoilt for use in uses for spoilt in use.spoils if not use.of or WRAPPED[loader] in use.of}
        if "simulation" in spoilt and loader == "test_simulated":
            assert all(f"worlds cannot be simulated: {reason}" in why for _, why in checks.values())
            continue
        for id, outcome in checks.items():
            kind, why = outcome
            if spoilt & {id, "inventory", *catalogue[id].needs} and usual[loader][id][1] != NO_VALUES:
                assert (kind, why.startswith(f"not judged: {reason}")) == ("not supported", True), (loader, id, outcome)
            elif spoilt & {*catalogue[id].uses} and outcome != usual[loader][id]:
                assert kind in SKIPPED, (loader, id, outcome)
                assert reason in why, (loader, id)
            else:
                assert outcome == usual[loader][id], (loader, id)
