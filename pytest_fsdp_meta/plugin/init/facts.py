"""What is known of a loader without calling it: its parameters, its model and weights, and what it returns."""

from __future__ import annotations

import ast
import inspect
import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pytest_fsdp_meta.plugin.init.config import add_fields, choose_values, hints_of, is_config_class
from pytest_fsdp_meta.plugin.init.pretrained import Transformers, fit_checkpoint
from pytest_fsdp_meta.plugin.init.reads import Chain, Names, Reads, chain_of, find_reads, find_scopes, signature_of
from pytest_fsdp_meta.plugin.init.source import Source, read_sources
from pytest_fsdp_meta.plugin.init.values import OTHER_MESHES, role_of

WEIGHTS = {
    "safetensors": re.compile(r"[\w.-]*\.safetensors$"),
    "torch": re.compile(r"[\w.-]*\.(?:pt|pth|bin|ckpt)$"),
}
"""Names of weight files, by the library that reads them."""
READERS = {"load_file": "safetensors", "safe_open": "safetensors", "torch.load": "torch"}
MOST_ELEMENTS = 2**26
"""The largest product of two sizes of a model that a test builds: 256 MiB in float32."""
MAY_BE_META = re.compile("meta|device|empty|init|fake|skip|defer|context", re.IGNORECASE)
"""What a context may be called in which a model is built without memory."""
DEFAULT_FILES = {"safetensors": "model.safetensors", "torch": "model.pt"}


@dataclass(frozen=True)
class Parameter:
    """A parameter of the loader that its call should pass."""

    name: str
    role: str
    annotation: Any
    positional: bool
    is_other: bool = False
    """Whether it is a mesh or a group of another dimension than the one over which FSDP shards."""
    expression: str = ""
    """The size that the test passes for it."""


@dataclass(frozen=True)
class Weights:
    """The file that the loader reads weights from, and whether its parameter is that file or the folder with it."""

    library: str
    file: str
    is_parameter: bool


@dataclass(frozen=True)
class Model:
    """The class of the project that the loader builds, and the call that builds it; None if only the loader can."""

    kind: Any
    call: str | None
    vocabulary: str
    """The expression for the size of its vocabulary; empty if that is not known."""
    needs: tuple[Any, ...] = ()
    """Classes and functions of the project that the call names."""
    too_large: str = ""
    """The sizes with which it is built, if they are those of a large model."""


@dataclass(frozen=True)
class Facts:
    """What ``--fsdp-init`` could find out about a loader."""

    module: str
    attribute: str
    signature: str
    parameters: tuple[Parameter, ...]
    returned: tuple[str, ...]
    """The parts of a tuple that it returns: "model", "optimizer", "scheduler", or "_"; empty for the model alone."""
    returns_subject: bool
    own_group: str
    """Where it calls ``init_process_group`` unguarded, such as "loading.py:12"; empty if it does not."""
    backend: str
    """The backend that it names there."""
    config: Reads | None
    config_class: Any
    model: Model | None
    weights: Weights | None
    seed: str
    transformers: Transformers | None
    from_pretrained: bool
    """Whether it is itself the ``from_pretrained`` of a transformers class."""
    builds_whole: bool
    """Whether its source was seen to build the model, and not on the meta device."""
    has_source: bool

    def role(self, role: str) -> Parameter | None:
        return next((one for one in self.parameters if one.role == role), None)


def find_facts(name: str, function: Callable[..., Any], root: Path) -> Facts:
    """Return what can be known of the loader ``MODULE:NAME``. Raises ValueError where it has no signature."""
    module, _, attribute = name.partition(":")
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        raise ValueError("it has no signature, as it is written in C; name a Python function that calls it") from None
    kind = getattr(function, "__self__", None)
    from_pretrained = attribute.endswith(".from_pretrained") and _is_transformers(kind)
    sources = [] if from_pretrained else read_sources(function, root)
    hints = hints_of(getattr(function, "__func__", function))
    parameters = tuple(_parameters(signature, hints, Reads()))
    config = next((one for one in parameters if one.role == "config"), None)
    group, backend = _own_group(sources)
    returned, returns_subject = _returned(sources)
    transformers = _describe(kind) if from_pretrained else _transformers(sources)
    scopes = find_scopes(sources)
    arguments = _read_arguments(scopes, signature, hints, config)
    if transformers is None or from_pretrained or _is_pretrained_config(config):
        choose_values(arguments, has_mesh=not group)
    else:
        transformers = fit_checkpoint(arguments, scopes, transformers, has_mesh=not group)
    parameters = tuple(_parameters(signature, hints, arguments))
    model = _model(scopes, config) if transformers is None else None
    text = "\n".join(ast.unparse(source.tree) for source in sources)
    return Facts(
        module=module,
        attribute=attribute,
        signature=_shown(signature),
        parameters=parameters,
        returned=returned,
        returns_subject=returns_subject,
        own_group=group,
        backend=backend,
        config=None if config is None else arguments.parts[config.name],
        config_class=config.annotation if config is not None and is_config_class(config.annotation) else None,
        model=model,
        weights=_weights(sources) if transformers is None else None,
        seed=next(iter(re.findall(r"manual_seed\((\d+)\)", text)), ""),
        transformers=transformers,
        from_pretrained=from_pretrained,
        builds_whole=model is not None and "'meta'" not in text and not _may_build_on_meta(sources),
        has_source=bool(sources) or from_pretrained,
    )


def _shown(signature: inspect.Signature) -> str:
    """Return the signature on one line, without the defaults that cannot be shown."""
    try:
        return " ".join(str(signature).split())
    except Exception:  # what the __repr__ of a default raises
        parameters = signature.parameters.values()
        bare = [one if one.default is one.empty else one.replace(default=...) for one in parameters]
        return str(signature.replace(parameters=bare)).replace("Ellipsis", "...")


def _read_arguments(
    scopes: Mapping[Source, Names], signature: inspect.Signature, hints: Mapping[str, Any], config: Parameter | None
) -> Reads:
    """Return what is read of each argument, and what its annotation and its default are."""
    arguments = find_reads(scopes)
    for name, one in signature.parameters.items():
        part = arguments.add(((True, name),))
        part.annotation, part.default = hints.get(name, one.annotation), one.default
    if config is not None and is_config_class(config.annotation) and not _is_pretrained_config(config):
        add_fields(arguments.parts[config.name], config.annotation)
    return arguments


def _is_pretrained_config(config: Parameter | None) -> bool:
    kind = None if config is None else config.annotation
    return inspect.isclass(kind) and any(base.__name__.startswith("PreTrained") for base in kind.__mro__)


def _may_build_on_meta(sources: Sequence[Source]) -> bool:
    for node in (node for source in sources for node in ast.walk(source.tree)):
        contexts = [ast.unparse(item) for item in node.items] if isinstance(node, ast.With) else []
        if any(MAY_BE_META.search(text) for text in contexts if not text.startswith(("open(", "safe_open("))):
            return True
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("set_default_device"):
            return True
    return False


def _parameters(signature: inspect.Signature, hints: dict[str, Any], arguments: Reads) -> Iterator[Parameter]:
    """Yield those that must be passed, those that say where the model lies, and sizes."""
    seen: set[str] = set()
    for name, one in signature.parameters.items():
        if one.kind in (one.VAR_POSITIONAL, one.VAR_KEYWORD):
            continue
        annotation = hints.get(name, one.annotation)
        role, value = role_of(name, annotation), arguments.parts.get(name, Reads())
        is_other = role in ("mesh", "group") and (role in seen or bool(OTHER_MESHES.intersection(name.split("_"))))
        is_size = isinstance(one.default, int) and bool(value.expression) and not value.role
        if one.default is one.empty or is_size or (role not in ("", "config") and not is_other):
            expression = value.expression if not role else ""
            yield Parameter(name, role, annotation, one.kind is one.POSITIONAL_ONLY, is_other, expression)
            seen |= set() if is_other else {role}


def _own_group(sources: Sequence[Source]) -> tuple[str, str]:
    for source in sources:
        names = [(call, ast.unparse(call.func).rpartition(".")[2]) for call in source.calls]
        if any(name == "is_initialized" for _, name in names):
            continue  # it uses a group that is there
        for call in (call for call, name in names if name == "init_process_group"):
            given = [*call.args[:1], *(keyword.value for keyword in call.keywords if keyword.arg == "backend")]
            backend = given[0].value if given and isinstance(given[0], ast.Constant) else ""
            return source.place(call), str(backend or "")
    return "", ""


def _returned(sources: Sequence[Source]) -> tuple[tuple[str, ...], bool]:
    """Return the parts of the tuple that the loader returns, and whether it returns a Subject."""
    for node in _own_nodes(sources[0].tree) if sources else ():
        value = node.value if isinstance(node, ast.Return) else None
        if isinstance(value, ast.Call) and ast.unparse(value.func).rpartition(".")[2].lower() == "subject":
            return (), True
        if isinstance(value, ast.Tuple) and len(value.elts) > 1:
            parts = [_part(element) for element in value.elts]
            return tuple(parts if "model" in parts else ["model", *parts[1:]]), False
    return (), False


def _own_nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """Walk the tree without the functions that are defined in it."""
    for node in ast.iter_child_nodes(tree):
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)):
            yield node
            yield from _own_nodes(node)


def _part(element: ast.AST) -> str:
    text = ast.unparse(element.func if isinstance(element, ast.Call) else element).lower()
    for part, words in {"optimizer": ("opt",), "scheduler": ("sched",), "model": ("model", "net", "module")}.items():
        if any(word in text for word in words):
            return part
    return "_"


def _transformers(sources: Sequence[Source]) -> Transformers | None:
    for source in sources:
        for node in ast.walk(source.tree):
            kind = source.resolve(node)
            if inspect.isclass(kind) and _is_transformers(kind):
                return _describe(kind)
    return None


def _is_transformers(kind: Any) -> bool:
    """Return whether this is a class of models that transformers builds from a checkpoint."""
    if not inspect.isclass(kind) or "transformers" not in sys.modules:
        return False
    is_auto = kind.__module__.startswith("transformers.") and kind.__name__.startswith("AutoModel")
    return is_auto or any(base.__name__ == "PreTrainedModel" for base in kind.__mro__[1:])


def _describe(kind: Any) -> Transformers:
    config = getattr(kind, "config_class", None)
    if kind.__name__.startswith("AutoModel") or config is None:
        return Transformers(kind.__name__, "llama")
    auto = f"AutoModel{''.join(re.findall(r'For[A-Z].*$', kind.__name__))}"
    known = hasattr(sys.modules["transformers"], auto)
    return Transformers(auto if known else "AutoModelForCausalLM", config.model_type)


def _model(scopes: Mapping[Source, Names], config: Parameter | None) -> Model | None:
    """Return the first class of the project that is a module and that the loader's own code builds."""
    torch: Any = sys.modules.get("torch")
    found = {source.owner for source in scopes}
    for source, names in scopes.items() if torch is not None else ():
        for call in sorted(source.calls, key=lambda call: call.lineno):
            kind = source.resolve(call.func)
            if inspect.isclass(kind) and issubclass(kind, torch.nn.Module) and kind in found:
                needed: list[Any] = [kind]
                of_config = {name: chain for name, chain in names.items() if config and chain[0][1] == config.name}
                whole = _inline(call, source, of_config, needed)
                text = None if whole is None else re.sub(r"'([^'\"\\]*)'", r'"\1"', ast.unparse(whole))
                return Model(kind, text, _vocabulary(kind, whole), tuple(needed), _too_large(kind, whole, needed))
    return None


def _vocabulary(kind: Any, call: ast.expr | None) -> str:
    """Return the expression that the call, or its class by default, gives the size of the vocabulary."""
    if not isinstance(call, ast.Call):
        return ""
    try:
        signature = inspect.signature(kind)
        bound = signature.bind(*call.args, **{one.arg: one.value for one in call.keywords if one.arg}).arguments
    except (TypeError, ValueError):  # it has **arguments, whose names bind cannot know
        return ""
    if any(one.arg is None for one in call.keywords):
        return ""
    for name, one in signature.parameters.items():
        if "vocab" in name:
            return ast.unparse(bound[name]) if name in bound else str(one.default) if one.default else ""
    return ""


def _too_large(kind: Any, call: ast.expr | None, needed: Sequence[Any]) -> str:
    """Return the largest sizes that the call gives the model, if they are too large for a test."""
    sizes = _sizes(kind, call, {one.__name__: one for one in needed}) if isinstance(call, ast.Call) else {}
    largest = sorted(sizes, key=lambda name: -sizes[name])[:2]
    is_large = math.prod(sizes[name] for name in largest) > MOST_ELEMENTS
    return ", ".join(f"{name}={sizes[name]}" for name in largest) if is_large else ""


def _sizes(kind: Any, call: ast.Call, needed: Mapping[str, Any]) -> dict[str, int]:
    """Return the integers that this call passes, also in configs that it makes, and those that are defaults."""
    given = {one.arg: one.value for one in call.keywords}
    sizes: dict[str, int] = {}
    for place, (name, one) in enumerate(signature_of(kind).items()):
        node = call.args[place] if place < len(call.args) else given.get(name)
        value = one.default if node is None else node.value if isinstance(node, ast.Constant) else None
        if isinstance(node, ast.Call) and ast.unparse(node.func) in needed:
            sizes |= _sizes(needed[ast.unparse(node.func)], node, needed)
        elif isinstance(value, int) and value > 1 and None not in given:
            sizes[name] = value
    return sizes


def _inline(node: ast.expr, source: Source, names: Names, needed: list[Any], depth: int = 4) -> ast.expr | None:
    """Replace local names by their values, until only the config and names of the project are left; else None."""
    assigned = {
        one.targets[0].id: one.value
        for one in ast.walk(source.tree)
        if isinstance(one, ast.Assign) and len(one.targets) == 1 and isinstance(one.targets[0], ast.Name)
    }
    fits = True

    class Inline(ast.NodeTransformer):
        def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
            return _expression(chain_of(node, names)) or self.generic_visit(node)

        def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
            return _expression(chain_of(node, names)) or self.generic_visit(node)

        def visit_Name(self, name: ast.Name) -> ast.expr:
            nonlocal fits
            if (part := _expression(chain_of(name, names))) is not None:
                return part
            if name.id in assigned and depth:
                value = _inline(assigned[name.id], source, names, needed, depth - 1)
                fits = fits and value is not None
                return value or name
            target = source.resolve(name)
            if name.id == "cls" and inspect.isclass(target):
                return ast.Name(target.__name__)
            own = (inspect.isclass(target) or inspect.isfunction(target)) and target.__name__ == name.id
            fits = fits and own and name.id not in source.parameters
            if own and target not in needed:
                needed.append(target)
            return name

    replaced = Inline().visit(ast.parse(ast.unparse(node), mode="eval").body)
    return replaced if fits else None


def _expression(chain: Chain | None) -> ast.expr | None:
    """Return the expression for a part of the config."""
    if not chain:
        return None
    node: ast.expr = ast.Name(chain[0][1])
    for is_attribute, name in chain[1:]:
        node = ast.Attribute(node, name) if is_attribute else ast.Subscript(node, ast.Constant(name))
    return node


def _weights(sources: Sequence[Source]) -> Weights | None:
    """Return the file that the loader reads: by its name in the source, else by the function that reads it."""
    for source in sources:
        for node in ast.walk(source.tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                for library, pattern in WEIGHTS.items():
                    if "*" not in node.value and (found := pattern.search(node.value)):
                        file = found[0]
                        return Weights(library, file if file[0] != "." else f"model{file}", is_parameter=False)
    for source in sources:
        for call in source.calls:
            text = ast.unparse(call.func)
            library = next((READERS[name] for name in READERS if text == name or text.endswith(f".{name}")), "")
            if library:
                glob = "glob" in ast.unparse(source.tree)
                return Weights(library, DEFAULT_FILES[library], is_parameter=not glob)
    return None
