"""Structure: the model has the names, dtypes and trainability that it should have, on every rank alike."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from pytest_fsdp_meta.catalogue.judging import NotJudged, View, majority
from pytest_fsdp_meta.catalogue.registry import Finding, Words, check
from pytest_fsdp_meta.evidence import TensorFacts
from pytest_fsdp_meta.words import name_ranks

MANIFEST = "same_manifest_on_every_rank"
NAMES = "names_match_reference"


@check(
    promise="names, shapes, dtypes, requires_grad and order of parameters and buffers agree on all ranks",
    family="structure",
    needs=["inventory"],
    why="FSDP pairs collectives by order: ranks that disagree exchange the wrong bytes, or hang.",
    cause="the loader branches on the rank while it builds, casts or freezes the model",
    remedy="do on every rank what is done on rank 0, and let only the reading of bytes depend on the rank",
    references=["vllm-project/speculators#776", "pytorch/pytorch#73547"],
)
def same_manifest_on_every_rank(view: View) -> Iterable[Finding]:
    inventories = view.evidence.inventory
    ranks = [rank.rank for rank in inventories]
    comparable = True
    for name, facts in view.tensors("parameter", "buffer"):
        there = [rank for rank, _ in facts]
        absent = tuple(rank for rank in ranks if rank not in there)
        if absent and 2 * len(absent) <= len(ranks) and (2 * len(absent) < len(ranks) or 0 in there):
            comparable = False
            yield Finding(name, absent, "missing", f"there, as on {name_ranks(there)}")
        elif absent:
            comparable = False
            yield Finding(name, tuple(there), "there", f"absent, as on {name_ranks(absent)}")
        comparable = comparable and len({tensor.kind for _, tensor in facts}) == 1
        yield from _disagreements(facts)
    if comparable:
        yield from _disorder(view)


def _disorder(view: View) -> Iterator[Finding]:
    told = [(rank.rank, tuple(tensor.name for tensor in rank.tensors)) for rank in view.evidence.inventory]
    usual = majority(told)
    assert isinstance(usual, tuple)
    odd: dict[tuple[str, ...], list[int]] = {}
    for rank, order in told:
        if order != usual:
            odd.setdefault(order, []).append(rank)
    for order, ranks in odd.items():
        first, should = next((a, b) for a, b in zip(order, usual, strict=True) if a != b)
        detail = f"the first out of place is {first}, where other ranks have {should}"
        yield Finding(None, tuple(ranks), "another order of names", "the order of the other ranks", detail)


def _disagreements(facts: list[tuple[int, TensorFacts]]) -> Iterator[Finding]:
    for aspect in ("kind", "shape", "dtype", "requires_grad"):
        told = [(rank, getattr(tensor, aspect)) for rank, tensor in facts]
        usual = majority(told)
        odd: dict[object, list[int]] = {}
        for rank, value in told:
            if value != usual:
                odd.setdefault(value, []).append(rank)
        for value, ranks in odd.items():
            others = [rank for rank, other in told if other == usual]
            yield Finding(facts[0][1].name, tuple(ranks), f"{aspect} {value}", f"{usual}, as on {name_ranks(others)}")


@check(
    promise="no parameter or buffer too many or too few",
    family="structure",
    needs=["inventory", "reference"],
    after=[MANIFEST],
    why="A bias that should not exist is trained and saved; one that is missing is silently left out of the forward.",
    cause="the sharded model was built from another config than the reference, or a wrapper renames its tensors",
    remedy="build both from one config and let wrappers be removed from names before they are compared",
    references=["NVIDIA/TransformerEngine#2713", "pytorch/pytorch#118119"],
)
def names_match_reference(view: View) -> Iterable[Finding]:
    ranks = tuple(rank.rank for rank in view.evidence.inventory)
    # Seen over all ranks: one that is missing on some of them is the manifest's affair.
    ours = {t.name: t for rank in view.evidence.inventory for t in rank.tensors}
    truth = view.truth.by_name
    ties = (*view.evidence.inventory[0].ties(), *view.evidence.subject.tied)
    stored_once = {name for group in ties if any(twin in truth for twin in group) for name in group}
    extra = [name for name in ours if name not in truth]
    if not view.reference.complete:  # a checkpoint holds neither transient buffers nor a tied weight twice
        extra = [name for name in extra if ours[name].persistent and name not in stored_once]
    missing = [name for name in truth if name not in ours]
    prefix = _common_prefix(extra, missing) if len(missing) == len(truth) else ""  # a wrapper renames every tensor
    if prefix:
        yield Finding(
            *(None, ranks, f"names begin with {prefix!r} ({extra[0]})", f"those of the reference ({missing[0]})"),
            cause="a wrapper is returned in place of the model that it wraps",
            remedy="return the wrapped model itself, or strip the prefix from its names",
            condemns=(*extra, *missing),
        )
        return
    for name in filter(view.judgeable, extra):
        what = f"a {ours[name].kind} that the reference does not have"
        yield Finding(name, ranks, what, "absent", **_about_bias(name))
    for name in filter(view.judgeable, missing):
        wanted = f"a {truth[name].kind}, as in the reference"
        yield Finding(name, ranks, "missing", wanted, **_about_bias(name))
    if view.reference.complete:  # a checkpoint does not tell parameters from buffers
        for name, facts in view.tensors("parameter", "buffer"):
            if name in truth:
                yield from view.broken(facts, lambda _, t, e=truth[name].kind: _kinds(t, e), _RECAST)  # type: ignore[misc]


def _kinds(tensor: TensorFacts, expected: str) -> tuple[str, str] | None:
    return None if tensor.kind == expected else (f"a {tensor.kind}", f"a {expected}, as in the reference")


_RECAST: Words = {
    "cause": "materialising or loading re-created it as the other kind: an optimizer and FSDP see parameters only",
    "remedy": "re-create a parameter as torch.nn.Parameter, a buffer by register_buffer",
}


def _common_prefix(extra: list[str], missing: list[str]) -> str:
    """The prefix that, put before every missing name, gives exactly the extra ones; empty when there is none."""
    if not extra or len(extra) != len(missing) or not extra[0].endswith(missing[0]):
        return ""
    prefix = extra[0].removesuffix(missing[0])
    return prefix if prefix.endswith(".") and {prefix + name for name in missing} == set(extra) else ""


def _about_bias(name: str) -> Words:
    return _BIAS if name.endswith("bias") else {}


_BIAS: Words = {
    "cause": "a bias that the config disables is registered as a parameter all the same, or the reverse",
    "remedy": "call register_parameter(name, None) for a disabled bias",
}


@check(
    promise="every parameter and buffer has the dtype that it has in the reference",
    family="structure",
    needs=["inventory", "reference"],
    after=[MANIFEST, NAMES],
    why="Norms, routers and rotary frequencies that are rounded to bfloat16 cost accuracy that no error tells of.",
    cause="a cast of the whole model (model.to(dtype), a default dtype, torch_dtype=...) took along what must keep its "
    "own",
    remedy="cast parameters by name, or build the reference with the same cast if it is meant",
    references=["huggingface/accelerate#3985", "vllm-project/speculators#668", "NVIDIA-NeMo/Automodel#2549"],
)
def dtypes_match_reference(view: View) -> Iterable[Finding]:
    truth = view.truth.by_name
    for name, facts in view.tensors("parameter", "buffer"):
        if name in truth:
            expected = truth[name].dtype
            yield from view.broken(facts, lambda _, t, e=expected: None if t.dtype == e else (t.dtype, e))  # type: ignore[misc]


@check(
    promise="frozen stays frozen, trainable stays trainable",
    family="structure",
    needs=["inventory", "reference"],
    after=[MANIFEST, NAMES],
    why="A frozen verifier that trains drifts away unseen; a trainable head that is frozen never learns.",
    cause="requires_grad was set before the parameters were re-created (to_empty, sharding, load with assign=True)",
    remedy="set requires_grad after the last step that makes new Parameter objects",
    references=["vllm-project/speculators#593", "pytorch/torchtitan#4593"],
)
def requires_grad_matches_reference(view: View) -> Iterable[Finding]:
    if not view.reference.complete:
        raise NotJudged("a checkpoint does not say what is trainable; declare Subject(reference=<callable>)")
    truth = view.truth.by_name
    for name, facts in view.tensors("parameter"):
        if name in truth:
            expected = truth[name].requires_grad
            yield from view.broken(facts, lambda _, t, e=expected: _trainability(t, e))  # type: ignore[misc]


def _trainability(tensor: TensorFacts, expected: bool) -> tuple[str, str] | None:
    words = {True: "trainable", False: "frozen"}
    return None if tensor.requires_grad == expected else (words[tensor.requires_grad], words[expected])
