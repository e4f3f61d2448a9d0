"""Hypothesis strategies for property tests of loaders: meshes, trees of modules, wrappings, configurations.

Strategies draw plain data (see ``plan``), which pickles to the ranks and shrinks: a failure is reported with the
smallest model, the fewest wrapped modules and the simplest mesh that still fail. ``planned`` builds models from it::

    @fsdp_conformance(world_size=2)
    @given(plan=plans(meshes(2)))
    @settings(max_examples=20)
    def test_loader(fsdp, plan):
        with torch.device("meta"):
            model = planned.build(plan.model)
        planned.shard(model, plan, planned.make_mesh(plan, fsdp.device))
        my_materialise(model, fsdp.device)
        return Subject(
            model,
            reference=lambda: planned.build(plan.model),
            batch=lambda step: planned.batch(plan.model, step),
            loss=planned.loss,
        )
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from pytest_fsdp_meta.strategies.plan import BUFFERS, Block, Layer, Mesh, Model, Plan

__all__ = [
    "BUFFERS",
    "MODEL_TYPES",
    "Block",
    "Layer",
    "Mesh",
    "Model",
    "Plan",
    "configs",
    "layers",
    "meshes",
    "models",
    "plans",
    "wrappings",
]

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")
"""The default model types of ``configs``; all have Llama's configuration fields."""


def meshes(world_size: int, dims: Sequence[str] = ("dp_replicate", "dp_shard")) -> st.SearchStrategy[Mesh]:
    """Draw meshes of ``world_size`` ranks with the last of ``dims`` and any of the others, in their order.

    Shrinks towards the last dimension alone. Raises ValueError for no ranks, no dimensions or duplicate names.
    """
    if not isinstance(world_size, int) or world_size < 1 or not dims or len(set(dims)) != len(dims):
        raise ValueError(f"a mesh needs ranks and distinct dimension names, not {world_size!r} and {tuple(dims)}")
    return st.sampled_from(sorted(_factors(world_size, dims), key=len))


def _factors(size: int, dims: Sequence[str]) -> Iterator[Mesh]:
    first, *others = dims
    if not others:
        yield ((first, size),)
        return
    yield from _factors(size, others)
    for part in range(2, size + 1):
        if size % part == 0:
            yield from (((first, part), *rest) for rest in _factors(size // part, others))


def layers(max_width: int = 9) -> st.SearchStrategy[Layer]:
    """Draw layers: odd widths, bias, a scalar parameter, frozen weights, buffers of any dtype, persistent or not.

    Shrinks towards a layer of width 1 with a weight only.
    """
    kinds = st.tuples(st.sampled_from(BUFFERS), st.booleans())
    return st.builds(
        Layer,
        width=st.integers(1, max_width),
        bias=st.booleans(),
        scalar=st.booleans(),
        frozen=st.booleans(),
        buffers=st.lists(kinds, max_size=3).map(tuple),
    )


@st.composite
def models(draw: st.DrawFn, max_layers: int = 4, max_width: int = 9) -> Model:
    """Draw trees of up to ``max_layers`` layers, in which the last may be tied to the first.

    Shrinks towards a single layer.
    """
    parts: list[Layer | Block] = list(draw(st.lists(layers(max_width), min_size=1, max_size=max_layers)))
    for _ in range(draw(st.integers(0, 2))):  # wrap a run of parts in a block; the second may contain the first
        start = draw(st.integers(0, len(parts) - 1))
        stop = draw(st.integers(start + 1, len(parts)))
        parts[start:stop] = [Block(tuple(parts[start:stop]))]
    model = Model(draw(st.integers(1, max_width)), Block(tuple(parts)))
    return _tied(model) if len(model.layers) > 1 and draw(st.booleans()) else model


def _tied(model: Model) -> Model:
    """Return the model with a tie and the widths that it needs, which random draws would rarely have."""
    first, *_, last = leaves = list(model.layers.values())
    leaves[-1] = replace(last, width=first.width, frozen=first.frozen)
    inputs = first.width if len(leaves) == 2 else model.inputs
    leaves[-2] = replace(leaves[-2], width=inputs)
    return Model(inputs, _replace_layers(model.root, iter(leaves)), tied=True)


def _replace_layers(block: Block, leaves: Iterator[Layer]) -> Block:
    parts = (_replace_layers(part, leaves) if isinstance(part, Block) else next(leaves) for part in block.parts)
    return Block(tuple(parts))


def wrappings(model: Model) -> st.SearchStrategy[tuple[str, ...]]:
    """Draw names of modules that become FSDP groups besides the root, inner modules before outer ones.

    Modules whose group would separate two tied layers are left out. Shrinks towards no names.
    """
    possible = [name for name in model.modules if model.can_wrap(name)]
    if not possible:
        return st.just(())
    chosen = st.lists(st.sampled_from(possible), unique=True, max_size=len(possible))
    return chosen.map(lambda names: tuple(name for name in possible if name in names))


@st.composite
def plans(draw: st.DrawFn, mesh: st.SearchStrategy[Mesh], model: st.SearchStrategy[Model] | None = None) -> Plan:
    """Draw plans: a model, its wrapping, and a mesh. ``model`` is ``models()`` by default."""
    drawn = draw(models() if model is None else model)
    return Plan(drawn, draw(wrappings(drawn)), draw(mesh))


@st.composite
def configs(draw: st.DrawFn, model_types: Sequence[str] = MODEL_TYPES, max_layers: int = 3) -> dict[str, Any]:
    """Draw arguments of ``transformers.AutoConfig.for_model`` for tiny causal language models of Llama's family.

    Numbers of heads divide the sizes that they have to divide; vocabularies may be odd and embeddings tied. Shrinks
    towards the first model type with one layer and one head.
    """
    groups, group, head = draw(st.integers(1, 2)), draw(st.integers(1, 2)), draw(st.sampled_from([4, 8]))
    return {
        "model_type": draw(st.sampled_from((model_types,) if isinstance(model_types, str) else tuple(model_types))),
        "vocab_size": draw(st.integers(5, 40)),
        "hidden_size": groups * group * head,
        "intermediate_size": draw(st.integers(1, 40)),
        "num_hidden_layers": draw(st.integers(1, max_layers)),
        "num_attention_heads": groups * group,
        "num_key_value_heads": groups,
        "head_dim": head,
        "max_position_embeddings": 32,
        "tie_word_embeddings": draw(st.booleans()),
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": None,
    }
