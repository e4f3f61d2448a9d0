"""Write the test file for a loader from what was seen of it. What was not seen is a TODO that says what to write."""

from __future__ import annotations

import ast
import keyword
from collections.abc import Callable

from pytest_fsdp_meta.plugin.init.layout import call, comment, function, import_lines, indent, literal, todo
from pytest_fsdp_meta.plugin.init.pretrained import Transformers
from pytest_fsdp_meta.plugin.init.probe import Seen
from pytest_fsdp_meta.plugin.init.recording import Part
from pytest_fsdp_meta.plugin.init.values import VARIABLES
from pytest_fsdp_meta.plugin.init.watching import INDEX, MAX_PARAMETERS, SHARDS

TOKENS = {"tokens", "input_ids", "ids", "idx", "token_ids", "inputs"}
"""Names of a parameter of ``forward`` that gets tokens."""
TAKEN = {
    *{"ast", "json", "Path", "pytest", "torch", "safetensors", "fsdp", "checkpoint", "model", "optimizer", "scheduler"},
    *{"make_config", "build_unsharded", "batch", "loss", "SimpleNamespace", "Subject", "fsdp_conformance", "step"},
    *{"tiny_checkpoint", "DistributedConfig", "AutoConfig", "tokens", "logits", "predicted", "generator"},
    *{"todo", "left", "reference", "folder", "subject", "weights", "shards", "index"},
}
"""Names that the test file uses itself; a loader with such a name is imported under another one."""
PARTS = ("model", "optimizer", "scheduler")
"""What of a returned tuple goes into the Subject."""
TODO = [
    "nodes = ast.walk(ast.parse(Path(__file__).read_text()))",
    "calls = [node for node in nodes if isinstance(node, ast.Call)]",
    'todos = [call for call in calls if ast.unparse(call.func) == "todo"]',
    "todos.sort(key=lambda call: call.lineno)",
    'lines = [f"TODO in line {one.lineno}: {one.args[0].value}" for one in todos]',
    'pytest.fail("\\n".join(lines), pytrace=False)',
]
"""What ``todo`` does in the test file: it lists all of them."""


class TestFile:
    """The text of a test file: ``text``. Where its author has to fill something in, it calls ``todo``, which fails."""

    __test__ = False

    def __init__(self, module: str, attribute: str, seen: Seen, test: str, is_own: Callable[[str], bool]) -> None:
        self._seen = seen
        self._attribute = attribute
        self._imports = {("pytest_fsdp_meta", "fsdp_conformance")}
        self._functions: list[str] = []
        self._config = seen.config
        self._config_takes_folder = False
        self._config_variables: list[tuple[str, str, str]] = []
        self._has_todo = False
        self._from_pretrained = seen.transformers is not None and attribute.endswith(".from_pretrained")
        loader = self._import_loader(module, test)
        values = [self._argument(one) for one in seen.parameters]
        self.given = {one.name: value for one, value in zip(seen.parameters, values, strict=True) if value}
        """Parameter -> the expression that the test passes for it."""
        self._has_reference = self._write_reference()
        self._takes_checkpoint = self._write_checkpoint()
        body = self._write_test(test, loader, values)
        doc = f"Check what {module}:{attribute} loads."
        if self._has_todo:
            doc += "\n\nReplace each todo(...) by what it says; the test fails until then.\n"
            self._imports |= {("pytest", ""), ("ast", ""), ("pathlib", "Path")}
            what = "Fail with all that is left to do, before the loader is called."
            self._functions.insert(0, function("def todo(what):", what, TODO))
        head = f'"""{doc}"""\n\n{import_lines(self._imports, is_own)}'
        self.text = "\n\n\n".join([head, *self._functions, body]) + "\n"

    def _todo(self, start: str, what: str, end: str = "", within: int = 4) -> list[str]:
        self._has_todo = True
        return todo(start, what, end, within)

    def _import_loader(self, module: str, test: str) -> str:
        """Import the loader; return the name by which the test calls it."""
        first, dot, rest = self._attribute.partition(".")
        collected = first.lower().startswith("test")  # pytest would take it for a test
        alias = f"loader_{first}" if collected or first in TAKEN else first
        self._imports.add((module, first if alias == first else f"{first} as {alias}"))
        return f"{alias}{dot}{rest}"

    def _argument(self, one: Part) -> str:
        """Return the expression that the test passes for a parameter; "" if its author has to write it."""
        if one.role in ("mesh", "group") and self._seen.group:
            return ""
        if one is not self._config:
            return one.expression
        if one.expression:
            self._imports.add(("transformers", "AutoConfig"))
            return one.expression
        self._write_config(one)
        return f"make_config({', '.join(self._config_arguments('checkpoint'))})"

    def _config_arguments(self, folder: str) -> list[str]:
        """Return what a rank passes to ``make_config``."""
        given = [folder] if self._config_takes_folder else []
        return given + [f"{name}={value}" for name, _, value in self._config_variables]

    def _write_config(self, one: Part) -> None:
        if not (one.parts or one.kind):
            what = f"the {one.name} that {self._attribute} gets, with small sizes and with paths to this folder"
            body = self._todo("return ", what)
            self._config_takes_folder = True
        else:
            roles = {part.role for part in one.walk() if part.role in VARIABLES and not part.is_kept}
            self._config_variables = sorted({VARIABLES[role] for role in roles})
            value = self._value(one, 4)
            body = [f"return {value[0]}", *value[1:]]
            self._config_takes_folder = any("folder" in line.partition("todo(")[0] for line in body)
        doc = f"Return a {one.name} with small sizes{' and paths to this folder' * self._config_takes_folder}."
        taken = ["folder"] * self._config_takes_folder
        taken += [f"{name}={default}" for name, default, _ in self._config_variables]
        self._functions.append(function(f"def make_config({', '.join(taken)}):", doc, body))

    def _value(self, whole: Part, within: int) -> list[str]:
        """Return the lines of an expression that has all that is read; a todo for what was not seen."""
        constructor = "SimpleNamespace" if whole.attributes else ""
        if whole.kind is not None:
            self._imports.add(whole.kind)
            constructor = whole.kind[1]
        elif constructor:
            self._imports.add(("types", constructor))
        lines = []
        for name, part in whole.parts.items():
            start = f"{name}=" if constructor else f'"{name}": '
            if part.is_kept:
                continue
            if part.expression:
                self._imports |= {("torch", "")} if part.expression.startswith("torch.") else set()
                lines.append(f"{start}{part.expression},")
            elif part.parts or part.kind:
                value = self._value(part, within + 4)
                lines += [start + value[0], *value[1:]]
                lines[-1] += ","
            else:
                lines += self._todo(start, f"a value for {part.path}{_describe(part)}", ",", within + 4)
        start, end = (f"{constructor}(", ")") if constructor else ("{", "}")
        return [start, *indent(lines), end] if lines else [start + end]

    def _build(self) -> tuple[list[str], str] | None:
        """Return the lines before the call that builds the model, and the call; None if only the loader can."""
        model, config = self._seen.model, self._config
        if model is None or model.call is None:
            return None
        self._imports |= set(model.needs)
        names = {node.id for node in ast.walk(ast.parse(model.call)) if isinstance(node, ast.Name)}
        if config is None or config.name not in names:
            return [], model.call
        return [f"{config.name} = make_config({'folder' * self._config_takes_folder})"], model.call

    def _has_folder(self) -> bool:
        """Return whether the loader learns where its weights are from what the test passes."""
        return self._seen.role("checkpoint") is not None or self._config_takes_folder

    def _needs_folder(self) -> bool:
        return self._has_folder() and (self._seen.weights is not None or self._config_takes_folder)

    def _write_reference(self) -> bool:
        """Write the function that builds the reference, where the class of the model is known; return whether."""
        seen = self._seen
        built = self._build() if self._has_folder() or seen.weights is None else None
        if built is None:
            return False  # the test has a todo for it
        before, made = built
        load = [f"model = {made}", *self._load(), "return model"] if seen.weights else [f"return {made}"]
        doc = "Return the same model on one device, which the loaded one must equal."
        head = f"def build_unsharded({'folder' * self._needs_folder()}):"
        self._functions.append(function(head, doc, [*before, *load]))
        return True

    def _load(self) -> list[str]:
        assert self._seen.weights is not None
        name = self._seen.weights.file
        if name.endswith(INDEX):
            self._imports.add(("safetensors.torch", ""))
            load = "model.load_state_dict(safetensors.torch.load_file(shard), strict=False)"
            return ['for shard in folder.glob("*.safetensors"):', f"    {load}"]
        if self._seen.weights.library == "safetensors":
            return [f'model.load_state_dict(safetensors.torch.load_file(folder / "{name}"))']
        self._imports.add(("torch", ""))
        return [f'model.load_state_dict(torch.load(folder / "{name}"))']

    def _write_checkpoint(self) -> bool:
        """Write the fixture ``checkpoint``; return whether the test needs one."""
        seen = self._seen
        if seen.transformers is not None:
            self._write_tiny_checkpoint(seen.transformers)
            return True
        if not self._has_folder():
            return False
        built = self._build()
        if seen.weights is None or built is None:
            file = f"{seen.weights.file} with small weights" if seen.weights else f"what {self._attribute} reads"
            what = f"a folder with {file}; tmp_path_factory.mktemp('checkpoint') makes an empty one"
            body = self._refuse_large() or self._todo("return ", what)
        else:
            make = 'folder = tmp_path_factory.mktemp("checkpoint")'
            self._imports.add(("torch", ""))
            build = [make, "torch.manual_seed(0)", *built[0]]
            body = [*self._refuse_large(), *build, *self._save(built[1]), "return folder"]
        self._write_fixture(f"Return a folder with small weights for {self._attribute}.", body)
        return True

    def _save(self, model: str) -> list[str]:
        """Return the lines that write the weights as the loader reads them."""
        assert self._seen.weights is not None
        name, is_torch = self._seen.weights.file, self._seen.weights.library == "torch"
        self._imports.add(("torch" if is_torch else "safetensors.torch", ""))
        if is_torch:
            return call("torch.save", [f"{model}.state_dict()", f'folder / "{name}"'])
        # With both names of a tie, as loaders may read either. safetensors refuses tensors that share memory.
        build = f"model = {model}"
        weights = "weights = {name: value.clone() for name, value in model.state_dict().items()}"
        if not name.endswith(INDEX):
            return [build, weights, f'safetensors.torch.save_file(weights, folder / "{name}")']
        self._imports.add(("json", ""))
        return [
            build,
            weights,
            f'shards = ["{SHARDS[0]}", "{SHARDS[1]}"]',
            "index = {name: shards[number % 2] for number, name in enumerate(weights)}",
            "for shard in shards:",
            "    part = {name: weights[name] for name in index if index[name] == shard}",
            "    safetensors.torch.save_file(part, folder / shard)",
            'text = json.dumps({"metadata": {}, "weight_map": index})',
            f'(folder / "{name}").write_text(text)',
        ]

    def _write_tiny_checkpoint(self, kind: Transformers) -> None:
        self._imports.add(("pytest_fsdp_meta.transformers", "tiny_checkpoint"))
        arguments = [f'"{kind.model_type}"', 'tmp_path_factory.mktemp("tiny") / "model"']
        if kind.auto_class != "AutoModelForCausalLM":
            self._imports.add(("transformers", kind.auto_class))
            arguments.append(f"auto_class={kind.auto_class}")
        before = self._todo("", kind.refused) if kind.refused else []
        arguments += [f"{name}={literal(value)}" for name, value in kind.sizes.items() if not kind.refused]
        doc = "Return a tiny checkpoint of this type: a model_type as in config.json."
        self._write_fixture(doc, [*before, *call("return tiny_checkpoint", arguments)])

    def _write_fixture(self, doc: str, body: list[str]) -> None:
        self._imports.add(("pytest", ""))
        head = '@pytest.fixture(scope="session")\ndef checkpoint(tmp_path_factory):'
        self._functions.append(function(head, doc, body))

    def _write_test(self, test: str, loader: str, values: list[str]) -> str:
        seen = self._seen
        body, given = [] if self._takes_checkpoint else self._refuse_large(), []
        if seen.model is not None and not self._has_reference:
            what = f"a function that returns a {seen.model.name} without sharding, with the weights that"
            body += self._todo("reference = ", f"{what} {self._attribute} loads")
        for one, value in zip(seen.parameters, values, strict=True):
            name = f"{one.name}_" if one.name in TAKEN or keyword.iskeyword(one.name) else one.name
            if not value:
                body += self._todo(f"{name} = ", f"what {self._attribute} gets as {one.name}{self._why(one)}")
                value = name
            elif one is self._config and self._config_variables:
                body += call(f"{name} = make_config", self._config_arguments("checkpoint"))
                value = name
            given.append(value if one.is_positional else f"{one.name}={value}")
        if seen.error and not self._has_todo:
            body += self._todo("", f"check all values, as {self._attribute} failed with them: {seen.error}")
        if self._from_pretrained:
            self._imports.add(("transformers.distributed", "DistributedConfig"))
            given = ["checkpoint", "distributed_config=DistributedConfig(fsdp_size=fsdp.world_size)"]
        names = [name if name in PARTS else "_" for name in seen.returned or ("model",)]
        if seen.returns_subject:
            body += call(f"return {loader}", given)
        else:
            body += [*call(f"{', '.join(names)} = {loader}", given), *self._subject(names)]
        group = '(process_group="loader")' if seen.group else ""
        arguments = "fsdp, checkpoint" if self._takes_checkpoint else "fsdp"
        head = [f"@fsdp_conformance{group}", f"def {test}({arguments}):  # runs on every rank"]
        return "\n".join([*head, *indent(body)])

    def _refuse_large(self) -> list[str]:
        """Return a todo for a loader that builds a large model, whatever the test does."""
        model = self._seen.model
        if model is None or model.parameters <= MAX_PARAMETERS:
            return []
        what = f"{model.name} has {model.parameters:,} parameters; let {self._attribute} take smaller sizes"
        return self._todo("", f"{what} from an argument")

    def _why(self, one: Part) -> str:
        """Return why the test cannot pass the mesh of the rank."""
        if one.is_other and not self._seen.group:
            return "; fsdp.mesh has the dimensions of @fsdp_conformance(mesh=...)"
        return f" (no mesh exists before {self._seen.group} makes the process group)" if one.role else ""

    def _subject(self, names: list[str]) -> list[str]:
        """Return the lines of the return statement."""
        seen = self._seen
        built = [f"{name}={name}" for name in PARTS[1:] if name in names]
        if seen.transformers is not None:
            self._imports.add(("pytest_fsdp_meta.transformers", "subject"))
            return call("return subject", ["model", "checkpoint", *built])
        self._imports.add(("pytest_fsdp_meta", "Subject"))
        lines = ["model,", *(f"{part}," for part in built)]
        if seen.model is not None:
            build = "lambda: build_unsharded(checkpoint)" if self._needs_folder() else "build_unsharded"
            lines.append(f"reference={build if self._has_reference else 'reference'},")
            if seen.weights is None:
                what = f'"*" if {self._attribute} draws all weights, as it opened no file of weights; if it loads them,'
                lines += self._todo("drawn=", f"{what} delete this line and let the reference load them", ",", 8)
        else:
            what = "reference=lambda: ..., a function that builds the same model on one device; without it, names"
            lines += comment(f"Optional: {what}, shapes and values are not compared")
        return ["return Subject(", *indent([*lines, *self._training()]), ")"]

    def _training(self) -> list[str]:
        """Return the fields for training: written where the model takes tokens, else an optional comment."""
        model = self._seen.model
        if model is not None and len(model.forward) == 1 and model.forward[0] in TOKENS and model.vocabulary:
            self._write_batch(model.forward[0], model.vocabulary, model.name)
            return ["batch=batch,", "loss=loss,"]
        known = model is not None and model.forward
        forward = f" ({model.name}.forward gets {', '.join(model.forward)})" if model is not None and known else ""
        what = f"batch=lambda step: {{...}}, a dict of tensors with the rows of all ranks{forward}, and loss=lambda"
        return comment(
            f"Optional: {what} model, batch: ...; without them, gradients, losses and resuming are not compared"
        )

    def _write_batch(self, name: str, vocabulary: int, kind: str) -> None:
        self._imports.add(("torch", ""))
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


def _describe(part: Part) -> str:
    """Return what is known of a part without a value: its type, examples, and what reads it."""
    kind = str(part.annotation).rpartition(".")[2]
    example = ", such as 'float32' or torch.float32" * ("dtype" in part.name.lower())
    return f"{f' ({kind})' * bool(kind)}{example}{f'; {part.reader} reads it' * bool(part.reader)}"
