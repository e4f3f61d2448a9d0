"""Test that watchers record collectives and memory, and that they change nothing."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint

from fixtures.releases import needs_gather_in_backward
from pytest_fsdp_meta.checks.collectives.facts import Collective
from pytest_fsdp_meta.checks.collectives.observe import FSDP_BUFFERS, Recorder, StepTraffic, observe_step, watching_step
from pytest_fsdp_meta.checks.memory import observe as memory
from pytest_fsdp_meta.checks.memory.observe import Change, Meter, Peak, find_peaks
from pytest_fsdp_meta.ranks.inventory import MAPS, MappedFiles
from pytest_fsdp_meta.ranks.watching import watching
from pytest_fsdp_meta.worlds import current
from tests.world_help import world_of

pytestmark = pytest.mark.skipif(not MAPS.exists(), reason="mapped files can be distinguished from memory on Linux only")


def recorded(talk: Callable[[nn.Module], object], **known: Tensor) -> tuple[Collective, ...]:
    model = nn.Linear(3, 2)
    recorder = Recorder(known)
    with watching(recorder):
        talk(model)
    return recorder.collectives(model)


def in_every_way(model: nn.Module) -> None:
    pair = dist.new_group([0, 1])
    dist.broadcast(model.weight.data, 1, group=pair)
    dist.all_reduce(torch.ones(2, dtype=torch.int32))
    dist.barrier()
    halves = [torch.ones(1 + rank) for rank in range(2)]
    dist.all_to_all_single(torch.ones(2), torch.ones(2))
    dist.all_gather([torch.ones(2), torch.ones(2)], halves[1])
    dist.all_gather_object([None, None], "x" * (1 + dist.get_rank()))
    distribute_tensor(torch.ones(4, 2), current().mesh, [Shard(0)]).full_tensor()
    if dist.get_rank():
        dist.recv(torch.ones(1), 0)
    else:
        dist.send(torch.ones(1), 1)


def ways() -> list[tuple[object, ...]]:
    seen = recorded(in_every_way)
    return [(c.op, c.ranks, c.dtype, c.shapes, c.root, c.reduction, c.tensors) for c in seen]


def test_collectives_of_every_kind_are_recorded_in_order():
    both = (0, 1)
    with world_of(2) as world:
        seen = world.run(ways)
    assert seen[0][:7] == seen[1][:7]
    assert seen[0][:5] == [
        ("broadcast", both, "float32", ((2, 3),), 1, "", ("weight",)),
        ("all_reduce", both, "int32", ((2,),), None, "", ()),
        ("barrier", both, "", (), None, "", ()),
        ("all_to_all", both, "float32", ((2,),), None, "", ()),
        ("all_gather of lists", both, "float32", ((2,),), None, "", ()),
    ]
    sizes, values, *of_dtensor = seen[0][5:]
    # torch 2.15 gathers the objects, first their sizes and then their bytes, into one tensor instead of a list.
    assert [(op.partition(" ")[0], dtype) for op, _, dtype, *_ in (sizes, values)] == [
        ("all_gather", "int64"),
        ("all_gather", "uint8"),
    ]
    assert [op for op, *_ in of_dtensor] == ["scatter", "all_gather"]


def recycled() -> list[tuple[str, ...]]:
    """Send and free some memory, and then reuse it for a parameter."""

    def talk(model: nn.Module) -> None:
        passing = torch.ones(2, 3)
        address = passing.data_ptr()
        dist.all_reduce(passing)
        del passing
        for _ in range(100):
            model.weight = nn.Parameter(torch.ones(2, 3))
            if model.weight.data_ptr() == address:
                break

    return [one.tensors for one in recorded(talk)]


def copied() -> list[tuple[str, ...]]:
    weight, zeros = torch.arange(6.0), torch.zeros(4)

    def talk(_: nn.Module) -> None:
        for tensor in (weight.clone(), weight + 1, zeros.clone(), torch.arange(7.0)):
            dist.broadcast(tensor, 0)

    return [one.tensors for one in recorded(talk, a=weight, zero=zeros)]


def threaded() -> list[str]:
    def talk(_: nn.Module) -> None:
        with ThreadPoolExecutor(1) as pool:
            pool.submit(dist.barrier).result()

    return [one.op for one in recorded(talk)]


@pytest.mark.parametrize(
    ("run", "expected"),
    [(recycled, [()]), (copied, [("a",), (), (), ()]), (threaded, ["barrier"])],
)
def test_sent_memory_is_matched_to_parameters(run, expected):
    with world_of(2) as world:
        assert world.run(run) == [expected] * 2


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.inner(x))


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


def observe_one_step(forwards: int, inside: bool) -> StepTraffic:
    """Train a step with several forwards and recomputed blocks; ``inside`` shards a module within each block."""
    me = current()
    me.state["watch"] = ("collectives",)
    model = Stack()
    for block in model.blocks:
        fully_shard(block.inner if inside else block, mesh=me.mesh)
    fully_shard(model, mesh=me.mesh)
    optimizer = torch.optim.SGD(model.parameters(), foreach=False)
    for step in range(2):
        with watching_step(me, model, 2, step):
            x = torch.ones(2, 4, requires_grad=True)
            for _ in range(forwards):
                x = model(x)
            x.sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    seen = observe_step()
    assert seen is not None
    return seen


@pytest.mark.parametrize(
    ("forwards", "inside"), [(1, False), (1, True), (2, False), pytest.param(2, True, marks=needs_gather_in_backward)]
)
def test_repeated_forwards_explain_the_gathers(forwards, inside):
    with world_of(2) as world:
        collectives, groups, unknown = world.run(observe_one_step, forwards, inside)[0]
    gathers = sum(c.op == "all_gather" and c.by_fsdp for c in collectives)
    assert (len(groups), unknown) == (2, ())
    assert 4 <= gathers <= sum(group.forwards * (2 if group.reshards else 1) for group in groups)
    assert all(c.by_fsdp for c in collectives)


def observe_gathers(stepping: str) -> tuple[list[tuple[bool, bool]], int]:
    """Train a step that gathers all gradients before or in the optimizer's step, or steps while the forward still runs.

    Return (by FSDP2, by the optimizer) of each all-gather, and how many gathers the FSDP2 groups need.
    """
    me = current()
    me.state["watch"] = ("collectives",)
    model = Stack()
    for module in (*model.blocks, model):
        fully_shard(module, mesh=me.mesh)
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(parameters, foreach=False)

    def gather(*_: object) -> None:
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad.full_tensor()

    if stepping == "in the forward":
        inner = torch.optim.SGD(parameters[:1])
        model.blocks[1].register_forward_pre_hook(lambda *_: inner.step())
    if stepping == "in the step":
        optimizer.register_step_pre_hook(gather)
    x = torch.ones(2, 4, requires_grad=True)
    with watching_step(me, model, 1, 0):
        model(x).sum().backward()
        if stepping == "before the step":
            gather()
        optimizer.step()
    seen = observe_step()
    assert seen is not None
    gathers = [(c.by_fsdp, c.optimizing) for c in seen[0] if c.op == "all_gather"]
    return gathers, sum(group.forwards * (2 if group.reshards else 1) for group in seen[1])


@pytest.mark.parametrize(
    ("stepping", "others"),
    [
        ("", set()),
        ("in the forward", set()),
        ("before the step", {(False, False)}),
        ("in the step", {(False, True)}),
    ],
)
def test_gathers_of_gradients_are_not_those_of_fsdp(stepping, others):
    with world_of(2) as world:
        for gathers, needed in world.run(observe_gathers, stepping):
            assert set(gathers) == {(True, False), *others}
            assert gathers.count((True, False)) <= needed


def observe_unknown_buffers() -> tuple[list[bool], tuple[str, ...]]:
    """Record a step as if no operator of FSDP2 were known that fills buffers of reduce-scatters."""
    known = {name: op for name, op in FSDP_BUFFERS.items() if op != "reduce_scatter"}
    with mock.patch("pytest_fsdp_meta.checks.collectives.observe.FSDP_BUFFERS", known):
        collectives, _, unknown = observe_one_step(1, False)
    return [c.by_fsdp for c in collectives if c.op == "reduce_scatter"], unknown


def test_operators_are_noted_that_are_not_known():
    with world_of(2) as world:
        for by_fsdp, unknown in world.run(observe_unknown_buffers):
            assert by_fsdp == [False, False]
            assert [name.startswith("fsdp::chunk_cat") for name in unknown] == [True]


KIB = 1024 // 4


def test_peak_of_the_memory_alive():
    def load() -> nn.Module:
        first = torch.empty(2 * KIB)
        del first
        second, third = torch.ones(KIB), torch.zeros(KIB)
        view = second[1:]
        del second
        return nn.ParameterList([third + 1, view])

    meter = Meter()
    with watching(meter):
        model = load()
    assert find_peaks(meter.changes, model).host == 3 * 1024
    before = len(meter.changes)
    del model
    assert sum(change.after - change.before for change in meter.changes) == 0
    assert len(meter.changes) > before


def largest_storage_of_a_new_operation() -> int:
    """Run an operation that DTensor first tries on fake tensors of the global shape, as it does for each new shape."""
    meter = Meter()
    whole = distribute_tensor(torch.ones(2 * 7919, 3), current().mesh, [Shard(0)])
    with watching(meter):
        kept = torch.zeros_like(whole)
    assert kept.shape == whole.shape
    return max(change.after for change in meter.changes)


def test_fake_tensors_of_dtensor_do_not_count():
    with world_of(2) as world:
        assert world.run(largest_storage_of_a_new_operation) == [7919 * 3 * 4] * 2


def test_memory_of_threads_counts():
    meter = Meter()
    with watching(meter), ThreadPoolExecutor(1) as pool:
        kept = pool.submit(torch.ones, KIB).result()
    assert find_peaks(meter.changes, nn.Module()).host == kept.untyped_storage().nbytes()


def test_a_thread_that_outlives_the_block_is_left_alone():
    meter = Meter()
    with ThreadPoolExecutor(1) as pool:
        with watching(meter):
            pool.submit(torch.ones, 1).result()
        seen = len(meter.changes)
        kept = pool.submit(torch.ones, KIB).result()
    assert len(kept) == KIB
    assert len([change for change in meter.changes if change.after == 4 * KIB]) == 0
    assert seen


def test_storages_resized_by_python_count():
    peak = Peak(torch.device("cpu"))
    with peak.measured(), watching(peak.meter):
        tensor = torch.ones(KIB)
        tensor.untyped_storage().resize_(0)
        other = torch.ones(KIB)
        tensor.untyped_storage().resize_(8 * KIB)
    assert len(other) == KIB
    assert peak.facts(nn.Module()).host == 3 * 1024
    assert torch.UntypedStorage.resize_.__qualname__ != "Peak.measured.<locals>.resized"


@pytest.mark.parametrize(("mapped", "expected"), [(True, 0), (False, 4096)])
def test_a_mapped_checkpoint_does_not_count(tmp_path: Path, mapped: bool, expected: int):
    torch.save({"a": torch.ones(4 * KIB)}, tmp_path / "a.pt")
    meter = Meter()
    with watching(meter):
        loaded = torch.load(tmp_path / "a.pt", mmap=mapped)["a"]
        loaded[:2].sum()
    assert max(change.after for change in meter.changes) >= expected
    assert sum(change.after for change in meter.changes if change.after == 4096) == expected


def test_a_slice_of_a_mapped_file_is_recognised(tmp_path: Path):
    save_file({"a": torch.ones(4 * KIB)}, tmp_path / "a.safetensors")
    loaded = load_file(tmp_path / "a.safetensors")["a"]
    files = MappedFiles()
    assert files.hold(loaded[5:].untyped_storage())
    assert not files.hold(loaded.clone().untyped_storage())
    shared = torch.ones(4 * KIB).share_memory_()
    files.refresh()
    assert not files.hold(shared.untyped_storage())
    assert not files.hold(torch.empty(0).untyped_storage())


def test_whole_parameters_are_distinguished_from_shards():
    model = nn.ParameterList([torch.empty(8), torch.empty(8), torch.empty(4)])
    whole = [Change(0, 32, 4), Change(0, 32, 4), Change(0, 16, 4)]
    assert find_peaks(whole, model).whole == 20
    assert find_peaks([*whole, Change(32, 0, 4), Change(0, 32, 4)], model).whole == 20
    assert find_peaks([Change(0, 16, 2), Change(0, 16, 2), Change(0, 8, 2)], model).whole == 20  # in another dtype
    assert find_peaks([Change(0, 16, 4)] * 5, model).whole == 4  # halves
    assert find_peaks([Change(0, 32, 4)] * 3, model).whole == 16


def test_an_exception_passes_and_leaves_nothing_behind():
    meter = Meter()
    with suppress(ZeroDivisionError), watching(meter):
        raise ZeroDivisionError
    torch.ones(3)
    assert meter.changes == []


def test_watching_does_not_change_results():
    def draw() -> list[float]:
        torch.manual_seed(1)
        return [*nn.Linear(4, 4).weight.flatten().tolist(), *torch.randn(8).tolist()]

    plain = draw()
    with watching(Meter(), Recorder()):
        assert draw() == plain


class Accelerator:
    """What the memory of a device is asked with, without a device."""

    def __init__(self) -> None:
        self.allocated = self.peak = 100
        self.calls: list[str] = []

    def reset_peak_memory_stats(self, device: torch.device) -> None:
        self.peak = self.allocated

    def memory_allocated(self, device: torch.device) -> int:
        return self.allocated

    def max_memory_allocated(self, device: torch.device) -> int:
        return self.peak

    def empty_cache(self) -> None:
        self.calls.append("empty_cache")

    def allocate(self, size: int) -> None:
        self.allocated += size
        self.peak = max(self.peak, self.allocated)


class _Operator:
    """An operator that FSDP2 calls when it gathers."""

    namespace = "fsdp"


@pytest.fixture
def accelerator(monkeypatch: pytest.MonkeyPatch) -> Accelerator:
    fake = Accelerator()
    monkeypatch.setattr(torch, "get_device_module", lambda device: fake)
    monkeypatch.setattr(memory, "_allocate_workspaces", lambda device: fake.allocate(2**25))
    return fake


def test_the_peak_of_a_device_ends_where_that_of_the_host_does(accelerator: Accelerator):
    """A loader may run a forward to warm up; what it gathers is no part of loading. Without a GPU: a fake one."""
    peak = Peak(torch.device("cuda", 1))
    with peak.measured():
        accelerator.allocate(1000)
        peak.meter.before(_Operator, (), {})
        accelerator.allocate(5000)
        peak.meter.before(_Operator, (), {})
    assert peak.facts(nn.Module()).device == 1000, "without the workspaces of libraries"
    with (peak := Peak(torch.device("cuda", 1))).measured():
        accelerator.allocate(7)
    assert peak.facts(nn.Module()).device == 7
    assert Peak(torch.device("cpu")).facts(nn.Module()).device is None


def test_a_device_gets_back_what_a_cycle_holds(accelerator: Accelerator):
    class Node:
        pass

    node = Node()
    node.itself = node
    gone = weakref.ref(node)
    del node
    memory.return_freed_memory(torch.device("cuda", 0))
    assert gone() is None
    assert accelerator.calls == ["empty_cache"]
    memory.return_freed_memory(torch.device("cpu"))
    assert accelerator.calls == ["empty_cache"]


def test_buffers_count_as_own_storages():
    model = nn.Module()
    model.register_buffer("table", torch.empty(1000))
    assert find_peaks([Change(0, 4000, 4)] * 2, model).beyond == 0
    assert find_peaks([Change(0, 4000, 4)] * 3, model).beyond == 4000
    assert find_peaks([Change(0, 4000, 4)] * 2, nn.Module()).beyond == 8000


def test_the_state_of_an_optimizer_is_not_the_model():
    """torch creates it by a step with gradients of zero: the shards twice, their gradients and two moments."""
    model = nn.Linear(10, 100, bias=False)
    optimizer = torch.optim.AdamW(model.parameters())
    assert find_peaks([Change(0, 4000, 4)] * 5, model, optimizer).beyond == 12000, "nothing has stepped"
    model.weight.grad = torch.zeros_like(model.weight)
    optimizer.step()
    assert find_peaks([Change(0, 4000, 4)] * 5, model, optimizer).beyond == 0
    assert find_peaks([Change(0, 4000, 4)] * 6, model, optimizer).beyond == 4000


def test_what_is_on_the_device_counts_but_not_for_the_host():
    model = nn.ParameterList([torch.empty(8), torch.empty(8)])
    on_device = Change(0, 32, 4, on_host=False)
    peaks = find_peaks([Change(0, 32, 4), on_device], model)
    assert (peaks.host, peaks.whole) == (32, 16)
