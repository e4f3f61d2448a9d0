"""Evidence of checkpoints: what a rank saves, and what it holds once that is loaded again: plain data, no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class RankStateDict:
    """The keys under which a rank saves the model.

    ``refused`` says why torch's own ``get_model_state_dict`` does not take the model; the keys are then those of
    ``model.state_dict()``, without what torch's wrappers insert.
    """

    keys: tuple[str, ...]
    refused: str = ""


@dataclass(frozen=True)
class RankSaved:
    """What a rank holds of what a checkpoint keeps: before it was saved, or after it was loaded.

    ``tensors`` are digests of this rank's parts of parameters and persistent buffers by name, ``extra`` those of what
    modules keep as ``_extra_state``; ``left_out`` are the tensors for which the state dict has no key, ``untouched``
    those that loading left as they were before it.
    """

    tensors: Mapping[str, str]
    extra: Mapping[str, str] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()
    untouched: tuple[str, ...] = ()


@dataclass(frozen=True)
class RankResumed:
    """A rank at a checkpoint of model and optimizer, and the losses of the steps that it trains from there.

    ``state`` is the optimizer's, by parameter and key, ``groups`` the hyperparameters of its groups: digests of
    tensors, and how all else is written.
    """

    model: RankSaved
    state: Mapping[str, Mapping[str, str]]
    groups: tuple[Mapping[str, str], ...]
    losses: tuple[float, ...] = ()


@dataclass(frozen=True)
class FirstStep:
    """A rank's optimizer once it has stepped.

    ``unloadable`` is why torch cannot load its state, ``stateless`` the trainable parameters that it keeps none of,
    as no gradient came to them.
    """

    unloadable: str
    stateless: tuple[str, ...]
