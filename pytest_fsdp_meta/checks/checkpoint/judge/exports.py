"""The export: the full state dict, as other programs read it, loads into the reference and equals it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace

from pytest_fsdp_meta.checks.checkpoint.facts import Assembled
from pytest_fsdp_meta.checks.checkpoint.judge.round_trip import (
    EQUAL,
    MOVED,
    describe_difference,
    equal_to_reference,
    explain_lacking,
    is_equal,
)
from pytest_fsdp_meta.evidence import Comparison, Export
from pytest_fsdp_meta.judging.causes import explain_pattern
from pytest_fsdp_meta.judging.findings import Explanation, Finding
from pytest_fsdp_meta.judging.gates import global_losses
from pytest_fsdp_meta.judging.limits import loss_tolerances, relative_distance
from pytest_fsdp_meta.judging.registry import checkpoint_check
from pytest_fsdp_meta.judging.view import Noted, PartlyJudged, View, ranks_by
from pytest_fsdp_meta.text import clean_name, first_of, name_ranks

OWN = "Subject(export_reference=...)"

_UNDO = "undo what sharding or kernels change in the export, and compare an exported checkpoint with the original"
_ROUNDED: Explanation = {
    "cause": "the export casts to a lower precision than the parameters have: its dtype is that of the computation, or "
    "of the config",
    "remedy": "export each tensor in the dtype of its parameter; if a smaller checkpoint is intended, skip this check "
    "with that reason: skip={'full_state_dict_exports': 'exported in a lower precision on purpose'}",
}
_COMPUTED: Explanation = {
    "cause": f"state_dict() computes other values than {OWN}: adapters are merged with another scale (alpha / rank), "
    "not at all or twice, or other rows are cut",
    "remedy": "compare how the two compute this tensor, with the settings of the adapters",
}
_NOT_APPLIED: Explanation = {
    "cause": f"the export has the model's own values, without what {OWN} adds: adapters are not merged, or the tensors "
    "were read after the merge had been undone",
    "remedy": "merge before state_dict() reads the tensors, and copy them before the merge is undone",
}
_UNTRAINED: Explanation = {
    "cause": "state_dict() leaves out or computes otherwise what training has changed: adapters whose second factor "
    "was 0 before are merged with another scale, or it returns copies from before",
    "remedy": "compare the exported weights with those that the forward uses, after a step; if averages are exported "
    "on purpose, skip this check with that reason",
}
_OTHER_NAMES: Explanation = {
    "cause": "state_dict() or a hook renames, leaves out or adds names",
    "remedy": f"export the reference's names; if it is another model's state dict, declare that model: {OWN}",
}
_OWN_SHARD: Explanation = {
    "cause": "state_dict() returns a rank's own shard",
    "remedy": "gather it: full_tensor(), or get_model_state_dict(model, "
    "options=StateDictOptions(full_state_dict=True))",
}
_OTHER_PART: Explanation = {
    "cause": "state_dict() or a state-dict hook returns the blocks in another order or transposed, a copy that is not "
    "current, or the part of another rank",
    "remedy": "return on each rank the parameter itself, or its current values in the layout that "
    "Subject(adapter=...) describes",
}
_NO_PART: Explanation = {
    "cause": "state_dict() leaves the tensor out on these ranks, as if another rank had gathered it",
    "remedy": "return each rank's part, or gather all parts on rank 0",
}


@checkpoint_check(
    promise="the gathered state dict loads strictly into the reference and equals it, including tied weights",
    needs=["inventory", "reference", "values", "export"],
    uses=["training"],
    after=[*EQUAL, "tied_weights_share_storage", "state_dict_names_clean"],
    why="The exported checkpoint is the one that is published and served.",
    cause="a state-dict hook changes its form (transposed, permuted, padded, cast), or saves a stale copy of a tied "
    "weight",
    remedy=_UNDO,
    references=["huggingface/accelerate#4206", "pytorch/torchtitan#3764", "NVIDIA-NeMo/Automodel#2511"],
)
def full_state_dict_exports(view: View) -> Iterable[Finding]:
    export = view.evidence.export
    assert export is not None
    declared = "export_reference" in view.evidence.subject.declared
    source, values = (OWN, f"those of {OWN}") if declared else ("the reference", "the reference's")
    equal, wrong = _right_values(view, export, declared)
    renamed = {clean_name(key) for key in export.unexpected}  # reported under the key with the wrapper's prefix
    changed = ((rank, name) for rank, names in enumerate(export.changed) for name in names)
    for name, ranks in ranks_by(changed).items():
        if view.judgeable(name):
            yield Finding(name, ranks, "state_dict() itself changes this frozen weight", "the same after it", **MOVED)
    lacking = explain_lacking(view, export.missing) or _OTHER_NAMES
    for name in export.missing:
        if name not in renamed and view.judgeable(name):
            yield Finding(name, (0,), "missing in the gathered state dict", "exported", **lacking)
    for name in export.unexpected:
        if view.judgeable(name):
            actual = f"extra key in the gathered state dict: {source} has no such key"
            yield Finding(name, (0,), actual, "", **_OTHER_NAMES)
    for name, dtype in export.rounded.items():
        expected = f"the dtype of {OWN}" if declared else _other_dtype(view, name, dtype)
        if expected and name in equal and view.judgeable(name):
            actual = f"{dtype} in the gathered state dict, which rounds its values"
            yield Finding(name, (0,), actual, expected, **_ROUNDED)
    for comparison in export.comparisons:
        if comparison.equal or not _usable(view, comparison.name) or not view.judgeable(comparison.name):
            continue
        if comparison.problem is not None:
            actual = f"{comparison.problem} in the gathered state dict"
            explanation = _OWN_SHARD if _has_shape_of_a_shard(view, comparison) else Explanation()
            yield Finding(comparison.name, (0,), actual, comparison.should_be, **explanation)
        elif comparison.name in equal and not is_equal(comparison):
            actual, detail = "different values in the gathered state dict", describe_difference(comparison)
            explanation = _COMPUTED if declared else _explain_pattern(view, comparison)
            if comparison.name in export.unchanged:
                explanation = _NOT_APPLIED
            yield Finding(comparison.name, (0,), actual, values, detail, **explanation)
    for found in export.assembled:
        if view.judgeable(found.name):
            yield from _judge_parts(view, found, found.name in equal)
    if wrong:
        raise PartlyJudged(f"values of the export are not compared: {first_of(wrong)} is not the reference's")
    yield from _judge_trained(view, export)


def _judge_trained(view: View, export: Export) -> Iterator[Finding]:
    """Judge the export of the trained model by its loss, if that is the model's own as long as nothing is trained."""
    if export.as_loaded:
        raise Noted("the export is compared as loaded; where export_reference builds a model, also after training")
    if export.no_losses:
        raise PartlyJudged(f"the export is not compared after training: {export.no_losses}")
    runs, reference = view.evidence.training, view.reference.losses or ()
    if not (export.live and runs):
        return
    allowed = max(export.rounding, loss_tolerances(view.evidence)[0])
    for ranks, loss in zip(export.live, export.losses, strict=True):
        trained = [replace(run, losses=(own,)) for run, own in zip(runs, ranks, strict=True)]
        [live] = global_losses(replace(view.evidence, training=tuple(trained)))
        if not math.isfinite(live):
            return  # update_parity reports it
        differs = relative_distance((loss,), (live, *reference), 0) > allowed
        if ranks is export.live[0] and differs:  # on purpose, perhaps: without the rows that pad a vocabulary
            reason = f"as loaded, its loss is {loss:.6g}, and that of the model {live:.6g}"
            raise PartlyJudged(f"the export is not compared after training: {reason}")
    if differs:
        actual = f"loss {loss:.6g} of a model that loads what is exported after training"
        yield Finding(None, (0,), actual, f"{live:.6g}, that of the trained model", **_UNTRAINED)


def _judge_parts(view: View, found: Assembled, equal: bool) -> Iterator[Finding]:
    """Judge a tensor that is put together from parts; its values only if the ``equal`` model has the right ones."""
    name = found.name
    compared = [(part.rank, part.comparison) for part in found.parts if part.comparison and _usable(view, name)]
    problems = [(rank, (c.problem, c.should_be)) for rank, c in compared if c.problem is not None]
    for (problem, should_be), ranks in ranks_by(problems).items():
        yield Finding(name, ranks, f"{problem} in the state dict", f"{should_be}, or the rank's part of it")
    wrong = [(rank, c) for rank, c in compared if c.problem is None and equal and not is_equal(c)]
    if wrong:
        ranks, detail = tuple(rank for rank, _ in wrong), describe_difference(wrong[0][1])
        actual = "different values in the exported part"
        yield Finding(name, ranks, actual, "the reference's", detail, **_OTHER_PART)
    dtypes = [(part.rank, (part.rounded, _other_dtype(view, name, part.rounded))) for part in found.parts]
    rounded = [(rank, pair) for rank, pair in dtypes if all(pair) and equal]
    for (dtype, expected), ranks in ranks_by(rounded).items():
        yield Finding(name, ranks, f"{dtype} in the exported part, which rounds its values", expected, **_ROUNDED)
    if found.diverging and not (wrong or rounded):
        s = "s" if len(found.before) == 1 else ""
        actual = (
            f"values in the state dict that differ from those of {name_ranks(found.before)}, which export{s} the same "
            "elements"
        )
        yield Finding(name, found.diverging, actual, "", **_OTHER_PART)
    if found.absent:
        index = ", ".join(map(str, found.index or ()))
        detail = f"{found.absent} of {found.elements} elements, first at [{index}]"
        yield Finding(name, found.lacking, "this part is in no rank's state dict", "exported", detail, **_NO_PART)


def _right_values(view: View, export: Export, declared: bool) -> tuple[set[str], list[str]]:
    """Return the tensors with the right values on the ranks, so that other ones in the export are its own.

    A tensor of a ``declared`` export_reference may be computed from any others, so none counts as right while one on
    the ranks is wrong; the wrong ones are returned as well.
    """
    names = {comparison.name for comparison in export.comparisons} | {found.name for found in export.assembled}
    if not ("params_equal_reference" in view.selection and "buffers_equal_reference" in view.selection):
        # No other check reports wrong values. What the second load drew is not what the reference has.
        return names.difference(view.evidence.subject.drawn), []
    right = equal_to_reference(view)
    if not declared:
        return right, []
    wrong = sorted({comparison.name for rank in view.evidence.values or () for comparison in rank} - right)
    return set() if wrong else names, wrong


def _explain_pattern(view: View, comparison: Comparison) -> Explanation:
    known = explain_pattern(view.holders(comparison.name)[0][1], [(0, comparison)], odd=False)
    return {"cause": f"in the export, {known['cause']}", "remedy": _UNDO} if known else {}


def _usable(view: View, name: str) -> bool:
    """Return whether the reference has values of this tensor that can be compared."""
    return name not in view.reference.unstable and name not in view.reference.uninitialised


def _other_dtype(view: View, name: str, dtype: str) -> str:
    """Return the ranks' dtype, as what is expected, if the export rounds to another one; empty if it does not."""
    own = next((tensor.dtype for _, tensor in view.holders(name)), dtype)
    return "" if own == dtype else f"{own}, as on the ranks"


def _has_shape_of_a_shard(view: View, comparison: Comparison) -> bool:
    """Return whether the shape, which is not the reference's, is that of the shard on some rank."""
    shards = [tensor.local_shape for _, tensor in view.holders(comparison.name) if tensor.local_shape != tensor.shape]
    return comparison.shape in shards
