"""Call a loader on one rank of a simulated world, until all that it reads is known or it cannot be called.

Ranks import this module, so nothing here imports pytest.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from pytest_fsdp_meta.checks.simulation.observe.load import limit_memory
from pytest_fsdp_meta.plugin.init.layout import literal
from pytest_fsdp_meta.plugin.init.pretrained import Transformers, describe_model, is_model_class, plain, unknown_type
from pytest_fsdp_meta.plugin.init.recording import EMPTY, Attempt, Missing, Number, Part, hints_of, part_of
from pytest_fsdp_meta.plugin.init.values import OTHER_MESHES
from pytest_fsdp_meta.plugin.init.watching import INDEX, Built, OwnGroup, Refused, Retry, Watch
from pytest_fsdp_meta.plugin.named_loader import find_function
from pytest_fsdp_meta.text import first_line
from pytest_fsdp_meta.worlds import current

MOST_CALLS = 200
"""Each shows at least one thing more: a part that is read, or its use."""
DEFAULT_FILES = {"safetensors": "model.safetensors", "torch": "model.pt"}
MISSING_ARGUMENTS = re.compile(r"missing \d+ required (?:positional|keyword-only) arguments?: (.*)")


@dataclass(frozen=True)
class Weights:
    """The file that the loader reads weights from; ``is_parameter`` if its argument is the file and not the folder."""

    library: str
    file: str
    is_parameter: bool = False


@dataclass(frozen=True)
class Model:
    """The class of the model that the loader builds, and the call that builds it; None if only the loader can."""

    name: str
    call: str | None
    needs: tuple[tuple[str, str], ...]
    """Modules and names of the classes in the call."""
    forward: tuple[str, ...]
    """The required parameters of its ``forward``."""
    vocabulary: int
    """The rows of its first embedding; 0 if it has none."""
    parameters: int


@dataclass(frozen=True)
class Seen:
    """What a loader did when it was called."""

    parameters: tuple[Part, ...]
    error: str = ""
    """Why the last call failed; empty if it did not."""
    returned: tuple[str, ...] = ()
    """The parts of a tuple that it returned: "model", "optimizer", "scheduler", "dataloader", or "_"."""
    returns_subject: bool = False
    group: str = ""
    """Where it calls ``init_process_group`` itself, such as "loading.py:12"."""
    backend: str = ""
    model: Model | None = None
    weights: Weights | None = None
    transformers: Transformers | None = None

    @property
    def config(self) -> Part | None:
        return next((one for one in self.parameters if one.role == "config" or one.parts or one.kind), None)

    def role(self, role: str) -> Part | None:
        return next((one for one in self.parameters if one.role == role), None)


def parameters_of(function: Any) -> list[Part]:
    """Return the parameters with what their names, annotations and defaults say. Raises ValueError without any."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        raise ValueError("it has no signature, as it is written in C; name a Python function that calls it") from None
    hints, parts, roles = hints_of(getattr(function, "__func__", function)), [], set()
    for name, one in signature.parameters.items():
        if one.kind in (one.VAR_POSITIONAL, one.VAR_KEYWORD):
            continue
        annotation = hints.get(name, one.annotation)
        part = Part(name, name, is_argument=True, annotation=annotation, default=one.default)
        part.is_positional = one.kind is one.POSITIONAL_ONLY
        part.settle()
        is_mesh = part.role in ("mesh", "group")
        part.is_other = is_mesh and (part.role in roles or bool(OTHER_MESHES.intersection(name.split("_"))))
        if part.is_other:
            part.expression, part.is_kept = "", one.default is not EMPTY
        else:
            roles.add(part.role)
        parts.append(part)
    return parts


def fallback(parameters: list[Part], error: str) -> Seen:
    """Return the parameters that the call needs; with an error, without values that only the call could confirm."""
    for part in parameters if error else ():
        is_known = part.role or part.parts or part.kind is not None or part.default is not EMPTY
        part.expression = part.expression if is_known else ""
    needed = (part for part in parameters if not part.is_kept)
    return Seen(tuple(part for part in needed if part.expression or part.parts or part.default is EMPTY), error)


def observe(name: str) -> Seen:
    """Call the loader ``MODULE:NAME`` until nothing new is seen; called on the rank."""
    folder = Path(tempfile.mkdtemp(prefix="init-", dir=current().shapes_folder))
    watch = Watch(folder, Attempt({}))
    watch.start()
    limit_memory()
    return Probe(name, find_function(name)[1], watch).run()


class Probe:
    """The calls of one loader."""

    def __init__(self, name: str, function: Any, watch: Watch) -> None:
        self._name = name
        self._function = function
        self._watch = watch
        self._parts = parameters_of(function)
        self._is_file = False

    def run(self) -> Seen:
        returned, failure, error = None, None, ""
        for _ in range(MOST_CALLS):
            returned, failure = self._call()
            is_refused = isinstance(failure, Refused)
            error = "" if failure is None or is_refused else f"{type(failure).__name__}: {first_line(failure)}"
            if not self._watch.start_transformers() and not (
                self._watch.attempt.is_changed if failure is None else self._learn(failure)
            ):
                break
        if failure is None and not _has_model(returned):
            error = f"TypeError: it returned {type(returned).__name__}, but should return the loaded model"
        seen = self._describe(returned, error)
        if isinstance(failure, Refused) and failure.model_type:
            return replace(seen, transformers=unknown_type(failure.model_type))
        return seen

    def _call(self) -> tuple[Any, BaseException | None]:
        """Call the loader once, with the values that are known by now."""
        import torch.distributed as dist

        from pytest_fsdp_meta.worlds.rank.process_groups import FAKE

        watch, rank = self._watch, current()
        rank = replace(rank, device=torch.device("cpu"))
        if not watch.group[0]:
            dist.init_process_group(FAKE, rank=rank.rank, world_size=rank.world_size)
            rank._mesh = dist.device_mesh.init_device_mesh("cpu", (rank.world_size,), mesh_dim_names=("dp_shard",))
        names = {"torch": torch, "fsdp": rank, "device": "cpu", "mesh": rank._mesh, "rank": rank.rank}
        names |= {"world_size": rank.world_size, "local_rank": 0, "folder": watch.folder, "checkpoint": watch.folder}
        names["group"] = None if rank._mesh is None else rank.mesh.get_group()
        watch.begin(names)
        try:
            positional, named = self._arguments()
            return self._function(*positional, **named), None
        except (Exception, SystemExit, Refused) as error:
            return None, error
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()

    def _arguments(self) -> tuple[list[Any], dict[str, Any]]:
        """Return positional and named arguments."""
        positional, named = [], {}
        for part in self._parts:
            if part.is_kept or (self._watch.group[0] and part.role in ("mesh", "group")):
                continue
            value = self._watch.attempt.value_of(part)
            if part.is_positional:
                positional.append(value)
            else:
                named[part.name] = value
        return positional, named

    def _learn(self, failure: BaseException) -> bool:
        """Give a part a value because the call failed; return whether there is something to try."""
        text = str(failure)
        if isinstance(failure, Refused):
            return False
        if self._watch.opened_folder:
            return not self._is_file and self._pass_file()
        if isinstance(failure, (OwnGroup, Retry)) or self._watch.attempt.is_changed or self._add_missing(failure):
            return True
        if "for /: 'str'" in text and self._change(lambda part: part.expression == "str(folder)", "folder"):
            return True
        left_out = [one for one in self._all() if one.kind is not None and one.is_kept and one.default is None]
        if left_out and isinstance(failure, (TypeError, AttributeError)):  # of a nested config
            left_out[0].is_kept = False
            return True
        return False

    def _all(self) -> list[Part]:
        return [part for one in self._parts for part in one.walk()]

    def _change(self, is_meant: Callable[[Part], bool], expression: str) -> bool:
        meant = [part for part in self._all() if is_meant(part)]
        for part in meant:
            part.expression = expression
        return bool(meant)

    def _add_missing(self, failure: BaseException) -> bool:
        """Add the part without which the loader failed, also where another error hides that."""
        error: BaseException | None = failure
        while error is not None:
            if isinstance(error, Missing) and error.part.is_kept:
                error.part.is_kept = False
                return True
            error = error.__cause__ or error.__context__
        found, whole = MISSING_ARGUMENTS.search(str(failure)), self._watch.attempt.unpacked
        names = re.findall(r"'(\w+)'", found[1]) if found is not None else []
        if type(failure) is KeyError:  # of the dict that the function got
            names = [name for name in failure.args if isinstance(name, str)]
        if whole is None or not names or names[0] in whole.parts:
            return False
        for name in names:
            whole.add(name, attribute=False).is_kept = False
        return True

    def _pass_file(self) -> bool:
        """Pass a file instead of the folder, as the loader opens the folder itself."""
        library, self._is_file = self._watch.opened_folder, True
        paths = [part for part in self._all() if part.role == "checkpoint"]
        named = [part for part in paths if part.name.lower().split("_")[-1] in ("file", "weights", "ckpt")]
        for part in named or paths:
            inner = part.expression.removeprefix("str(").removesuffix(")")
            file = f'{inner} / "{DEFAULT_FILES[library]}"'
            part.expression = f"str({file})" if part.expression.startswith("str(") else file
        return bool(paths)

    def _describe(self, returned: Any, error: str) -> Seen:
        watch, kinds = self._watch, [returned] if not isinstance(returned, tuple) else list(returned)
        model = next((one for one in kinds if isinstance(one, nn.Module)), None)
        built = next((one for one in watch.built if one.module is model), None) or watch.root
        transformers = None
        if built is not None and is_model_class(built.kind):
            transformers = describe_model(built.module, built.kind, self._name.rpartition(":")[2])
        return replace(
            fallback(self._parts, error),
            returned=tuple(map(_part_of, returned)) if isinstance(returned, tuple) else (),
            returns_subject=_is_subject(returned),
            group=watch.group[0],
            backend=watch.group[1],
            model=self._model(built) if built is not None and transformers is None else None,
            weights=self._weights(),
            transformers=transformers,
        )

    def _weights(self) -> Weights | None:
        files = self._watch.files
        index = next((name for name in files if name.endswith(INDEX)), "")
        name = index or next(iter(files), "")
        return Weights(files[name], name, is_parameter=self._is_file) if name else None

    def _model(self, built: Built) -> Model:
        needs: list[tuple[str, str]] = []
        try:
            call = self._call_of(built, needs)
        except ValueError:
            call, needs = None, []
        embedding = next((one for one in built.module.modules() if isinstance(one, nn.Embedding)), None)
        positional = inspect.Parameter.POSITIONAL_OR_KEYWORD
        taken = list(inspect.signature(built.kind.forward).parameters.values())[1:]
        return Model(
            name=built.kind.__name__,
            call=call,
            needs=tuple(needs),
            forward=tuple(one.name for one in taken if one.default is one.empty and one.kind is positional),
            vocabulary=0 if embedding is None else int(embedding.num_embeddings),
            parameters=built.size,
        )

    def _call_of(self, built: Built, needs: list[tuple[str, str]]) -> str:
        kind = built.kind
        given = [self._written(value, needs) for value in built.args]
        given += [f"{name}={self._written(value, needs)}" for name, value in built.kwargs.items()]
        return f"{_import(kind, needs)}({', '.join(given)})"

    def _written(self, value: Any, needs: list[tuple[str, str]]) -> str:
        """Return the value as Python; a part of the config by its name. Raises ValueError for other objects."""
        part = part_of(value) or self._watch.attempt.made.get(id(value))
        config = next((one for one in self._parts if one.parts), None)
        if part is not None and config is not None and any(part is one for one in config.walk()):
            return part.path
        built = next((one for one in self._watch.built if one.module is value), None)
        if built is not None:
            return self._call_of(built, needs)
        if value is None or type(value) in (bool, int, float, str, Number):
            return literal(plain(value))
        if isinstance(value, torch.dtype):
            needs.append(("torch", ""))
            return str(value)
        if type(value) in (list, tuple) and value:
            inner = ", ".join(self._written(one, needs) for one in value)
            return f"[{inner}]" if type(value) is list else f"({inner},)"
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            changed = {one.name: getattr(value, one.name) for one in dataclasses.fields(value) if one.init}
            defaults = {one.name: one.default for one in dataclasses.fields(value)}
            given = [
                f"{name}={self._written(one, needs)}" for name, one in changed.items() if one is not defaults[name]
            ]
            return f"{_import(type(value), needs)}({', '.join(given)})"
        raise ValueError(type(value).__name__)


def _import(kind: type, needs: list[tuple[str, str]]) -> str:
    """Add the import of a class. Raises ValueError for one that cannot be imported."""
    if getattr(sys.modules.get(kind.__module__), kind.__name__, None) is not kind:
        raise ValueError(kind.__name__)
    is_of_nn = getattr(nn, kind.__name__, None) is kind
    needs.append(("torch.nn" if is_of_nn else kind.__module__, kind.__name__))
    return str(kind.__name__)


def _is_subject(returned: Any) -> bool:
    return type(returned).__name__ == "Subject"


def _has_model(returned: Any) -> bool:
    parts = returned if isinstance(returned, tuple) else (returned,)
    return _is_subject(returned) or any(isinstance(part, nn.Module) for part in parts)


def _part_of(value: Any) -> str:
    names = {nn.Module: "model", torch.optim.Optimizer: "optimizer", torch.optim.lr_scheduler.LRScheduler: "scheduler"}
    names[torch.utils.data.DataLoader] = "dataloader"
    return next((name for kind, name in names.items() if isinstance(value, kind)), "_")
