"""``--fsdp-loader``: run the checks on a loader without a test file, as if the loader's own file held a test of it.

Its items have node ids like those of any test, ``pkg/mod.py::load[no_meta_params]``, which work on the command line and
with -k, --lf and xdist.
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
from pytest_fsdp_meta.plugin.collection import require_plain_function
from pytest_fsdp_meta.plugin.markers import MARK
from pytest_fsdp_meta.plugin.named_loader import NamedLoader, Unfit, import_loader, model_type, modelling_modules
from pytest_fsdp_meta.plugin.settings import Settings, runs_nothing
from pytest_fsdp_meta.worlds import Engine


def plan(config: pytest.Config, settings: Settings, engine: Engine) -> None:
    """Make pytest collect the named loader: alone, or in addition to the paths on the command line.

    Raises UsageError with one line where the loader does not exist or cannot be called.
    """
    if not settings.loader:
        if settings.checkpoint:
            raise pytest.UsageError("--fsdp-checkpoint requires --fsdp-loader=MODULE:FUNCTION")
        return
    if not settings.checkpoint:
        raise pytest.UsageError("--fsdp-loader requires --fsdp-checkpoint=DIR, which the loader is called with")
    here = os.fspath(config.invocation_params.dir)
    if here not in sys.path and "" not in sys.path:
        sys.path.insert(0, here)
    collection = LoaderCollection(settings.loader, Path(here, settings.checkpoint))
    config.pluginmanager.register(collection, "fsdp_loader_option")
    if config.args_source is not pytest.Config.ArgsSource.ARGS:
        config.args = []
    _import_ahead(config, settings, engine, collection)
    try:
        collection.find()
    except ValueError as error:
        raise pytest.UsageError(f"--fsdp-loader={settings.loader}: {error}") from None
    if not any(collection.has(arg) for arg in config.args):
        config.args.append(os.fspath(collection.path))
    if model_type(collection.checkpoint) and importlib.util.find_spec("transformers") is None:
        message = (
            f"{collection.checkpoint} is a transformers checkpoint, but transformers is not installed, so only values "
            "are checked; install it with: pip install 'pytest-fsdp-meta[transformers]'"
        )
        config.issue_config_time_warning(pytest.PytestConfigWarning(message), stacklevel=2)


def _import_ahead(config: pytest.Config, settings: Settings, engine: Engine, collection: LoaderCollection) -> None:
    """Start the ranks' imports before this process imports the loader, if nothing else is collected; both take seconds.

    Not under xdist: its workers start the ranks, and pytest-cov starts in a worker later than this.
    """
    distributed = hasattr(config, "workerinput") or config.pluginmanager.hasplugin("dsession")
    if runs_nothing(config) or distributed or settings.engine != "local":
        return
    try:
        spec = importlib.util.find_spec(collection.module)
    except Exception:  # raised by a parent package; find() imports it again and reports the error
        return
    if spec is not None and spec.origin is not None and os.path.isfile(spec.origin):
        collection.path = Path(os.path.abspath(spec.origin))
        if all(collection.has(arg) for arg in config.args):
            engine.worlds = preloading.WORLDS_OF_A_LOADER
            preloading.begin(engine, {collection.module: os.fspath(collection.path)}, config, loaders=True)


class LoaderCollection:
    """A pytest plugin that collects the loader's file as a module with one test, the loader."""

    def __init__(self, name: str, checkpoint: Path) -> None:
        self.name = name
        self.module, _, self._attribute = name.partition(":")
        self.checkpoint = checkpoint
        self.path = Path()
        """The file of the loader's module, once it is found."""
        self._test_module = ModuleType(self.module)

    def find(self) -> None:
        """Import the loader. Raises ValueError where the name does not lead to one."""
        module, function = import_loader(self.name)
        require_plain_function(function, "a loader")
        file = getattr(module, "__file__", None)
        if file is None:
            raise Unfit(f"module {self.module!r} has no file, so its items could not have node ids")
        self.path = Path(os.path.abspath(file))
        setattr(self._test_module, self._attribute, _test(NamedLoader(self.name, self.checkpoint), function))

    def has(self, argument: str) -> bool:
        """Return whether this argument of pytest names the loader's file, or a node in it."""
        return self._is(Path(argument.partition("::")[0]).absolute())

    def _is(self, path: Path) -> bool:
        return path == self.path or (path.name == self.path.name and path.exists() and path.samefile(self.path))

    def pytest_fsdp_preload(self) -> list[str]:
        return modelling_modules(self.checkpoint)

    @pytest.hookimpl(wrapper=True)
    def pytest_collect_file(
        self, file_path: Path, parent: pytest.Collector
    ) -> Generator[None, list[pytest.Collector], list[pytest.Collector]]:
        """Add the loader, and keep pytest's own collector only for a file that ``python_files`` matches.

        pytest collects any file on the command line as a test module, which the loader's file need not be.
        """
        found = yield
        if not self._is(file_path):
            return found
        is_test_file = any(_matches(file_path, pattern) for pattern in parent.config.getini("python_files"))
        root = parent.config.rootpath
        # Relative to the root folder as pytest's, or the whole path of a file outside of it.
        nodeid = (file_path.relative_to(root) if file_path.is_relative_to(root) else file_path).as_posix()
        loader = LoaderFile.from_parent(parent, path=file_path, nodeid=nodeid)
        loader.obj = self._test_module
        return [loader, *(found if is_test_file else ())]


def _matches(path: Path, pattern: str) -> bool:
    """Match as pytest does: against the name, or against the end of the path if the pattern has a slash."""
    if "/" not in pattern:
        return fnmatch(path.name, pattern)
    return fnmatch(os.fspath(path), pattern if pattern.startswith("/") else f"*/{pattern}")


class LoaderFile(pytest.Module):
    """The file of a loader, which pytest does not import: its only test is the NamedLoader."""

    def istestfunction(self, obj: object, name: str) -> bool:
        return isinstance(obj, NamedLoader)


def _test(loader: NamedLoader, function: Any) -> Any:
    """Make the loader look like a test function: it requests ``fsdp``, and its source is the loader's."""
    plain = inspect.unwrap(getattr(function, "__func__", function))
    test: Any = loader
    test.pytestmark = [getattr(pytest.mark, MARK).mark]
    test.__signature__ = inspect.Signature([inspect.Parameter("fsdp", inspect.Parameter.POSITIONAL_OR_KEYWORD)])
    test.__wrapped__ = plain if inspect.isfunction(plain) else NamedLoader.__call__
    test.__name__ = loader.name.rpartition(".")[2].rpartition(":")[2]  # pytest 8.0 reads it
    test.__doc__ = plain.__doc__
    return test
