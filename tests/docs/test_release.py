"""All files that name the version name the same one."""

from __future__ import annotations

import re

import pytest_fsdp_meta
from tests.world_help import ROOT

VERSION = pytest_fsdp_meta.__version__


def read(path: str) -> str:
    return (ROOT / path).read_text("utf-8")


def test_the_version_is_the_same_everywhere():
    assert f'version = "{VERSION}"' in read("pyproject.toml")
    newest, *older = re.findall(r"^## \[(\S+)\]", read("CHANGELOG.md"), re.MULTILINE)
    assert newest == VERSION
    assert older == sorted(older, reverse=True)


def test_the_downstream_repository_uses_this_version():
    minor = VERSION.rpartition(".")[0]
    assert f"pytest-fsdp-meta[transformers]>={minor}" in read("examples/downstream/pyproject.toml")
    assert f"nightly.yml@v{VERSION}" in read("examples/downstream/.github/workflows/nightly.yml")


def test_the_guide_to_a_new_check_has_ten_steps_and_names_existing_folders_and_targets():
    guide = read("CONTRIBUTING.md").partition("## A new check in ten lines")[2].partition("\n## ")[0]
    assert [int(number) for number in re.findall(r"^(\d+)\. ", guide, re.MULTILINE)] == list(range(1, 11))
    for path in re.findall(r"`([a-z_]+(?:/[a-z_]+)*/)`", read("CONTRIBUTING.md")):
        assert (ROOT / path).is_dir() or (ROOT / "pytest_fsdp_meta" / path).is_dir(), path
    targets = re.findall(r"^(\w+):", read("Makefile"), re.MULTILINE)
    assert set(re.findall(r"make (\w+)", read("CONTRIBUTING.md"))) <= set(targets)
