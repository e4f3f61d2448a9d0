"""What Hypothesis draws, as plain data: it pickles to the ranks, and its repr is the code that makes it again.

``planned`` builds what a plan says, ``strategies`` draws it. Nothing here imports torch or Hypothesis.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

Mesh = tuple[tuple[str, int], ...]
"""Named dimensions in order: ``(("dp_replicate", 2), ("dp_shard", 2))``."""
BUFFERS = ("float", "int", "bool")


@dataclass(frozen=True)
class Layer:
    """A linear layer of ``width`` outputs; its inputs are the outputs of the layer before.

    ``buffers`` are (kind, persistent) pairs, kinds as in ``BUFFERS``; ``frozen`` holds for weight and bias; ``scalar``
    is a frozen parameter of no dimension, which FSDP2 cannot shard.
    """

    width: int = 1
    bias: bool = False
    scalar: bool = False
    frozen: bool = False
    buffers: tuple[tuple[str, bool], ...] = ()


@dataclass(frozen=True)
class Block:
    """Layers and blocks, one after another."""

    parts: tuple[Layer | Block, ...]


@dataclass(frozen=True)
class Model:
    """A tree of modules. ``tied``: the last layer uses the weight of the first; ValueError where that does not fit."""

    inputs: int
    root: Block
    tied: bool = False

    def __post_init__(self) -> None:
        if self.tied and not self._fits():
            raise ValueError("the weight of the first layer does not fit the last, so the two cannot be tied")

    @property
    def layers(self) -> dict[str, Layer]:
        """By the name of the module, in the order in which they are called."""
        return {name: part for name, part in self._parts() if isinstance(part, Layer)}

    @property
    def modules(self) -> tuple[str, ...]:
        """The names of all layers and blocks, each after what is within it."""
        return tuple(name for name, _ in self._parts())

    @property
    def outputs(self) -> int:
        return list(self.layers.values())[-1].width

    def can_wrap(self, name: str) -> bool:
        """Whether the module can be an FSDP group of its own: a tie does not reach from one group to another."""
        first, *_, last = self.layers if self.tied else ("", "")
        return _within(first, name) == _within(last, name)

    def _fits(self) -> bool:
        layers = list(self.layers.values())
        widths = [self.inputs, *(layer.width for layer in layers)]
        first, last = layers[0], layers[-1]
        return len(layers) > 1 and (first.width, widths[0], first.frozen) == (last.width, widths[-2], last.frozen)

    def _parts(self) -> Iterator[tuple[str, Layer | Block]]:
        yield from _walk("", self.root)


@dataclass(frozen=True)
class Plan:
    """A model, the mesh it is sharded over, and the modules that are FSDP groups beside the root."""

    model: Model
    wrapped: tuple[str, ...] = ()
    mesh: Mesh = (("dp_shard", 2),)

    @property
    def world_size(self) -> int:
        return prod(size for _, size in self.mesh)


def _walk(name: str, block: Block) -> Iterator[tuple[str, Layer | Block]]:
    for number, part in enumerate(block.parts):
        within = f"{name}.parts.{number}" if name else f"parts.{number}"
        if isinstance(part, Block):
            yield from _walk(within, part)
        yield within, part


def _within(name: str, module: str) -> bool:
    return f"{name}.".startswith(f"{module}.")
