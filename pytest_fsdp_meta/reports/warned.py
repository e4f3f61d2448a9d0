"""Warnings of ranks, raised again in the pytest process: there the user's filters are, and pytest's summary."""

from __future__ import annotations

import builtins
import sys
import warnings
from collections.abc import Sequence

from pytest_fsdp_meta.words import name_ranks
from pytest_fsdp_meta.worlds import World
from pytest_fsdp_meta.worlds.warned import Warned


class Warnings:
    """Those of one item: each once, however many ranks and loads have raised it."""

    def __init__(self) -> None:
        self._heard: dict[Warned, tuple[set[int], list[str]]] = {}

    def hear(self, world: World, rank: int, one: Warned) -> None:
        ranks, alone = self._heard.setdefault(one, (set(), []))
        if not world.label or world.spec.size > 1:
            ranks.add(rank)
        elif world.label not in alone:
            alone.append(world.label)

    def tell(self) -> list[Warning]:
        """Raises them all again, and returns those that the user's filters make errors of."""
        heard, self._heard = self._heard, {}
        errors = []
        for one, (ranks, alone) in heard.items():
            try:
                raise_again(one, f"on {name_ranks(ranks)}" if ranks else f"in {' and '.join(alone)}")
            except Warning as error:
                error.__notes__ = [f"raised at {one.file}:{one.line}"]  # type: ignore[attr-defined]
                errors.append(error)
        return errors


def raise_again(one: Warned, where: str) -> None:
    """As if it were raised here, at the very place; the text says ``where`` it was. Raises it where it is an error."""
    category, known = category_of(one.classes)
    text = one.text if known else f"{one.classes[0].replace(':', '.')}: {one.text}"
    try:
        warning = category(f"{text} ({where})")
    except Exception:  # of a class that takes other arguments
        warning = UserWarning(f"{category.__name__}: {text} ({where})")
    warnings.warn_explicit(warning, type(warning), one.file, one.line, one.module or one.file.removesuffix(".py"))


def category_of(classes: Sequence[str]) -> tuple[type[Warning], bool]:
    """The class, and whether it is the very one: where only ranks have imported it, its nearest base stands for it."""
    for name in classes:
        module, _, path = name.partition(":")
        found: object = builtins if module == "builtins" else sys.modules.get(module)
        for part in path.split("."):
            found = getattr(found, part, None)
        if isinstance(found, type) and issubclass(found, Warning):
            return found, name == classes[0]
    return UserWarning, False
