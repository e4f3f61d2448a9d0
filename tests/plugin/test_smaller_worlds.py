"""A loader that fails is judged once more in a world of one rank, and along each dimension of its mesh."""

from __future__ import annotations

import json

from tests.conftest import Project

LOADERS = """
CHECKS = ["params_equal_reference", "loss_parity"]


def subject(model, fsdp):
    fully_shard(model, mesh=fsdp.mesh["dp_shard"])
    print("a rank of", fsdp.world_size)
    return Subject(model, reference=build)


@fsdp_conformance(only=CHECKS, world_size=2)
def test_transposed(fsdp):
    model = build()
    model.weight.data = model.weight.data.flip(0)
    return subject(model, fsdp)


@fsdp_conformance(only=CHECKS, world_size=2)
def test_of_two(fsdp):
    if fsdp.world_size != 2:
        raise ValueError("made for two ranks")
    model = build()
    model.weight.data = model.weight.data.flip(0)
    return subject(model, fsdp)


@fsdp_conformance(only=CHECKS, world_size=2, xfail={"params_equal_reference": "known"})
def test_expected(fsdp):
    model = build()
    model.weight.data = model.weight.data.flip(0)
    return subject(model, fsdp)


@fsdp_conformance(only=CHECKS, world_size=2)
def test_right(fsdp):
    return subject(build(), fsdp)
"""


def test_a_finding_says_whether_fewer_ranks_are_enough_for_it(project: Project) -> None:
    project.loaders(LOADERS)
    result = project.run("--fsdp-report=report", "-rA")
    loaders = json.loads((project.path / "report" / "report.json").read_text())["loaders"]
    found = {loader["loader"].split("::")[1]: loader for loader in loaders}
    starts = {
        name: {finding["origin"] for check in loader["checks"] for finding in check["findings"]}
        for name, loader in found.items()
    }
    as_well = "a world of one rank fails as well, so not in the sharding: compare the code that builds the model and "
    assert starts == {
        "test_transposed": {f"{as_well}loads its weights"},
        "test_of_two": {"not known: in a world of 1 (dp_shard=1), rank 0 raised ValueError: made for two ranks"},
        "test_expected": {""},
        "test_right": set(),
    }
    tried = {name: "smaller worlds" in loader["seconds"] for name, loader in found.items()}
    assert [name for name, once_more in tried.items() if not once_more] == ["test_expected", "test_right"]
    assert "a rank of 1" not in result.stdout.str(), "what it writes in a smaller world would be taken for a rank's"
