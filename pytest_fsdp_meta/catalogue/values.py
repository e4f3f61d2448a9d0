"""Values: every shard holds the bits of the slice that it stands for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from pytest_fsdp_meta.catalogue.judging import Unjudgeable, View
from pytest_fsdp_meta.catalogue.registry import Finding, check
from pytest_fsdp_meta.evidence import Comparison

BASIC = (
    "same_manifest_on_every_rank",
    "names_match_reference",
    "no_meta_params",
    "no_meta_buffers",
    "no_uninitialized_memory",
)
ROUNDING = {"bfloat16": 2.0**-7, "float16": 2.0**-10, "float32": 2.0**-23, "float8_e4m3fn": 2.0**-3, "float8_e5m2": 2.0**-2}
"""One unit in the last place, relative: what a loader that casts may be off by."""


@check(
    promise="every parameter shard equals the reference's slice, bit for bit (within rounding where the loader casts)",
    family="values",
    needs=["inventory", "reference", "values"],
    after=BASIC,
    why="A weight that was not loaded, or loaded into the wrong place, trains all the same.",
    cause="the weight was not loaded (it still has its initialisation), or it was loaded from another tensor",
    remedy="load by name and fail on missing and unexpected keys; initialise before loading, never after",
    references=["NVIDIA-NeMo/Automodel#3597", "huggingface/transformers#46620", "speculators 0.4.0"],
)
def params_equal_reference(view: View) -> Iterable[Finding]:
    # A frozen tensor has one judge: frozen_weights_equal_verifier.
    frozen = frozen_names(view)
    names = [name for name in view.names("parameter") if name not in frozen]
    yield from _differences(view, names, view.evidence.values)


@check(
    promise="every buffer, persistent or not, equals the reference's on every rank",
    family="values",
    needs=["inventory", "reference", "values"],
    after=BASIC,
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
    frozen = frozen_names(view)
    names = [name for name in view.names("buffer") if name not in frozen]
    yield from _differences(view, names, view.evidence.values)


@check(
    promise="frozen weights equal the verifier's tensors that they were taken from",
    family="values",
    needs=["inventory", "verifier"],
    after=BASIC,
    why="A frozen weight is never trained, so what went wrong while loading stays wrong for good.",
    cause="a second pass initialised it again after it was loaded, or it was never loaded",
    remedy="load frozen weights last, and keep init_weights() away from modules that are frozen or already loaded",
    references=["vllm-project/speculators#314", "vllm-project/speculators#452"],
)
def frozen_weights_equal_verifier(view: View) -> Iterable[Finding]:
    names = [name for name in view.names("parameter", "buffer") if name in frozen_names(view)]
    sources = view.evidence.subject.frozen
    for finding in _differences(view, names, view.evidence.verifier, truth="the verifier's"):
        source = sources.get(finding.tensor or "", finding.tensor)
        expected = finding.expected if source == finding.tensor else f"the verifier's {source}"
        yield Finding(finding.tensor, finding.ranks, finding.actual, expected, finding.detail)


def frozen_names(view: View) -> set[str]:
    """What the subject declares frozen and, where it has a whole reference, what the reference freezes."""
    frozen = set(view.evidence.subject.frozen)
    reference = view.evidence.reference
    if reference is not None and reference.complete and "verifier" not in view.evidence.unavailable:
        frozen |= {t.name for t in reference.inventory.tensors if t.kind == "parameter" and not t.requires_grad}
    return frozen


def _differences(
    view: View,
    names: Sequence[str],
    comparisons: tuple[tuple[Comparison, ...], ...] | None,
    truth: str = "the reference's slice",
) -> Iterator[Finding]:
    reference = view.evidence.reference
    unusable = {name: "gives other bits when it is built again" for name in (reference.unstable if reference else ())}
    unusable |= {name: "never writes it" for name in (reference.uninitialised if reference else ())}
    found = view.comparisons(comparisons)
    blamed = [name for name in names if name in unusable and name in found]
    for name in names:
        if name in found and name not in unusable:
            yield from _difference(view, name, found[name], truth)
    if blamed:
        raise Unjudgeable(
            f"the reference does not reproduce itself: it {unusable[blamed[0]]} ({blamed[0]}"
            f"{f' and {len(blamed) - 1} more' if len(blamed) > 1 else ''}); make it build the same model every time"
        )


def _difference(view: View, name: str, pairs: list[tuple[int, Comparison]], truth: str) -> Iterator[Finding]:
    dtype = view.evidence.inventory[pairs[0][0]].by_name[name].dtype
    wrong = [(rank, c) for rank, c in pairs if not c.equal and not _rounded(c, dtype)]
    by_problem: dict[str | None, list[tuple[int, Comparison]]] = {}
    for rank, comparison in wrong:
        by_problem.setdefault(comparison.problem, []).append((rank, comparison))
    for problem, cases in by_problem.items():
        ranks = tuple(rank for rank, _ in cases)
        if problem is not None:
            yield Finding(name, ranks, "another shape", truth, problem, **_SHAPE)
        else:
            odd = {} if len(cases) == len([c for _, c in pairs if c.elements]) else _ODD_RANKS
            yield Finding(name, ranks, "other values", truth, _numbers(cases), **odd)


_SHAPE = {
    "cause": "the placements do not fit the tensor, for example those of a 2-D weight reused for a 3-D stack of experts",
    "remedy": "give every parameter placements for its own dims, and DTensor.from_local the global shape",
}
_ODD_RANKS = {
    "cause": "these ranks read the slice of another rank, or only the others were given the weight",
    "remedy": "take the offset from the DTensor's own mesh coordinate, and let every rank load",
}


def _rounded(comparison: Comparison, dtype: str) -> bool:
    return comparison.cast and comparison.problem is None and comparison.max_rel <= ROUNDING.get(dtype, 0.0)


def _numbers(cases: list[tuple[int, Comparison]]) -> str:
    rank, worst = max(cases, key=lambda case: case[1].max_abs)
    index = ", ".join(map(str, worst.index or ()))
    differing = "all" if worst.differing == worst.elements else f"{worst.differing} of {worst.elements}"
    return (
        f"{differing} elements of rank {rank}'s shard differ, first at [{index}]: {worst.actual:.6g}, but should be "
        f"{worst.expected:.6g}; largest difference {worst.max_abs:.3g}"
    )
