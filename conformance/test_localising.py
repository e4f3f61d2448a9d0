"""With the first step traced on request, no module of any conforming loader is named."""

from __future__ import annotations

import pytest
import torch

from fixtures.forms import FORMS
from fixtures.needs import lacking
from pytest_fsdp_meta.catalogue.diagnosis.origin import describe_origin, find_place
from pytest_fsdp_meta.trial.localising import STAGES

pytestmark = pytest.mark.slow
PARITY = ("loss_parity", "grad_parity")


@pytest.mark.parametrize("name", FORMS)
def test_no_module_of_a_conforming_loader_is_named(name, checkpoint, trace_loader):
    form = FORMS[name]
    if form.needs_accelerator and not torch.accelerator.is_available():
        pytest.skip("torch refuses this form without an accelerator")
    if lack := lacking(form.needs):
        pytest.skip(lack)
    path = checkpoint(form.architecture) if form.architecture else None
    evidence = trace_loader(form.load, form.mesh, checks=PARITY, path=path)
    assert evidence.traces is not None
    problem = STAGES if "pp" in form.mesh else ""
    assert [trace.problem for trace in evidence.traces] == [problem] * len(evidence.traces)
    assert find_place(evidence.traces) is None, describe_origin(evidence.traces)
