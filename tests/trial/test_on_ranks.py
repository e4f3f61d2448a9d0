"""Errors say in plain words what the ranks were doing, so each observer that a trial calls has its words."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest_fsdp_meta.trial
from pytest_fsdp_meta.trial import on_ranks
from pytest_fsdp_meta.trial.on_ranks import DOING, doing_in

NOT_MODULES = {"DOING", "ON_RANKS", "doing_in", "run_on"}


def observers_of(file: Path) -> set[str]:
    """Return the functions of observer modules that a file names, as in ``on_ranks.values.observe_values``."""
    nodes = list(ast.walk(ast.parse(file.read_text())))
    imports = [node for node in nodes if isinstance(node, ast.ImportFrom) and node.module == on_ranks.__name__]
    modules = {name.name for node in imports for name in node.names} - NOT_MODULES
    modules |= {f"on_ranks.{name}" for name, own in vars(on_ranks).items() if isinstance(own, on_ranks.ObserverModule)}
    return {node.attr for node in nodes if isinstance(node, ast.Attribute) and ast.unparse(node.value) in modules}


def test_every_observer_has_words() -> None:
    [folder] = pytest_fsdp_meta.trial.__path__
    called = set().union(*map(observers_of, Path(folder).glob("*.py")))
    assert called == set(DOING)


def test_the_words_are_those_of_the_function() -> None:
    assert doing_in("pytest_fsdp_meta.checks.training.observe.reference_training:train_reference") == (
        "training the reference"
    )
    assert doing_in("module:other") == ""
