"""The module where a difference starts, as a user sees it: in the message and in the report."""

from __future__ import annotations

import json

from tests.conftest import Project

LOADERS = """
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from pytest_fsdp_meta import Subject, fsdp_conformance


def build(act=nn.SiLU):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), act(), nn.Linear(8, 4))


def subject(fsdp, act):
    model = build(act)
    fully_shard(model, mesh=fsdp.mesh)
    batch = lambda step: {"x": torch.randn(4, 4)}
    return Subject(model, reference=build, batch=batch, loss=lambda model, batch: model(batch["x"]).square().mean())


@fsdp_conformance(only=["loss_parity", "grad_parity"])
def test_wrong(fsdp):
    return subject(fsdp, nn.GELU)


@fsdp_conformance(only=["loss_parity", "grad_parity"])
def test_right(fsdp):
    return subject(fsdp, nn.SiLU)
"""


def test_the_module_is_named_in_the_message_and_in_the_report(project: Project) -> None:
    project.write("test_it.py", LOADERS)
    result = project.run("--fsdp-report=report")
    said = " ".join(line.strip() for line in result.outlines)
    assert "where it starts: 1 (GELU, torch/nn/modules/activation.py:" in said
    assert ", SiLU in the reference), forward, ranks 0, 1: the inputs agree, the output is off by" in said
    wrong, right = json.loads((project.path / "report" / "report.json").read_text())["loaders"]
    [origin] = {finding["origin"] for check in wrong["checks"] for finding in check["findings"]}
    assert origin.startswith("1 (GELU, torch/nn/modules/activation.py:")
    assert wrong["seconds"]["localising"] > 0
    assert "where it starts:" in (project.path / "report" / "index.html").read_text()
    passed = [check["check"] for check in right["checks"] if check["status"] == "passed"]
    assert sorted(passed) == ["grad_parity", "loss_parity"]
    assert "localising" not in right["seconds"], "a right loader is not traced"
