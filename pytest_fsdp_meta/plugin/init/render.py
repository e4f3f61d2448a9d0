"""Write the test file for a loader from what is known of it. What is not known is a TODO that says what to write."""

from __future__ import annotations

import ast
import inspect
import keyword
from collections.abc import Callable
from typing import Any

from pytest_fsdp_meta.plugin.init.config import VARIABLES, roles_of
from pytest_fsdp_meta.plugin.init.facts import Facts, Parameter
from pytest_fsdp_meta.plugin.init.layout import call, comment, function, import_lines, indent, quoted, todo
from pytest_fsdp_meta.plugin.init.reads import EMPTY, Reads
from pytest_fsdp_meta.plugin.init.values import FROM_RANK, SIZES, annotation_text, guess

TOKENS = {"tokens", "input_ids", "ids", "idx", "token_ids", "inputs"}
"""Names of a parameter of ``forward`` that gets tokens."""
TAKEN = {
    *{"pytest", "torch", "safetensors", "fsdp", "checkpoint", "model", "optimizer", "scheduler", "folder", "subject"},
    *{"make_config", "build_unsharded", "batch", "loss", "SimpleNamespace", "Subject", "fsdp_conformance", "step"},
    *{"tiny_checkpoint", "DistributedConfig", "AutoConfig", "tokens", "logits", "predicted", "generator"},
    *{"todo", "sizes", "reference"},
}
"""Names that the test file uses itself; a loader with such a name is imported under another one."""
PARTS = ("model", "optimizer", "scheduler")
"""What of a returned tuple goes into the Subject."""


class TestFile:
    """The text of a test file: ``text``. Where its author has to fill something in, it calls ``todo``, which fails."""

    __test__ = False

    def __init__(self, facts: Facts, test: str, is_own: Callable[[str], bool]) -> None:
        self._facts = facts
        self._imports = {("pytest_fsdp_meta", "fsdp_conformance")}
        self._functions: list[str] = []
        self._config = facts.role("config")
        self._config_takes_folder = False
        self._config_variables: list[tuple[str, str, str]] = []
        self._has_todo = False
        self._has_reference = False
        loader = self._import_loader(test)
        values = [self._argument(one) for one in facts.parameters]
        self.given = {one.name: value for one, value in zip(facts.parameters, values, strict=True) if value}
        """Parameter -> the expression that the test passes for it."""
        self._write_reference()
        self._takes_checkpoint = self._write_checkpoint()
        body = self._write_test(test, loader, values)
        doc = f"Check what {facts.module}:{facts.attribute} loads."
        if self._has_todo:
            doc += "\n\nReplace each todo(...) by what it says; the test fails until then.\n"
            self._imports.add(("pytest", ""))
            body_of_todo = ['pytest.fail(f"TODO: {what}", pytrace=False)']
            self._functions.insert(0, function("def todo(what):", "Fail before the loader is called.", body_of_todo))
        head = f'"""{doc}"""\n\n{import_lines(self._imports, is_own)}'
        self.text = "\n\n\n".join([head, *self._functions, body]) + "\n"

    def _todo(self, start: str, what: str, end: str = "", within: int = 4) -> list[str]:
        self._has_todo = True
        return todo(start, what, end, within)

    def _import_loader(self, test: str) -> str:
        """Import the loader; return the name by which the test calls it."""
        first, dot, rest = self._facts.attribute.partition(".")
        collected = first.lower().startswith("test")  # pytest would take it for a test
        alias = f"loader_{first}" if collected or first in TAKEN else first
        self._imports.add((self._facts.module, first if alias == first else f"{first} as {alias}"))
        return f"{alias}{dot}{rest}"

    def _argument(self, one: Parameter) -> str:
        """Return the expression that the test passes for a parameter; "" if its author has to write it."""
        facts, as_text = self._facts, one.annotation in (str, "str")
        if one.is_other or (one.role in ("mesh", "group") and facts.own_group):
            return ""
        if one.role in FROM_RANK:
            value = FROM_RANK[one.role]
            return f"str({value})" if one.role == "device" and as_text else value
        if one.role == "checkpoint":
            is_file = facts.weights is not None and facts.weights.is_parameter
            value = f'checkpoint / "{facts.weights.file}"' if facts.weights and is_file else "checkpoint"
            return f"str({value})" if as_text else value
        if one.role == "config":
            if facts.transformers and any(
                base.__name__.startswith("PreTrained") for base in _bases(facts.config_class)
            ):
                self._imports.add(("transformers", "AutoConfig"))
                return "AutoConfig.from_pretrained(checkpoint)"
            self._write_config(one)
            return f"make_config({', '.join(self._config_arguments('checkpoint'))})"
        return one.expression or guess(one.name, one.annotation, "checkpoint")

    def _config_arguments(self, folder: str) -> list[str]:
        """Return what a rank passes to ``make_config``."""
        given = [folder] if self._config_takes_folder else []
        return given + [f"{name}={value}" for name, _, value in self._config_variables]

    def _write_config(self, one: Parameter) -> None:
        facts = self._facts
        kind, reads = facts.config_class, facts.config
        if reads is None or not (reads.parts or reads.unpacked or kind):
            what = f"the {one.name} that {facts.attribute} gets, with small sizes and with paths to this folder"
            body = self._todo("return ", what)
            self._config_takes_folder = True
        else:
            self._config_variables = sorted({VARIABLES[role] for role in roles_of(reads)})
            value = self._value(reads, one.name, 4)
            body = [f"return {value[0]}", *value[1:]]
            self._config_takes_folder = any("folder" in line.partition("todo(")[0] for line in body)
        doc = f"Return a {one.name} with small sizes{' and paths to this folder' * self._config_takes_folder}."
        taken = ["folder"] * self._config_takes_folder
        taken += [f"{name}={default}" for name, default, _ in self._config_variables]
        self._functions.append(function(f"def make_config({', '.join(taken)}):", doc, body))

    def _value(self, reads: Reads, path: str, within: int) -> list[str]:
        """Return the lines of an expression that has all that is read; a todo for what cannot be guessed."""
        by_name, constructor = reads.attributes, ""
        if reads.kind is not None:
            constructor = reads.kind.__name__
            self._imports.add((reads.kind.__module__, constructor))
        elif by_name:
            constructor = "SimpleNamespace"
            self._imports.add(("types", "SimpleNamespace"))
        lines = []
        for name, below in reads.parts.items():
            where, start = (f"{path}.{name}", f"{name}=") if by_name else (f"{path}['{name}']", f'"{name}": ')
            if below.is_kept:
                continue
            if below.expression:
                self._imports |= {("torch", "")} if below.expression.startswith("torch.") else set()
                lines.append(f"{start}{below.expression},")
            elif below.parts or below.unpacked or below.kind:
                value = self._value(below, where, within + 4)
                lines += [start + value[0], *value[1:]]
                lines[-1] += ","
            else:
                lines += self._todo(start, f"a value for {where}{_describe(name, below)}", ",", within + 4)
        start, end = (f"{constructor}(", ")") if by_name else ("{", "}")
        return [start, *indent(lines), end] if lines else [start + end]

    def _build(self) -> tuple[list[str], str] | None:
        """Return the lines before the call that builds the model, and the call; None if only the loader can."""
        model, config = self._facts.model, self._config
        if model is None or model.call is None:
            return None
        for needed in model.needs:
            self._imports.add((needed.__module__, needed.__name__))
        names = {node.id for node in ast.walk(ast.parse(model.call)) if isinstance(node, ast.Name)}
        if config is None or config.name not in names:
            return [], model.call
        return [f"{config.name} = make_config({'folder' * self._config_takes_folder})"], model.call

    def _has_folder(self) -> bool:
        """Return whether the loader learns where its weights are from what the test passes."""
        return self._facts.role("checkpoint") is not None or self._config_takes_folder

    def _needs_folder(self) -> bool:
        return self._has_folder() and (self._facts.weights is not None or self._config_takes_folder)

    def _write_reference(self) -> None:
        """Write the function that builds the reference, where the class of the model is known."""
        facts = self._facts
        if facts.model is None:
            return
        built = self._build() if self._has_folder() or facts.weights is None else None
        if built is None:
            return  # the test has a todo for it
        before, made = built
        seeded = [f"torch.manual_seed({facts.seed})"] if facts.seed and facts.weights is None else []
        self._imports |= {("torch", "")} if seeded else set()
        load = [f"model = {made}", self._load(), "return model"] if facts.weights else [f"return {made}"]
        doc = "Return the same model on one device, which the loaded one must equal."
        head = f"def build_unsharded({'folder' * self._needs_folder()}):"
        self._functions.append(function(head, doc, [*before, *seeded, *load]))
        self._has_reference = True

    def _load(self) -> str:
        assert self._facts.weights is not None
        file = f'folder / "{self._facts.weights.file}"'
        if self._facts.weights.library == "safetensors":
            return f"safetensors.torch.load_model(model, {file})"
        self._imports.add(("torch", ""))
        return f"model.load_state_dict(torch.load({file}))"

    def _write_checkpoint(self) -> bool:
        """Write the fixture ``checkpoint``; return whether the test needs one."""
        facts = self._facts
        if facts.transformers is not None:
            self._write_tiny_checkpoint()
            return True
        if not self._has_folder():
            return False
        built = self._build()
        make = 'folder = tmp_path_factory.mktemp("checkpoint")'
        if facts.weights is None or built is None:
            file = f"{facts.weights.file} with small weights" if facts.weights else f"what {facts.attribute} reads"
            what = f"a folder with {file}; tmp_path_factory.mktemp('checkpoint') makes an empty one"
            body = self._todo("return ", what)
        else:
            library, file = facts.weights.library, f'folder / "{facts.weights.file}"'
            self._imports.add(("safetensors.torch" if library == "safetensors" else "torch", ""))
            start = "safetensors.torch.save_model" if library == "safetensors" else "torch.save"
            saved = built[1] if library == "safetensors" else f"{built[1]}.state_dict()"
            body = [*self._refuse_large(), make, *built[0], *call(start, [saved, file]), "return folder"]
        doc = f"Return a folder with small weights for {facts.attribute}."
        self._write_fixture(doc, body)
        return True

    def _write_tiny_checkpoint(self) -> None:
        kind = self._facts.transformers
        assert kind is not None
        self._imports.add(("pytest_fsdp_meta.transformers", "tiny_checkpoint"))
        arguments = [f'"{kind.model_type}"', 'tmp_path_factory.mktemp("tiny") / "model"']
        before = []
        if kind.auto_class != "AutoModelForCausalLM":
            self._imports.add(("transformers", kind.auto_class))
            arguments.append(f"auto_class={kind.auto_class}")
        if kind.sizes.refused:
            before = self._todo("", kind.sizes.refused)
        else:
            arguments += [f"{name}={literal(value)}" for name, value in kind.sizes.values.items()]
        if kind.sizes.unknown:
            before = self._todo("sizes = ", kind.sizes.unknown)
            arguments.append("**sizes")
        doc = "Return a tiny checkpoint of this type: a model_type as in config.json."
        self._write_fixture(doc, [*before, *call("return tiny_checkpoint", arguments)])

    def _write_fixture(self, doc: str, body: list[str]) -> None:
        self._imports.add(("pytest", ""))
        head = '@pytest.fixture(scope="session")\ndef checkpoint(tmp_path_factory):'
        self._functions.append(function(head, doc, body))

    def _write_test(self, test: str, loader: str, values: list[str]) -> str:
        facts = self._facts
        body, given = [] if self._takes_checkpoint else self._refuse_large(), []
        if facts.model is not None and not self._has_reference:
            what = f"a function that returns a {facts.model.kind.__name__} without sharding, with the weights that"
            body += self._todo("reference = ", f"{what} {facts.attribute} loads")
        for one, value in zip(facts.parameters, values, strict=True):
            name = f"{one.name}_" if one.name in TAKEN or keyword.iskeyword(one.name) else one.name
            if not value:
                body += self._todo(f"{name} = ", f"what {facts.attribute} gets as {one.name}{self._why(one)}")
                value = name
            elif one is self._config and self._config_variables:
                body += call(f"{name} = make_config", self._config_arguments("checkpoint"))
                value = name
            given.append(value if one.positional else f"{one.name}={value}")
        if facts.from_pretrained:
            given = ["checkpoint"]
            self._imports.add(("transformers.distributed", "DistributedConfig"))
            given.append("distributed_config=DistributedConfig(fsdp_size=fsdp.world_size)")
        names = [name if name in PARTS else "_" for name in facts.returned or ("model",)]
        if facts.returns_subject:
            body += call(f"return {loader}", given)
        else:
            body += [*call(f"{', '.join(names)} = {loader}", given), *self._subject(names)]
        group = '(process_group="loader")' if facts.own_group else ""
        arguments = "fsdp, checkpoint" if self._takes_checkpoint else "fsdp"
        head = [f"@fsdp_conformance{group}", f"def {test}({arguments}):  # runs on every rank"]
        return "\n".join([*head, *indent(body)])

    def _refuse_large(self) -> list[str]:
        """Return a todo for a loader that builds a large model, whatever the test does."""
        model = self._facts.model
        if model is None or not model.too_large:
            return []
        what = f"{model.kind.__name__} has {model.too_large}; let {self._facts.attribute} take smaller sizes"
        return self._todo("", f"{what} from an argument")

    def _why(self, one: Parameter) -> str:
        """Return why the test cannot pass the mesh of the rank."""
        if one.is_other and not self._facts.own_group:
            return "; fsdp.mesh has the dimensions of @fsdp_conformance(mesh=...)"
        return f" (no mesh exists before {self._facts.own_group} makes the process group)" if one.role else ""

    def _subject(self, names: list[str]) -> list[str]:
        """Return the lines of the return statement."""
        facts = self._facts
        built = [f"{name}={name}" for name in PARTS[1:] if name in names]
        if facts.transformers is not None:
            self._imports.add(("pytest_fsdp_meta.transformers", "subject"))
            return call("return subject", ["model", "checkpoint", *built])
        self._imports.add(("pytest_fsdp_meta", "Subject"))
        lines = ["model,", *(f"{part}," for part in built)]
        if facts.model is not None:
            build = "lambda: build_unsharded(checkpoint)" if self._needs_folder() else "build_unsharded"
            lines.append(f"reference={build if self._has_reference else 'reference'},")
            if facts.weights is None and not facts.seed:
                lines.append('drawn="*",  # its source loads no weights, so they are random')
        else:
            what = "reference=lambda: ..., a function that builds the same model on one device; without it, names"
            lines += comment(f"Optional: {what}, shapes and values are not compared")
        if facts.builds_whole:
            lines.append("whole_while_loading=True,  # its source does not use the meta device")
        return ["return Subject(", *indent([*lines, *self._training()]), ")"]

    def _training(self) -> list[str]:
        """Return the fields for training: written where the model takes tokens, else a TODO."""
        kind = None if self._facts.model is None else self._facts.model.kind
        taken = [] if kind is None else list(inspect.signature(kind.forward).parameters.values())[1:]
        required = [one.name for one in taken if one.default is one.empty and one.kind is one.POSITIONAL_OR_KEYWORD]
        vocabulary = self._vocabulary()
        if len(required) == 1 and required[0] in TOKENS and vocabulary:
            self._write_batch(required[0], vocabulary)
            return ["batch=batch,", "loss=loss,"]
        forward = f" ({kind.__name__}.forward gets {', '.join(required)})" if kind is not None and required else ""
        what = f"batch=lambda step: {{...}}, a dict of tensors with the rows of all ranks{forward}, and loss=lambda"
        return comment(
            f"Optional: {what} model, batch: ...; without them, gradients, losses and resuming are not compared"
        )

    def _vocabulary(self) -> str:
        """Return the size of the vocabulary of the model that is built; "" if that is not known."""
        facts = self._facts
        if facts.model is None:
            return ""
        if facts.model.vocabulary.isdecimal():
            return facts.model.vocabulary
        named = facts.config is not None and any("vocab" in name for name in _leaves(facts.config))
        return str(SIZES["vocab"]) if named else ""

    def _write_batch(self, name: str, vocabulary: str) -> None:
        self._imports.add(("torch", ""))
        kind = self._facts.model.kind.__name__ if self._facts.model is not None else ""
        batch = [
            "generator = torch.Generator().manual_seed(step)",
            f'return {{"{name}": torch.randint({vocabulary}, (8, 16), generator=generator)}}',
        ]
        loss = [
            f'logits, tokens = model(batch["{name}"]), batch["{name}"]',
            "predicted = logits[:, :-1].flatten(0, 1)",
            "return torch.nn.functional.cross_entropy(predicted, tokens[:, 1:].flatten())",
        ]
        doc = "Return the rows of all ranks for a step; each rank trains on its own."
        self._functions.append(function("def batch(step):", doc, batch))
        doc = f"Return the loss, if {kind} returns logits; else write your own."
        self._functions.append(function("def loss(model, batch):", doc, loss))


def _bases(kind: Any) -> tuple[type, ...]:
    return kind.__mro__ if inspect.isclass(kind) else ()


def literal(value: Any) -> str:
    """Return the value as ruff writes it."""
    if isinstance(value, dict):
        return f"{{{', '.join(f'{literal(key)}: {literal(one)}' for key, one in value.items())}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(literal, value))}]"
    return quoted(value) if isinstance(value, str) else repr(value)


def _describe(name: str, part: Reads) -> str:
    """Return what is known of a part without a value: its type, examples, and what reads it."""
    kind = annotation_text(part.annotation).rpartition(".")[2] if part.annotation is not EMPTY else ""
    example = ", such as 'float32' or torch.float32" * ("dtype" in name.lower())
    return f"{f' ({kind})' * bool(kind)}{example}{f'; {part.reader} reads it' * bool(part.reader)}"


def _leaves(reads: Reads) -> list[str]:
    return [*reads.parts, *(leaf for below in reads.parts.values() for leaf in _leaves(below))]
