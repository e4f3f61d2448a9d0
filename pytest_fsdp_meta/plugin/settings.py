"""Read settings from the command line, the environment and the ini file, in this order of precedence."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import pytest

from pytest_fsdp_meta import standin
from pytest_fsdp_meta.reports.io import FILE, PAGE
from pytest_fsdp_meta.worlds import SCOPES

DEVICES = ("auto", "cpu", "cuda", standin.NAME)
BACKENDS = ("auto", "gloo", "nccl")
ENGINES = ("local", "ray")
FAIL_ON = ("failure", "regression", "any")
"""What makes a compared run fail: any failure; only failures that the earlier run did not have; or any failure and
anything else that got worse."""
ANNOTATE = ("auto", "github", "none")
UNITS = {"MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "": 0}
"""Bytes of a unit; a number without one is refused."""
REPEATED = ("-c", "-o", "-p", "--config-file", "--override-ini", "--rootdir", "--import-mode")
"""Options of pytest, with a value, that change which tests are collected or how; rerun commands repeat them."""


@dataclass(frozen=True)
class Settings:
    """The checked settings. ``given`` are the options that a rerun command must repeat to have the same effect."""

    world_sizes: tuple[int, ...] = (2,)
    simulate: tuple[int, ...] = ()
    simulate_ranks: tuple[int, ...] = ()
    device_memory: int = 0
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
    localise: bool = False
    report: str = ""
    keep_evidence: bool = False
    compare: tuple[str, ...] = ()
    fail_on: str = "failure"
    allow_missing: tuple[str, ...] = ()
    annotate: str = "auto"
    given: tuple[str, ...] = ()


@dataclass(frozen=True)
class Option:
    """A setting: ``--fsdp-NAME``, ``fsdp_NAME`` in the ini file, ``PYTEST_FSDP_NAME`` in the environment.

    ``expected`` describes valid values in usage errors. An option without ``metavar`` is a switch.
    """

    name: str
    help: str
    parse: Callable[[str], Any]
    expected: str
    metavar: str
    repeated: bool = True
    """Whether the command for rerunning one item includes this option."""

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


def _ranks(text: str) -> tuple[int, ...]:
    ranks = tuple(int(part) for part in text.split(","))
    if any(rank < 0 for rank in ranks):
        raise ValueError
    return ranks


def _bytes(text: str) -> int:
    unit = next(unit for unit in UNITS if text.endswith(unit) or not unit)
    size = float(text.removesuffix(unit)) * UNITS[unit]
    if not 0 < size < 2**63:
        raise ValueError
    return int(size)


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


def parse_loader(text: str) -> str:
    """Return "MODULE:NAME" if it may be such a name. Raises ValueError."""
    module, _, name = text.partition(":")
    if not all(part.isidentifier() for part in (*module.split("."), *name.split("."))):
        raise ValueError
    return text


def _folder(text: str) -> str:
    folder = os.path.expanduser(text)  # shells do not expand the ~ in --fsdp-checkpoint=~/model
    if not os.path.isdir(folder):
        raise ValueError
    return folder


def _reports(text: str) -> tuple[str, ...]:
    parts = [text] if os.path.exists(os.path.expanduser(text)) else text.split(",")
    paths = tuple(Path(part.strip()).expanduser() for part in parts)
    if not all(part.strip() for part in parts) or not all(path.is_file() or path.is_dir() for path in paths):
        raise ValueError
    return tuple(map(str, paths))


def _patterns(text: str) -> tuple[str, ...]:
    try:
        return ("*",) if _switch(text) else ()
    except KeyError:
        patterns = tuple(filter(None, (part.strip() for part in re.split(r"[,\n]", text))))
        if not all("::" in pattern or "*" in pattern for pattern in patterns):
            raise ValueError from None
        return patterns


def _new_folder(text: str) -> str:
    if not text.strip():
        raise ValueError
    folder = Path(text).expanduser().absolute()
    existing = next(path for path in (folder, *folder.parents) if path.exists() or path.is_symlink())
    if not existing.is_dir() or any((folder / name).is_dir() for name in (FILE, PAGE)):
        raise ValueError
    try:
        TemporaryFile(dir=existing).close()  # os.access allows root everything, also in /proc
    except OSError as error:
        raise ValueError from error
    return str(folder)


def _switch(text: str) -> bool:
    return {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}[
        text.lower()
    ]


OPTIONS = (
    Option(
        "world-size",
        "number of ranks for loaders and tests whose marker sets none; a list such as 1,2,4 runs them once per size "
        "(default: 2)",
        _sizes,
        "expected a positive int, or a list of distinct ones such as 1,2,4",
        "N[,N...]",
    ),
    Option(
        "simulate",
        "judge loaders at this world size, or these, without running it: some of its ranks run, without values and "
        "without a network, and the checks that need neither judge them",
        _sizes,
        "expected a positive int, or a list of distinct ones such as 64,1024",
        "N[,N...]",
    ),
    Option(
        "simulate-ranks",
        "which ranks run in a simulated world, besides rank 0 (default: both ends of each mesh dimension)",
        _ranks,
        "expected a list of ranks such as 1,1023",
        "RANK[,RANK...]",
    ),
    Option(
        "device-memory",
        "memory of a device, such as 80GiB: the summary of a simulated loader says at which sizes a step fits",
        _bytes,
        "expected a number with MiB, GiB or TiB, such as 80GiB",
        "SIZE",
    ),
    Option(
        "device",
        "device type of the ranks: auto (default: cuda if there is a GPU for every rank, else cpu), cpu, cuda, or "
        "standin, a device in the host's memory that does not mix with the CPU (compiled once, with a C++ compiler)",
        _one_of(DEVICES),
        "choose auto, cpu, cuda or standin",
        "DEVICE",
    ),
    Option(
        "backend",
        "process group backend: auto (default: nccl on cuda, gloo on cpu), gloo or nccl; with gloo on cuda, ranks can "
        "share a GPU",
        _one_of(BACKENDS),
        "choose auto, gloo or nccl",
        "BACKEND",
    ),
    Option(
        "timeout",
        "seconds that one call to the ranks may take; after it, their stacks are shown and the ranks are ended "
        "(default: 300)",
        _seconds,
        "expected a positive number of seconds",
        "SECONDS",
    ),
    Option(
        "require-gpu",
        "fail instead of falling back to the CPU if there are too few GPUs; useful for nightly jobs",
        _switch,
        "choose true or false",
        "",
    ),
    Option(
        "world-scope",
        "how long the ranks of @fsdp_spmd and fsdp_world live if the marker does not say: function (default: fresh "
        "ranks for every test), module or session",
        _one_of(SCOPES),
        "choose function, module or session",
        "SCOPE",
    ),
    Option(
        "slots",
        "with pytest-xdist, number of ranks that all workers together may run on the CPU at a time; a larger world "
        "runs alone (default: number of available CPU cores)",
        _count,
        "expected a positive int",
        "N",
    ),
    Option(
        "engine",
        "where ranks run: local (default: processes on this machine) or ray (spread over a Ray cluster; needs the "
        "extra 'ray')",
        _one_of(ENGINES),
        "choose local or ray",
        "ENGINE",
    ),
    Option(
        "ray-address",
        "cluster for --fsdp-engine=ray: HOST:PORT, auto (the cluster that this machine belongs to) or local (a new "
        "cluster on this machine, for this run); default: RAY_ADDRESS, else local",
        _ray_address,
        "expected HOST:PORT, auto or local; Ray's client protocol, ray://, cannot run ranks",
        "ADDRESS",
    ),
    Option(
        "loader",
        "run the checks on this function, without a test file; test paths on the command line run as well. Every rank "
        "calls it with fsdp (the rank) and checkpoint (a pathlib.Path), by name or in this order, and it returns the "
        "model or a Subject; MODULE may also be in the current folder",
        parse_loader,
        "expected MODULE:FUNCTION, such as mypkg.loading:load",
        "MODULE:FUNCTION",
    ),
    Option(
        "checkpoint",
        "checkpoint folder for --fsdp-loader. If the loader returns a bare model, it is also the reference: a "
        "transformers checkpoint (config.json) is loaded with from_pretrained and trained for comparison; otherwise "
        "values are compared with the *.safetensors files",
        _folder,
        "expected an existing folder",
        "DIR",
    ),
    Option(
        "localise",
        "compare every module with the reference's in one more first step even if no check finds a difference; without "
        "this option, that is done for the first step that departs where loss_parity, grad_parity or "
        "second_grad_parity fails, to name the module where it starts",
        _switch,
        "choose true or false",
        "",
    ),
    Option(
        "report",
        "write report.json, the page index.html, summary.md and a badge into this folder, replacing those of an "
        "earlier run",
        _new_folder,
        "expected a writable folder, or one that can be created",
        "DIR",
        repeated=False,
    ),
    Option(
        "keep-evidence",
        "with --fsdp-report: store what was observed on the ranks in DIR/evidence; 'pytest DIR/evidence' runs the "
        "checks on it again, without ranks",
        _switch,
        "choose true or false",
        "",
        repeated=False,
    ),
    Option(
        "compare",
        "report.json of an earlier run to compare with: show new failures, fixed checks, slower loads and checks that "
        "no longer run. Several, or a folder in which every run leaves its report, also show the history of each "
        "check; the run is then compared with the last that passed",
        _reports,
        "expected an existing report.json, a folder of reports, or several, separated by commas",
        "REPORT[,REPORT...]",
        repeated=False,
    ),
    Option(
        "fail-on",
        "with --fsdp-compare, what makes the run fail: failure (default: as without --fsdp-compare), regression (only "
        "failures that the earlier run did not have, and missing loaders) or any (every failure, missing loaders, "
        "slower loads, drifting losses and checks that no longer run)",
        _one_of(FAIL_ON),
        "choose failure, regression or any",
        "WHAT",
        repeated=False,
    ),
    Option(
        "allow-missing",
        "with --fsdp-fail-on, accept that loaders of the earlier run are missing; in the ini file or the environment "
        "also for some loaders only: their node ids, * for any text, separated by commas",
        _patterns,
        "choose true or false, or node ids such as tests/test_old.py::*",
        "",
        repeated=False,
    ),
    Option(
        "annotate",
        "print an annotation for each failed loader, which the CI service shows at its line: auto (default: in GitHub "
        "Actions), github or none",
        _one_of(ANNOTATE),
        "choose auto, github or none",
        "SERVICE",
        repeated=False,
    ),
)


FLAGS = (*(option.flag for option in OPTIONS), "--fsdp-init", "--fsdp-list-checks")


def add_options(parser: pytest.Parser) -> None:
    group = parser.getgroup("fsdp", "conformance of sharded model loaders (pytest-fsdp-meta)")
    for option in OPTIONS:
        text = f"{option.help} [ini: {option.ini}, env: {option.variable}]"
        if option.metavar:
            group.addoption(option.flag, dest=option.ini, metavar=option.metavar, default=None, help=text)
        else:
            group.addoption(option.flag, dest=option.ini, action="store_const", const="true", default=None, help=text)
        parser.addini(option.ini, f"default for {option.flag}", default="")
    group.addoption(
        "--fsdp-init",
        metavar="MODULE:FUNCTION",
        default=None,
        help="write a test file for this loader, from its signature and its source, print what is left to fill in and "
        "a CI job, and exit; no file is overwritten",
    )
    group.addoption("--fsdp-list-checks", action="store_true", default=False, help="list all checks and exit")


def read_settings(config: pytest.Config) -> Settings:
    """Read and check all settings. Raises UsageError with one line: the source of an invalid value, and what is valid.

    Warns of environment variables that look like settings of this plugin but are misspelt; they have no effect.
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
            raise pytest.UsageError(f"{source}: invalid value {text!r} ({option.expected})") from None
        values["world_sizes" if option.name == "world-size" else option.ini.removeprefix("fsdp_")] = value
        if option.repeated and not source.startswith("ini"):
            given += [f"{option.flag}={text}"] if option.metavar else [option.flag] * value
    if values.get("keep_evidence") and not values.get("report"):
        raise pytest.UsageError("--fsdp-keep-evidence requires --fsdp-report=DIR")
    if values.get("fail_on", "failure") != "failure" and not values.get("compare"):
        raise pytest.UsageError(
            f"--fsdp-fail-on={values['fail_on']} requires an earlier run: --fsdp-compare=OLD/report.json"
        )
    return Settings(**values, given=(*_repeated(config.invocation_params.args), *given))


def _warn_of_unknown(config: pytest.Config) -> None:
    known = {option.variable for option in OPTIONS}
    for name in sorted(os.environ):
        if name.startswith("PYTEST_FSDP_") and not name.startswith("PYTEST_FSDP_META_") and name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"the variables are {', '.join(sorted(known))}"
            message = f"unknown environment variable {name} of pytest-fsdp-meta; {hint}"
            config.issue_config_time_warning(pytest.PytestConfigWarning(message), stacklevel=2)


def _repeated(args: Sequence[str | os.PathLike[str]]) -> list[str]:
    """Return the ``REPEATED`` options on the command line: "-c x", "-cx", "--rootdir x" or "--rootdir=x"."""
    found: list[str] = []
    rest = iter(map(str, args))
    for arg in rest:
        if arg in REPEATED:
            found += [arg, next(rest, "")]
        elif arg.startswith(REPEATED[:3]) or arg.partition("=")[0] in REPEATED:
            found.append(arg)
    return found


def _find(config: pytest.Config, option: Option) -> tuple[str, str] | None:
    """Return (value, source) as strings, or None where the option is not set."""
    typed = config.getoption(option.ini)
    if typed is not None:
        return str(typed), option.flag
    if os.environ.get(option.variable):
        return os.environ[option.variable], option.variable
    written = config.getini(option.ini)
    return (str(written).strip(), f"ini option {option.ini}") if written else None
