"""Hypothesis strategies for property tests of loaders: meshes, trees of modules, wrappings, configurations.

What they draw is plain data (``plans``), so that it pickles to the ranks and shrinks: a failing loader is told with the
smallest model, the fewest wrapped modules and the simplest mesh that still break it. ``planned`` builds it there::

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

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")


def meshes(world_size: int, dims: Sequence[str] = ("dp_replicate", "dp_shard")) -> st.SearchStrategy[Mesh]:
    """Meshes of ``world_size`` ranks. Of ``dims``, in their order, the last is always there, the others may be.

    Shrinks to the last dimension alone.
    """
    if not isinstance(world_size, int) or world_size < 1 or not dims or len(set(dims)) != len(dims):
        raise ValueError(f"a mesh needs ranks and different names of dimensions, not {world_size!r} and {tuple(dims)}")
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
    """A layer of every kind: odd widths, bias, a scalar, frozen, buffers of any dtype, persistent or not.

    Shrinks to one of width 1 that has nothing but a weight.
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
    """A tree of up to ``max_layers`` layers, with or without a tie of the last to the first. Shrinks to one layer."""
    parts: list[Layer | Block] = list(draw(st.lists(layers(max_width), min_size=1, max_size=max_layers)))
    for _ in range(draw(st.integers(0, 2))):  # a block around some of them, which may hold the one before
        start = draw(st.integers(0, len(parts) - 1))
        stop = draw(st.integers(start + 1, len(parts)))
        parts[start:stop] = [Block(tuple(parts[start:stop]))]
    model = Model(draw(st.integers(1, max_width)), Block(tuple(parts)))
    return _tied(model) if len(model.layers) > 1 and draw(st.booleans()) else model


def _tied(model: Model) -> Model:
    """With the widths that a tie needs, which chance would seldom draw."""
    first, *_, last = leaves = list(model.layers.values())
    leaves[-1] = replace(last, width=first.width, frozen=first.frozen)
    inputs = first.width if len(leaves) == 2 else model.inputs
    leaves[-2] = replace(leaves[-2], width=inputs)
    return Model(inputs, _with(model.root, iter(leaves)), tied=True)


def _with(block: Block, leaves: Iterator[Layer]) -> Block:
    return Block(tuple(_with(part, leaves) if isinstance(part, Block) else next(leaves) for part in block.parts))


def wrappings(model: Model) -> st.SearchStrategy[tuple[str, ...]]:
    """Names of modules that are FSDP groups beside the root, each after those within it. Shrinks to none.

    Modules that would take one end of a tie into a group of its own are left out.
    """
    possible = [name for name in model.modules if model.can_wrap(name)]
    if not possible:
        return st.just(())
    chosen = st.lists(st.sampled_from(possible), unique=True, max_size=len(possible))
    return chosen.map(lambda names: tuple(name for name in possible if name in names))


@st.composite
def plans(draw: st.DrawFn, mesh: st.SearchStrategy[Mesh], model: st.SearchStrategy[Model] | None = None) -> Plan:
    """A model, how it is wrapped, and a mesh; ``model`` is ``models()`` by default."""
    drawn = draw(models() if model is None else model)
    return Plan(drawn, draw(wrappings(drawn)), draw(mesh))


@st.composite
def configs(draw: st.DrawFn, model_types: Sequence[str] = MODEL_TYPES, max_layers: int = 3) -> dict[str, Any]:
    """Arguments of ``transformers.AutoConfig.for_model`` for a tiny causal language model of Llama's family.

    Heads divide what they have to, vocabularies may be odd, embeddings tied. Shrinks to the first type with one layer
    and one head.
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
