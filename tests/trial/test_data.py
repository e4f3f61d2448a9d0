"""The author's own loaders of batches, on real ranks: what is right, what is wrong, and one line for bad input."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    TensorDataset,
    get_worker_info,
)

from pytest_fsdp_meta import Subject
from pytest_fsdp_meta.catalogue import Verdict, built_in, judge
from pytest_fsdp_meta.checks.data.observe import MOST_BATCHES
from pytest_fsdp_meta.evidence import Evidence
from pytest_fsdp_meta.worlds import Rank
from tests.trial_help import judge_all, observe

FOLLOW, RESUME, LOSSES = "batches_follow_the_mesh", "batches_resume", "loss_parity"
PASSED = (("passed", ""), ("passed", ""))
NOT_SAVED = "the loader of batches has no state_dict and load_state_dict, which keep its position; declare Subject("
ROWS = torch.arange(22.0).view(22, 1).expand(22, 4).contiguous()


def build() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(4, 2)


def load(fsdp: Rank, **declared: Any) -> Subject:
    model = fully_shard(build(), mesh=fsdp.mesh["dp_shard"] if fsdp.mesh.ndim > 1 else fsdp.mesh)
    return Subject(
        model,
        reference=build,
        batch=lambda step: {"input": torch.linspace(-1.0, 1.0, 16).view(4, 4) + step},
        loss=lambda model, batch: model(**batch).square().mean(),
        **declared,
    )


def observed(
    declare: Callable[[Rank], Mapping[str, Any]],
    checks: Iterable[str] = (FOLLOW, RESUME),
    **how: Any,
) -> Evidence:
    """Take the observations of these checks; ``declare`` returns the declared fields on each rank."""

    def loader(fsdp: Rank) -> Subject:
        return load(fsdp, **declare(fsdp))

    return observe(loader, checks, **how)


def judged(declare: Callable[[Rank], Mapping[str, Any]], *checks: str, **how: Any) -> dict[str, Verdict]:
    checks = checks or (FOLLOW, RESUME)
    return judge_all(observed(declare, checks, **how), checks)


def outcome(found: Mapping[str, Verdict]) -> tuple[tuple[str, str], ...]:
    return tuple((one.status, one.reason or "; ".join(f.actual for f in one.findings)) for one in found.values())


class Counting:
    """A loader with a state: its part of the rows, in batches of two."""

    def __init__(self, index: int, size: int, rows: Tensor = ROWS) -> None:
        self.rows, self.position = rows[: len(rows) // size * size][index::size], 0

    def __iter__(self) -> Iterator[Tensor]:
        while self.position * 2 < len(self.rows):
            self.position += 1
            yield self.rows[self.position * 2 - 2 : self.position * 2]
        self.position = 0

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


def sampled(data: Dataset[Any], *of: int, batch_size: int = 4, **options: Any) -> DataLoader[Any]:
    return DataLoader(data, batch_size, sampler=DistributedSampler(data, *of), **options)


class Streamed(IterableDataset[Tensor]):
    """Each worker process of each rank reads its own rows."""

    def __iter__(self) -> Iterator[Tensor]:
        worker = get_worker_info()
        number, workers = (worker.id, worker.num_workers) if worker else (0, 1)
        own = dist.get_rank() * workers + number
        yield from ROWS[:16][own :: dist.get_world_size() * workers]


def of_rank(fsdp: Rank) -> DataLoader[Any]:
    return sampled(TensorDataset(ROWS), fsdp.world_size, fsdp.rank)


def of_mesh(fsdp: Rank) -> DataLoader[Any]:
    return sampled(TensorDataset(ROWS), fsdp.mesh.size(), fsdp.mesh.get_local_rank())


RIGHT: dict[str, Callable[[Rank], Any]] = {
    "one class only": lambda fsdp: lambda: sampled(TensorDataset(torch.ones(24, 3))),
    "with worker processes": lambda fsdp: lambda: DataLoader(Streamed(), 2, num_workers=2),
    "holds the mesh": lambda fsdp: partial(
        lambda mesh: sampled(TensorDataset(ROWS), mesh.size(), mesh.get_local_rank()), fsdp.mesh
    ),
    "holds the group": lambda fsdp: partial(
        lambda group: sampled(TensorDataset(ROWS), group.size(), group.rank()), fsdp.mesh.get_group()
    ),
}


@pytest.mark.parametrize("name", RIGHT)
def test_right_loaders_pass(name):
    found = judged(lambda fsdp: {"data": RIGHT[name](fsdp)}, FOLLOW)[FOLLOW]
    assert (found.status, found.reason, found.findings) == ("passed", "", ())


def saved_by_the_author(fsdp: Rank) -> dict[str, Any]:
    """Skip what was seen, as accelerate's skip_first_batches does: data() is called after resume()."""
    seen = {"batches": 0}

    def save(model: nn.Module, optimizer: Any, folder: Path) -> None:
        torch.save((model.state_dict(), optimizer.state_dict(), seen), folder / f"{fsdp.rank}.pt")

    def resume(model: nn.Module, optimizer: Any, folder: Path) -> None:
        state, momenta, position = torch.load(folder / f"{fsdp.rank}.pt", weights_only=False)
        model.load_state_dict(state)
        optimizer.load_state_dict(momenta)
        seen.update(position)

    def data() -> Iterator[Any]:
        skipped = seen["batches"]
        for number, batch in enumerate(of_mesh(fsdp)):
            if number >= skipped:
                seen["batches"] += 1
                yield batch

    return {"data": data, "save": save, "resume": resume}


def test_shuffling_by_the_global_generator_is_repeated_after_resuming():
    """The loader seeds nothing: a run that is started again has the same random numbers up to the first batch."""

    def declare(fsdp: Rank) -> dict[str, Any]:
        class Shuffled(Counting):
            def __iter__(self) -> Iterator[Tensor]:
                order = torch.randperm(len(self.rows))
                for number, chosen in list(enumerate(order.split(2)))[self.position :]:
                    self.position = number + 1
                    yield self.rows[chosen]

        return {"data": Shuffled(fsdp.rank, fsdp.world_size)}

    assert outcome(judged(declare, FOLLOW, RESUME, LOSSES))[1:] == (("passed", ""), ("passed", ""))


class Wrapped:
    """A loader around a DataLoader, whose sampler a trainer does not see."""

    def __init__(self) -> None:
        self.loader = sampled(TensorDataset(ROWS), dist.get_world_size(), dist.get_rank())

    def __iter__(self) -> Iterator[Any]:
        yield from self.loader


class Passing(Wrapped):
    def set_epoch(self, epoch: int) -> None:
        self.loader.sampler.set_epoch(epoch)


class Ignoring(Wrapped):
    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


class Sequential(Wrapped):
    def __init__(self) -> None:
        sampler = DistributedSampler(ROWS, dist.get_world_size(), dist.get_rank(), shuffle=False)
        self.loader = DataLoader(TensorDataset(ROWS), 4, sampler=sampler)


class WithPreview(Wrapped):
    """The rows come from a loader that does not shuffle."""

    def __init__(self) -> None:
        own = ROWS[dist.get_rank() :: dist.get_world_size()]
        self.loader = DataLoader(TensorDataset(own), 4)
        self.preview = DataLoader(TensorDataset(own), 4, shuffle=True)


class Once(Wrapped):
    passes = 0

    def __iter__(self) -> Iterator[Any]:
        self.passes += 1
        if self.passes > 1:
            raise RuntimeError("for one epoch only")
        return iter(self.loader)


class BreaksLater(Once):
    """Its second epoch begins, and ends in an error."""

    def __iter__(self) -> Iterator[Any]:
        self.passes += 1
        for number, batch in enumerate(self.loader):
            if number and self.passes > 1:
                raise KeyError("closed")
            yield batch


def batch_sampled() -> DataLoader[Any]:
    sampler = DistributedSampler(ROWS, dist.get_world_size(), dist.get_rank())
    return DataLoader(TensorDataset(ROWS), batch_sampler=BatchSampler(sampler, 4, drop_last=False))


class SeededEachTime(Wrapped):
    def __init__(self) -> None:
        own = ROWS[dist.get_rank() :: dist.get_world_size()]
        self.generator = torch.Generator()
        self.loader = DataLoader(TensorDataset(own), 4, shuffle=True, generator=self.generator)

    def __iter__(self) -> Iterator[Any]:
        self.generator.manual_seed(0)
        yield from self.loader


class OnceOnOneRank(Once):
    def __iter__(self) -> Iterator[Any]:
        return super().__iter__() if dist.get_rank() else iter(self.loader)


class EmptyLater(Once):
    def __iter__(self) -> Iterator[Any]:
        self.passes += 1
        return iter(self.loader if self.passes == 1 else ())


PASSING = (Passing, Sequential, WithPreview, batch_sampled)


@pytest.mark.parametrize(
    ("data", "expected", "cause"),
    [
        (Ignoring, "another order, as DistributedSampler shuffles", "set_epoch(1) was called before the second epoch"),
        (SeededEachTime, "another order, as RandomSampler shuffles", "its generator is seeded again"),
        *[(right, None, "") for right in PASSING],
    ],
)
def test_the_order_of_the_second_epoch(data, expected, cause):
    found = judged(lambda fsdp: {"data": data}, FOLLOW)[FOLLOW]
    if expected is None:
        assert (found.status, found.findings) == ("passed", ())
        return
    (finding,) = found.findings
    again = "the order of the first epoch again in the second"
    assert (finding.ranks, finding.actual, finding.expected) == ((0, 1), again, expected)
    assert cause in finding.cause


@pytest.mark.parametrize(
    ("data", "problem"),
    [(Once, "it raises RuntimeError: for one epoch only"), (EmptyLater, "it has no batches")],
)
def test_a_loader_for_one_epoch_is_partly_checked(data, problem):
    found = judged(lambda fsdp: {"data": data}, FOLLOW)[FOLLOW]
    assert (found.status, found.why) == ("skipped", "partly checked")
    assert f"the second epoch was not read: {problem}" in found.reason


def test_a_loader_that_begins_again_on_some_ranks_only():
    (finding,) = judged(lambda fsdp: {"data": OnceOnOneRank}, FOLLOW)[FOLLOW].findings
    actual = "in the second epoch: it raises RuntimeError: for one epoch only"
    assert (finding.ranks, finding.actual) == ((1,), actual)


class Positioned(Counting):
    """Shuffled by the number of the epoch, which ``set_epoch`` may set: it begins the epoch, as loading does not."""

    epoch, counts = 0, True

    def __iter__(self) -> Iterator[Tensor]:
        order = torch.randperm(len(self.rows), generator=torch.Generator().manual_seed(self.epoch))
        for number, chosen in list(enumerate(order.split(2)))[self.position :]:
            self.position = number + 1
            yield self.rows[chosen]
        self.position, self.epoch = 0, self.epoch + self.counts

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position} | ({"epoch": self.epoch} if self.counts else {})

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position, self.epoch = state["position"], state.get("epoch", self.epoch)


class SetByTheTrainer(Positioned):
    counts = False

    def set_epoch(self, epoch: int) -> None:
        self.epoch, self.position = epoch, 0


@pytest.mark.parametrize(("data", "built"), [(Positioned, False), (SetByTheTrainer, True)], ids=["function", "loader"])
def test_resuming_within_the_second_epoch(data, built):
    def declare(fsdp: Rank) -> dict[str, Any]:
        own = data(fsdp.rank, fsdp.world_size)
        return {"data": own if built else lambda: own}

    assert judged(declare, RESUME)[RESUME].status == "passed"


def test_a_loader_whose_state_is_not_used_needs_save_and_resume():
    """accelerate's DataLoaderAdapter has both methods, which raise without ``use_stateful_dataloader=True``."""

    class Adapter(Counting):
        use_stateful_dataloader = False

        def state_dict(self) -> dict[str, int]:
            raise AttributeError("'DataLoader' object has no attribute 'dl_state_dict'")

    found = judged(lambda fsdp: {"data": Adapter(fsdp.rank, fsdp.world_size)}, RESUME)[RESUME]
    assert found.reason.startswith(NOT_SAVED)


def saved_and_reset(fsdp: Rank) -> dict[str, Any]:
    """``set_epoch()`` begins an epoch, and ``resume()`` restores epoch and position."""
    own = SetByTheTrainer(fsdp.rank, fsdp.world_size)

    def save(model: nn.Module, optimizer: Any, folder: Path) -> None:
        torch.save({"position": own.position, "epoch": own.epoch}, folder / f"{fsdp.rank}.pt")

    def resume(model: nn.Module, optimizer: Any, folder: Path) -> None:
        state = torch.load(folder / f"{fsdp.rank}.pt")
        own.position, own.epoch = state["position"], state["epoch"]

    return {"data": lambda: own, "save": save, "resume": resume}


def test_set_epoch_does_not_undo_what_resume_restores():
    found = judged(saved_and_reset, RESUME)[RESUME]
    assert (found.findings, found.why) == ((), "differs")  # the position counts the batches of each rank


def endless(fsdp: Rank) -> Iterator[Tensor]:
    while True:
        yield from Counting(fsdp.rank, fsdp.world_size)


def test_a_loader_without_an_end_is_judged_by_its_first_batches():
    evidence = observed(lambda fsdp: {"data": partial(endless, fsdp)}, [FOLLOW])
    assert [len(rank.batches) for rank in evidence.batches.ranks] == [MOST_BATCHES] * 2
    found = judge(built_in()[FOLLOW], evidence, built_in())
    reason = "missing rows were not looked for: an epoch has more batches than are read"
    assert (found.status, found.reason) == ("skipped", reason)


def test_some_ranks_get_their_batches_from_others():
    def declare(fsdp: Rank) -> dict[str, Any]:
        own = fsdp.mesh["dp_shard"]
        if fsdp.mesh["tp"].get_local_rank():
            return {}
        return {"data": lambda: Counting(own.get_local_rank(), own.size())}

    assert outcome(judged(declare, FOLLOW, mesh={"dp_shard": 2, "tp": 2})) == (("passed", ""),)


# The loaders of accelerate.


def prepared(fsdp: Rank, rows: int, **options: Any) -> Any:
    from accelerate import PartialState
    from accelerate.data_loader import prepare_data_loader

    PartialState(cpu=True)
    loader = DataLoader(TensorDataset(ROWS[:rows]), 2, shuffle=True)
    return prepare_data_loader(
        loader, torch.device("cpu"), dist.get_world_size(), dist.get_rank(), put_on_device=True, **options
    )


@pytest.mark.parametrize("options", [{}, {"even_batches": False}, {"split_batches": True}, {"dispatch_batches": True}])
def test_loaders_of_accelerate(options):
    pytest.importorskip("accelerate")
    found = judged(lambda fsdp: {"data": partial(prepared, fsdp, rows=19, **options)}, FOLLOW)[FOLLOW]
    # 19 rows are 10 batches for 2 ranks; where they are not filled up, the last batch of rank 1 has one row.
    assert (found.status, found.findings, found.reason) == ("passed", (), "")


def accelerated(fsdp: Rank) -> dict[str, Any]:
    """Save with the number of batches, and skip them: accelerate shuffles by the seed of the run."""
    seen = {"batches": 0}

    def save(model: nn.Module, optimizer: Any, folder: Path) -> None:
        torch.save((model.state_dict(), seen["batches"]), folder / f"{fsdp.rank}.pt")

    def resume(model: nn.Module, optimizer: Any, folder: Path) -> None:
        state, seen["batches"] = torch.load(folder / f"{fsdp.rank}.pt", weights_only=False)
        model.load_state_dict(state)

    def data() -> Iterator[Any]:
        from accelerate import skip_first_batches

        loader = prepared(fsdp, rows=20, use_seedable_sampler=True, data_seed=3)
        for batch in skip_first_batches(loader, seen["batches"]):
            seen["batches"] += 1
            yield batch

    return {"data": data, "save": save, "resume": resume}


def test_skip_first_batches_of_accelerate():
    pytest.importorskip("accelerate")
    assert judged(accelerated, RESUME)[RESUME].status == "passed"


# What is wrong with the field.


@pytest.mark.parametrize("value", [3, "text", {"x": 1}, torch.ones(2)])
def test_a_value_that_is_no_loader(value):
    with pytest.raises(
        ValueError,
        match=r"Subject\(data=...\): .* should be a function data\(\), which returns a loader of batches, or",
    ):
        Subject(build(), data=value)


BAD = {
    "returns none": (lambda: None, "data() returned NoneType, but should return an iterable of batches, such as"),
    "returns a batch": (lambda: {"x": ROWS}, "data() returned dict, but should return an iterable of batches, such as"),
    "no tensors": (lambda: [["text"]], "batch 0 is list without a tensor that has rows, but should be a tensor, or a"),
    "no rows": (lambda: [ROWS[:0]], "batch 0 has no rows"),
    "empty": (list, "it has no batches, but should have some on every rank"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_data_is_one_line(name):
    data, message = BAD[name]
    found = judged(lambda fsdp: {"data": (lambda: data())}, FOLLOW, LOSSES)
    assert found[FOLLOW].status == "error"
    assert f"Subject(data=...): {message}" in found[FOLLOW].reason
    assert "Traceback" not in found[FOLLOW].detail
    assert found[LOSSES].status == "passed"


def raising() -> Iterator[Tensor]:
    yield ROWS[:2]
    raise KeyError("tokens")


class WithoutState(Counting):
    def __init__(self) -> None:
        super().__init__(dist.get_rank(), dist.get_world_size())

    def state_dict(self) -> dict[str, int]:
        raise OSError("no state")


def refusing(model: nn.Module, optimizer: Any, folder: Path) -> None:
    raise OSError("no space")


@pytest.mark.parametrize(
    ("declared", "failing", "reason"),
    [
        ({"data": raising}, {FOLLOW, RESUME}, "raised KeyError in Subject(data=...): 'tokens'"),
        ({"data": BreaksLater}, {FOLLOW, RESUME}, "raised KeyError in Subject(data=...): 'closed'"),
        (
            {"data": lambda step: [ROWS]},
            {FOLLOW, RESUME},
            "Subject(data=...): give a function that can be called as data(); <lambda>()",
        ),
        ({"data": WithoutState}, {RESUME}, "raised OSError in state_dict() of Subject(data=...): no state"),
        (
            {"data": lambda: Counting(dist.get_rank(), dist.get_world_size()), "save": refusing, "resume": refusing},
            {RESUME},
            "raised OSError in Subject(save=...): no space",
        ),
    ],
    ids=["raises", "raises in the second epoch", "takes an argument", "a state that fails", "a save that fails"],
)
def test_what_raises_fails_only_the_checks_that_need_it(declared, failing, reason):
    found = judged(lambda fsdp: declared, FOLLOW, RESUME, LOSSES)
    assert {id for id, one in found.items() if one.status == "error"} == failing
    assert {id for id, one in found.items() if one.status == "passed"} == {FOLLOW, RESUME, LOSSES} - failing
    assert all(reason in found[id].reason for id in failing)


@pytest.mark.nightly
def test_a_loader_that_waits_for_a_rank_that_has_ended():
    def waiting(fsdp: Rank) -> Iterator[Tensor]:
        for number in range(4 - fsdp.rank):
            dist.barrier()
            yield ROWS[2 * number : 2 * number + 2]

    found = judged(lambda fsdp: {"data": partial(waiting, fsdp)}, FOLLOW, timeout=8)[FOLLOW]
    assert found.status == "error"
    assert "rank 0" in found.reason
    assert "batch 3 of data" in found.detail


def test_data_that_fails_in_a_world_of_one_rank_is_judged_on_the_ranks():
    def data() -> Iterable[Tensor]:
        if dist.get_world_size() == 1:
            raise RuntimeError("too few ranks")
        return Counting(dist.get_rank(), dist.get_world_size())

    found = judged(lambda fsdp: {"data": data}, FOLLOW)[FOLLOW]
    reason = "missing rows were not looked for: data() raises RuntimeError in a world of one rank: too few ranks"
    assert (found.status, found.reason) == ("skipped", reason)


def test_data_that_cannot_be_sent_is_judged_on_the_ranks():
    def declare(fsdp: Rank) -> dict[str, Any]:
        loader = (batch for batch in Counting(fsdp.rank, fsdp.world_size))
        return {"data": lambda: loader}

    found = judged(declare, FOLLOW)[FOLLOW]
    assert found.status == "skipped"
    assert "data cannot be sent to a world of one rank: cannot pickle 'generator' object" in found.reason


def test_a_save_that_keeps_one_checkpoint_leaves_the_others_to_be_resumed():
    def declare(fsdp: Rank) -> dict[str, Any]:
        found = saved_by_the_author(fsdp)
        plain, last = found["save"], []

        def save(model: nn.Module, optimizer: Any, folder: Path) -> None:
            dist.barrier()
            if last and fsdp.rank == 0:
                shutil.rmtree(last.pop())
            plain(model, optimizer, folder)
            last.append(folder)
            dist.barrier()

        return {**found, "save": save}

    found = judged(declare, FOLLOW, RESUME, "resume_parity", "second_save_is_current")
    assert outcome(found) == (*PASSED, *PASSED)


def test_a_loader_of_few_batches_is_saved_after_the_first():
    class Two(Counting):
        def __len__(self) -> int:
            return 2

    found = judged(lambda fsdp: {"data": Two(fsdp.rank, fsdp.world_size, ROWS[:8])}, RESUME)[RESUME]
    assert (found.status, found.reason) == ("passed", "")
