"""Fourteen nightly runs of four loaders, in which bugs come and go, and a picture of the last report.

``python -m tests.reports.nightly_picture docs/images`` takes two minutes.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Collection, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

from playwright.sync_api import sync_playwright

from pytest_fsdp_meta.reports.io import PAGE
from tests.reports.chromium import QUIET, chromium

LOADERS = """
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import fully_shard

from pytest_fsdp_meta import Subject, fsdp_conformance

BUGS = {bugs}


class Net(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.register_buffer("scale", torch.full((width,), 0.5), persistent=False)

    def forward(self, x):
        return self.down(torch.relu(self.up(x * self.scale)))


def build():
    torch.manual_seed(0)
    return Net()


def batch(step):
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(step))
    return {{"x": x, "y": x.flip(1)}}


def loss(model, batch):
    return (model(batch["x"]) - batch["y"]).square().mean()


def load(fsdp, name):
    with torch.device("meta"):
        model = fully_shard(Net(), mesh=fsdp.mesh)
    model.to_empty(device=fsdp.device)
    weights = build().state_dict()
    if f"{{name}} rounds" in BUGS:
        weights["up.bias"] = weights["up.bias"].half().float()
    set_model_state_dict(model, weights, options=StateDictOptions(full_state_dict=True))
    if f"{{name}} forgets a buffer" not in BUGS:
        model.scale.fill_(0.5)
    if f"{{name}} freezes" in BUGS:
        model.down.bias.requires_grad_(False)
    return Subject(model, reference=build, batch=batch, loss=loss)
"""
LOADER = """

@fsdp_conformance(world_size=2)
def test_{name}(fsdp):
    return load(fsdp, "{name}")
"""
NAMES = ("dense", "experts", "vision", "draft")
ROUNDS, FREEZES, FORGETS = "experts rounds", "vision freezes", "dense forgets a buffer"
NIGHTS: tuple[Collection[str], ...] = (
    (),
    (),
    (ROUNDS,),
    (ROUNDS,),
    (),
    (FREEZES,),
    (FREEZES,),
    (ROUNDS,),
    (),
    (FORGETS,),
    (FORGETS,),
    (FORGETS, ROUNDS),
    (FORGETS,),
    (FORGETS, "without draft"),
)
"""The bugs of each night."""


def run_nights(folder: Path, nights: Collection[Collection[str]] = NIGHTS, *options: str) -> Iterator[tuple[int, str]]:
    """Run the loaders once for each night, each in a commit of its own, and yield the exit status and the output."""
    environ = os.environ | {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}
    # With this interpreter first in PATH, rerun commands say "python" and no path of this machine.
    environ["PATH"] = os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]])
    git = ("git", "-C", str(folder), "-c", "user.name=Night", "-c", "user.email=night@example.org")
    subprocess.run([*git, "init", "-q"], check=True, env=environ)
    (folder / "reports").mkdir()
    for number, bugs in enumerate(nights, 1):
        loaders = (LOADER.format(name=name) for name in NAMES if f"without {name}" not in bugs)
        (folder / "test_models.py").write_text(LOADERS.format(bugs=sorted(bugs)) + "".join(loaders))
        subprocess.run([*git, "add", "test_models.py"], check=True, env=environ)
        subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", f"Night {number}"], check=True, env=environ)
        compared = ("--fsdp-compare=reports", "--fsdp-fail-on=regression") if number > 1 else ()
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_models.py", *compared]
        command += [f"--fsdp-report=reports/night-{number:02}", *options]
        done = subprocess.run(
            command, cwd=folder, check=False, timeout=500, env=environ, capture_output=True, text=True
        )
        yield done.returncode, done.stdout + done.stderr


def shoot(page_file: Path, target: Path) -> None:
    """What changed, the last runs, the checks, and the first failed check."""
    with sync_playwright() as started:
        browser = started.chromium.launch(executable_path=chromium(started), args=QUIET)
        page = browser.new_page(viewport={"width": 1280, "height": 1180}, color_scheme="light")
        page.goto(page_file.as_uri())
        page.wait_for_timeout(1000)
        top, end = page.locator("#changes").bounding_box(), page.locator(".result").first.bounding_box()
        height = end["y"] + end["height"] - top["y"] + 24
        clip = {"x": 0, "y": top["y"] - 10, "width": 1280, "height": height}
        page.screenshot(path=target / "nightly.png", clip=clip, full_page=True)
        browser.close()


def main(target: Path) -> None:
    target.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory() as folder:
        project = Path(folder, "my-project")
        project.mkdir()
        for status, output in run_nights(project):
            print(status, output.splitlines()[-1], flush=True)
        shoot(project / "reports" / f"night-{len(NIGHTS):02}" / PAGE, target)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
