"""Evidence of one more first step with hooks on all modules: how far each is from the reference's, on each rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

INPUT, OUTPUT, GRADIENT = "input", "output", "gradient"
"""What was traced of a module's call: its inputs and outputs in the forward, and the gradients of its outputs."""
AGAIN_INPUT, AGAIN_OUTPUT = "recomputed input", "recomputed output"
"""Inputs and outputs where activation checkpointing runs the forward again in the backward."""
RECOMPUTED = {AGAIN_INPUT: INPUT, AGAIN_OUTPUT: OUTPUT}
AGREES, DEPARTS = 2.0, 10.0
"""How many times its noise a tensor may be off and still agree, and must be off to depart; between them it does
neither. Right loaders reach 0.7; see benchmarks/results, "localising"."""


@dataclass(frozen=True)
class TracedCall:
    """The tensors that one call of a module got or returned, or their gradients, compared with the reference's.

    ``turn`` counts the calls of the module from 0. ``distance`` and ``noise`` are those of the tensor that is farthest
    off in multiples of its noise, relative to the norm of the reference's tensor.
    """

    stage: str
    module: str
    turn: int = 0
    compared: int = 0
    unmatched: int = 0
    """The tensors whose part of the reference's tensor is not known."""
    distance: float = 0.0
    noise: float = 0.0
    split: bool = False
    """Whether a tensor holds a part along a dim that ranks with the same rows share out."""
    sketch: tuple[float, ...] = ()
    """Sums of the tensor's elements with random signs, if it is as large as the reference's and far from it."""
    expected: tuple[float, ...] = ()
    """The same sums of the reference's tensor: those of parts that add up to it add up to these."""


@dataclass(frozen=True)
class ModuleFacts:
    """The class of a module, and where its forward is defined."""

    kind: str
    file: str = ""
    line: int = 0
    reference: str = ""
    """The class of the reference's module if it is another one."""


@dataclass(frozen=True)
class RankTrace:
    """The calls of all modules in one more first step, from the loaded weights, in the order in which they ran.

    If ``problem`` is set, the step could not be traced, and nothing else is.
    """

    data_parallel: tuple[int, int] = (0, 1)
    forward: tuple[TracedCall, ...] = ()
    backward: tuple[TracedCall, ...] = ()
    modules: Mapping[str, ModuleFacts] = field(default_factory=dict)
    handed: bool = False
    """Whether modules got the reference's inputs and gradients in place of own ones that agree."""
    problem: str = ""
