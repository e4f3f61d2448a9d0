"""The stand-in as torch's device: what mixes, what is refused, memory, random numbers, autocast, and collectives."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from pytest_fsdp_meta import standin
from pytest_fsdp_meta.worlds import World, WorldError, WorldSpec, current
from tests.world_help import preload

SIZE = 2


@pytest.fixture(scope="module")
def ranks() -> Iterator[World]:
    standin.prepare()
    with World(WorldSpec({"dp_shard": SIZE}, standin.NAME), preload()) as world:
        yield world


def refuses(*calls: Callable[[], Any]) -> list[str]:
    """Return the messages of the calls, all of which must raise RuntimeError."""
    messages = []
    for call in calls:
        try:
            call()
        except RuntimeError as error:
            messages.append(str(error).splitlines()[0])
        else:
            messages.append("no error")
    return messages


def mix() -> list[str]:
    import torch
    from torch.nn import functional

    here, other = (torch.ones(2, 4, device=f"standin:{index}") for index in (0, 1))
    host = torch.ones(2, 4)
    return refuses(
        lambda: here + host,
        lambda: here + other,
        lambda: here.add_(host),
        lambda: functional.linear(here, host),
        lambda: functional.linear(host, here),
        lambda: torch.cat([here, host]),
        lambda: functional.embedding(torch.tensor([0]), here),
        lambda: functional.conv1d(here[None], torch.ones(2, 2, 1)),
        lambda: functional.layer_norm(here, (4,), torch.ones(4)),
        lambda: torch._foreach_add([here], [host]),
        lambda: here.masked_fill(torch.ones(2, 4, dtype=torch.bool), 0.0),
        lambda: here.index_put_((torch.tensor([0]),), host[:1]),
    )


def test_tensors_of_several_devices_do_not_mix(ranks: World) -> None:
    for message in ranks.run(mix)[0]:
        assert message.startswith("Expected all tensors to be on the same device, but found at least two devices, ")


def compute_with_numbers_and_indices() -> list[str]:
    import torch

    here = torch.arange(8.0, device="standin:1").reshape(2, 4)
    made = [here * torch.tensor(2.0), here + 1, here[torch.tensor([1])], torch.where(here > 1, here, 0.0)]
    return [str(tensor.device) for tensor in made]


def test_numbers_and_indices_may_be_on_the_cpu(ranks: World) -> None:
    assert ranks.run(compute_with_numbers_and_indices)[0] == ["standin:1"] * 4


def train() -> tuple[float, bool]:
    """Return the largest difference from the CPU after two steps, and whether the tie lasted."""
    import torch
    from torch import nn

    def build() -> nn.Sequential:
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Embedding(8, 6), nn.Conv1d(4, 4, 3, padding=1), nn.LayerNorm(6), nn.GELU(), nn.Linear(6, 8)
        )
        model[4].weight = model[0].weight
        return model

    device, models = current().device, (build(), build())
    models[1].to(device)
    for model, place in zip(models, ("cpu", device), strict=True):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        for step in range(2):
            tokens = torch.tensor([[0, 1, 2, step], [4, 5, 6, 7]]).to(place)
            nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
    pairs = zip(*(model.parameters() for model in models), strict=True)
    return max(float((a - b.cpu()).abs().max()) for a, b in pairs), models[1][4].weight is models[1][0].weight


def test_training_gives_what_the_cpu_gives(ranks: World) -> None:
    for apart, tied in ranks.run(train):
        assert apart < 1e-6
        assert tied


def run_recurrent_layers() -> list[float]:
    """Return the largest differences from the CPU, of results and gradients."""
    import torch
    from torch import nn

    apart = []
    for build in (nn.LSTM, nn.GRU, nn.RNN):
        torch.manual_seed(0)
        layer = build(3, 4, num_layers=2, bidirectional=True)
        made = []
        for place in ("cpu", current().device):
            x = torch.linspace(-1, 1, 30).reshape(5, 2, 3).to(place).requires_grad_()
            layer.to(place).zero_grad()
            out = layer(x)[0]
            out.pow(2).sum().backward()
            with torch.inference_mode():
                # The CPU may use another kernel where nothing trains: on AMD it rounds otherwise.
                torch.testing.assert_close(layer(x)[0], out, rtol=0, atol=1e-6)
            made.append(
                [tensor.detach().cpu().clone() for tensor in (out, x.grad, *(p.grad for p in layer.parameters()))]
            )
        apart += [float((host - here).abs().max()) for host, here in zip(*made, strict=True)]
    return apart


def test_recurrent_layers_give_what_the_cpu_gives(ranks: World) -> None:
    assert max(ranks.run(run_recurrent_layers)[0]) < 1e-5


def measure() -> dict[str, int]:
    import torch

    device, module = current().device, torch.standin  # type: ignore[attr-defined]
    before = module.memory_allocated(device)
    module.reset_peak_memory_stats(device)
    first = torch.ones(1000, device=device)
    made = first * 2  # a CPU kernel allocates it
    found = {"two": module.memory_allocated(device) - before}
    del made
    first.untyped_storage().resize_(0)
    found |= {"freed": module.memory_allocated(device) - before}
    found |= {"peak": module.max_memory_allocated(device) - before}
    return found


def test_memory_is_counted_by_device(ranks: World) -> None:
    assert ranks.run(measure) == [{"two": 8000, "freed": 0, "peak": 8000}] * SIZE


def use_freed_memory() -> list[str]:
    import torch

    freed = torch.ones(4, device=current().device)
    freed.untyped_storage().resize_(0)
    return refuses(lambda: freed + 1, lambda: freed.cpu())


def test_freed_memory_is_an_error(ranks: World) -> None:
    [first, second] = ranks.run(use_freed_memory)[0]
    assert first.startswith("standin: the storage of this tensor has no memory")
    assert second == first


def name_absent_devices() -> list[str]:
    import torch

    module = torch.standin  # type: ignore[attr-defined]
    module.set_device(-1)  # changes nothing
    return refuses(
        lambda: torch.empty(1, device="standin:7"),
        lambda: module.set_device(300),
        lambda: module.memory_allocated(100),
        lambda: module.reset_peak_memory_stats(-5),
        lambda: module.get_rng_state(9),
        lambda: torch.Generator("standin:9"),
    )


def test_absent_devices_are_errors(ranks: World) -> None:
    named = (7, 300, 100, -5, 9, 9)
    found = ranks.run(name_absent_devices)[0]
    assert found == [f"standin: invalid device ordinal {index}, there are 2" for index in named]


def use_what_it_lacks() -> list[str]:
    import torch

    here = torch.ones(2, 2, device=current().device)
    scale = torch.ones(2, device=here.device, requires_grad=True)
    torch.sgn(scale).sum().backward()
    assert scale.grad is not None
    assert scale.grad.tolist() == [0, 0]  # elsewhere a tensor without memory
    return refuses(here.to_sparse, lambda: here.to_sparse_csr())


def test_sparse_tensors_are_refused(ranks: World) -> None:
    for message in ranks.run(use_what_it_lacks)[0]:
        assert message == "standin: sparse and quantized tensors are not implemented; test them on the CPU"


def draw() -> dict[str, bool]:
    import torch
    from torch.nn.functional import dropout

    device, module = current().device, torch.standin  # type: ignore[attr-defined]
    torch.manual_seed(3)
    first, host = torch.randn(64, device=device), torch.randn(64)
    state = module.get_rng_state(device)
    second = dropout(torch.ones(64, device=device), 0.5)
    native = torch.native_dropout(torch.ones(64, device=device), 0.5, True)[0]
    module.set_rng_state(state, device)
    again = dropout(torch.ones(64, device=device), 0.5), torch.native_dropout(torch.ones(64, device=device), 0.5, True)
    torch.manual_seed(3)
    own = torch.Generator(device).manual_seed(5)
    kept = own.get_state()
    drawn = [torch.rand(8, device=device, generator=own) for _ in range(2)]
    own.set_state(kept)
    return {
        "seeded": torch.equal(first, torch.randn(64, device=device)) and torch.equal(host, torch.randn(64)),
        "resumed": torch.equal(second, again[0]) and torch.equal(native, again[1][0]),
        "advances": not torch.equal(*drawn) and torch.equal(drawn[0], torch.rand(8, device=device, generator=own)),
        "state": state.numel() == 16 and not torch.equal(second, native),
        "refused": refuses(lambda: torch.rand(2, device=device, generator=torch.Generator()))[0].startswith(
            "Expected a"
        ),
    }


def test_random_numbers_have_a_state_of_their_own(ranks: World) -> None:
    for found in ranks.run(draw):
        assert all(found.values()), found


def cast() -> list[str]:
    import torch
    from torch import nn

    layer, x = nn.Linear(4, 4).to(current().device), torch.ones(2, 4, device=current().device)
    with torch.autocast(standin.NAME, dtype=torch.bfloat16):
        made = [layer(x), layer(x).softmax(-1), layer(x) + x, torch.nn.functional.layer_norm(x.bfloat16(), (4,))]
    return [str(tensor.dtype) for tensor in made]


def test_autocast_casts_as_on_cuda(ranks: World) -> None:
    assert ranks.run(cast)[0] == ["torch.bfloat16", "torch.float32", "torch.float32", "torch.float32"]


def fill() -> list[bool]:
    import torch

    from pytest_fsdp_meta.ranks.bits import poisoned_memory

    with poisoned_memory():
        empty = torch.empty(3, device=current().device)
        strided = torch.empty_strided((2, 2), (1, 2), device=current().device)
        integers = torch.empty(2, dtype=torch.int32, device=current().device)
    return [bool(empty.isnan().all()), bool(strided.isnan().all()), integers.tolist() == [2**31 - 1] * 2]


def test_memory_that_nothing_wrote_is_poisoned(ranks: World) -> None:
    assert ranks.run(fill) == [[True, True, True]] * SIZE


def make_views() -> list[Any]:
    import torch

    x = torch.arange(6.0, device=current().device).reshape(2, 3)
    x.t()[0].mul_(10)
    z = torch.ones(2, dtype=torch.complex64, device=current().device).mul_(1j).conj()
    counted = torch.histc(torch.tensor([0, 0, 1], dtype=torch.int32, device=current().device), 2, 0, 1)
    pinned = torch.ones(2).pin_memory()
    first, event = (torch.standin.Event(enable_timing=True) for _ in range(2))  # type: ignore[attr-defined]
    first.record()
    event.record()
    assert first.elapsed_time(event) >= 0
    torch.accelerator.synchronize()
    return [
        x.tolist(),
        z.clone().tolist(),
        counted.tolist(),
        pinned.is_pinned(),
        torch.unique(x.bool()).tolist(),
        str(torch.accelerator.current_accelerator()),
        torch.standin.current_device(),  # type: ignore[attr-defined]
        event.query(),
    ]


def test_views_pins_and_streams(ranks: World) -> None:
    view = [[0.0, 1.0, 2.0], [30.0, 4.0, 5.0]]
    for rank, found in enumerate(ranks.run(make_views)):
        assert found == [view, [-1j, -1j], [2, 1], True, [False, True], standin.NAME, rank, True]


def send() -> dict[str, Any]:
    import torch
    import torch.distributed as dist

    rank, device = current().rank, current().device
    own = torch.full((2,), float(rank), device=device)
    summed, gathered = own.clone(), torch.empty(4, device=device)
    dist.all_reduce(summed)
    dist.all_gather_into_tensor(gathered, own)
    scattered = torch.empty(2, device=device)
    dist.reduce_scatter_tensor(scattered, torch.arange(4.0, device=device))
    swapped = torch.empty(2, device=device)
    dist.all_to_all_single(swapped, own)
    objects: list[Any] = [None, None]
    dist.all_gather_object(objects, {"rank": rank})
    work = dist.all_reduce(own, async_op=True)
    work.wait()
    dist.barrier()
    host = torch.ones(1)
    dist.all_reduce(host)
    return {
        "summed": summed.tolist(),
        "gathered": gathered.tolist(),
        "scattered": scattered.tolist(),
        "swapped": swapped.tolist(),
        "objects": objects,
        "later": own.tolist(),
        "host": host.tolist(),
        "devices": {str(tensor.device) for tensor in (summed, gathered, scattered, swapped)},
    }


def test_collectives(ranks: World) -> None:
    for rank, found in enumerate(ranks.run(send)):
        assert found == {
            "summed": [1.0, 1.0],
            "gathered": [0.0, 0.0, 1.0, 1.0],
            "scattered": [4.0 * rank, 4.0 * rank + 2],
            "swapped": [0.0, 1.0],
            "objects": [{"rank": 0}, {"rank": 1}],
            "later": [1.0, 1.0],
            "host": [2.0],
            "devices": {f"standin:{rank}"},
        }


def send_from_two_devices() -> list[str]:
    import torch
    import torch.distributed as dist

    here, host = torch.ones(2, device=current().device), torch.ones(2)
    return refuses(lambda: dist.all_gather_into_tensor(torch.empty(4, device=here.device), host))


def test_a_collective_refuses_several_devices(ranks: World) -> None:
    for rank, [message] in enumerate(ranks.run(send_from_two_devices)):
        assert "all tensors should be on one device, not" in message, rank


def wait_for_ever() -> None:
    import torch
    import torch.distributed as dist

    if current().rank == 0:
        dist.all_reduce(torch.ones(1, device=current().device))


def test_a_hang_is_named_as_on_the_cpu() -> None:
    standin.prepare()
    spec = WorldSpec({"dp_shard": SIZE}, standin.NAME, timeout=3.0)
    with World(spec, preload()) as world, pytest.raises(WorldError) as caught:
        world.run(wait_for_ever)
    assert "all_reduce" in caught.value.view
