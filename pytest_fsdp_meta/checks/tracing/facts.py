"""Evidence of one more step with hooks on all modules: how far each is from the reference's, on each rank."""

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
class Departure:
    """How a tensor departs from the reference's, if that has a simple form: one of the fields is set.

    Rows are vectors along the last dim.
    """

    dtypes: tuple[str, str] | None = None
    """The dtype in which its values are, or to which they were rounded, and the finer one of the reference."""
    factor: float | None = None
    """All elements are so many times the reference's."""
    same_vector: bool = False
    """Every row is off by one and the same vector."""
    rows: tuple[int, int] | None = None
    """How many rows are off, and how many there are; the others agree."""
    zero: bool = False
    """Whether the rows that are off are zero, and the reference's are not."""
    row_factors: tuple[float, float] | None = None
    """The least and the largest of the factors by which each row is a multiple of the reference's."""
    columns: tuple[int, int, int] | None = None
    """The half-open range in the last dim that is off, and the size of that dim; what is outside agrees."""


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
    """The tensors whose part of the reference's tensor is not known, and the other arguments that are not the same."""
    distance: float = 0.0
    noise: float = 0.0
    split: bool = False
    """Whether a tensor holds a part along a dim that ranks with the same rows share out."""
    sketch: tuple[float, ...] = ()
    """Sums of the tensor's elements with random signs, if it is as large as the reference's and far from it."""
    expected: tuple[float, ...] = ()
    """The same sums of the reference's tensor: those of parts that add up to it add up to these."""
    caller: str | None = None
    """Of an input: the module in whose forward the call was made; None outside of all."""
    argument: tuple[str, str, str] | None = None
    """Of an input: name, value and the reference's value of the only argument that is not the same."""
    used_in: tuple[str, ...] = ()
    """Of a gradient: the modules in whose forward the tensor that it belongs to was returned or handed to another."""
    departure: Departure | None = None
    """How that tensor departs; looked at for the first tensors that do."""


@dataclass(frozen=True)
class OtherSetting:
    """A setting of a module that is not the reference's, as text; ``number`` says whether both are numbers."""

    name: str
    value: str
    reference: str
    number: bool = False

    def __str__(self) -> str:
        return f"{self.name} is {self.value}, in the reference {self.reference}"


@dataclass(frozen=True)
class ModuleFacts:
    """The class of a module, and where its forward is defined."""

    kind: str
    file: str = ""
    line: int = 0
    reference: str = ""
    """The class of the reference's module if it is another one."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """Its public attributes that are plain values, as text."""
    otherwise: tuple[OtherSetting, ...] = ()
    """Its settings that differ from the reference's, numbers first; empty for the reference itself."""
    splits_output: bool = False
    """Whether it is a linear layer that returns a part of its output on each rank, because its weight is split."""


@dataclass(frozen=True)
class RankTrace:
    """The calls of all modules in one more step, from the loaded weights, in the order in which they ran.

    ``step`` is the number of its batch. The backward is empty where the author has a step of their own. If ``problem``
    is set, the step could not be traced, and nothing else is.
    """

    data_parallel: tuple[int, int] = (0, 1)
    forward: tuple[TracedCall, ...] = ()
    backward: tuple[TracedCall, ...] = ()
    modules: Mapping[str, ModuleFacts] = field(default_factory=dict)
    draws: tuple[str, ...] = ()
    """The modules that draw random numbers themselves, not in those inside, where the reference's do not."""
    handed: bool = False
    """Whether modules got the reference's inputs and gradients in place of own ones that agree."""
    step: int = 0
    problem: str = ""
