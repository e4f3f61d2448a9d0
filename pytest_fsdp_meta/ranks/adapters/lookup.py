"""Look up which part of a tensor this rank holds, by asking the adapters of its model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from weakref import WeakKeyDictionary

from torch import Tensor
from torch.nn import Module

from pytest_fsdp_meta.loader.adapter import BUILT_IN, Adapter, Part, PartError
from pytest_fsdp_meta.loader.subject import SubjectError
from pytest_fsdp_meta.ranks.adapters import fsdp1, megatron_fsdp, zero3
from pytest_fsdp_meta.ranks.adapters.checking import describe_misfit, find_fault
from pytest_fsdp_meta.ranks.adapters.dtensor import own_memory, own_part, own_share, with_elements, without_partial
from pytest_fsdp_meta.worlds import CallFailed


@dataclass(frozen=True)
class Parts:
    """The parts of one model's tensors that this rank holds; the first of ``adapters`` that knows a tensor answers."""

    adapters: Sequence[Adapter] = ()

    def of(self, name: str, tensor: Tensor) -> Part:
        """Return the part of a parameter or buffer."""
        return self._adapted(name, tensor) or own_part(tensor)

    def gradient(self, name: str, parameter: Tensor) -> Part | None:
        """Return the part of the parameter's gradient; None where this rank has none.

        Of a DTensor, it is the part of the reduced gradient.
        """
        part = self._adapted(name, parameter)
        gradient = parameter.grad if part is None or part.gradient is None else part.gradient
        if gradient is None:
            return None
        if part is not None:
            _require_fit(name, gradient, part)
            return with_elements(part, gradient)
        return own_part(without_partial(parameter, gradient))

    def _adapted(self, name: str, tensor: Tensor) -> Part | None:
        for adapter in self.adapters:
            part = adapter(name, tensor)
            if part is not None:
                return replace(part, local=own_memory(part.local))
        return None


def _require_fit(name: str, gradient: Tensor, part: Part) -> None:
    """Raise SubjectError for a gradient of another shape than its part: checks of gradients would skip it silently.

    FSDP1 and megatron-fsdp may hold whole gradients for a while, as FSDP1 does under no_sync().
    """
    if part.by not in BUILT_IN and (problem := describe_misfit(gradient, part)):
        where = "parameter.grad is a" if part.gradient is None else "Part(gradient=...) is a"
        raise SubjectError("adapter", f"{name!r}: {where} {problem}")


_declared: WeakKeyDictionary[Module, Adapter] = WeakKeyDictionary()


def remember(model: Module, declared: Adapter | None) -> None:
    """Store the adapter that the author declared for this model."""
    if declared is not None:
        _declared[model] = _checked(declared)


def parts_of(model: Module) -> Parts:
    """Return the parts of a model; the adapter that the author declared is asked before the built-in ones."""
    own = [_declared[model]] if model in _declared else []
    candidates = (make(model) for make in (fsdp1.adapter, megatron_fsdp.adapter, zero3.adapter))
    return Parts((*own, *(built_in for built_in in candidates if built_in is not None)))


def _checked(declared: Adapter) -> Adapter:
    """Return the adapter with its errors and its results checked."""

    def adapter(name: str, tensor: Tensor) -> Part | None:
        try:
            part = declared(name, tensor)
        except PartError as error:
            raise SubjectError("adapter", f"{name!r}: {error}") from None
        except Exception as error:
            raise CallFailed(f"Subject(adapter=...), adapter({name!r}, ...)") from error
        if part is not None and not isinstance(part, Part):
            raise SubjectError(
                "adapter",
                f"it returned {type(part).__name__} for {name!r}, but should return pytest_fsdp_meta.Part, or None for "
                "a tensor that it does not describe",
            )
        if part is not None and (problem := find_fault(part)):
            raise SubjectError("adapter", f"{name!r}: {problem}")
        return part and replace(own_share(part), shape=tuple(part.shape))  # messages should not show torch.Size([4, 8])

    return adapter
