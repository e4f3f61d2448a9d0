"""Choose values for the parameters of a loader and for what it reads of its config, by their names and annotations."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from pytest_fsdp_meta.plugin.init.source import Source

CONFIGS = {"cfg", "config", "configuration", "conf", "args", "hparams", "settings", "options", "opts"}
PATHS = {"path", "checkpoint", "ckpt", "folder", "dir", "directory", "weights", "pretrained", "file"}
MODELS_BY_NAME = {"model_id", "model_name", "repo_id", "name_or_path"}
SIZES = {
    **dict.fromkeys(("layer", "layers", "depth", "blocks"), 2),
    **dict.fromkeys(("head", "heads", "experts"), 4),
    **dict.fromkeys(("vocab", "vocabulary"), 128),
    **dict.fromkeys(("intermediate", "ffn", "mlp", "ff"), 64),
    **dict.fromkeys(("length", "len", "positions", "context", "seq"), 64),
    **dict.fromkeys(("hidden", "width", "dim", "embd", "embed", "embedding"), 32),
}
"""Small sizes by a word of a name, for names about which nothing else is known; the first word that fits decides."""
PLAIN = {
    **dict.fromkeys(("lr", "learning_rate"), "1e-3"),
    **dict.fromkeys(("dropout", "weight_decay"), "0.0"),
    **dict.fromkeys(("eps", "norm_eps"), "1e-5"),
    "seed": "0",
    "d_model": "32",
    "head_dim": "8",
    "top_k": "2",
    "rope_theta": "10000.0",
}
"""Values by a whole name."""
FROM_RANK = {
    "fsdp": "fsdp",
    "mesh": "fsdp.mesh",
    "group": "fsdp.mesh.get_group()",
    "local_rank": "fsdp.local_rank",
    "rank": "fsdp.rank",
    "world_size": "fsdp.world_size",
    "device_type": "fsdp.device.type",
    "device": "fsdp.device",
}
"""What a parameter of this role gets; all of it exists on ranks only."""


def role_of(name: str, annotation: Any) -> str:
    """Return what a parameter is: a key of ``FROM_RANK``, "checkpoint", "config", or "" where that cannot be known."""
    words, kind = name.lower().strip("_").split("_"), annotation_text(annotation)
    if name == "fsdp":
        return "fsdp"
    if "mesh" in words or "DeviceMesh" in kind:
        return "mesh"
    if name in ("local_rank", "device_type"):
        return name
    if words[-1] == "rank":
        return "rank"
    if name in ("world_size", "num_ranks", "nranks"):
        return "world_size"
    if words[-1] in ("group", "pg") or "ProcessGroup" in kind:
        return "group"
    if words[-1] in ("device", "dev") or kind == "torch.device":
        return "device"
    if CONFIGS.intersection(words) and not PATHS.intersection(words) and "name" not in words:
        return "config"
    if (PATHS.intersection(words) and not CONFIGS.intersection(words)) or "Path" in kind or name in MODELS_BY_NAME:
        return "checkpoint"
    return ""


def annotation_text(annotation: Any) -> str:
    if annotation is inspect.Parameter.empty:
        return ""
    return annotation if isinstance(annotation, str) else getattr(annotation, "__name__", str(annotation))


def guess(name: str, annotation: Any, folder: str) -> str:
    """Return the expression for a value of this name; "" where none can be guessed. ``folder`` is the checkpoint's."""
    words, kind = name.lower().split("_"), annotation_text(annotation)
    if role_of(name, annotation) == "checkpoint":
        return folder if "Path" in kind else f"str({folder})"
    if name in PLAIN:
        return PLAIN[name]
    if kind == "bool":
        return "False"
    if kind in ("", "int") and "name" not in words:
        return next((str(size) for word, size in SIZES.items() if word in words), "")
    return ""


@dataclass
class Reads:
    """What a source reads of a value: attributes (``cfg.size``) or items (``cfg["size"]``), each read further."""

    parts: dict[str, Reads] = field(default_factory=dict)
    attributes: bool = False
    unpacked: bool = False
    """Whether it is passed on as keyword arguments."""
    annotations: dict[str, Any] = field(default_factory=dict)

    def add(self, chain: Iterable[tuple[bool, str]]) -> Reads:
        here = self
        for attribute, name in chain:
            here.attributes = here.attributes or attribute
            here = here.parts.setdefault(name, Reads())
        return here


def find_reads(sources: Iterable[Source], parameter: str) -> Reads:
    """Return what these sources read of the parameter, in all functions that have one of this name."""
    reads = Reads()
    for source in sources:
        if parameter not in source.parameters:
            continue
        called = {id(call.func) for call in source.calls}
        for node in ast.walk(source.tree):
            chain = _chain(node, parameter)
            if chain and id(node) not in called:
                reads.add(chain)
            if isinstance(node, ast.Call):
                _add_call(source, node, parameter, reads)
    return reads


def _add_call(source: Source, call: ast.Call, parameter: str, reads: Reads) -> None:
    """Add ``cfg.get("size")``, and for ``Model(**cfg)`` the parameters of Model."""
    if isinstance(call.func, ast.Attribute) and call.func.attr == "get" and call.args:
        key, chain = call.args[0], _chain(call.func.value, parameter)
        if chain is not None and isinstance(key, ast.Constant) and isinstance(key.value, str):
            reads.add([*chain, (False, key.value)])
    for keyword in call.keywords:
        chain = _chain(keyword.value, parameter) if keyword.arg is None else None
        target = source.resolve(call.func)
        if chain is not None and callable(target):
            here = reads.add(chain)
            here.unpacked = True
            for name, one in _signature_of(target).items():
                if one.default is one.empty:
                    here.add([(False, name)])
                    here.annotations[name] = one.annotation


def _chain(node: ast.AST, parameter: str) -> list[tuple[bool, str]] | None:
    """Return the names that lead from the parameter, or from ``self.`` and its name, to this node; None for others."""
    if isinstance(node, ast.Name):
        return [] if node.id == parameter else None
    if isinstance(node, ast.Attribute):
        if isinstance(node.value, ast.Name) and node.value.id == "self":
            return [] if node.attr == parameter else None
        chain = _chain(node.value, parameter)
        return None if chain is None else [*chain, (True, node.attr)]
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant) and isinstance(node.slice.value, str):
        chain = _chain(node.value, parameter)
        return None if chain is None else [*chain, (False, node.slice.value)]
    return None


def _signature_of(target: Any) -> dict[str, inspect.Parameter]:
    try:
        parameters = inspect.signature(target).parameters
    except (TypeError, ValueError):
        return {}
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {name: one for name, one in parameters.items() if one.kind in named}


def fields_of(kind: Any) -> Reads | None:
    """Return what an own config class takes: its parameters that have no default, and those that are paths."""
    if not inspect.isclass(kind) or kind.__module__ in ("builtins", "types", "typing", "argparse", "inspect"):
        return None
    reads = Reads(attributes=True)
    for name, one in _signature_of(kind).items():
        if one.default is one.empty or role_of(name, one.annotation) == "checkpoint":
            reads.add([(True, name)])
            reads.annotations[name] = one.annotation
    return reads
