"""Handmade reports: a passing loader, a failing one, and large or hostile reports."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import product
from math import prod

from pytest_fsdp_meta.catalogue import built_in
from pytest_fsdp_meta.checks.memory.facts import RankMemory
from pytest_fsdp_meta.checks.structure.facts import regions
from pytest_fsdp_meta.evidence import MeshFacts, Region, WorldFacts
from pytest_fsdp_meta.reports.history import Timeline
from pytest_fsdp_meta.reports.schema import (
    SCHEMA,
    SKIPS,
    CatalogueRecord,
    CheckRecord,
    Curves,
    FindingRecord,
    Header,
    LoaderRecord,
    Piece,
    Report,
    Summary,
    TensorRecord,
    TracedPhase,
    TracedRow,
    TracedStep,
)
from tests.checks.evidence_factory import shard_of

CATALOGUE = tuple(CatalogueRecord(c.id, c.family, c.promise, c.since) for c in built_in())
LLAMA = "tests/test_llama.py::test_llama"
ROTARY = "model.rotary_emb.inv_freq"
EMBEDDING = "model.embed_tokens.weight"
HOSTILE = (
    "<script>window.hacked = 1</script>",
    "</script><img src=x onerror='window.hacked = 1'>",
    "\"'><svg/onload=window.hacked=1>",
    "a\u202egnp.weight",
    "\u05e9\u05dc\u05d5\u05dd.weight",
    "x" * 300,
    "two\nlines\x00",
    "{{ 7 * 7 }}{% raw %}",
    "]]><!-- --\u2028",
    "lone \ud800 surrogate",
)


def with_history(now: Report, earlier: Iterable[Report]) -> Report:
    """Return the report with the history of each check in these earlier ones."""
    return Timeline(tuple(earlier)).add_to(now)


def header(**facts: object) -> Header:
    """Return the header of an ordinary run, with some fields replaced."""
    usual = Header(
        started="2026-11-20T22:30:00Z",
        project="my-project",
        command=("pytest", "--fsdp-report=report", "tests"),
        versions={"system": "Linux-6.1", "pytest-fsdp-meta": "0.3.0", "torch": "2.13.0", "transformers": "5.23.0"},
        hardware={"machine": "x86_64", "cpu": "AMD EPYC", "cores": "8", "memory": "32 GiB"},
        engine="local",
        commit="0123abc+",
        catalogue=CATALOGUE,
    )
    return replace(usual, **facts)  # type: ignore[arg-type]


def report(*loaders: LoaderRecord, **facts: object) -> Report:
    """Return a complete run of these loaders; without any, of a passing and a failing one."""
    usual = Report(SCHEMA, header(), loaders or (loader(), broken_loader()), 12.5, 0, True)
    return replace(usual, **facts)  # type: ignore[arg-type]


def loader(
    name: str = LLAMA,
    mesh: Mapping[str, int] | None = None,
    checks: Mapping[str, CheckRecord] | None = None,
    tensors: Iterable[TensorRecord] | None = None,
) -> LoaderRecord:
    """Return a loader whose checks have passed, except for ``checks``."""
    mesh = mesh or {"dp_shard": 4}
    size = prod(mesh.values())
    world = WorldFacts(size, tuple(mesh.items()), "cpu", "gloo")
    given = checks or {}
    records = tuple(given.get(c.check, check(c.check, name=name)) for c in CATALOGUE)
    return LoaderRecord(
        loader=name,
        world=world,
        checks=records,
        seconds={"world": 0.3, "loading": 1.25, "reference": 0.8, "training": 2.4, "checkpoint": 1.1},
        summary=Summary(
            tensors=tuple(llama(mesh) if tensors is None else tensors),
            losses=curves(size),
            memory=tuple(memory(rank) for rank in range(size)),
            model_bytes=49_152,
            load_budget=98_304,
            unavailable={"verifier": "nothing is frozen"},
        ),
    )


def check(
    check: str, kind: str = "passed", findings: Iterable[FindingRecord] = (), name: str = LLAMA, **facts: object
) -> CheckRecord:
    """Return a check with this ``CheckRecord.kind``: a status, or the kind of a skip."""
    item = f"{name}[{check}]"
    status, skip = ("skipped", kind) if kind in SKIPS else (kind, "")
    usual = CheckRecord(check, status, item, findings=tuple(findings), seconds=0.01, skip=skip)
    return replace(usual, **{"again": f"python -m pytest '{item}'", **facts})  # type: ignore[arg-type]


def finding(
    tensor: str | None, *ranks: int, actual: str = "wrong", expected: str = "right", **texts: str
) -> FindingRecord:
    return FindingRecord(tensor, ranks or (0, 1, 2, 3), actual, expected, **texts)


def broken_loader() -> LoaderRecord:
    """Return a loader with findings of every kind: never written, not sharded, wrong on some ranks, another loss."""
    name = "tests/test_llama.py::test_broken"
    cause = {"cause": "it is a non-persistent buffer", "remedy": "recompute it after to_empty()"}
    found = {
        "no_uninitialized_memory": check(
            "no_uninitialized_memory",
            "failed",
            [finding(ROTARY, actual="never written (poison value NaN)", expected="written", detail="8 of 8", **cause)],
            name,
        ),
        "nothing_left_unsharded": check(
            "nothing_left_unsharded",
            "failed",
            [finding(EMBEDDING, actual="whole on every rank", expected="sharded", cause="it was not sharded")],
            name,
        ),
        "params_equal_reference": check(
            "params_equal_reference",
            "failed",
            [
                finding(
                    f"model.layers.{layer}.mlp.up_proj.weight", 1, 3, detail=f"first at ({layer}, 0)", cause="swapped"
                )
                for layer in range(4)
            ],
            name,
            unjudged={"no_uninitialized_memory": (ROTARY,)},
        ),
        "loss_parity": check(
            "loss_parity",
            "failed",
            [
                finding(
                    None,
                    actual="a loss of 4.61",
                    expected="4.43",
                    detail="4% at step 2",
                    cause="an average of averages",
                )
            ],
            name,
        ),
        "tied_weights_share_storage": check("tied_weights_share_storage", "xfailed", name=name, reason="known"),
        "frozen_weights_equal_verifier": check(
            "frozen_weights_equal_verifier", "not applicable", name=name, reason="nothing is frozen"
        ),
        "dcp_reshards": check("dcp_reshards", "error", name=name, reason="rank 1 raised OSError: disk is full"),
        "resume_parity": check("resume_parity", "not run", name=name),
        "communication_scales": check("communication_scales", "not run", name=name),
    }
    mesh = {"dp_replicate": 2, "dp_shard": 2}
    tensors = [
        whole(one, mesh) if one.name == EMBEDDING else poisoned(one) if one.name == ROTARY else one
        for one in llama(mesh)
    ]
    record = loader(name, mesh, found, tensors)
    assert record.summary is not None
    return replace(record, summary=replace(record.summary, losses=curves(4, distance=0.18), traced=traced_step()))


def raised() -> LoaderRecord:
    """Return a loader that raises, so that all its checks are errors."""
    reason = "rank 1 raised OSError: model.safetensors"
    record = loader(checks={one.check: check(one.check, "error", reason=reason) for one in CATALOGUE})
    return replace(record, error=reason, summary=None)


def llama(mesh: Mapping[str, int], layers: int = 4) -> list[TensorRecord]:
    placements = tuple("R" if "replicate" in dim else "S(0)" for dim in mesh)
    shapes = {EMBEDDING: (128, 32)}
    for layer in range(layers):
        block = f"model.layers.{layer}"
        shapes |= {
            f"{block}.self_attn.q_proj.weight": (32, 32),
            f"{block}.mlp.up_proj.weight": (64, 32),
            f"{block}.mlp.down_proj.weight": (32, 64),
            f"{block}.input_layernorm.weight": (6,),
        }
    sharded = [tensor(name, shape, mesh, placements) for name, shape in shapes.items()]
    tied = tensor("lm_head.weight", (128, 32), mesh, placements)
    buffer = tensor(ROTARY, (8,), mesh, kind="buffer", persistent=False, requires_grad=False)
    ties = [replace(sharded[0], tied=(tied.name,)), *sharded[1:], replace(tied, tied=(EMBEDDING,))]
    return [*ties, buffer]


def tensor(
    name: str,
    shape: tuple[int, ...],
    mesh: Mapping[str, int],
    placements: tuple[str, ...] | None = None,
    **facts: object,
) -> TensorRecord:
    """Return a tensor laid out by ``placements``, or whole on every rank without them."""
    sizes = tuple(mesh.values())
    held: dict[tuple[Region, ...], list[int]] = {}
    for rank, coordinate in enumerate(product(*map(range, sizes))):
        held.setdefault(_held(shape, placements, sizes, coordinate), []).append(rank)
    pieces = tuple(
        Piece(tuple(ranks), part, dtype="float32", device="cpu", placements=placements) for part, ranks in held.items()
    )
    on = MeshFacts(tuple(mesh), sizes, (0,) * len(sizes)) if placements else None
    return replace(
        TensorRecord(name, "parameter", shape, shape, pieces, on, requires_grad=True),
        **facts,  # type: ignore[arg-type]
    )


def _held(
    shape: tuple[int, ...], placements: tuple[str, ...] | None, sizes: tuple[int, ...], coordinate: tuple[int, ...]
) -> tuple[Region, ...]:
    if placements is None:
        return regions(shape, (), (), ())
    return regions(shape, [shard_of(one) for one in placements], sizes, coordinate)


def whole(one: TensorRecord, mesh: Mapping[str, int]) -> TensorRecord:
    return replace(one, pieces=tensor(one.name, one.shape, mesh).pieces, mesh=None)


def poisoned(one: TensorRecord) -> TensorRecord:
    count = prod(one.shape)
    return replace(one, pieces=tuple(replace(piece, poisoned=count, nan=count) for piece in one.pieces))


def curves(size: int, steps: int = 3, distance: float = 0.0) -> Curves:
    reference = tuple(round(4.85 - 0.21 * step, 6) for step in range(steps))
    mean = tuple(round(value + distance * step / 2, 6) for step, value in enumerate(reference))
    ranks = tuple(tuple(value + 0.05 * (slice_ - size / 2) for value in mean) for slice_ in range(size))
    return Curves(mean, ranks, reference, (1e-5,) * steps)


def traced_step(block: str = "model.layers.2") -> TracedStep:
    """Return a step that departs on rank 3, in an activation."""

    def row(stage: str, name: str, kind: str, *states: str, **facts: object) -> TracedRow:
        distances = tuple({"agrees": 0.4, "in between": 5.0, "departs": 5.4e5}.get(state) for state in states)
        usual = TracedRow(stage, f"{block}.{name}" if name else "", states, distances, kind)
        return replace(usual, **facts)  # type: ignore[arg-type]

    good, bad = ("agrees", "agrees"), ("agrees", "departs")
    folded = {"module": "model.embed_tokens", "calls": 118, "until": f"{block}.self_attn.o_proj", "times": (118, 118)}
    forward = (
        row("output", "", "", *good, **folded),
        row("output", "self_attn", "LlamaAttention", "not compared", "in between"),
        row("output", "mlp.gate_proj", "Linear", *good),
        row("output", "mlp.act_fn", "GELU", *bad),
        row("input", "mlp.down_proj", "Linear", *bad),
        row("output", "mlp", "LlamaMLP", *bad),
        row("output", "", "LlamaForCausalLM", *bad),
    )
    rest = row("gradient", "mlp", "", *bad, calls=97, until="model.embed_tokens", times=(97, 60))
    origin = f"{block}.mlp.act_fn (GELU, SiLU in the reference), forward, rank 3: the inputs agree, the output is off"
    return TracedStep(
        ranks=((0, 1, 2), (3,)),
        forward=TracedPhase(forward),
        backward=TracedPhase((row("gradient", "", "LlamaForCausalLM", *bad), rest)),
        origin=origin,
        module=f"{block}.mlp.act_fn",
        phase="forward",
    )


def memory(rank: int) -> RankMemory:
    levels = (0, 8192, 24576, 65536, 40960 + 512 * rank, 73728, 32768, 16384, 16384)
    return RankMemory(host=max(levels), whole=2048, beyond=0)


def passing(now: Report) -> Report:
    """Return a report of the day before, in which all checks of the same loaders passed."""
    before = tuple(
        replace(one, checks=tuple(CheckRecord(check.check, "passed") for check in one.checks)) for one in now.loaders
    )
    return replace(now, header=replace(now.header, started="2026-11-19T21:04:00+00:00"), loaders=before)


def nights() -> Report:
    """Return the last of fourteen runs, in which one check is broken since the tenth and another one is flaky."""
    earlier: list[Report] = []
    for day in range(1, 15):
        broken = {"loss_parity"} if day >= 10 else set()
        broken |= {"params_equal_reference"} if day in (3, 4, 8, 14) else set()
        checks = {one: check(one, "failed", [finding(EMBEDDING)]) for one in broken}
        top = header(started=f"2026-11-{day:02}T02:17:00+00:00", commit=f"{day:x}" * 40)
        night = report(loader(checks=checks), loader("tests/test_llama.py::test_other"), header=top)
        earlier.append(with_history(replace(night, exit_status=int(bool(broken))), earlier))
    return earlier[-1]


def hostile() -> Report:
    """Return a report in which every text would break a page that does not escape it."""
    first, second, *others = HOSTILE
    mesh = {first: 2}
    tensors = [tensor(name, (8, 4), mesh, ("S(0)",), tied=(second,)) for name in HOSTILE]
    found = [
        FindingRecord(
            name, (0, 1), f"actual {name}", f"expected {name}", f"detail {name}", f"cause {name}", f"do {name}"
        )
        for name in (*HOSTILE, None)
    ]
    own = CatalogueRecord(second, first, first, second, own=True)
    records = {
        "params_equal_reference": check("params_equal_reference", "failed", found, reason=second, again=first),
        "loss_parity": check("loss_parity", "error", reason=second, again=first, unjudged={second: HOSTILE}),
    }
    record = loader(f"tests/test_{second}::test[{first}]", mesh, records, tensors)
    assert record.summary is not None
    summary = replace(
        record.summary,
        unavailable={first: second},
        traced=traced_step(second),
    )
    record = replace(
        record,
        checks=(*record.checks, CheckRecord(second, "failed", first, first, tuple(found))),
        error=second,
        seconds=dict.fromkeys(HOSTILE, 0.5),
        summary=summary,
    )
    top = header(
        project=first,
        command=HOSTILE,
        versions={first: second},
        hardware={second: first},
        engine=second,
        commit=second,
        started=second,
        catalogue=(*CATALOGUE, own),
        settings=dict(zip(HOSTILE, reversed(HOSTILE), strict=True)),
    )
    return report(record, *(replace(loader(name), summary=None) for name in others), header=top)
