"""Command line, environment and ini file, in this order of precedence, as one frozen Settings."""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from pytest_fsdp_meta.worlds import SCOPES

DEVICES = ("auto", "cpu", "cuda")
BACKENDS = ("auto", "gloo", "nccl")
ENGINES = ("local", "ray")
FAIL_ON = ("failure", "regression", "any")
"""What decides the exit status: what does without a comparison; only a failure that the earlier run did not have; or
any failure, and whatever else is worse than it was."""
REPEATED = ("-c", "-o", "-p", "--config-file", "--override-ini", "--rootdir", "--import-mode")
"""Options of pytest with a value that decide which tests there are and what they mean."""


@dataclass(frozen=True)
class Settings:
    """What the user set, checked. ``given`` is what a command that we suggest must repeat to mean the same run."""

    world_sizes: tuple[int, ...] = (2,)
    device: str = "auto"
    backend: str = "auto"
    timeout: float = 300.0
    require_gpu: bool = False
    world_scope: str = "function"
    slots: int | None = None
    engine: str = "local"
    ray_address: str = ""
    loader: str = ""
    checkpoint: str = ""
    report: str = ""
    keep_evidence: bool = False
    compare: str = ""
    fail_on: str = "failure"
    given: tuple[str, ...] = ()


@dataclass(frozen=True)
class Option:
    """One setting: ``--fsdp-NAME``, ``fsdp_NAME`` in the ini file, ``PYTEST_FSDP_NAME`` in the environment."""

    name: str
    help: str
    parse: Callable[[str], Any]
    right: str
    metavar: str
    repeated: bool = True
    """Whether a command that runs one item again has it as well."""

    @property
    def flag(self) -> str:
        return f"--fsdp-{self.name}"

    @property
    def ini(self) -> str:
        return f"fsdp_{self.name.replace('-', '_')}"

    @property
    def variable(self) -> str:
        return f"PYTEST_{self.ini.upper()}"


def _sizes(text: str) -> tuple[int, ...]:
    sizes = tuple(int(part) for part in text.split(","))
    if any(size < 1 for size in sizes) or len(set(sizes)) != len(sizes):
        raise ValueError
    return sizes


def _count(text: str) -> int:
    count = int(text)
    if count < 1:
        raise ValueError
    return count


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 < seconds < 1e9:
        raise ValueError
    return seconds


def _one_of(values: Sequence[str]) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in values:
            raise ValueError
        return text

    return parse


def _ray_address(text: str) -> str:
    host, _, port = text.rpartition(":")
    if text not in ("auto", "local") and not (host and port.isdecimal() and "/" not in host):
        raise ValueError
    return text


def _loader(text: str) -> str:
    module, _, name = text.partition(":")
    if not all(part.isidentifier() for part in (*module.split("."), *name.split("."))):
        raise ValueError
    return text


def _folder(text: str) -> str:
    folder = os.path.expanduser(text)  # a shell leaves the ~ of --fsdp-checkpoint=~/model as it is
    if not os.path.isdir(folder):
        raise ValueError
    return folder


def _report(text: str) -> str:
    path = Path(text).expanduser()
    path = path / "report.json" if path.is_dir() else path
    if not path.is_file():
        raise ValueError
    return str(path)


def _new_folder(text: str) -> str:
    if not text.strip():
        raise ValueError
    folder = Path(text).expanduser().absolute()
    there = next(path for path in (folder, *folder.parents) if path.exists() or path.is_symlink())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        raise ValueError
    return str(folder)


def _switch(text: str) -> bool:
    return {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}[
        text.lower()
    ]


OPTIONS = (
    Option(
        "world-size",
        "ranks of the world that a loader is judged in, where its marker does not say; a list, such as 1,2,4, judges "
        "each (default: 2)",
        _sizes,
        "a positive int, or a list of different ones such as 1,2,4",
        "N[,N...]",
    ),
    Option(
        "device",
        "auto (default: cuda when there is a GPU for every rank, else cpu), cpu or cuda",
        _one_of(DEVICES),
        "auto, cpu or cuda",
        "DEVICE",
    ),
    Option(
        "backend",
        "auto (default: nccl on cuda, gloo on cpu), gloo or nccl; gloo on cuda lets several ranks share a GPU",
        _one_of(BACKENDS),
        "auto, gloo or nccl",
        "BACKEND",
    ),
    Option(
        "timeout",
        "seconds for one call to the ranks, after which they are ended and their stacks shown (default: 300)",
        _seconds,
        "a positive number of seconds",
        "SECONDS",
    ),
    Option(
        "require-gpu",
        "fail instead of judging on the CPU where GPUs are missing; for nightly jobs",
        _switch,
        "true or false",
        "",
    ),
    Option(
        "world-scope",
        "how long ranks of @fsdp_spmd and fsdp_world are kept, where the mark does not say: function (default: every "
        "test gets fresh ones), module or session",
        _one_of(SCOPES),
        "function, module or session",
        "SCOPE",
    ),
    Option(
        "slots",
        "ranks that the workers of pytest-xdist run on the CPU at a time, all together; a larger world runs alone "
        "(default: the CPU cores that may be used)",
        _count,
        "a positive int",
        "N",
    ),
    Option(
        "engine",
        "local (default: ranks are processes of this machine) or ray (they are spread over a Ray cluster; needs the "
        "extra 'ray')",
        _one_of(ENGINES),
        "local or ray",
        "ENGINE",
    ),
    Option(
        "ray-address",
        "which cluster --fsdp-engine=ray uses: HOST:PORT, auto (the one that this machine belongs to), or local (a new "
        "one of this machine alone, for this run); default: RAY_ADDRESS, else local",
        _ray_address,
        "HOST:PORT, auto or local; Ray's client protocol (ray://) has no place for ranks",
        "ADDRESS",
    ),
    Option(
        "loader",
        "judge this function as a loader, without a test file: alone, or beside the paths that are given; every rank "
        "calls it with fsdp (the rank) and checkpoint (a pathlib.Path), by name or in this order, for the model or a "
        "Subject; the current folder is on the search path",
        _loader,
        "MODULE:FUNCTION, such as mypkg.loading:load",
        "MODULE:FUNCTION",
    ),
    Option(
        "checkpoint",
        "the checkpoint for --fsdp-loader; of a bare model, it tells what the model shall equal: with a config.json of "
        "transformers the model that from_pretrained makes of it, which is trained beside it, else the values in its "
        "*.safetensors",
        _folder,
        "a folder that exists",
        "DIR",
    ),
    Option(
        "report",
        "write report.json, the page index.html, summary.md and a badge into this folder; what an earlier run has left "
        "there is replaced",
        _new_folder,
        "a folder that exists or can be made, and be written to",
        "DIR",
        repeated=False,
    ),
    Option(
        "keep-evidence",
        "with --fsdp-report: keep what the ranks saw, in DIR/evidence, so that 'pytest DIR/evidence' judges it again "
        "later, without ranks",
        _switch,
        "true or false",
        "",
        repeated=False,
    ),
    Option(
        "compare",
        "the report.json of an earlier run: tell what is newly broken, fixed, slower, or no longer judged",
        _report,
        "a report.json that exists, or its folder",
        "REPORT",
        repeated=False,
    ),
    Option(
        "fail-on",
        "with --fsdp-compare, what fails the run: failure (default: what does without it), regression (only what the "
        "earlier run did not have; known failures are forgiven) or any (every failure, slower loads, losses that "
        "drift, promises no longer judged)",
        _one_of(FAIL_ON),
        "failure, regression or any",
        "WHAT",
        repeated=False,
    ),
)


def add_options(parser: pytest.Parser) -> None:
    group = parser.getgroup("fsdp", "conformance of sharded model loaders (pytest-fsdp-meta)")
    for option in OPTIONS:
        known = f"{option.help} [ini: {option.ini}, env: {option.variable}]"
        if option.metavar:
            group.addoption(option.flag, dest=option.ini, metavar=option.metavar, default=None, help=known)
        else:
            group.addoption(option.flag, dest=option.ini, action="store_const", const="true", default=None, help=known)
        parser.addini(option.ini, f"default of {option.flag}", default="")
    group.addoption(
        "--fsdp-list-checks", action="store_true", default=False, help="print the catalogue of checks and exit"
    )


def read_settings(config: pytest.Config) -> Settings:
    """Raises UsageError, in one line that names where a wrong value comes from and what would be right.

    Warns of an environment variable that looks like one of ours and is none: it would be left out silently.
    """
    _warn_of_unknown(config)
    values: dict[str, Any] = {}
    given: list[str] = []
    for option in OPTIONS:
        found = _find(config, option)
        if found is None:
            continue
        text, source = found
        try:
            value = option.parse(text)
        except (ValueError, KeyError, OSError, RuntimeError):
            raise pytest.UsageError(f"{source}: {text!r} is wrong, it should be {option.right}") from None
        values["world_sizes" if option.name == "world-size" else option.ini.removeprefix("fsdp_")] = value
        if option.repeated and not source.startswith("ini"):
            given += [f"{option.flag}={text}"] if option.metavar else [option.flag] * value
    if values.get("keep_evidence") and not values.get("report"):
        raise pytest.UsageError("--fsdp-keep-evidence keeps it beside the report; say where: --fsdp-report=DIR")
    if values.get("fail_on", "failure") != "failure" and not values.get("compare"):
        raise pytest.UsageError(
            f"--fsdp-fail-on={values['fail_on']} needs an earlier run to compare with: --fsdp-compare=OLD/report.json"
        )
    return Settings(**values, given=(*_repeated(config.invocation_params.args), *given))


def _warn_of_unknown(config: pytest.Config) -> None:
    known = {option.variable for option in OPTIONS}
    for name in sorted(os.environ):
        if name.startswith("PYTEST_FSDP_") and not name.startswith("PYTEST_FSDP_META_") and name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"they are {', '.join(sorted(known))}"
            told = f"the environment variable {name} is no setting of pytest-fsdp-meta; {hint}"
            config.issue_config_time_warning(pytest.PytestConfigWarning(told), stacklevel=2)


def _repeated(args: Sequence[str | os.PathLike[str]]) -> list[str]:
    """What was typed of ``REPEATED``: "-c x", "-cx", "--rootdir x" or "--rootdir=x"."""
    found: list[str] = []
    words = iter(map(str, args))
    for word in words:
        if word in REPEATED:
            found += [word, next(words, "")]
        elif word.startswith(REPEATED[:3]) or word.partition("=")[0] in REPEATED:
            found.append(word)
    return found


def _find(config: pytest.Config, option: Option) -> tuple[str, str] | None:
    """(text, where it stands), or None where nobody set it."""
    typed = config.getoption(option.ini)
    if typed is not None:
        return str(typed), option.flag
    if os.environ.get(option.variable):
        return os.environ[option.variable], option.variable
    written = config.getini(option.ini)
    return (str(written).strip(), f"ini option {option.ini}") if written else None
