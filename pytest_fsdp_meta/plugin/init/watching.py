"""Watch a loader that is called: which files of the checkpoint it asks for, what it builds, and what it starts.

Files of the checkpoint are written when the loader opens them, with zeros for the weights of the model that is built.
"""

from __future__ import annotations

import importlib
import inspect
import json
import os
import shutil
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from pytest_fsdp_meta.plugin.init.recording import Attempt, Part, Recorder, part_of, signature_of

LIBRARIES = {".safetensors": "safetensors", **dict.fromkeys((".pt", ".pth", ".bin", ".ckpt"), "torch")}
"""The library that reads a file of weights, by the ending of its name."""
INDEX = ".safetensors.index.json"
SHARDS = tuple(f"model-0000{number}-of-00002.safetensors" for number in (1, 2))
MAX_PARAMETERS = 8_000_000
"""Of a model that a test builds, and of the files that the loader finds."""
MAX_BUILT = 4 * MAX_PARAMETERS
"""Of all modules in one call, which a loader may replace while it builds."""


class Retry(Exception):
    """A use was seen that needs another call of the loader."""


class Refused(BaseException):
    """The loader asks for what a test does not have: a large model, or a checkpoint of an unknown type.

    Not an Exception, which the loader might handle.
    """

    def __init__(self, model_type: str = "") -> None:
        super().__init__(model_type)
        self.model_type = model_type


class OwnGroup(Exception):
    """The loader makes the process group itself."""


@dataclass
class Built:
    """A module that the loader has built."""

    module: nn.Module
    kind: type[nn.Module]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def size(self) -> int:
        return sum(parameter.numel() for parameter in self.module.parameters())


@dataclass
class Watch:
    """What was seen in the calls of the loader so far; ``built`` is of the running call."""

    folder: Path
    attempt: Attempt
    built: list[Built] = field(default_factory=list)
    files: dict[str, str] = field(default_factory=dict)
    """The names of files of weights that were opened, and the libraries that read them."""
    opened_folder: str = ""
    """The library that opened the folder itself: the argument is a file."""
    group: tuple[str, str] = ("", "")
    """Where the loader calls ``init_process_group``, and with which backend."""
    is_pretrained: bool = False
    """Whether transformers reads a checkpoint."""
    is_serving: bool = False
    elements: int = 0
    """Elements of parameters that were made in memory in the running call."""
    sees_transformers: bool = False

    @property
    def root(self) -> Built | None:
        """The largest module that was built; of equal ones the first, which has the others in it."""
        with suppress(Exception):  # a module whose __init__ did not run
            return max(self.built, key=lambda built: built.size, default=None)
        return None

    def start(self) -> None:
        """Replace what all loaders call, before the loader is imported."""
        import torch.distributed as dist

        sys.addaudithook(self._audit)
        self._replace(os, "stat", self._stat)
        with suppress(ImportError):
            for name in ("safetensors", "safetensors.torch"):
                self._replace(importlib.import_module(name), "safe_open", self._safe_open)
        for module in (dist, dist.distributed_c10d):
            self._replace(module, "init_process_group", self._init_group)
        self._replace(nn.Module, "register_parameter", self._register)
        self._replace(nn.Module, "_apply", self._apply)
        nn.Module.__new__ = self._build

    def start_transformers(self) -> bool:
        """Watch transformers' configs, once the loader has imported transformers; return whether that is new."""
        if self.sees_transformers or "transformers" not in sys.modules:
            return False
        from transformers import PretrainedConfig

        PretrainedConfig.__new__ = self._configure
        read = PretrainedConfig.get_config_dict.__func__

        def get_config_dict(cls: Any, name: Any, *args: Any, **kwargs: Any) -> Any:
            self._write_pretrained(cls, name)
            return read(cls, name, *args, **kwargs)

        PretrainedConfig.get_config_dict = classmethod(get_config_dict)
        self.sees_transformers = True
        return True

    def begin(self, names: dict[str, Any]) -> None:
        """Forget the last call, and empty the folder."""
        self.attempt, self.built, self.files = Attempt(names), [], {}
        self.opened_folder, self.is_pretrained, self.elements = "", False, 0
        self.is_serving = True
        shutil.rmtree(self.folder)
        self.folder.mkdir()
        self.is_serving = False

    def _replace(self, module: Any, name: str, instead: Callable[..., Any]) -> None:
        real = getattr(module, name)

        def replaced(*args: Any, **kwargs: Any) -> Any:
            return instead(real, *args, **kwargs)

        setattr(module, name, replaced)

    def _name_of(self, path: Any) -> str | None:
        """Return the name of a file in the checkpoint; "." for the folder itself, None for other paths."""
        if not isinstance(path, (str, os.PathLike)) or isinstance(path, Recorder):
            return None
        with suppress(ValueError, TypeError):
            return Path(os.path.abspath(path)).relative_to(self.folder).as_posix()
        return None

    def _audit(self, event: str, args: tuple[Any, ...]) -> None:
        if self.is_serving or event not in ("open", "os.listdir", "os.scandir"):
            return
        name = self._name_of(args[0])
        if name is not None and event == "open":
            self._open(name)
        elif name == ".":
            self._open("model.safetensors")

    def _stat(self, real: Any, path: Any, *args: Any, **kwargs: Any) -> Any:
        name = None if self.is_serving else self._name_of(path)
        if name and not name.endswith(".json"):  # whoever asks for an index first can do without it
            self._open(name)
        return real(path, *args, **kwargs)

    def _safe_open(self, real: Any, path: Any, *args: Any, **kwargs: Any) -> Any:
        if (name := self._name_of(path)) == ".":
            self.opened_folder = "safetensors"
            raise Retry
        if name:
            self._open(name)
        return real(path, *args, **kwargs)

    def _open(self, name: str) -> None:
        """Write the file if it can be written by now."""
        if name == ".":
            self.opened_folder = "" if self.is_pretrained else "torch"
            return
        self.is_serving = True
        try:
            path, library = self.folder / name, LIBRARIES.get(Path(name).suffix, "")
            if library and not self.is_pretrained:
                self.files[name] = library
            if name.endswith(INDEX):
                self.files[name] = "safetensors"
            if self.built and (library or name.endswith(INDEX)) and not path.exists():
                path.parent.mkdir(parents=True, exist_ok=True)
                self._write_weights(path, library)
        finally:
            self.is_serving = False

    def _write_weights(self, path: Path, library: str) -> None:
        root = self.root
        if root is None:
            return
        if root.size > MAX_PARAMETERS:
            raise Refused
        state = {name: value for name, value in root.module.state_dict().items() if isinstance(value, torch.Tensor)}
        if not library:
            names = {name: SHARDS[number % 2] for number, name in enumerate(state)}
            path.write_text(json.dumps({"metadata": {}, "weight_map": names}))
            return
        if path.name in SHARDS:
            state = {
                name: value for number, (name, value) in enumerate(state.items()) if SHARDS[number % 2] == path.name
            }
        zeros = {name: torch.zeros(value.shape, dtype=value.dtype, device="cpu") for name, value in state.items()}
        if library == "torch":
            torch.save(zeros, path)
        else:
            from safetensors.torch import save_file

            save_file(zeros, path)

    def _init_group(self, real: Any, *args: Any, **kwargs: Any) -> Any:
        frame = inspect.stack()[2]
        if not self.group[0] and torch.distributed.is_initialized():
            backend = args[0] if args else kwargs.get("backend", "")
            self.group = f"{Path(frame.filename).name}:{frame.lineno}", str(backend or "")
            raise OwnGroup
        return real(*args, **kwargs)

    def _build(self, kind: Any, *args: Any, **kwargs: Any) -> Any:
        self._unpack(kind, args, kwargs)
        module = object.__new__(kind)
        self.built.append(Built(module, kind, args, kwargs))
        return module

    def _register(self, real: Any, module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            self.elements += parameter.numel()
            if self.elements > MAX_BUILT:
                raise Refused
        real(module, name, parameter)

    def _apply(self, real: Any, module: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        """Refuse to give memory to a large model: ``to``, ``to_empty`` and others come here."""
        if sum(parameter.numel() for parameter in module.parameters()) > MAX_PARAMETERS:
            raise Refused
        moved: nn.Module = real(module, *args, **kwargs)
        return moved

    def _unpack(self, kind: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Add what a class requires, and its sizes, where it gets all parts of a config as ``**``."""
        whole = self.attempt.unpacked
        if whole is None or args or not kwargs.keys() >= {name for name, one in whole.parts.items() if not one.is_kept}:
            return
        self.attempt.unpacked = None
        taken = {
            name: one
            for name, one in signature_of(kind).items()
            if type(one.default) is int or one.default is one.empty
        }
        if new := taken.keys() - whole.parts.keys():
            for name in (name for name in taken if name in new):
                part = whole.add(name, attribute=False, default=taken[name].default)
                part.reader = kind.__name__
            raise Retry

    def _configure(self, kind: Any, *args: Any, **kwargs: Any) -> Any:
        """Give the parts that become sizes of a transformers config the values of a tiny one."""
        parts: dict[str, Part] = {}
        for keyword, value in kwargs.items():
            if (part := part_of(value)) is not None:
                parts[keyword] = part
        whole = self.attempt.unpacked
        if getattr(kind, "model_type", "") and (parts or whole is not None):
            from pytest_fsdp_meta.plugin.init.pretrained import fit_parts

            self.attempt.unpacked = None
            if fit_parts(kind, parts, kwargs, whole):
                raise Retry
        return object.__new__(kind)

    def _write_pretrained(self, kind: Any, name: Any) -> None:
        if self._name_of(name) != ".":
            return
        self.is_pretrained = self.is_serving = True
        try:
            from transformers import CONFIG_MAPPING

            from pytest_fsdp_meta.transformers import tiny_checkpoint

            if not (self.folder / "config.json").exists():
                model_type = getattr(kind, "model_type", "") or "llama"
                if model_type not in CONFIG_MAPPING:
                    raise Refused(model_type)
                tiny_checkpoint(model_type, self.folder)
        finally:
            self.is_serving = False
