"""Test what observers see of single tensors, mostly without ranks."""

from __future__ import annotations

import math
import pickle
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from pytest_fsdp_meta import Part, Subject
from pytest_fsdp_meta.checks.checkpoint.facts import Fingerprint
from pytest_fsdp_meta.checks.checkpoint.observe.fingerprints import fingerprint
from pytest_fsdp_meta.checks.training.observe.movement import copy_shards, moved_rows, movements
from pytest_fsdp_meta.checks.values.facts import Element
from pytest_fsdp_meta.checks.values.observe import SLICE, compare, length, measure
from pytest_fsdp_meta.evidence import Comparison, Movement
from pytest_fsdp_meta.ranks.adapters.dtensor import local_part, own_part
from pytest_fsdp_meta.ranks.batches import call_field, loss_of
from pytest_fsdp_meta.ranks.bits import digest
from pytest_fsdp_meta.ranks.inventory import take_inventory, tensor_facts
from pytest_fsdp_meta.ranks.optimizers import optimizer_facts, pack_optimizer
from pytest_fsdp_meta.ranks.reference_record import Record, write_record
from pytest_fsdp_meta.worlds import CallFailed, Misuse, current
from tests.world_help import world_of

NAN, INF = float("nan"), float("inf")


@pytest.fixture
def compared(tmp_path):
    """Return a function that compares a tensor with the record of another."""

    def compare_with(actual: Tensor, expected: Tensor) -> Comparison:
        write_record(tmp_path / "values.safetensors", [("a", expected)])
        return compare("a", own_part(actual), Record(tmp_path / "values.safetensors"), "a")

    return compare_with


@pytest.mark.parametrize("flat", [False, True])
def test_the_drawn_rows_are_not_compared(tmp_path, flat):
    write_record(tmp_path / "values.safetensors", [("a", torch.zeros(4, 2))])
    record = Record(tmp_path / "values.safetensors")

    def compare_rows(values: list[float], start: int | None, stop: int | None) -> Comparison:
        local = torch.tensor(values)  # the last three rows
        part = Part.run(local, (4, 2), start=2) if flat else Part.block(local.view(3, 2), (4, 2), start=(1, 0))
        return compare("a", part, record, "a", measuring=True, drawn=(start, stop))

    drawn = compare_rows([0.0, 0.0, 1.0, NAN, 2.0, 3.0], 2, None)
    assert (drawn.equal, math.isfinite(drawn.measure.actual)) == (True, False)
    wrong = compare_rows([0.0, 5.0, 1.0, 1.0, 2.0, 3.0], -2, None)
    assert (wrong.equal, wrong.differing, wrong.index, wrong.actual) == (False, 1, (1, 1), 5.0)
    assert compare_rows([0.0, 0.0, 1.0, 1.0, 2.0, 3.0], None, 3).differing == 2


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor([2**60 + 1, -(2**63), 2**63 - 1]),
        torch.tensor([2**64 - 1, 2**63], dtype=torch.uint64),
        torch.tensor([2**16 - 1], dtype=torch.uint16),
        torch.tensor([True, False]),
        torch.tensor([NAN, INF, -INF, 1.0]),
        torch.tensor([NAN, 1.0], dtype=torch.bfloat16),
        torch.tensor([NAN, 1.0]).to(torch.float8_e4m3fn),
        torch.tensor([complex(NAN, 1.0), complex(INF, NAN)]),
        torch.tensor([1e-300 + 1j], dtype=torch.complex128),
    ],
    ids=lambda tensor: str(tensor.dtype),
)
def test_a_tensor_equals_itself(compared, tensor):
    assert compared(tensor.clone(), tensor) == Comparison("a", True, elements=tensor.numel())


@pytest.mark.parametrize(
    ("actual", "expected", "index", "distance"),
    [
        (torch.tensor([0, 2**60 + 1]), torch.tensor([0, 2**60]), (1,), 1.0),
        (torch.tensor([2**63 - 1]), torch.tensor([-(2**63)]), (0,), 2.0**64),
        (torch.tensor([2**64 - 1], dtype=torch.uint64), torch.tensor([2**64 - 2], dtype=torch.uint64), (0,), 1.0),
        (torch.tensor([True, True]), torch.tensor([True, False]), (1,), 1.0),
        (torch.tensor([1.0, NAN]), torch.tensor([1.0, 2.0]), (1,), INF),
        (torch.tensor([1.0, 2.0]).to(torch.float8_e5m2), torch.tensor([1.0, 4.0]).to(torch.float8_e5m2), (1,), 2.0),
        (torch.tensor([complex(NAN, 1.0)]), torch.tensor([complex(NAN, 3.0)]), (0,), 2.0),
    ],
)
def test_a_difference_in_the_own_dtype_is_found(compared, actual, expected, index, distance):
    found = compared(actual, expected)
    assert (found.equal, found.differing, found.index, found.max_abs) == (False, 1, index, distance)


LAZY = {
    "conjugated": torch.tensor([1 + 2j, 3 - 4j]).conj(),
    "negated": torch.tensor([1 + 2j, 3 - 4j]).conj().imag,
    "negated and conjugated": torch._neg_view(torch.tensor([1 + 2j, 3 - 4j])).conj(),
}


def test_the_farthest_element_is_not_the_first_that_differs(compared):
    expected = torch.tensor([[1.0, 2.0], [3.0, 4.0], [-5.0, 6.0]])
    actual = expected + torch.tensor([[0.0, 0.25], [0.0, 0.0], [2.0, -2.0]])
    found = compared(actual, expected)
    assert (found.index, found.farthest) == ((0, 1), Element((2, 0), actual=-3.0, expected=-5.0))
    assert compared(torch.full((2,), torch.nan), torch.ones(2)).farthest.index == (0,)
    assert compared(torch.tensor(2.0), torch.tensor(1.0)).farthest == Element((), actual=2.0, expected=1.0)
    part = compared(torch.tensor([1 + 1j, 2 + 5j]), torch.tensor([1 + 2j, 2 + 2j])).farthest
    assert part == Element((1,), actual=5.0, expected=2.0)
    assert compared(expected, expected).farthest is None


@pytest.mark.parametrize("lazy", LAZY.values(), ids=LAZY)
def test_a_lazy_tensor_equals_its_values(compared, lazy):
    real = torch.tensor(lazy.tolist())
    assert (lazy.is_conj() or lazy.is_neg(), real.is_conj() or real.is_neg()) == (True, False)
    assert digest(local_part(lazy)) == digest(real)
    facts = tensor_facts("a", "buffer", lazy, persistent=True, attributes=())
    assert (facts.digest, facts.storage) == (digest(real), f"{lazy.data_ptr()}:(2,)")
    assert compared(lazy, real).equal
    assert compared(real, lazy).equal
    assert not compared(lazy, -real).equal


def test_a_tensor_and_its_lazy_conjugate_differ(tmp_path):
    plain = torch.tensor([1 + 2j, 3 - 4j])
    write_record(tmp_path / "values.safetensors", [("a", plain), ("b", plain.conj())])
    reference = Record(tmp_path / "values.safetensors")
    assert [compare(name, own_part(plain.conj()), reference, name).equal for name in ("a", "b")] == [False, True]


def test_an_element_of_a_complex_tensor_counts_once(compared):
    reference = torch.tensor([1 + 2j, 3 + 4j, 5 + 6j])
    found = compared(reference + torch.tensor([0, 3 + 4j, 3j]), reference)
    assert (found.elements, found.differing, found.index, found.max_abs) == (3, 2, (1,), 5.0)
    assert (found.expected, found.actual) == (3.0, 6.0)
    found = compared(reference + torch.tensor([0, 0, 3j]), reference)
    assert (found.differing, found.index, found.expected, found.actual) == (1, (2,), 6.0, 9.0)


THIRDS = torch.arange(1, 9) / 3


WHOLE = torch.randn(8, 8, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("actual", "reference", "pattern"),
    [
        (torch.zeros(8), THIRDS, "zeros"),
        (THIRDS.bfloat16().float(), THIRDS, "rounded bfloat16"),
        (torch.cat([THIRDS[:4].bfloat16().float(), THIRDS[4:]]), THIRDS, "rounded bfloat16"),
        (-THIRDS, THIRDS, "times -1"),
        (THIRDS.bfloat16() * 1.5, THIRDS.bfloat16(), "times 1.5"),
        (torch.arange(4) + 1, torch.arange(4), "plus 1"),
        (torch.cat([THIRDS[:5], -THIRDS[5:]]), THIRDS, "part"),
        (torch.tensor([1.0, 1.0, 0.3, 0.7]), torch.tensor([1.001, 1.002, 0.3, 0.7]), ""),  # only 1 may be rounded
        (torch.ones(64).bfloat16(), (0.45 + 0.003 * WHOLE.flatten()).bfloat16(), ""),  # ours is constant
        (torch.cat([WHOLE[:6], WHOLE[:1], WHOLE[:1]]), WHOLE, "part"),  # a row that is there once
        (WHOLE.mT, WHOLE, "transposed"),
        (WHOLE[[1, 0, *range(2, 8)]], WHOLE, "reordered"),
        (WHOLE + 1e-6 * WHOLE.mT, WHOLE, "close"),
        (torch.view_as_complex(WHOLE.view(4, 8, 2)) * 2, torch.view_as_complex(WHOLE.view(4, 8, 2)), "times 2"),
    ],
)
def test_what_was_done_to_a_wrong_tensor_is_found_by_doing_it(tmp_path, actual, reference, pattern):
    assert found_pattern(tmp_path, own_part(actual.contiguous()), reference) == pattern


@pytest.mark.parametrize(
    ("rows", "start", "flat", "pattern"),
    [
        (WHOLE[[1, 0, *range(2, 8)], :4], 0, False, "reordered"),
        (WHOLE[:4], 4, False, "elsewhere"),
        (WHOLE.mT[4:], 4, False, "transposed"),
        (WHOLE[:4].flatten(), 4, True, "elsewhere"),
    ],
)
def test_what_was_done_to_a_wrong_shard(tmp_path, rows, start, flat, pattern):
    rows = rows.contiguous()
    part = Part.run(rows, (8, 8), start=8 * start) if flat else Part.block(rows, (8, 8), start=(start, 0))
    assert found_pattern(tmp_path, part, WHOLE) == pattern


def test_the_runs_of_another_rank(tmp_path):
    part = Part.blocks(WHOLE[[0, 1, 4, 5]], (8, 8), [(2, 4), (6, 8)])  # the second half of each fused matrix
    assert found_pattern(tmp_path, part, WHOLE) == "elsewhere"


def found_pattern(folder: Path, part: Part, reference: Tensor) -> str:
    write_record(folder / "values.safetensors", [("a", reference)])
    found = compare("a", part, Record(folder / "values.safetensors"), "a", measuring=True).pattern
    number = f"{float(found.by):.3g}" if found and found.kind == "times" else found and found.by
    return "" if found is None else f"{found.kind} {number}".rstrip()


PACKED = [name for name in ("float4_e2m1fn_x2", "uint4") if hasattr(torch, name)]


@pytest.mark.parametrize("name", PACKED)
def test_packed_dtypes_are_compared_as_bytes(compared, name):
    data = torch.arange(4, dtype=torch.uint8)
    packed = data.view(getattr(torch, name))
    facts = tensor_facts("a", "buffer", packed, persistent=True, attributes=())
    assert (facts.dtype, facts.poisoned, facts.digest) == (name, 0, digest(data))
    assert compared(packed, packed).equal
    found = compared(packed, data.flip(0).view(packed.dtype))
    assert (found.differing, found.index, found.max_abs) == (4, (0,), 3.0)


def maybe_tied(tie: bool) -> nn.ModuleDict:
    model = nn.ModuleDict({name: nn.Linear(2, 2, bias=name == "a") for name in "abc"})
    if tie:
        model["c"].weight = model["b"].weight
    return model


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.int64])
@pytest.mark.parametrize("size", [0, 1, SLICE, 2 * SLICE + 7])
def test_what_is_measured_stays_as_it_is(dtype, size):
    ours, theirs, before, old = vectors = [(torch.arange(size) % (7 + k)).to(dtype) for k in range(4)]
    copies = [vector.clone() for vector in vectors]
    found = measure(ours, theirs, since=(before, old))
    assert all(torch.equal(*pair) for pair in zip(vectors, copies, strict=True))
    moved, due = (ours - before).double(), (theirs - old).double()
    expected = [moved.norm(), due.norm(), (moved - due).norm(), moved.dot(due)]
    assert [found.actual, found.truth, found.apart, found.dot] == pytest.approx([float(e) for e in expected])
    assert length(ours) == pytest.approx(float(ours.double().norm()))


@pytest.mark.parametrize("model_tied", [True, False])
@pytest.mark.parametrize("reference_tied", [True, False])
def test_an_optimizer_is_rebuilt_by_the_names_of_its_parameters(model_tied, reference_tied):
    ours, theirs = maybe_tied(model_tied), maybe_tied(reference_tied)
    theirs["a"].weight.requires_grad_(False)
    optimizer = torch.optim.AdamW(
        [
            {"params": [ours["a"].weight, nn.Parameter(torch.ones(1))], "lr": 0.5},
            {"params": list(dict.fromkeys([ours["b"].weight, ours["c"].weight])), "weight_decay": 0.25},
        ],
        betas=(0.5, 0.75),
    )
    [packed] = pickle.loads(pack_optimizer(optimizer, ours))
    rebuilt = packed.rebuild(theirs, [p for p in theirs.parameters() if p.requires_grad])
    first, second = rebuilt.param_groups
    assert (type(rebuilt), rebuilt.state) == (torch.optim.AdamW, {})
    assert [id(p) for p in first["params"]] == [
        id(theirs["a"].bias)
    ]  # in no group of the optimizer, and therefore in the first
    assert [id(p) for p in second["params"]] == list(dict.fromkeys([id(theirs["b"].weight), id(theirs["c"].weight)]))
    assert (first["lr"], first["betas"], second["weight_decay"]) == (0.5, (0.5, 0.75), 0.25)
    hyperparameters = [{k: v for k, v in group.items() if k != "params"} for group in rebuilt.param_groups]
    assert hyperparameters == [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]


def test_fingerprints_show_numbers_and_dtypes():
    assert fingerprint(torch.tensor(3.0)) == Fingerprint("3.0", 3.0, "float32", ())
    assert fingerprint(torch.tensor(0.5, dtype=torch.bfloat16)) == Fingerprint("0.5", 0.5, "bfloat16", ())
    numbers = {3.0: 3.0, 10**400: float("inf"), True: None, "3": None}
    assert {value: fingerprint(value).number for value in numbers} == numbers
    hashed = fingerprint(torch.ones(2))
    assert (hashed.number, hashed.dtype, hashed.shape) == (None, "float32", (2,))
    assert hashed != fingerprint(torch.zeros(2))
    nan = fingerprint(float("nan"))
    assert nan == replace(nan, number=-float("nan")), "it is as it was saved"


@pytest.mark.parametrize(
    ("moments", "counted"),
    [
        ((torch.zeros(2, 3), torch.zeros(2)), 1.0),
        ((torch.zeros(2, 3), torch.ones(2)), 0.0),
        ((torch.zeros(2, 3), None), 1.0),
        ((torch.full((2, 3), NAN), None), 0.0),
    ],
)
def test_steps_that_an_optimizer_has_counted_without_gradients(moments, counted):
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter, moment in zip(model.parameters(), moments, strict=True):
        if moment is not None:
            optimizer.state[parameter] = {"step": torch.tensor(1.0), "exp_avg": moment}
    assert optimizer_facts(optimizer, Subject(model, optimizer=optimizer)).counted == counted
    assert optimizer_facts(optimizer, Subject(model, optimizer=lambda parameters: optimizer)).counted == 0.0


def test_an_optimizer_of_named_parameters_is_rebuilt():
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.named_parameters(), lr=0.5)
    [packed] = pickle.loads(pack_optimizer(optimizer, model))
    rebuilt = packed.rebuild(model, model.parameters())
    assert [id(p) for p in rebuilt.param_groups[0]["params"]] == [id(p) for p in model.parameters()]


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (True, "True"),
        ((1, "a", None), "(1, 'a', None)"),
        (torch.bfloat16, "torch.bfloat16"),
        (nn.Linear(1, 1), "a Linear"),
        (torch.ones(2), "a Tensor"),
        ([object()], "a list"),
    ],
)
def test_an_attribute_has_the_same_text_in_every_process(value, shown):
    parameter = nn.Parameter(torch.ones(1))
    parameter.present = value
    facts = tensor_facts("a", "parameter", parameter, persistent=True, attributes=("present", "missing"))
    assert facts.attributes == {"present": shown}


def wrapped_in_part() -> dict[str, bool]:
    model = nn.Sequential(nn.Linear(2, 2, bias=False), DistributedDataParallel(nn.Linear(2, 2, bias=False)))
    return {tensor.name: tensor.ddp for tensor in take_inventory(model, 0, "cpu").tensors}


def test_parameters_of_ddp_are_marked():
    with world_of(2) as world:
        assert world.run(wrapped_in_part) == [{"0.weight": False, "1.weight": True}] * 2


def errors_of_losses():
    """Return where errors of FSDP's forward, of a module's forward and of the loss itself are said to be."""
    on_meta = fully_shard(nn.Linear(2, 2, device="meta"), mesh=current().mesh)
    losses = [
        (on_meta, lambda model, rows: model(torch.ones(1, 2)).sum()),
        (nn.Linear(2, 2), lambda model, rows: model(torch.ones(1, 3)).sum()),
        (nn.Linear(2, 2), lambda model, rows: rows.x),
    ]
    found = []
    for model, loss in losses:
        with pytest.raises(CallFailed) as caught:
            loss_of(Subject(model, loss=loss), {})
        found.append((caught.value.where, type(caught.value.__cause__).__name__))
    return found


def test_an_error_of_fsdp_is_not_one_of_the_loss():
    with world_of(1) as world:
        assert world.run(errors_of_losses) == [
            [
                ("the model's forward", "RuntimeError"),
                ("Subject(loss=...)", "RuntimeError"),
                ("Subject(loss=...), called as loss(model, batch)", "AttributeError"),
            ]
        ]


def test_a_row_that_later_steps_take_back_has_moved():
    model = torch.nn.Linear(2, 2, bias=False)
    before = copy_shards(model)
    with torch.no_grad():
        model.weight[0] += 1
        after_first_step = moved_rows(model, before)
        model.weight.copy_(before["weight"])

    def due(name, tensor, part, old):
        return torch.ones_like(old, dtype=torch.bool)

    assert movements(model, before, due, {}) == (Movement("weight", 2, 2, 0),)
    assert movements(model, before, due, after_first_step) == (Movement("weight", 2, 1, 1),)


def test_what_is_due_is_looked_up_only_where_it_can_matter():
    model = nn.ParameterDict({name: nn.Parameter(torch.zeros(2, 2)) for name in "abcd"})
    before, asked = copy_shards(model), []
    with torch.no_grad():
        for name in "abd":
            model[name] += 1
        model["c"][0] += 1

    def due(name, tensor, part, old):
        asked.append(name)
        return torch.full_like(old, name != "a", dtype=torch.bool)

    assert movements(model, before, due, {}) == (
        Movement("a", 0, 0),
        Movement("b", 2, 0),
        Movement("c", 2, 1, 1),
        Movement("d", 2, 0),
    )
    assert asked == ["a", "b", "c"]


def missing(batch):
    raise KeyError("labels")


@pytest.mark.parametrize(
    ("loss", "call"),
    [
        (lambda batch, model: batch.keys(), ", called as loss(model, batch)"),
        (lambda model, batch: model(), ""),  # a TypeError in torch, about another call
        (lambda model, batch: missing(batch), ""),
    ],
)
def test_an_error_about_the_arguments_says_how_the_function_is_called(loss, call):
    with pytest.raises(CallFailed) as raised:
        loss_of(Subject(nn.Linear(2, 2), loss=loss), {})
    assert raised.value.where == f"Subject(loss=...){call}"


def test_a_function_that_takes_other_arguments_is_an_error_in_one_line():
    with pytest.raises(Misuse) as raised:
        loss_of(Subject(nn.Linear(2, 2), loss=lambda batch: 1), {})
    assert str(raised.value) == (
        "Subject(loss=...): give a function that can be called as loss(model, batch); <lambda>() takes 1 positional "
        "argument but 2 were given"
    )


def names_of(model, optimizer, folder):
    return f"{model} {optimizer} {folder}"


@pytest.mark.parametrize(
    "save",
    [
        names_of,
        lambda folder, model, optimizer: names_of(model, optimizer, folder),
        lambda where, optimizer, model: names_of(model, optimizer, where),
        lambda net, opt, where, folder="its default": names_of(net, opt, where),
        lambda net, kind="its default", folder=None, optimizer=None: names_of(net, optimizer, folder),
        lambda *args: names_of(*args),
        lambda **fields: names_of(**fields),
        partial(lambda config, **fields: names_of(**fields), config="its own"),
        "{} {} {}".format,
    ],
)
def test_arguments_go_to_the_parameters_of_their_names(save):
    assert call_field("save", save, "the model", "the optimizer", "the folder") == "the model the optimizer the folder"


@pytest.mark.parametrize("save", [lambda model, folder: 1, lambda model, scheduler, *rest: 1])
def test_a_refused_call_is_shown_as_it_was_made(save):
    with pytest.raises(Misuse, match=r"called as save\(model, None, folder, scheduler=scheduler\); .*<lambda>"):
        call_field("save", save, 1, None, 3, scheduler=4)


@pytest.mark.parametrize(
    ("save", "call"),
    [
        (lambda model, optimizer, folder, scheduler: optimizer.step(), "model, None, folder, scheduler=scheduler"),
        (
            lambda folder, scheduler, model, opt: opt.step(),
            "model=model, opt=None, folder=folder, scheduler=scheduler",
        ),
    ],
)
def test_an_error_shows_the_call_as_it_was_made(save, call):
    with pytest.raises(CallFailed) as raised:
        call_field("save", save, 1, None, 3, scheduler=4)
    assert raised.value.where == f"Subject(save=...), called as save({call})"
