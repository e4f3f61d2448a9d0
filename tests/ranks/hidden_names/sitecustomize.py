"""Hide a private name of torch from this package, as if a release had renamed it: HIDE=module:Class.attribute.

torch itself still finds it. Python imports this module at start if its folder is on PYTHONPATH, in the fork server too.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from types import ModuleType
from typing import Any

FIRST = "pytest_fsdp_meta.ranks.torch_private"
"""The first module that uses such names."""


def hide_before_use(event: str, arguments: tuple[Any, ...]) -> None:
    """Hide the name before the module that uses it is imported. An audit hook comes before all finders of modules."""
    if event == "import" and arguments[0] == FIRST and FIRST not in sys.modules:
        names = import_module("pytest_fsdp_meta.ranks.torch_names")
        hidden = os.environ["HIDE"]
        exists = names.exists
        names.exists = lambda asked: asked.rstrip("=") != hidden.rstrip("=") and exists(asked)
        for alternative in names._alternatives(hidden):
            hide(alternative.rstrip("="), os.path.dirname(names.__file__).rpartition(os.sep)[0])


def hide(name: str, package: str) -> None:
    """Let the attribute be found by code outside of the package only."""
    module, _, path = name.partition(":")
    owner: Any = import_module(module)
    *parts, attribute = path.split(".")
    for part in parts:
        owner = getattr(owner, part)

    def guarded(found: Any) -> Any:
        def look_up(self: Any, key: str) -> Any:
            if key == attribute and sys._getframe(1).f_code.co_filename.startswith(package):
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {key!r} (hidden)")
            return found(self, key)

        return look_up

    if isinstance(owner, ModuleType):
        owner.__class__ = type("Hiding", (type(owner),), {"__getattribute__": guarded(type(owner).__getattribute__)})
    elif owner.__flags__ & (1 << 9):  # a class of Python's; those of C refuse to be changed
        owner.__getattribute__ = guarded(owner.__getattribute__)


if os.environ.get("HIDE"):
    sys.addaudithook(hide_before_use)
