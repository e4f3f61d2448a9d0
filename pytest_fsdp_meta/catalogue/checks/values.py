"""Values: every shard holds the bits of the slice that it stands for."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from types import MappingProxyType

from pytest_fsdp_meta.catalogue.diagnosis.expectations import is_whole
from pytest_fsdp_meta.catalogue.diagnosis.patterns import EXCHANGED, ROUNDING, Cases, exchanged, pattern, unwritten
from pytest_fsdp_meta.catalogue.findings import Explanation, Finding
from pytest_fsdp_meta.catalogue.registry import check
from pytest_fsdp_meta.catalogue.view import NotJudged, PartlyJudged, Unjudgeable, View
from pytest_fsdp_meta.evidence import Comparison, TensorFacts, frozen_sources
from pytest_fsdp_meta.text import first_of

BASIC = (
    "same_manifest_on_every_rank",
    "names_match_reference",
    "shapes_match_reference",
    "collectives_match_on_every_rank",
    "no_meta_params",
    "no_meta_buffers",
    "no_uninitialized_memory",
    "managed_params_are_registered",
    "shards_tile_the_tensor",
)
REFERENCE, WHOLE, VERIFIER = "the reference's slice", "the reference's value", "the verifier's"


@check(
    promise="every parameter shard equals the reference's slice, bit for bit (within rounding where the loader casts)",
    family="values",
    needs=["inventory", "reference", "values"],
    after=[*BASIC, "replicas_equal"],
    why="A weight that was not loaded, or loaded into the wrong place, trains all the same.",
    cause="the weight was not loaded (it still has its initialisation), was loaded from another tensor or checkpoint, "
    "or was initialised again once it was loaded",
    remedy="load by name and fail on missing and unexpected keys; initialise before loading, never after",
    references=["NVIDIA-NeMo/Automodel#3597", "huggingface/transformers#46620", "speculators 0.4.0"],
)
def params_equal_reference(view: View) -> Iterable[Finding]:
    # A frozen tensor has one judge: frozen_weights_equal_verifier.
    names = view.names("parameter", but=frozen_names(view))
    yield from _differences(view, names, view.evidence.values)


@check(
    promise="every buffer, persistent or not, equals the reference's on every rank",
    family="values",
    needs=["inventory", "reference", "values"],
    after=[*BASIC, "replicas_equal"],
    why="A rotary frequency or a mask that is garbage still gives a finite loss.",
    cause="the buffer was not recomputed after to_empty(), or it was computed from other settings or in another dtype",
    remedy="recompute buffers on every rank from the config, in the dtype of the reference",
    references=[
        "huggingface/transformers#45902",
        "huggingface/transformers#48892",
        "hiyouga/LLaMA-Factory#10236",
        "hiyouga/LLaMA-Factory#10820",
        "LLaMA-Factory 0.9.5",
    ],
)
def buffers_equal_reference(view: View) -> Iterable[Finding]:
    names = view.names("buffer", but=frozen_names(view))
    yield from _differences(view, names, view.evidence.values)
    if not view.reference.complete:
        known = {comparison.name for rank in view.evidence.values or () for comparison in rank}
        transient = {t.name for rank in view.evidence.inventory for t in rank.tensors if not t.persistent}
        unknown = [name for name in names if name in transient - known]
        if unknown:
            raise NotJudged(
                f"a checkpoint does not hold non-persistent buffers ({len(unknown)} here, first: {unknown[0]}), so "
                "nothing tells their values; declare Subject(reference=<callable>)"
            )


@check(
    promise="frozen weights equal the verifier's tensors that they were taken from",
    family="values",
    needs=["inventory", "verifier"],
    after=[*BASIC, "replicas_equal"],
    why="A frozen weight is never trained, so what went wrong while loading stays wrong for good.",
    cause="a second pass initialised it again after it was loaded, or it was never loaded",
    remedy="load frozen weights last, and keep init_weights() away from modules that are frozen or already loaded",
    references=["vllm-project/speculators#314", "vllm-project/speculators#452"],
)
def frozen_weights_equal_verifier(view: View) -> Iterable[Finding]:
    sources = view.evidence.subject.frozen
    names = view.names("parameter", "buffer", only=frozen_names(view))
    yield from _differences(view, names, view.evidence.verifier, VERIFIER, sources)


def frozen_names(view: View) -> set[str]:
    """What is laid beside the verifier: what the subject declares frozen, else what a whole reference freezes.

    Nothing where the reference is the verifier and nobody laid them side by side: its slices then judge all alike.
    """
    subject, reference = view.evidence.subject, view.evidence.reference
    if "verifier" in view.evidence.unavailable and "verifier" not in subject.declared:
        return set()
    return set(frozen_sources(subject, reference))


def _differences(
    view: View,
    names: Collection[str],
    comparisons: tuple[tuple[Comparison, ...], ...] | None,
    truth: str = REFERENCE,
    sources: Mapping[str, str] = MappingProxyType({}),
) -> Iterator[Finding]:
    """``sources`` maps names to those in the truth, where they are others."""
    unusable = _unusable(view, truth)
    blamed: list[str] = []
    found = view.comparisons(comparisons, names)
    swapped = exchanged({name: [(rank, c) for rank, c in pairs if not c.equal] for name, pairs in found.items()})
    for name, pairs in found.items():
        source = sources.get(name, name)
        if source in unusable:
            blamed.append(source)
        else:
            yield from _difference(view, name, pairs, truth if source == name else f"{truth} {source}", swapped)
    if blamed:
        raise Unjudgeable(
            f"the reference does not reproduce itself: it {unusable[blamed[0]]} ({first_of(blamed)}); make it build "
            "the same model every time"
        )
    silent = [name for name in names if name not in found and (truth == VERIFIER or name in view.truth.by_name)]
    if silent:
        raise PartlyJudged(
            f"{first_of(silent)} could not be compared: torch cannot lay it beside the truth in slices (quantized, "
            "sparse, nested, or a subclass)"
        )


def _unusable(view: View, truth: str) -> dict[str, str]:
    """Names in the reference that are no truth, with the reason. A verifier of its own is not the reference."""
    reference = view.evidence.reference
    if reference is None or (truth == VERIFIER and "verifier" in view.evidence.subject.declared):
        return {}
    unusable = dict.fromkeys(reference.unstable, "gives other bits when it is built again")
    return unusable | dict.fromkeys(reference.uninitialised, "never writes it")


def _difference(view: View, name: str, pairs: Cases, truth: str, swapped: Mapping[str, str]) -> Iterator[Finding]:
    """``swapped`` names what a tensor holds in place of its own."""
    tensor = view.evidence.inventory[pairs[0][0]].by_name[name]
    wrong = [(rank, c) for rank, c in pairs if not c.equal and not _rounded(c, tensor.dtype)]
    zeros = [rank for rank, c in wrong if unwritten(c)]
    by_problem: dict[tuple[str | None, str, bool], list[tuple[int, Comparison]]] = {}
    for rank, c in wrong:
        by_problem.setdefault((c.problem, c.should_be, rank in zeros), []).append((rank, c))
    for (problem, should_be, zero), cases in by_problem.items():
        ranks = tuple(rank for rank, _ in cases)
        if problem is not None:
            local = problem.startswith("local shape") and tensor.sharded_by
            yield Finding(name, ranks, problem, should_be, **(_ADAPTED if local else _SHAPE))
        else:
            other = swapped.get(name, "")
            detail = numbers(cases, tensor) + f"; it is what {other} should be" * bool(other)
            # Beside ranks on which nothing was written, the others are not odd for being wrong.
            beside = pairs if zero else [(rank, c) for rank, c in pairs if rank not in zeros]
            words = EXCHANGED if other else pattern(tensor, cases, beside)
            should = truth.replace(REFERENCE, WHOLE) if is_whole(tensor) else truth
            yield Finding(name, ranks, "other values", should, detail, **words)


_SHAPE: Explanation = {
    "cause": "it is the verifier of another model, or a tensor of another name there, or a resized vocabulary",
    "remedy": "take the frozen weights from the model that they were made for, or map its names: "
    "Subject(frozen={name: name in the verifier})",
}
_ADAPTED: Explanation = {
    "cause": "the adapter describes another part than the rank holds",
    "remedy": "compare start and shape of its Part.block or Part.run with what the rank holds",
}


def _rounded(comparison: Comparison, dtype: str) -> bool:
    return comparison.cast and comparison.problem is None and comparison.max_rel <= ROUNDING.get(dtype, 0.0)


def numbers(cases: list[tuple[int, Comparison]], tensor: TensorFacts) -> str:
    """How far apart the worst of them is, and where."""
    rank, worst = max(cases, key=lambda case: case[1].max_abs)
    if not worst.index:
        return f"{worst.actual:.6g} on rank {rank}, but should be {worst.expected:.6g}"
    index = ", ".join(map(str, worst.index))
    differing = "all" if worst.differing == worst.elements else f"{worst.differing} of {worst.elements}"
    what = "tensor" if is_whole(tensor) else "shard"
    return (
        f"{differing} elements of rank {rank}'s {what} differ, first at [{index}]: {worst.actual:.6g}, but should be "
        f"{worst.expected:.6g}; largest difference {worst.max_abs:.3g}"
    )
