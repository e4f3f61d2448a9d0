"""Evidence about random numbers: what each rank draws in a step, and its generators at a checkpoint.

What is drawn depends on the generator's state, the operator and the shape alone, so equal states mean equal numbers,
also in kernels that show no mask.
"""

from __future__ import annotations

from dataclasses import dataclass

OWN_GENERATOR = "own"
"""``Draw.generator`` if the operator was given a generator."""


@dataclass(frozen=True)
class Draw:
    """One operator that drew random numbers on one rank."""

    module: str
    """The FQN of the innermost module that was running; empty for the model itself and outside of it."""
    call: int
    """How many operators had drawn in the same module before."""
    operator: str
    shape: tuple[int, ...]
    generator: str
    """The device type of torch's default generator, or ``OWN_GENERATOR``."""
    state: str
    """A digest of the generator's state before."""
    seed: int
    """The seed that the generator was last given."""
    seeded: bool
    """Whether the author gave it: it is not the seed that the plugin sets before loading."""
    operand: str = ""
    """A digest of the tensor that the numbers are applied to, such as the input of a dropout; empty if unknown."""
    again: bool = False
    """Whether the backward drew, where it computes a part of the forward again."""
    for_all_rows: bool = False
    """Whether the numbers are applied to several rows at once, as the factor of a whole layer is."""
    by_dtensor: bool = False
    """Whether a DTensor ran the operator on its shard. Only on accelerators does it give each shard its own numbers."""


@dataclass(frozen=True)
class RandomState:
    """One of torch's default generators on a rank, while a checkpoint is saved or loaded.

    Each is a digest of the state. Before saving, ranks of different data-parallel slices have drawn different amounts
    since the loader returned; before loading, the state is the one that the loader left.
    """

    before: str
    after: str
    seed: int
    """The seed of the state after."""
