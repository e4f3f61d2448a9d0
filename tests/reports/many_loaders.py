"""A handmade report of many loaders, as a nightly run writes it: most pass, a few fail for the same few causes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import product
from math import nan

from pytest_fsdp_meta.checks.memory.facts import RankMemory
from pytest_fsdp_meta.reports.schema import CheckRecord, Curves, LoaderRecord, Report
from tests.reports import report_factory as factory
from tests.reports.report_factory import ROTARY, check, finding

MODELS = [
    "llama",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "gemma2",
    "gemma3",
    "mistral",
    "mixtral",
    "phi3",
    "falcon",
    "gpt_neox",
    "gpt2",
    "opt",
    "bloom",
    "olmo2",
    "glm4",
    "cohere2",
    "granite",
    "mamba2",
    "t5",
    "bart",
    "whisper",
    "vit",
    "clip",
    "bert",
    "deepseek_v3",
]
MODES = ("fsdp2", "hsdp", "tp", "fsdp2-tp", "offload")
STEPS, POINTS, LAYERS = 6, 60, 4
LOST = "ranks 0, 1 raised FileNotFoundError: [Errno 2] No such file or directory: 'model-00003-of-00007.safetensors'"
TRACEBACK = """Traceback (most recent call last):
  File "mypkg/loading.py", line 88, in load
    shard = load_file(folder / name)
FileNotFoundError: [Errno 2] No such file or directory: 'model-00003-of-00007.safetensors'"""
PLACE = "mypkg/loading.py:88"
NOT_APPLICABLE = ("frozen_weights_equal_verifier", "tied_weights_share_storage")
NOT_DECLARED = ("batches_follow_the_mesh", "batches_resume", "beside_parity", "beside_round_trip")


def nightly(loaders: int = 130, started: str = "2026-11-20T22:30:00Z", broken: bool = True) -> Report:
    """Return a run of so many loaders; of each 130, 4 fail checks, 3 crash, and 1 passes a check unexpectedly."""
    names = [f"tests/test_zoo.py::test_loads[{model}-{mode}]" for model, mode in product(MODELS, MODES)]
    rounds = -(-loaders // len(names))
    names = [name if turn == 0 else name.replace("]", f"-{turn}]") for turn in range(rounds) for name in names]
    top = factory.header(started=started, commit="0123abc" if broken else "9876fed")
    records = [_loader(index, name, broken) for index, name in enumerate(names[:loaders])]
    return factory.report(*records, header=top, seconds=4.2 * loaders, exit_status=int(broken))


def yesterday(loaders: int = 130) -> Report:
    """Return the run of the day before, in which only the rotary buffers were broken."""
    return nightly(loaders, "2026-11-19T22:30:00Z", broken=False)


def _loader(index: int, name: str, broken: bool) -> LoaderRecord:
    place = index % 130
    usual = {one: check(one, "not applicable", name=name, reason="nothing is frozen or tied") for one in NOT_APPLICABLE}
    usual |= {one: check(one, "not declared", name=name, reason="declare it in Subject(...)") for one in NOT_DECLARED}
    record = factory.loader(name, {"dp_shard": 4}, usual)
    assert record.summary is not None
    measured = replace(
        record.summary, losses=_curves(STEPS), memory=tuple(_memory(rank) for rank in range(4)), unavailable={}
    )
    record = replace(record, summary=measured)
    if place in (12, 47):
        return _with(record, _rotary(name))
    return BROKEN[place](record) if broken and place in BROKEN else record


def _with(record: LoaderRecord, changed: Mapping[str, CheckRecord], losses: Curves | None = None) -> LoaderRecord:
    assert record.summary is not None
    summary = replace(record.summary, losses=losses or record.summary.losses)
    checks = tuple(changed.get(one.check, one) for one in record.checks)
    return replace(record, checks=checks, summary=summary)


def _rotary(name: str) -> dict[str, CheckRecord]:
    found = finding(
        ROTARY,
        actual="never written (poison value NaN)",
        expected="written by the loader",
        detail="8 of 8 elements",
        cause="it is a non-persistent buffer, so no checkpoint has it, and nothing recomputed it after to_empty()",
        remedy="recompute it after to_empty(), as the module's __init__ does",
    )
    blocked = ("loss_parity", "grad_parity", "update_parity")
    after = {
        one: check(one, "depends on a failed check", name=name, reason="no_uninitialized_memory failed")
        for one in blocked
    }
    return {"no_uninitialized_memory": check("no_uninitialized_memory", "failed", [found], name)} | after


def _crashed(record: LoaderRecord) -> LoaderRecord:
    detail = TRACEBACK
    errors = tuple(
        check(
            one.check,
            "error",
            name=record.loader,
            reason=LOST,
            detail=detail if not number else "",
            place=PLACE,
            seconds=0.0,
        )
        for number, one in enumerate(record.checks)
    )
    return replace(record, checks=errors, error=LOST, summary=None, seconds={"world": 0.3, "loading": 0.2})


def _untied(record: LoaderRecord) -> LoaderRecord:
    found = finding(
        "lm_head.weight",
        actual="does not share storage with model.embed_tokens.weight",
        expected="tied",
        cause="to_empty() unties weights, and tie_weights() was not called after it",
        remedy="call model.tie_weights() after to_empty()",
    )
    name = "tied_weights_share_storage"
    return _with(record, {name: check(name, "failed", [found], record.loader)})


def _doubled(record: LoaderRecord) -> LoaderRecord:
    step = factory.traced_step()
    texts = {
        "cause": "the loss of each micro-batch is not divided by their number before its backward",
        "remedy": "divide the loss by the number of micro-batches",
        "origin": step.origin,
    }
    names = [f"model.layers.{layer}.mlp.up_proj.weight" for layer in range(LAYERS)]
    grads = [finding(name, actual="2 times the reference's gradient", expected="", **texts) for name in names]
    loss = finding(None, actual="a loss of 9.28 at step 2", expected="4.64", detail="2 times the reference's", **texts)
    changed = {
        "grad_parity": check("grad_parity", "failed", grads, record.loader),
        "loss_parity": check("loss_parity", "failed", [loss], record.loader),
    }
    record = _with(record, changed, _curves(STEPS, 0.18))
    assert record.summary is not None
    return replace(record, summary=replace(record.summary, traced=step))


def _diverged(record: LoaderRecord) -> LoaderRecord:
    found = finding(
        None,
        actual="a loss of nan at step 4",
        expected="4.22",
        cause="an activation overflows in float16",
        remedy="compute this layer in float32 or bfloat16",
    )
    changed = {"loss_parity": check("loss_parity", "failed", [found], record.loader)}
    curves = _curves(STEPS, 0.001)
    lost = tuple(nan if step >= 3 else value for step, value in enumerate(curves.mean))
    return _with(record, changed, replace(curves, mean=lost))


def _unexpected(record: LoaderRecord) -> LoaderRecord:
    name = "dcp_reshards"
    reason = "resharding of the MoE router is not supported yet, issue 71"
    return _with(record, {name: check(name, "xpassed", name=record.loader, reason=reason)})


BROKEN: dict[int, Callable[[LoaderRecord], LoaderRecord]] = {
    30: _crashed,
    31: _crashed,
    33: _crashed,
    61: _untied,
    78: _doubled,
    99: _diverged,
    126: _unexpected,
}
"""Place of a loader -> what breaks it."""


def _curves(steps: int, distance: float = 4e-7) -> Curves:
    reference = tuple(round(4.85 - 0.21 * step, 6) for step in range(steps))
    mean = tuple(value * (1 + distance * (step + 1) / steps) for step, value in enumerate(reference))
    ranks = tuple(tuple(round(value + 0.05 * (slice_ - 2), 6) for value in mean) for slice_ in range(4))
    return Curves(mean, ranks, reference, (1e-5,) * steps)


def _memory(rank: int) -> RankMemory:
    levels = [(8192 + 512 * rank) * (1 + (7 * point + rank) % 11) for point in range(POINTS)]
    return RankMemory(host=max(levels), whole=2048)
