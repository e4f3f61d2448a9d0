"""In which simple way a tensor departs, by tensors made by hand; noise alone has none."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pytest_fsdp_meta.checks.tracing.facts import Departure
from pytest_fsdp_meta.checks.tracing.observe.matching import describe_departure

NOISE = UNIT = 1.2e-7


def reference() -> Tensor:
    return torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(0))


def random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(2))


def described(ours: Tensor, theirs: Tensor, noise: float = NOISE, unit: float = UNIT) -> Departure | None:
    return describe_departure(ours, theirs, (ours.double(), theirs.double()), noise, unit)


def changed(rows: slice = slice(None), columns: slice = slice(None), by: float = 0.0) -> Tensor:
    ours = reference()
    part = ours[0, rows, columns]
    part.copy_(by * torch.randn(part.shape, generator=torch.Generator().manual_seed(1)))
    return ours


@pytest.mark.parametrize(
    ("ours", "found"),
    [
        (reference() * 2, Departure(factor=2.0)),
        (-reference(), Departure(factor=-1.0)),
        (torch.zeros(2, 4, 8), Departure(factor=0.0)),
        (reference() + torch.linspace(1, 2, 8), Departure(same_vector=True)),
        (changed(rows=slice(1, 3)), Departure(rows=(2, 8), zero=True)),
        (changed(rows=slice(1, 3), by=1.0), Departure(rows=(2, 8))),
        (changed(rows=slice(0, 4), columns=slice(0, 4), by=1.0), Departure(rows=(4, 8))),
        (reference() + torch.nn.functional.one_hot(torch.tensor(3), 8), Departure(columns=(3, 4, 8))),
        (reference().bfloat16(), Departure(dtypes=("bfloat16", "float32"))),
        (reference().bfloat16().float(), Departure(dtypes=("bfloat16", "float32"))),
        (reference().half().float(), Departure(dtypes=("float16", "float32"))),
        (reference().sign(), None),
        (torch.ones(2, 4, 8), None),
        (reference() + random(2, 4, 8), None),
        (torch.full((2, 4, 8), float("nan")), None),
        (torch.full((2, 4, 8), float("inf")), None),
    ],
)
def test_simple_ways(ours, found):
    departure = described(ours, reference())
    if found is not None and found.factor is not None:
        assert departure is not None
        assert departure.factor == pytest.approx(found.factor)
    else:
        assert departure == found


def test_a_range_of_the_last_dim():
    ours = reference()
    ours[..., 2:5] += random(2, 4, 3)
    assert described(ours, reference()) == Departure(columns=(2, 5, 8))
    ours[..., 6] += random(2, 4)
    assert described(ours, reference()) is None  # not a single range


def test_errors_as_large_as_noise_have_no_way():
    """Also those of a coarse dtype, in which the loader is known to compute."""
    noisy = reference() * (1 + 1e-7 * random(2, 4, 8))
    assert described(noisy, reference()) is None
    assert described(reference().bfloat16(), reference(), noise=4e-3, unit=4e-3) is None
    doubled = (2 * reference()).bfloat16()
    found = described(doubled, reference(), noise=4e-3, unit=4e-3)
    assert found is not None
    assert found.factor == pytest.approx(2.0, rel=1e-2)


@pytest.mark.parametrize("shape", [(0,), (1,), (2,), (3, 0), (1, 8)])
def test_small_tensors(shape):
    theirs = torch.ones(shape)
    assert described(theirs + random(*shape).abs(), theirs) is None


def test_a_few_large_elements_are_no_multiple():
    theirs = random(8, 64)
    theirs[0, 0] = 1000.0
    for factor in (2.0, 0.0):
        ours = theirs.clone()
        ours[0, 0] *= factor
        found = described(ours, theirs)
        assert found is None or found.factor is None


def test_rows_that_are_one_vector_can_only_be_off_alike():
    theirs = random(1, 8).expand(6, 8)
    assert described(theirs + random(9, 8)[-1], theirs) is None


def test_other_dtypes_have_no_rounding():
    theirs = torch.complex(random(4, 8), random(4, 8))
    ours = theirs * 2
    assert describe_departure(ours, theirs, (torch.view_as_real(ours), torch.view_as_real(theirs)), NOISE, UNIT) is None
    double = reference().double()
    assert described(double + random(2, 4, 8).double(), double) is None
    eighth = reference().to(torch.float8_e4m3fn)
    assert described(eighth.float(), reference()) is None
