"""The transformers config that a loader builds: values that fit it, and a tiny checkpoint of its sizes."""

from __future__ import annotations

import ast
import inspect
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pytest_fsdp_meta.plugin.init.recording import Part

IGNORED = {"attn_implementation", "torch_dtype", "dtype", "use_cache", "_attn_implementation", "architectures"}
"""What a config says beside the sizes of its model."""


@dataclass(frozen=True)
class Transformers:
    """The class of transformers that the loader builds, and the sizes in which its checkpoint is not the usual one."""

    auto_class: str
    model_type: str
    sizes: dict[str, Any] = field(default_factory=dict)
    refused: str = ""
    """Why ``tiny_checkpoint`` cannot write the checkpoint; empty if it can."""


def is_model_class(kind: Any) -> bool:
    """Return whether this is a class of models that transformers builds from a checkpoint."""
    if not inspect.isclass(kind) or "transformers" not in sys.modules:
        return False
    is_auto = kind.__module__.startswith("transformers.") and kind.__name__.startswith("AutoModel")
    return is_auto or any(base.__name__ == "PreTrainedModel" for base in kind.__mro__[1:])


def describe_class(kind: Any) -> Transformers:
    config = getattr(kind, "config_class", None)
    if kind.__name__.startswith("AutoModel") or config is None:
        return Transformers(kind.__name__, "llama")
    auto = f"AutoModel{''.join(re.findall(r'For[A-Z].*$', kind.__name__))}"
    known = hasattr(sys.modules["transformers"], auto)
    return Transformers(auto if known else "AutoModelForCausalLM", config.model_type)


def unknown_type(model_type: str) -> Transformers:
    what = f"return a folder that save_pretrained wrote; tiny_checkpoint does not know the type {model_type!r}"
    return Transformers("AutoModelForCausalLM", model_type, refused=what)


def describe_model(model: Any, kind: Any, loader: str) -> Transformers:
    """Return the type of a model that was built, and the sizes of its config that ``tiny_config`` does not have."""
    from transformers import CONFIG_MAPPING

    from pytest_fsdp_meta.transformers.tiny import MAX_PARAMETERS, tiny_config

    found, config = describe_class(kind), model.config.to_dict()
    if found.model_type not in CONFIG_MAPPING:
        return unknown_type(found.model_type)
    tiny = tiny_config(found.model_type).to_dict()
    sizes = {name: plain(value) for name, value in config.items() if _differs(name, value, tiny)}
    count = sum(parameter.numel() for parameter in model.parameters())
    refused = (
        f"{loader} builds a model of {count:,} parameters; let it take smaller sizes from an argument or a checkpoint"
    )
    return Transformers(found.auto_class, found.model_type, sizes, refused if count > MAX_PARAMETERS else "")


def plain(value: Any) -> Any:
    """Return the value without subclasses of int, as it is written into the test."""
    return int(value) if isinstance(value, int) and not isinstance(value, bool) else value


def _differs(name: str, value: Any, tiny: Mapping[str, Any]) -> bool:
    if name in IGNORED or name.endswith("token_id") or name not in tiny or value == tiny[name]:
        return False
    try:
        return bool(ast.literal_eval(repr(value)) == value)
    except (ValueError, SyntaxError):
        return False


def fit_parts(kind: Any, parts: dict[str, Part], given: Mapping[str, Any], whole: Part | None) -> bool:
    """Give the parts that became sizes of a config tiny values; ``whole`` was unpacked. Return whether any changed."""
    from transformers import CONFIG_MAPPING

    from pytest_fsdp_meta.transformers.tiny import SIZES, tiny_config

    if kind.model_type not in CONFIG_MAPPING:
        return False
    tiny = tiny_config(kind.model_type).to_dict()
    if whole is not None:
        names = [name for name in SIZES if tiny.get(name) is not None and "token_id" not in name]
        parts |= {name: whole.add(name, attribute=False) for name in names if name not in parts}
    if "num_attention_heads" not in parts:  # rotary embeddings need two numbers in each head
        heads = given.get("num_attention_heads", getattr(kind(), "num_attention_heads", 0))
        tiny["hidden_size"] = max(tiny.get("hidden_size", 0), 2 * heads if isinstance(heads, int) else 0)
    changed = False
    for name, part in parts.items():
        value, before = tiny.get(name), part.expression
        if isinstance(value, (int, float, str)) and not part.is_fitted:
            part.expression = f'"{value}"' if isinstance(value, str) else repr(value)
            part.is_kept = False
            changed = changed or part.expression != before
        part.is_fitted = True
    return changed
