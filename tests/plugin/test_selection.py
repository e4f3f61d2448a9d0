"""A check leaves a defect to another check only if that one is selected and fails the run."""

from __future__ import annotations

import re

import pytest

from tests.conftest import Project

HEAD = """
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from pytest_fsdp_meta import Subject, fsdp_conformance


def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))


def batch(step):
    generator = torch.Generator().manual_seed(step)
    return {"x": torch.randn(8, 8, generator=generator), "y": torch.randn(8, 8, generator=generator)}


def loss(model, batch):
    return nn.functional.mse_loss(model(batch["x"]), batch["y"])


def load(fsdp, weights=1.0, gradients=1.0, device="cpu"):
    with torch.device(device):
        model = build()
    with torch.no_grad():
        model[0].weight *= weights
    fully_shard(model, mesh=fsdp.mesh)
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: p.grad.mul_(gradients))
    return Subject(model, reference=build, batch=batch, loss=loss)


"""


def loader(name: str, arguments: str, defect: str) -> str:
    return f"""
@fsdp_conformance({arguments})
def test_{name}(fsdp):
    return load(fsdp, {defect})
"""


def messages(result: pytest.RunResult) -> dict[str, dict[str, str]]:
    """Return the messages of the checks that fail, by loader and check."""
    found: dict[str, dict[str, str]] = {}
    for line in result.outlines:
        if match := re.match(r"(?:FAILED|ERROR) test_it.py::test_(\w+)\[(\w+)\] - (.*)", line):
            found.setdefault(match[1], {})[match[2]] = match[3]
    return found


EXPECTED = 'xfail={"params_equal_reference": "known"}'
SELECTED = {
    "a wrong weight without the check of weights": (
        'only=["loss_parity", "no_meta_params"]',
        "weights=1.5",
        ["loss_parity"],
    ),
    "doubled gradients without the check of gradients": (
        'skip={"grad_parity": "slow"}',
        "gradients=2.0",
        ["grad_norm_parity", "update_parity"],
    ),
    "one cause is one finding with all checks": ("", "gradients=2.0", ["grad_parity"]),
    "a right loader": ('skip={"grad_parity": "slow", "params_equal_reference": "slow"}', "", []),
    "values that do not exist are not equal": (
        'only=["params_equal_reference"]',
        'device="meta"',
        ["params_equal_reference"],
    ),
    "training that did not run if no check says why": ('only=["loss_parity"]', 'device="meta"', ["loss_parity"]),
    "an expected difference is taken out of the training": (EXPECTED, "weights=1.5", []),
    "a second defect beside an expected one": (EXPECTED, "weights=1.5, gradients=2.0", ["grad_parity"]),
}


def test_what_is_found_depends_on_the_selected_checks(project: Project) -> None:
    cases = enumerate(SELECTED.values())  # a longer name leaves no room for a message in pytest's summary
    loaders = [loader(str(number), arguments, defect) for number, (arguments, defect, _) in cases]
    project.write("test_it.py", HEAD + "".join(loaders))
    by_number = messages(project.run())
    found = {name: by_number.get(str(number), {}) for number, name in enumerate(SELECTED)}
    assert {name: list(checks) for name, checks in found.items()} == {
        name: checks for name, (_, _, checks) in SELECTED.items()
    }
    unequal = found["values that do not exist are not equal"]["params_equal_reference"]
    assert unequal.startswith("all 4 parameters, ranks 0")
    untrained = found["training that did not run if no check says why"]["loss_parity"]
    assert untrained == "not trained: 0.weight is on meta"
    second = found["a second defect beside an expected one"]["grad_parity"]
    assert second.startswith("all 4 parameters, ranks 0, 1: gradie")


@pytest.mark.parametrize("option", ["-k=not grad_parity", "--deselect=test_it.py::test_it[grad_parity]"])
def test_doubled_gradients_are_found_by_a_part_of_the_items(project: Project, option: str) -> None:
    project.write("test_it.py", HEAD + loader("it", "", "gradients=2.0"))
    assert "update_parity" in messages(project.run(option))["it"]


@pytest.mark.parametrize(
    ("mark", "found"), [("skipif(True, reason='slow')", ["loss_parity"]), ("skipif(False, reason='slow')", [])]
)
def test_a_check_that_a_mark_skips_explains_nothing(project: Project, mark: str, found: list[str]) -> None:
    project.write(
        "conftest.py",
        f"""
        import pytest

        def pytest_collection_modifyitems(items):
            for item in items:
                if "params_equal_reference" in item.name:
                    item.add_marker(pytest.mark.{mark})
        """,
    )
    only = 'only=["loss_parity", "params_equal_reference"]'
    project.write("test_it.py", HEAD + loader("it", only, "weights=1.5"))
    assert [name for name in messages(project.run()).get("it", {}) if name == "loss_parity"] == found


def test_adopted_values_of_empty_and_uneven_shards(project: Project) -> None:
    project.write(
        "test_it.py",
        """
        import torch
        from torch import nn
        from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
        from pytest_fsdp_meta import Subject, fsdp_conformance

        def build():
            torch.manual_seed(0)
            return nn.Sequential(nn.Linear(4, 7), nn.Tanh(), nn.Linear(7, 3))

        def wrong():
            model = build()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter *= 1.5
            return model

        def batch(step):
            return {"x": torch.linspace(-1, 1, 32).view(8, 4) + step}

        def loss(model, batch):
            return model(batch["x"]).square().mean()

        ONLY = ["params_equal_reference", "loss_parity", "grad_parity", "update_parity"]

        @fsdp_conformance(world_size=4, only=ONLY)
        def test_fsdp2(fsdp):
            return Subject(fully_shard(wrong(), mesh=fsdp.mesh), reference=build, batch=batch, loss=loss)

        @fsdp_conformance(world_size=4, only=ONLY)
        def test_fsdp1(fsdp):
            model = FullyShardedDataParallel(wrong(), use_orig_params=True, device_id=torch.device("cpu"))
            return Subject(model, reference=build, batch=batch, loss=loss)
        """,
    )
    result = project.run("-W", "ignore")
    result.assert_outcomes(passed=6, failed=2)
    assert [line.split()[1] for line in result.outlines if line.startswith("FAILED")] == [
        "test_it.py::test_fsdp2[params_equal_reference]",
        "test_it.py::test_fsdp1[params_equal_reference]",
    ]
