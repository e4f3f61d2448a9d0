"""A check leaves a defect to another check only if that one is selected and fails the run."""

from __future__ import annotations

import pytest

LOADERS = """
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from pytest_fsdp_meta import Subject, fsdp_conformance


def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))


def batch(step):
    generator = torch.Generator().manual_seed(step)
    return {{"x": torch.randn(8, 8, generator=generator), "y": torch.randn(8, 8, generator=generator)}}


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


@fsdp_conformance({arguments})
def test_it(fsdp):
    return load(fsdp, {defect})
"""


@pytest.fixture
def failed(project):
    """Return a function that runs a loader with a defect and returns the messages of the checks that fail, by id."""

    def run(arguments: str, defect: str, *options: str) -> dict[str, str]:
        project.write("test_it.py", LOADERS.format(arguments=arguments, defect=defect))
        result = project.run(*options)
        lines = [line for line in result.outlines if line.startswith(("FAILED", "ERROR"))]
        return {line.partition("[")[2].partition("]")[0]: line.partition(" - ")[2] for line in lines}

    return run


def test_a_wrong_weight_is_found_without_the_check_of_weights(failed):
    found = failed('only=["loss_parity", "no_meta_params"]', "weights=1.5")
    assert list(found) == ["loss_parity"]


def test_doubled_gradients_are_found_without_the_check_of_gradients(failed):
    found = failed('skip={"grad_parity": "slow"}', "gradients=2.0")
    assert list(found) == ["grad_norm_parity", "update_parity"]


@pytest.mark.parametrize("option", ["-k=not grad_parity", "--deselect=test_it.py::test_it[grad_parity]"])
def test_doubled_gradients_are_found_by_a_part_of_the_items(failed, option):
    assert "update_parity" in failed("", "gradients=2.0", option)


def test_with_all_checks_one_cause_is_one_finding(failed):
    assert list(failed("", "gradients=2.0")) == ["grad_parity"]


def test_a_right_loader_passes_any_selection(failed):
    assert failed('skip={"grad_parity": "slow", "params_equal_reference": "slow"}', "") == {}


def test_values_that_do_not_exist_are_not_equal(failed):
    found = failed('only=["params_equal_reference"]', 'device="meta"')
    assert found["params_equal_reference"].startswith("0.weight, ranks 0, 1: no")


def test_training_that_did_not_run_is_an_error_if_no_check_says_why(failed):
    assert failed('only=["loss_parity"]', 'device="meta"') == {"loss_parity": "not trained: 0.weight is on meta"}


EXPECTED = 'xfail={"params_equal_reference": "known"}'


def test_an_expected_difference_of_values_is_taken_out_of_the_training(failed):
    assert failed(EXPECTED, "weights=1.5") == {}


def test_a_second_defect_is_found_beside_an_expected_one(failed):
    found = failed(EXPECTED, "weights=1.5, gradients=2.0")
    assert list(found) == ["grad_parity"]
    # The backward reaches the last bias first.
    assert found["grad_parity"].startswith("2.bias, ranks 0, 1: gradient")


@pytest.mark.parametrize(
    ("mark", "found"), [("skipif(True, reason='slow')", ["loss_parity"]), ("skipif(False, reason='slow')", [])]
)
def test_a_check_that_a_mark_skips_explains_nothing(failed, project, mark, found):
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
    names = failed('only=["loss_parity", "params_equal_reference"]', "weights=1.5")
    assert [name for name in names if name == "loss_parity"] == found


def test_adopted_values_of_empty_and_uneven_shards(project):
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
