"""``--fsdp-loader``: a loader is judged without a test file, as if its own file held a test of its name.

So its items have node ids like those of any test, ``pkg/mod.py::load[no_meta_params]``: they can be typed again, and
mean the same to -k, --lf and xdist.
"""

from __future__ import annotations

import importlib.util
import inspect
import os
import sys
from collections.abc import Generator
from fnmatch import fnmatch
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from pytest_fsdp_meta.plugin import preloading
from pytest_fsdp_meta.plugin.collection import require_plain_function, runs_nothing
from pytest_fsdp_meta.plugin.markers import MARK
from pytest_fsdp_meta.plugin.named_loader import NamedLoader, Unfit, find, model_type, modelling
from pytest_fsdp_meta.plugin.settings import Settings
from pytest_fsdp_meta.worlds import Engine


def plan(config: pytest.Config, settings: Settings, engine: Engine) -> None:
    """Lets pytest collect the loader that is named: alone, or beside the paths that were given to pytest.

    Raises UsageError, in one line, for one that is not there or cannot be called.
    """
    if not settings.loader:
        if settings.checkpoint:
            raise pytest.UsageError(
                "--fsdp-checkpoint is what a named loader is called with, but there is none; name it with "
                "--fsdp-loader=MODULE:FUNCTION"
            )
        return
    if not settings.checkpoint:
        raise pytest.UsageError("--fsdp-loader needs --fsdp-checkpoint=DIR, what it is called with and judged by")
    here = os.fspath(config.invocation_params.dir)
    if here not in sys.path and "" not in sys.path:
        sys.path.insert(0, here)
    collection = LoaderCollection(settings.loader, Path(here, settings.checkpoint))
    config.pluginmanager.register(collection, "fsdp_zero_code")
    if config.args_source is not pytest.Config.ArgsSource.ARGS:
        config.args = []
    _import_ahead(config, settings, engine, collection)
    try:
        collection.find()
    except ValueError as error:
        raise pytest.UsageError(f"--fsdp-loader={settings.loader}: {error}") from None
    if not any(collection.has(arg) for arg in config.args):
        config.args.append(os.fspath(collection.path))
    _warn_of_values_only(config, collection.checkpoint)


def _import_ahead(config: pytest.Config, settings: Settings, engine: Engine, collection: LoaderCollection) -> None:
    """Ranks' imports begin before the loader is imported here, where it is all that there is: both take seconds.

    Under xdist the workers have their own ranks, and coverage of these begins later than this.
    """
    distributed = hasattr(config, "workerinput") or config.pluginmanager.hasplugin("dsession")
    if runs_nothing(config) or distributed or settings.engine != "local":
        return
    try:
        spec = importlib.util.find_spec(collection.module)
    except Exception:  # of the package that it is in; find() meets it again, and tells
        return
    if spec is not None and spec.origin is not None and os.path.isfile(spec.origin):
        collection.path = Path(os.path.abspath(spec.origin))
        if all(collection.has(arg) for arg in config.args):
            preloading.begin(engine, {collection.module: os.fspath(collection.path)}, config, loaders=True)


def _warn_of_values_only(config: pytest.Config, checkpoint: Path) -> None:
    if model_type(checkpoint) and importlib.util.find_spec("transformers") is None:
        told = (
            f"{checkpoint} is a checkpoint of transformers, which is not installed, so its values are all that is "
            "judged; install it with: pip install 'pytest-fsdp-meta[transformers]'"
        )
        config.issue_config_time_warning(pytest.PytestConfigWarning(told), stacklevel=2)


class LoaderCollection:
    """A plugin of the session: gives the file of the loader an item for each check."""

    def __init__(self, name: str, checkpoint: Path) -> None:
        self.name = name
        self.module, _, self._attribute = name.partition(":")
        self.checkpoint = checkpoint
        self.path = Path()
        """Once it is found, that of its module."""
        self._made_up = ModuleType(self.module)

    def find(self) -> None:
        """Raises ValueError where the name stands for no loader."""
        module, function = find(self.name)
        require_plain_function(function, "a loader")
        file = getattr(module, "__file__", None)
        if file is None:
            raise Unfit(f"module {self.module!r} has no file, under which its items could be told")
        self.path = Path(os.path.abspath(file))
        setattr(self._made_up, self._attribute, _test(NamedLoader(self.name, self.checkpoint), function))

    def has(self, argument: str) -> bool:
        """Whether this is the file that the argument of pytest names, or a node in it."""
        return self._is(Path(argument.partition("::")[0]).absolute())

    def _is(self, path: Path) -> bool:
        return path == self.path or (path.name == self.path.name and path.exists() and path.samefile(self.path))

    def pytest_fsdp_preload(self) -> list[str]:
        return modelling(self.checkpoint)

    @pytest.hookimpl(wrapper=True)
    def pytest_collect_file(
        self, file_path: Path, parent: pytest.Collector
    ) -> Generator[None, list[pytest.Collector], list[pytest.Collector]]:
        """The loader, and what is a file of tests anyway; pytest takes every file that it is given for one."""
        found = yield
        if not self._is(file_path):
            return found
        tests = any(_matches(file_path, one) for one in parent.config.getini("python_files"))
        loader = LoaderFile.from_parent(parent, path=file_path, nodeid=_nodeid(file_path, parent.config.rootpath))
        loader.obj = self._made_up
        return [loader, *(found if tests else ())]


def _matches(path: Path, pattern: str) -> bool:
    """As pytest has it: by the name, or where the pattern has a slash by the end of the path."""
    if "/" not in pattern:
        return fnmatch(path.name, pattern)
    return fnmatch(os.fspath(path), pattern if pattern.startswith("/") else f"*/{pattern}")


class LoaderFile(pytest.Module):
    """The file of a loader, of which pytest imports nothing: the one test in it is ours."""

    def istestfunction(self, obj: object, name: str) -> bool:
        return isinstance(obj, NamedLoader)


def _nodeid(path: Path, root: Path) -> str:
    """As pytest would have it; where it has nothing to say, the whole path, which can be typed again."""
    return path.relative_to(root).as_posix() if path.is_relative_to(root) else path.as_posix()


def _test(loader: NamedLoader, function: Any) -> Any:
    """What pytest takes for the function of a test: it asks for the rank, and stands where the loader is written."""
    plain = inspect.unwrap(getattr(function, "__func__", function))
    test: Any = loader
    test.pytestmark = [getattr(pytest.mark, MARK).mark]
    test.__signature__ = inspect.Signature([inspect.Parameter("fsdp", inspect.Parameter.POSITIONAL_OR_KEYWORD)])
    test.__wrapped__ = plain if inspect.isfunction(plain) else NamedLoader.__call__
    test.__name__ = loader.name.rpartition(".")[2].rpartition(":")[2]  # pytest 8.0 asks for it
    test.__doc__ = plain.__doc__
    return test
