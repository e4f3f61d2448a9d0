"""The options, and the settings that they make, read from the command line, else from the ini file."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable, Collection, Iterable, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any

import pytest

from pytest_fsdp_meta import standin
from pytest_fsdp_meta.plugin import option_values
from pytest_fsdp_meta.plugin._pytest_private import ini_keys
from pytest_fsdp_meta.text import did_you_mean

REPEATED = ("-c", "-o", "-p", "--config-file", "--override-ini", "--rootdir", "--import-mode")
"""Options of pytest, with a value, that change which tests are collected or how; rerun commands repeat them."""
SHOWN = (*REPEATED, "-k", "-m", "-n", "-r")
SHOWN_INI = ("python_classes", "python_files", "python_functions", "pythonpath", "testpaths", "xfail_strict")
"""Options, and keys of "-o", whose values are harmless; those of others may be secret and are hidden."""
SWITCHES = re.compile("-[lqsvx]*|--")
WORD = re.compile(r"(--[\w.-]*(?==|$)|-[A-Za-z]|)(=?)(.*)", re.DOTALL)
"""An option, "=" and its value, in one word of a command line; or a value alone."""
HIDDEN = "..."


@dataclass(frozen=True)
class Settings:
    """The checked settings. ``given`` are the options that a rerun command must repeat to have the same effect."""

    world_sizes: tuple[int, ...] = (2,)
    simulate: tuple[int, ...] = ()
    device_memory: int = 0
    memory_reserve: float = 0.06
    device: str = "auto"
    backend: str = "auto"
    timeout: float = 300.0
    require_gpu: bool = False
    slots: int | None = None
    engine: str = "local"
    loader: str = ""
    checkpoint: str = ""
    report: str = ""
    compare: tuple[str, ...] = ()
    fail_on: str = "failure"
    allow_missing: tuple[str, ...] = ()
    strict: bool = False
    given: tuple[str, ...] = ()


@dataclass(frozen=True)
class Option:
    """A setting: ``--fsdp-NAME``, or ``fsdp_NAME`` in the ini file.

    ``expected`` describes valid values in usage errors. An option without ``metavar`` is a switch.
    """

    name: str
    help: str
    parse: Callable[[str], Any] = option_values.parse_switch
    expected: str = "choose true or false"
    metavar: str = ""
    repeated: bool = True
    """Whether the command for rerunning one item includes this option."""

    @property
    def flag(self) -> str:
        return f"--fsdp-{self.name}"

    @property
    def ini(self) -> str:
        return f"fsdp_{self.name.replace('-', '_')}"


def _choice(name: str, values: Sequence[str], help: str, metavar: str, repeated: bool = True) -> Option:
    """Return an option that is one of these values."""
    parse = option_values.checked(str, values.__contains__)
    return Option(name, help, parse, f"choose {', '.join(values[:-1])} or {values[-1]}", metavar, repeated)


OPTIONS = (
    Option(
        "world-size",
        "number of ranks for loaders and tests whose marker sets none; a list such as 1,2,4 runs them once per size "
        "(default: 2)",
        option_values.parse_sizes,
        "expected a positive int, or a list of distinct ones such as 1,2,4",
        "N[,N...]",
    ),
    Option(
        "simulate",
        "judge loaders at this world size, or these, without running it: some of its ranks run, without values and "
        "without a network, and the checks that need neither judge them",
        option_values.parse_sizes,
        "expected a positive int, or a list of distinct ones such as 64,1024",
        "N[,N...]",
    ),
    Option(
        "device-memory",
        "memory of a device, such as 80GiB: step_fits judges whether a step of a simulated loader fits, and the "
        "summary says at which sizes it does",
        option_values.parse_bytes,
        "expected a number with MiB, GiB or TiB, such as 80GiB",
        "SIZE",
    ),
    Option(
        "memory-reserve",
        "share of --fsdp-device-memory that is not for tensors: the device's context, buffers of NCCL, fragmentation "
        "(default: 6%%)",
        option_values.parse_share,
        "expected a percentage below 100, such as 6%",
        "PERCENT",
    ),
    _choice(
        "device",
        ("auto", "cpu", "cuda", standin.NAME),
        "device type of the ranks: auto (default: cuda if there is a GPU for every rank, else cpu), cpu, cuda, or "
        f"standin, a device in the host's memory that does not mix with the CPU (torch {', '.join(standin.TORCH)}; "
        "compiled once, with a C++ compiler)",
        "DEVICE",
    ),
    _choice(
        "backend",
        ("auto", "gloo", "nccl"),
        "process group backend: auto (default: nccl on cuda, gloo on cpu), gloo or nccl; with gloo on cuda, ranks can "
        "share a GPU",
        "BACKEND",
    ),
    Option(
        "timeout",
        "seconds that one call to the ranks may take; after it, their stacks are shown and the ranks are ended "
        "(default: 300)",
        option_values.parse_seconds,
        "expected a positive number of seconds below 1e9",
        "SECONDS",
    ),
    Option("require-gpu", "fail instead of falling back to the CPU if there are too few GPUs; useful for nightly jobs"),
    Option(
        "slots",
        "with pytest-xdist, number of ranks that all workers together may run on the CPU at a time; a larger world "
        "runs alone (default: number of available CPU cores)",
        option_values.parse_count,
        "expected a positive int",
        "N",
    ),
    _choice(
        "engine",
        ("local", "ray"),
        "where ranks run: local (default: processes on this machine) or ray (spread over a Ray cluster; needs the "
        "extra 'ray')",
        "ENGINE",
    ),
    Option(
        "loader",
        "run the checks on this function, without a test file; test paths on the command line run as well. Every rank "
        "calls it with fsdp (the rank) and checkpoint (a pathlib.Path), by name or in this order, and it returns the "
        "model or a Subject; MODULE may also be in the current folder",
        option_values.parse_loader,
        "expected MODULE:FUNCTION, such as mypkg.loading:load",
        "MODULE:FUNCTION",
    ),
    Option(
        "checkpoint",
        "checkpoint folder for --fsdp-loader. If the loader returns a bare model, it is also the reference: a "
        "transformers checkpoint (config.json) is loaded with from_pretrained and trained for comparison; otherwise "
        "values are compared with the *.safetensors files",
        option_values.parse_folder,
        "expected an existing folder",
        "DIR",
    ),
    Option(
        "report",
        "write report.json, the page index.html and summary.md into this folder, replacing those of an earlier run",
        option_values.parse_new_folder,
        "expected a writable folder, or one that can be created",
        "DIR",
        repeated=False,
    ),
    Option(
        "compare",
        "report.json of an earlier run to compare with: show new failures, fixed checks and checks that "
        "no longer run. Several, or a folder in which every run leaves its report, also show the history of each "
        "check; the run is then compared with the last that passed",
        option_values.parse_reports,
        "expected an existing report.json, a folder of reports, or several, separated by commas",
        "REPORT[,REPORT...]",
        repeated=False,
    ),
    _choice(
        "fail-on",
        ("failure", "regression", "any"),
        "with --fsdp-compare, what makes the run fail: failure (default: as without --fsdp-compare), regression (only "
        "failures and differences that the earlier run did not have, checks that now depend on a failed one, and "
        "missing loaders) or any (every failure, new differences, missing loaders and "
        "checks that no longer run)",
        "WHAT",
        repeated=False,
    ),
    Option(
        "allow-missing",
        "with --fsdp-fail-on, accept that loaders of the earlier run are missing; in the ini file also for some "
        "loaders only: their node ids, * for any text, separated by commas",
        option_values.parse_patterns,
        "choose true or false, or node ids such as tests/test_old.py::*",
        "",
        repeated=False,
    ),
    Option(
        "strict",
        "fail checks that differ (a measured difference is beyond its limit, and not judged for a reason that is "
        "given) or are only partly checked",
    ),
)


CLOSE = 0.75
"""Least similarity of an option that may be a misspelling of another: other plugins' often end like one of these."""
EARLIER_RUN = "an earlier run: --fsdp-compare=OLD/report.json"
DEPENDENT = (
    ("allow_missing", "compare", EARLIER_RUN),
    ("memory_reserve", "device_memory", "--fsdp-device-memory=SIZE"),
)
"""Option that does nothing without another one, that one, and how a usage error asks for it."""
FLAGS = (*(option.flag for option in OPTIONS), "--fsdp-init", "--fsdp-list-checks")


def add_options(parser: pytest.Parser) -> None:
    group = parser.getgroup("fsdp", "conformance of sharded model loaders (pytest-fsdp-meta)")
    for option in OPTIONS:
        text = f"{option.help} [ini: {option.ini}]"
        if option.metavar:
            group.addoption(option.flag, dest=option.ini, metavar=option.metavar, default=None, help=text)
        else:
            group.addoption(option.flag, dest=option.ini, action="store_const", const="true", default=None, help=text)
        parser.addini(option.ini, f"default for {option.flag}", default="")
    group.addoption(
        "--fsdp-init",
        metavar="MODULE:FUNCTION",
        default=None,
        help="write a test file for this loader, from its signature, print what is left to fill in, and exit; "
        "no file is overwritten",
    )
    group.addoption("--fsdp-list-checks", action="store_true", default=False, help="list all checks and exit")


def check_options(config: pytest.Config, parser: pytest.Parser, args: Sequence[str]) -> None:
    """Raise UsageError for the first option like one of this plugin's that no plugin has registered, with the nearest.

    pytest itself only says "unrecognized arguments". To be called when conftest files have registered theirs, which may
    begin with the same word.
    """
    _, unknown = parser.parse_known_and_unknown_args(args, copy(config.known_args_namespace))
    for argument in unknown:
        typed = argument.partition("=")[0]
        hint = did_you_mean(typed.replace("_", "-"), FLAGS, cutoff=CLOSE)
        if typed.startswith("--") and hint:
            raise pytest.UsageError(f"{typed}: there is no such option{hint}")


def _check_ini_keys(config: pytest.Config) -> None:
    """Raise UsageError for the first key in the ini file that misspells an option of this plugin.

    Other plugins and conftest files may have registered keys that begin with the same word.
    """
    known = [option.ini for option in OPTIONS]
    for key in ini_keys(config):
        if not key.startswith("fsdp_") or key in known or _is_registered(config, key):
            continue
        if hint := did_you_mean(key, known, cutoff=CLOSE):
            raise pytest.UsageError(f"ini option {key}: there is no such option{hint}")


def _is_registered(config: pytest.Config, key: str) -> bool:
    try:
        config.getini(key)
    except ValueError as error:
        return "unknown configuration value" not in str(error)
    return True


def read_settings(config: pytest.Config) -> Settings:
    """Read and check all settings. Raises UsageError with one line: the source of an invalid value, what is valid."""
    _check_ini_keys(config)
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
    if values.get("fail_on", "failure") != "failure" and not values.get("compare"):
        raise pytest.UsageError(f"--fsdp-fail-on={values['fail_on']} requires {EARLIER_RUN}")
    for name, needed, what in DEPENDENT:
        # In the ini file, it waits for the runs that have the other option.
        if config.getoption(f"fsdp_{name}") and values.get(name) and not values.get(needed):
            raise pytest.UsageError(f"--fsdp-{name.replace('_', '-')} requires {what}")
    return Settings(**values, given=(*_repeated(config.invocation_params.args), *given))


def runs_nothing(config: pytest.Config) -> bool:
    """Return whether pytest was asked to show something instead of running tests, as ``--collect-only`` does."""
    shown = ("collectonly", "setuponly", "setupplan", "showfixtures", "show_fixtures_per_test", "cacheshow")
    return any(config.getoption(option, False) for option in shown)


def settings_elsewhere(config: pytest.Config) -> dict[str, str]:
    """Return PYTEST_ADDOPTS or an ini option -> what it sets that the command line does not, with hidden values."""
    words = {"PYTEST_ADDOPTS": shlex.split(os.environ.get("PYTEST_ADDOPTS", "")), "addopts": config.getini("addopts")}
    found = {name: shlex.join(hide_values(value, config.args)) for name, value in words.items()}
    for option in OPTIONS:
        text, source = _find(config, option) or ("", "")
        if source != option.flag:
            found[source.removeprefix("ini option ")] = text
    return {name: text for name, text in found.items() if text}


def hide_values(words: Iterable[str], paths: Collection[str] = ()) -> list[str]:
    """Return a command line with ``HIDDEN`` for the values of others' options, which may be secret."""
    hidden: list[str] = []
    before = ""
    for word in words:
        option, joint, value = WORD.fullmatch(word).groups()  # type: ignore[union-attr]
        is_shown = word in paths or SWITCHES.fullmatch(word)
        hidden.append(word if is_shown else option + joint + _hide_value(option or before, value, paths))
        before = "" if joint or value else option
    return hidden


def _hide_value(option: str, value: str, paths: Collection[str]) -> str:
    key, equals, text = value.partition("=")
    if option in ("-o", "--override-ini") and equals:
        if key == "addopts":
            text = shlex.join(hide_values(shlex.split(text), paths))
        elif key not in (*SHOWN_INI, *(one.ini for one in OPTIONS)):
            text = text and HIDDEN
        return f"{key}={text}"
    return value if option in (*SHOWN, *FLAGS) else value and HIDDEN


def _repeated(args: Sequence[str | os.PathLike[str]]) -> list[str]:
    """Return the ``REPEATED`` options on the command line: "-c x", "-cx", "--rootdir x" or "--rootdir=x"."""
    found: list[str] = []
    rest = iter(map(str, args))
    for arg in rest:
        if arg in REPEATED:
            found += [arg, next(rest, "")]
        elif arg.startswith(REPEATED[:3]) or arg.partition("=")[0] in REPEATED:
            found.append(arg)
    return hide_values(found)


def _find(config: pytest.Config, option: Option) -> tuple[str, str] | None:
    """Return (value, source) as strings, or None where the option is not set."""
    typed = config.getoption(option.ini)
    if typed is not None:
        return str(typed), option.flag
    written = config.getini(option.ini)
    return (str(written).strip(), f"ini option {option.ini}") if written else None
