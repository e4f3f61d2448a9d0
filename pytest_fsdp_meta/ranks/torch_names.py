"""Look up the private names of torch once, and say which observations and checks are lost where a release has not one.

``torch_private`` declares with each of its functions which names it uses. Where torch lacks one of them, the function
is replaced by what does nothing, and ``lacking`` reports what can then not be judged; everything else runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from inspect import get_annotations, getmro, isclass
from types import FunctionType
from typing import Any, NamedTuple, TypeVar

import torch
from torch.nn import Module

F = TypeVar("F", bound=Callable[..., Any])


class Use(NamedTuple):
    """Private names of torch that serve one purpose."""

    names: tuple[str, ...]
    """Each as "module:Class.attribute"; with "|" between the names that different releases give it, and with
    "=" at the end where the attribute is written."""
    spoils: tuple[str, ...]
    """The observations and checks that are not judged without them."""
    of: tuple[type, ...]
    """The classes of modules that make a model need them; empty: every model does."""
    missing: str
    """The first of the names that this torch lacks; empty where it has all."""


USES: list[Use] = []


def needs(
    *names: str, spoils: Sequence[str] = (), of: type | tuple[type, ...] = (), instead: Callable[..., Any]
) -> Callable[[F], F]:
    """Declare the names that a function uses, and what is called ``instead`` where torch lacks one of them."""
    use = _declare(names, spoils, of)

    def choose(function: F) -> F:
        return instead if use.missing else function  # type: ignore[return-value]

    return choose


def borrow(name: str, spoils: Sequence[str], instead: Any = None) -> Any:
    """Return what has the name; where torch lacks it, ``instead`` or a class whose objects do nothing."""
    if _declare((name,), spoils, ()).missing:
        return instead or Absent
    return _resolve(name)


class Absent:
    """Stands for a class that torch lacks: nothing is an instance of it, and as a context it does nothing."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __enter__(self) -> Absent:
        return self

    def __exit__(self, *_: object) -> None: ...


def lacking(model: Module | None = None) -> dict[str, str]:
    """Return the observations and checks that cannot be judged, for any model or for this one, each with the reason."""
    modules = () if model is None else tuple(model.modules())
    found: dict[str, str] = {}
    for use in USES:
        if use.missing and (not use.of or any(isinstance(module, use.of) for module in modules)):
            found |= {spoilt: _describe(use.missing) for spoilt in use.spoils if spoilt not in found}
    return found


def _describe(name: str) -> str:
    shown = name.partition(":")[2].rstrip("=").replace("|", " or ")
    lacks = "does not let us write" if exists(name.rstrip("=")) else "has no"
    return f"torch {torch.__version__.partition('+')[0]} {lacks} {shown}; please report it to pytest-fsdp-meta"


def _declare(names: Sequence[str], spoils: Sequence[str], of: type | tuple[type, ...]) -> Use:
    missing = next((name for name in names if not exists(name)), "")
    use = Use(tuple(names), tuple(spoils), of if isinstance(of, tuple) else (of,), missing)
    USES.append(use)
    return use


def exists(name: str) -> bool:
    """Return whether torch has the name, or one of its alternatives."""
    return any(_exists(alternative) for alternative in _alternatives(name))


def _alternatives(name: str) -> Iterator[str]:
    """Yield "m:C.a" and "m:C.b" for "m:C.a|b"."""
    first, *others = name.split("|")
    yield first
    yield from (f"{first.rpartition('.')[0]}.{other}" for other in others)


def _exists(name: str) -> bool:
    owner, _, attribute = name.rpartition(".") if "." in name.partition(":")[2] else name.partition(":")
    written = attribute.endswith("=")
    attribute = attribute.rstrip("=")
    try:
        held = _resolve(owner)
    except (ImportError, AttributeError):
        return False
    own = getattr(held, attribute, None)
    if written and isinstance(own, property) and own.fset is None:
        return False
    return hasattr(held, attribute) or (isclass(held) and _mentions(held, attribute))


def _resolve(name: str) -> Any:
    module, _, path = name.partition(":")
    found: Any = import_module(module)
    for part in path.split(".") if path else ():
        found = getattr(found, part)
    return found


def _mentions(kind: type, attribute: str) -> bool:
    """Return whether a method of the class reads or writes the attribute of an instance, or an annotation names it."""
    for own in getmro(kind):
        functions = [f.__func__ if hasattr(f, "__func__") else f for f in vars(own).values()]
        functions += [f.fget for f in vars(own).values() if isinstance(f, property)]
        if attribute in get_annotations(own) or any(
            attribute in f.__code__.co_names for f in functions if isinstance(f, FunctionType)
        ):
            return True
    return False
