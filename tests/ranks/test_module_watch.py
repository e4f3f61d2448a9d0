"""What the watch sees of the modules: each call, by the author's names, without changing anything."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import checkpoint

from pytest_fsdp_meta.ranks.module_watch import (
    Entered,
    ModuleWatch,
    Seen,
    describe_modules,
    shorten_path,
    tensors_in,
)

CPU = torch.device("cpu")


class Watcher:
    """Keeps what it is told, and answers with ``see`` of a watcher or a function."""

    def __init__(self, see: Callable[[Seen, Tensor], Tensor | None] = lambda *_: None) -> None:
        self.entered: list[Entered] = []
        self.seen: list[Seen] = []
        self._see = see

    def enter(self, entered: Entered) -> None:
        self.entered.append(entered)

    def see(self, seen: Seen, tensor: Tensor) -> Tensor | None:
        self.seen.append(seen)
        return self._see(seen, tensor)


def watched(model: nn.Module, *args: Any) -> tuple[list[Seen], str]:
    """Return what is seen in a forward and a backward, and the problem."""
    watcher = Watcher()
    watch = ModuleWatch(model, watcher, CPU)
    with watch.watching():
        found = next(tensor for _, tensor in tensors_in(model(*args)) if tensor.requires_grad)
        found.sum().backward()
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    return watcher.seen, watch.problem


def short(seen: list[Seen]) -> list[str]:
    return [f"{one.stage} {one.module}#{one.turn}{one.path}" for one in seen]


def test_inputs_outputs_and_gradients_in_order():
    found, problem = watched(nn.Sequential(nn.Linear(2, 2), nn.Tanh()), torch.ones(1, 2))
    assert not problem
    assert short(found) == [
        *("input #0.0", "input 0#0.0", "output 0#0", "input 1#0.0", "output 1#0", "output #0"),
        *("gradient 1#0", "gradient #0", "gradient 0#0"),
    ]


def test_the_calls_of_a_module_are_counted():
    shared = nn.Linear(2, 2)
    found, _ = watched(nn.Sequential(shared, shared), torch.ones(1, 2))
    assert [name for name in short(found) if name.startswith("output 0")] == ["output 0#0", "output 0#1"]
    assert [name for name in short(found) if name.startswith("gradient 0")] == ["gradient 0#1", "gradient 0#0"]


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)

    def forward(self, rows: dict[str, Tensor], *, scale: float, mask: Tensor) -> Any:
        out = self.inner(rows["x"]) * scale
        return {"out": out, "all": (out * 2, [None, "text", mask])}, SimpleNamespace(hidden=out)


def test_nested_arguments_and_results():
    model, watcher = Nested(), Watcher()
    with ModuleWatch(model, watcher, CPU).watching():
        model({"x": torch.ones(1, 2)}, scale=2.0, mask=torch.ones(1, dtype=torch.bool))
    assert [f"{one.stage} {one.path}" for one in watcher.seen if one.module == ""] == [
        *("input .0.x", "input .mask", "output .0.out", "output .0.all.0"),  # neither integers nor other objects
    ]


@dataclass
class Options:
    scale: Any
    mask: Tensor


def test_other_arguments_than_tensors_and_who_makes_the_call():
    class Getting(nn.Module):
        def forward(self, x: Tensor, *given: Any, **named: Any) -> Tensor:
            return x

    class Calling(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Getting()

        def forward(self, x: Tensor) -> Tensor:
            deep = [[[[[x]]]]]
            options = Options(torch.tensor(0.5), x)
            return self.inner(x, None, 2, name="a", options=options, other=SimpleNamespace(), deep=deep)

    watcher = Watcher()
    watch = ModuleWatch(model := Calling(), watcher, CPU)
    with watch.watching():
        model(torch.ones(1, 2))
    assert not watch.problem
    outer, inner = watcher.entered
    assert outer == Entered("", 0, None, {".0": "a tensor of 2 dims"})
    assert (inner.module, inner.turn, inner.caller) == ("inner", 0, "")
    deep = inner.arguments[".deep.0.0.0"]
    assert deep != deep  # nothing is known of it, so that it equals nothing
    assert {path: value for path, value in inner.arguments.items() if not path.startswith(".deep")} == {
        ".0": "a tensor of 2 dims",
        ".1": None,
        ".2": 2,
        ".name": "'a'",
        ".other": "an object of SimpleNamespace",
        ".options.scale": 0.5,
        ".options.mask": "a tensor of 2 dims",
    }
    assert [one.path for one in watcher.seen if one.module == "inner" and one.stage == "input"] == [
        *(".0", ".options.scale", ".options.mask"),
    ]


def test_wrapped_modules_have_the_authors_names():
    model = nn.Sequential(checkpoint_wrapper(nn.Linear(2, 2)), torch.compile(nn.Tanh(), backend="eager"))
    found, problem = watched(model, torch.ones(1, 2))
    assert not problem
    assert {one.module for one in found} == {"", "0", "1"}
    assert {one.turn for one in found} == {0}


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.first, self.second, self.reentrant = nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.Tanh()), reentrant

    def forward(self, x: Tensor) -> Any:
        return checkpoint(self.second, self.first(x), use_reentrant=self.reentrant)


def test_a_forward_that_is_repeated_in_the_backward_is_kept_apart():
    for reentrant in (False, True):
        found, problem = watched(Checkpointed(reentrant), torch.ones(1, 2))
        assert not problem
        names = short(found)
        assert names.count("output second.0#0") == names.count("recomputed output second.0#0") == 1
        assert names.index("gradient #0") < names.index("recomputed input second#0.0")
        assert names.count("gradient second.0#0") == 1


def test_a_write_in_place_leaves_what_was_seen_before():
    class Values:
        def __init__(self) -> None:
            self.sums: dict[str, float] = {}

        def see(self, one: Seen, tensor: Tensor) -> None:
            self.sums[f"{one.stage} {one.module}"] = float(tensor.sum())

    model = nn.Sequential(nn.Linear(1, 2, bias=False), nn.ReLU(inplace=True))
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([[-3.0], [1.0]]))
    values = Values()
    with ModuleWatch(model, Watcher(values.see), CPU).watching():
        model(torch.ones(1, 1)).sum().backward()
    assert (values.sums["output 0"], values.sums["input 1"], values.sums["output 1"]) == (-2.0, -2.0, 1.0)
    assert (values.sums["gradient 1"], values.sums["gradient 0"]) == (2.0, 1.0)


def test_an_error_ends_the_watching_and_not_the_step():
    def see(one: Seen, tensor: Tensor) -> None:
        raise ValueError("cannot read it")

    model = nn.Linear(2, 2)
    watch = ModuleWatch(model, Watcher(see), CPU)
    with watch.watching():
        model(torch.ones(1, 2)).sum().backward()
    assert watch.problem == "input of the model: ValueError: cannot read it"
    assert model.weight.grad is not None


def test_the_class_and_the_line_of_the_forward():
    model = nn.Sequential(Nested(), nn.Tanh())
    facts = describe_modules(model)
    assert facts["0"].kind == "Nested"
    assert (facts["0"].file, facts["0"].line) == (
        "tests/ranks/test_module_watch.py",
        Nested.forward.__code__.co_firstlineno,
    )
    assert facts["1"].file == "torch/nn/modules/activation.py"

    def replaced(x: Tensor) -> Tensor:
        return x

    model[1].forward = replaced
    assert describe_modules(model)["1"].line == replaced.__code__.co_firstlineno
    model[1].forward = len  # has no code
    assert (describe_modules(model)["1"].kind, describe_modules(model)["1"].file) == ("Tanh", "")


def test_a_path_outside_of_all_known_folders_is_whole():
    assert shorten_path("/nowhere/at/all.py") == "/nowhere/at/all.py"


class Summing(nn.Module):
    def forward(self, x: Tensor, pair: tuple[Tensor, Tensor], *, more: dict[str, list[Tensor]], other: Any) -> Tensor:
        assert type(pair) is tuple
        assert isinstance(other, SimpleNamespace)
        return x + 2 * pair[1] + 3 * more["a"][0] + other.kept


def test_other_values_take_the_place_of_inputs_and_of_gradients():
    leaf = torch.ones(1, requires_grad=True)

    def see(seen: Seen, tensor: Tensor) -> Tensor | None:
        return torch.full_like(tensor, 10.0)  # also for outputs, which stay as they are

    watch = ModuleWatch(nn.Sequential(model := Summing()), Watcher(see), CPU)
    with watch.watching():
        out = model(leaf, (leaf, leaf), more={"a": [leaf]}, other=SimpleNamespace(kept=leaf))
        assert out.tolist() == [10 + 20 + 30 + 1]
        out.backward(torch.ones(1))
    assert not watch.problem
    assert leaf.grad is not None
    assert leaf.grad.tolist() == [10 * (1 + 2 + 3 + 1)]
    assert leaf.tolist() == [1]


def test_no_hook_stays_on_a_parameter_that_is_returned():
    class Returning(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self) -> Tensor:
            return self.weight

    model = Returning()
    seen, problem = watched(model)
    assert not problem
    assert [one.stage for one in seen] == ["output", "gradient"]
    assert not model.weight._backward_hooks


def test_a_view_from_before_a_write_to_its_base():
    """Torch crashes where a hook is set on such a view of a tensor that has one."""

    class Writing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            y = self.linear(x)
            view = y.view(2, 2, 4)
            y.relu_()
            return view

    seen, problem = watched(Writing(), torch.randn(4, 4))
    assert not problem
    assert "gradient linear#0" in short(seen)


def test_random_numbers_belong_to_the_module_that_draws_them():
    class Failing(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise ValueError

    class Drawing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.before, self.failing, self.after = nn.Linear(4, 4), Failing(), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            x = self.before(x)
            try:
                x = self.failing(x)
            except ValueError:
                x = x + torch.rand(4)
            return self.after(x)

    model = nn.Sequential(nn.Linear(4, 4), Drawing())
    watch = ModuleWatch(model, Watcher(), CPU)
    with watch.watching():
        model(torch.randn(4, 4))
    assert list(watch.draws) == ["1"]
    assert not watch.problem


class Settings(nn.Module):
    """Attributes that the class reads, in several ways, and others that configure nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.eps, self.gain, self.scale, self.shift = 1e-5, 2.0, 0.5, 0.1
        self.started, self.last, self.use_cache, self.calls = 3.5, 0.0, True, 0
        self.is_causal = self.verbose = True

    @property
    def doubled(self) -> float:
        return 2 * self.gain

    def forward(self, x: Tensor) -> Tensor:
        def inner(y: Tensor) -> Tensor:
            return y * self.scale + getattr(self, "shift")  # noqa: B009

        self.calls += 1
        self.last = float(x.sum())
        return inner(x) * self.doubled / self.eps if self.use_cache else x


def test_settings_are_what_the_class_reads_or_attention_does_and_no_forward_writes():
    settings = describe_modules(Settings())[""].settings
    assert settings == {"eps": "1e-05", "gain": "2.0", "scale": "0.5", "shift": "0.1", "is_causal": "True"}
