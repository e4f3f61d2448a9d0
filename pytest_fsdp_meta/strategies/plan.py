"""Plans: plain data that describes a model, its wrapping and its mesh.

``strategies`` draws plans and ``planned`` builds them. A plan pickles to the ranks, and its ``repr`` is code that
creates it. Nothing here imports torch or Hypothesis.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

Mesh = tuple[tuple[str, int], ...]
"""Mesh dimensions in order, as (name, size): ``(("dp_replicate", 2), ("dp_shard", 2))``."""
BUFFERS = ("float", "int", "bool")
"""The kinds of buffers; ``build.DTYPES`` has their dtypes."""


@dataclass(frozen=True)
class Layer:
    """A linear layer with ``width`` outputs; its inputs are the outputs of the previous layer.

    ``buffers`` are (kind, persistent) pairs with a kind from ``BUFFERS``. ``frozen`` applies to weight and bias.
    ``scalar`` adds a frozen parameter without dims, which FSDP2 cannot shard.
    """

    width: int = 1
    bias: bool = False
    scalar: bool = False
    frozen: bool = False
    buffers: tuple[tuple[str, bool], ...] = ()


@dataclass(frozen=True)
class Block:
    """Layers and blocks that are called one after another."""

    parts: tuple[Layer | Block, ...]


@dataclass(frozen=True)
class Model:
    """A tree of modules; if ``tied``, the last layer uses the weight of the first.

    Raises ValueError if there is only one layer, or the two weights differ in shape or in whether they are frozen.
    """

    inputs: int
    root: Block
    tied: bool = False

    def __post_init__(self) -> None:
        if not self.tied:
            return
        layers = list(self.layers.values())
        first, last = layers[0], layers[-1]
        inputs = [self.inputs, *(layer.width for layer in layers)][-2]
        alike = (first.width, self.inputs, first.frozen) == (last.width, inputs, last.frozen)
        if len(layers) == 1 or not alike:
            raise ValueError("the weight of the first layer does not fit the last layer, so they cannot be tied")

    @property
    def layers(self) -> dict[str, Layer]:
        """Map module names to layers, in the order in which they are called."""
        return {name: part for name, part in _walk("", self.root) if isinstance(part, Layer)}

    @property
    def modules(self) -> tuple[str, ...]:
        """The names of all layers and blocks, inner modules before outer ones."""
        return tuple(name for name, _ in _walk("", self.root))

    @property
    def outputs(self) -> int:
        """The width of the last layer."""
        return list(self.layers.values())[-1].width

    def can_wrap(self, name: str) -> bool:
        """Return whether the module can be a separate FSDP group: groups must not separate tied layers."""
        first, *_, last = self.layers if self.tied else ("", "")
        return _within(first, name) == _within(last, name)


@dataclass(frozen=True)
class Plan:
    """A model, the names of the modules that are FSDP groups besides the root, and the mesh."""

    model: Model
    wrapped: tuple[str, ...] = ()
    mesh: Mesh = (("dp_shard", 2),)

    @property
    def world_size(self) -> int:
        return prod(size for _, size in self.mesh)


def _walk(name: str, block: Block) -> Iterator[tuple[str, Layer | Block]]:
    for number, part in enumerate(block.parts):
        part_name = f"{name}.parts.{number}" if name else f"parts.{number}"
        if isinstance(part, Block):
            yield from _walk(part_name, part)
        yield part_name, part


def _within(name: str, module: str) -> bool:
    return f"{name}.".startswith(f"{module}.")
