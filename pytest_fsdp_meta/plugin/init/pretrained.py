"""The transformers config that a loader builds itself: values that fit it, and a tiny checkpoint of its sizes."""

from __future__ import annotations

import ast
import inspect
import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from pytest_fsdp_meta.plugin.init.config import choose_values
from pytest_fsdp_meta.plugin.init.reads import EMPTY, Names, Reads, chain_of
from pytest_fsdp_meta.plugin.init.source import Source

IGNORED = {"attn_implementation", "torch_dtype", "dtype", "use_cache", "_attn_implementation", "architectures"}
"""What a config says beside the sizes of its model."""
OPERATORS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
}


@dataclass(frozen=True)
class Built:
    """The call that builds a transformers config."""

    kind: Any
    call: ast.Call
    source: Source
    names: Names
    overrides: bool
    """Whether its keywords override the config of the checkpoint, as those of ``from_pretrained`` do."""

    @property
    def place(self) -> str:
        return f"{getattr(self.source.owner, '__name__', 'it')} ({self.source.place(self.call)})"


@dataclass(frozen=True)
class Sizes:
    """The sizes of the tiny checkpoint that differ from those of ``tiny_config``, and what is wrong with them."""

    values: dict[str, Any] = field(default_factory=dict)
    unknown: str = ""
    """What its author has to write; empty if all is known."""
    refused: str = ""
    """Why ``tiny_checkpoint`` cannot write the checkpoint; empty if it can."""


@dataclass(frozen=True)
class Transformers:
    """The class of transformers that the loader builds."""

    auto_class: str
    model_type: str
    sizes: Sizes = field(default_factory=Sizes)


def fit_checkpoint(
    arguments: Reads, scopes: Mapping[Source, Names], model: Transformers, *, has_mesh: bool
) -> Transformers:
    """Choose values for the arguments, and the sizes of the tiny checkpoint that fits them."""
    from transformers import CONFIG_MAPPING

    built, (instance, place) = find_built(scopes), find_instance(scopes)
    kind = built.kind if built is not None else type(instance)
    model_type = getattr(kind, "model_type", "") or model.model_type
    if model_type not in CONFIG_MAPPING:
        choose_values(arguments, has_mesh=has_mesh)
        what = f"return a folder that save_pretrained wrote; tiny_checkpoint does not know the type {model_type!r}"
        return Transformers(model.auto_class, model_type, Sizes(refused=what))
    model = Transformers(model.auto_class, model_type)
    if built is not None:
        fit_config(arguments, built, model_type)
    choose_values(arguments, has_mesh=has_mesh)
    if built is not None:
        sizes = find_sizes(arguments, built, model)
    elif instance is not None:
        sizes = sizes_of(instance.to_dict(), model, place)
    elif any("from_pretrained" in ast.unparse(source.tree) for source in scopes):
        sizes = Sizes()
    else:
        sizes = Sizes(unknown="the sizes of the config from which the loader builds its model, as a dict")
    return replace(model, sizes=sizes)


def find_built(scopes: Mapping[Source, Names]) -> Built | None:
    for source, names in scopes.items():
        for call in source.calls:
            kind = source.resolve(call.func)
            if _is_config(kind):
                return Built(kind, call, source, names, overrides=False)
            owner = getattr(kind, "__self__", None)
            is_loaded = getattr(kind, "__name__", "") == "from_pretrained" and call.keywords
            if is_loaded and (_is_config(owner) or getattr(owner, "__name__", "") == "AutoConfig"):
                return Built(owner, call, source, names, overrides=True)
    return None


def _is_config(kind: Any) -> bool:
    names = {base.__name__ for base in kind.__mro__} if inspect.isclass(kind) else set()
    return bool(names & {"PreTrainedConfig", "PretrainedConfig"})


def fit_config(reads: Reads, built: Built, model_type: str) -> None:
    """Choose the values of ``tiny_config`` for the parts of the loader's config that become a size of the model."""
    from pytest_fsdp_meta.transformers.sizes import SIZES, tiny_config

    tiny = tiny_config(model_type).to_dict()
    taken: dict[str, Reads] = {}
    for keyword in built.call.keywords:
        chain = chain_of(keyword.value, built.names)
        part = None if chain is None else reads.find(chain)
        if part is not None and keyword.arg is not None:
            taken[keyword.arg] = part
        elif part is not None:
            names = [name for name in SIZES if tiny.get(name) is not None and "token_id" not in name]
            names = [name for name in names if part.kind is None or name in part.parts]
            taken |= {name: part.add(((part.kind is not None, name),), built.place) for name in names}
    if "num_attention_heads" not in taken and not built.overrides:
        node = next((one.value for one in built.call.keywords if one.arg == "num_attention_heads"), None)
        heads = _default(built.kind, "num_attention_heads") if node is None else getattr(node, "value", 0)
        if isinstance(heads, int):  # rotary embeddings need two numbers in each head
            tiny["hidden_size"] = max(tiny.get("hidden_size", 0), 2 * heads)
    for name, part in taken.items():
        is_size = isinstance(part.default, int) and not isinstance(part.default, bool)
        value = tiny.get(name)
        if isinstance(value, (int, float, str)) and (is_size or part.default is EMPTY):
            part.expression = f'"{value}"' if isinstance(value, str) else repr(value)


def _default(kind: Any, name: str) -> Any:
    try:
        return getattr(kind(), name, 0)
    except Exception:  # its defaults do not pass its own validation
        return 0


def find_sizes(reads: Reads, built: Built, model: Transformers) -> Sizes:
    """Return the sizes that the loader's model has when it gets these values."""
    from pytest_fsdp_meta.transformers.sizes import tiny_config

    tiny = tiny_config(model.model_type).to_dict()
    given: dict[str, Any] = {}
    unknown = []
    for keyword in built.call.keywords:
        if keyword.arg in IGNORED:
            continue
        try:
            value = _evaluate(keyword.value, built, reads)
            given.update({keyword.arg: value} if keyword.arg is not None else value)
        except (ValueError, TypeError, SyntaxError):
            unknown.append(keyword.arg or f"**{ast.unparse(keyword.value)}")
    if built.call.args and not built.overrides:
        unknown.append(ast.unparse(built.call.args[0]))
    what = f"the sizes of the config that {built.place} builds, as a dict"
    try:
        whole = {**tiny, **given} if built.overrides else built.kind(**given).to_dict()
    except Exception as error:  # the architecture's own validation
        return Sizes(unknown=f"{what}; {type(error).__name__}: {str(error).splitlines()[0]}")
    if unknown:
        return Sizes(unknown=f"{what}; the source does not say {', '.join(unknown)}")
    return sizes_of(whole, model, built.place)


def sizes_of(config: Mapping[str, Any], model: Transformers, place: str) -> Sizes:
    """Return the sizes of this config that a tiny checkpoint needs, or that it is too large."""
    from pytest_fsdp_meta.transformers.sizes import tiny_config

    tiny = tiny_config(model.model_type).to_dict()
    values = {name: value for name, value in config.items() if _differs(name, value, tiny)}
    return Sizes(values, refused=_too_large(model, values, place))


def find_instance(sources: Iterable[Source]) -> tuple[Any, str]:
    """Return the transformers config that a source names, and where; None if there is none."""
    for source in sources:
        for node in ast.walk(source.tree):
            found = source.resolve(node) if isinstance(node, (ast.Name, ast.Attribute)) else None
            if _is_config(type(found)):
                return found, f"{getattr(source.owner, '__name__', 'it')} ({source.place(node)})"
    return None, ""


def _differs(name: str, value: Any, tiny: Mapping[str, Any]) -> bool:
    if name in IGNORED or name.endswith("token_id") or name not in tiny:
        return False
    return bool(value != tiny[name]) and _is_literal(value)


def _is_literal(value: Any) -> bool:
    """Return whether the value can be written into the test."""
    try:
        return bool(ast.literal_eval(repr(value)) == value)
    except (ValueError, SyntaxError):
        return False


def _too_large(model: Transformers, values: Mapping[str, Any], place: str) -> str:
    """Return why the model is not tiny; empty if it is."""
    import torch
    import transformers

    from pytest_fsdp_meta.transformers.checkpoints import MAX_PARAMETERS
    from pytest_fsdp_meta.transformers.sizes import tiny_config

    try:
        with torch.device("meta"):
            made = getattr(transformers, model.auto_class).from_config(tiny_config(model.model_type, **values))
    except Exception:  # the fixture, which calls tiny_checkpoint, fails with it, before the loader is called
        return ""
    count = sum(parameter.numel() for parameter in made.parameters())
    if count <= MAX_PARAMETERS:
        return ""
    return f"{place} builds a model of {count:,} parameters; let it take smaller sizes from an argument or a checkpoint"


def _evaluate(node: ast.AST, built: Built, reads: Reads, depth: int = 4) -> Any:
    """Return the value of an expression. Raises ValueError where that cannot be known."""
    chain = chain_of(node, built.names)
    if chain is not None:
        return _value(reads.find(chain))
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.Dict) and all(node.keys):
        keys = [_evaluate(key, built, reads) for key in node.keys if key is not None]
        return dict(zip(keys, (_evaluate(value, built, reads) for value in node.values), strict=True))
    if isinstance(node, ast.List):
        return [_evaluate(one, built, reads) for one in node.elts]
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        left, right = _evaluate(node.left, built, reads), _evaluate(node.right, built, reads)
        return OPERATORS[type(node.op)](left, right)
    if isinstance(node, ast.Name) and depth and node.id in built.source.assigned:
        return _evaluate(built.source.assigned[node.id], built, reads, depth - 1)
    value = built.source.resolve(node)
    if isinstance(value, (int, float, str, dict)):
        return value
    raise ValueError(ast.unparse(node))


def _value(part: Reads | None) -> Any:
    if part is None:
        raise ValueError
    if part.parts or part.unpacked:
        return {name: _value(below) for name, below in part.parts.items()}
    if part.is_kept and (part.default is None or isinstance(part.default, (int, float, str))):
        return part.default
    return ast.literal_eval(part.expression)
