"""Screenshots of a report for README and docs: ``python -m tests.reports.report_picture docs/images``."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from playwright.sync_api import sync_playwright

from pytest_fsdp_meta.reports.compare import compare
from pytest_fsdp_meta.reports.io import read_report
from pytest_fsdp_meta.reports.page import write_page
from tests.reports.chromium import QUIET, chromium
from tests.reports.many_loaders import nightly, yesterday
from tests.reports.report_factory import nights

SCALE = 0.8
"""Pixels of the picture for each of the page, so that a picture stays below 300 kB."""
LIST_SCALE = 0.72
"""The same for the page of few loaders, whose list of checks is taller than a table."""
MANY = 1000
EXAMPLE = Path(__file__).parents[2] / "examples" / "test_llama.py"
BROKEN = """

@fsdp_conformance(mesh={"dp_replicate": 2, "dp_shard": 2})
def test_hsdp(fsdp, tiny_llama):  # does not shard the embedding, and changes one weight
    config = LlamaConfig.from_pretrained(tiny_llama)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    for module in (*model.model.layers, model.lm_head):
        fully_shard(module, mesh=fsdp.mesh)
    model.to_empty(device=fsdp.device)
    weights = load_file(Path(tiny_llama, "model.safetensors"))
    weights["model.layers.1.mlp.up_proj.weight"] *= 1.5
    set_model_state_dict(model, weights, options=StateDictOptions(full_state_dict=True))
    model.model.rotary_emb = LlamaRotaryEmbedding(config).to(fsdp.device)
    return Subject(
        model,
        reference=lambda: LlamaForCausalLM.from_pretrained(tiny_llama),
        batch=lambda step: token_batch(step, size=8),
    )


@fsdp_conformance(world_size=2)
def test_rotary(fsdp, tiny_llama):  # does not recompute non-persistent buffers
    config = LlamaConfig.from_pretrained(tiny_llama)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    fully_shard(model, mesh=fsdp.mesh)
    model.to_empty(device=fsdp.device)
    weights = load_file(Path(tiny_llama, "model.safetensors"))
    set_model_state_dict(model, weights, options=StateDictOptions(full_state_dict=True))
    return Subject(model, reference=lambda: LlamaForCausalLM.from_pretrained(tiny_llama))
"""


def run_broken(folder: Path) -> Path:
    """Run the example with two failing loaders, and return the page of the report."""
    (folder / "test_llama.py").write_text(EXAMPLE.read_text() + BROKEN)
    command = [sys.executable, "-m", "pytest", "--fsdp-report=report"]
    # With this interpreter first in PATH, rerun commands say "python" and no path of this machine.
    path = os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]])
    subprocess.run(command, cwd=folder, check=False, timeout=500, env=os.environ | {"PATH": path})
    report = read_report(folder / "report" / "report.json")
    # The published picture does not show the machine.
    write_page(replace(report, header=replace(report.header, hardware={})), folder / "report" / "index.html")
    return folder / "report" / "index.html"


def shoot(page: Any, folder: Path) -> None:
    """What a reader sees first, and how tensors lie."""
    first = page.locator(".loader").first
    page.screenshot(path=folder / "report.png", clip=top_until(page, "#matrix"), full_page=True)
    top = first.locator(".charts").bounding_box()
    end = first.locator(".drawings").first.bounding_box()
    height = end["y"] + end["height"] - top["y"] + 24
    page.screenshot(
        path=folder / "report-tensors.png",
        clip={"x": 0, "y": top["y"], "width": 1280, "height": height},
        full_page=True,
    )


def shoot_many(browser: Any, folder: Path, target: Path, loaders: int) -> None:
    """What broke in a nightly run of so many loaders, and for the smaller one the table below it."""
    now = nightly(loaders)
    write_page(now, folder / "index.html", compare(yesterday(loaders), now))
    page = open_page(browser, folder / "index.html")
    page.screenshot(path=target / f"report-{loaders}.png", clip=top_until(page, "#broke"), full_page=True)
    if loaders < MANY:
        top, end = page.locator("#overview").bounding_box(), page.locator(".others").first.bounding_box()
        clip = {"x": 0, "y": top["y"] - 14, "width": 1280, "height": end["y"] + end["height"] + 14 - top["y"]}
        page.screenshot(path=target / f"report-{loaders}-matrix.png", clip=clip, full_page=True)
    page.close()


def shoot_nights(browser: Any, folder: Path, target: Path) -> None:
    """What is broken or flaky after fourteen runs, the list of checks, and the first failed check."""
    write_page(nights(), folder / "nights.html")
    page = open_page(browser, folder / "nights.html")
    top, end = page.locator("#history").bounding_box(), page.locator(".result").first.bounding_box()
    clip = {"x": 0, "y": top["y"] - 10, "width": 1280, "height": end["y"] + end["height"] + 24 - top["y"]}
    page.screenshot(path=target / "nightly.png", clip=clip, full_page=True)
    page.close()


def open_page(browser: Any, path: Path, scale: float = SCALE) -> Any:
    viewport = {"width": 1280, "height": 1180}
    page = browser.new_page(viewport=viewport, color_scheme="light", device_scale_factor=scale)
    page.goto(path.as_uri())
    page.wait_for_timeout(1000)
    return page


def top_until(page: Any, selector: str) -> dict[str, float]:
    """Return the clip from the top of the page to the end of an element."""
    end = page.locator(selector).first.bounding_box()
    return {"x": 0, "y": 0, "width": 1280, "height": end["y"] + end["height"] + 14}


def main(target: Path) -> None:
    target.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory() as folder, sync_playwright() as started:
        project = Path(folder, "my-project")
        project.mkdir()
        path = run_broken(project)
        browser = started.chromium.launch(executable_path=chromium(started), args=QUIET)
        shoot(open_page(browser, path, LIST_SCALE), target)
        for loaders in (130, MANY):
            shoot_many(browser, Path(folder), target, loaders)
        shoot_nights(browser, Path(folder), target)
        browser.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
