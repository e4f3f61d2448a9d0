"""Options from the command line and the ini file; none of them needs torch."""

from __future__ import annotations

import importlib.util
import shlex
import subprocess
import sys

import pytest

from pytest_fsdp_meta.plugin.settings import OPTIONS, Settings, hide_values, read_settings
from tests.conftest import CHECK, Project, errors

LOADER = """
from pytest_fsdp_meta import fsdp_conformance
@fsdp_conformance(only=["no_meta_params"])
def test_x(fsdp): ...
"""


def settings(pytester: pytest.Pytester, *args: str) -> Settings:
    return read_settings(pytester.parseconfig(*args))


def test_defaults(pytester: pytest.Pytester) -> None:
    assert settings(pytester) == Settings(
        world_sizes=(2,), device="auto", backend="auto", timeout=300.0, require_gpu=False
    )


@pytest.mark.parametrize(
    ("name", "field", "texts", "values"),
    [
        ("world-size", "world_sizes", ("1,2,4", "8"), ((1, 2, 4), (8,))),
        ("simulate", "simulate", ("64,1024", "16"), ((64, 1024), (16,))),
        ("device", "device", ("cpu", "auto"), ("cpu", "auto")),
        ("backend", "backend", ("gloo", "auto"), ("gloo", "auto")),
        ("timeout", "timeout", ("5", "60"), (5.0, 60.0)),
        ("engine", "engine", ("local", "ray"), ("local", "ray")),
        ("require-gpu", "require_gpu", ("true", "no"), (True, False)),
    ],
)
def test_command_line_before_ini(
    pytester: pytest.Pytester, name: str, field: str, texts: tuple[str, str], values: tuple[object, object]
) -> None:
    pytester.makeini(f"[pytest]\nfsdp_{name.replace('-', '_')} = {texts[1]}")
    assert getattr(settings(pytester), field) == values[1]
    typed = f"--fsdp-{name}" if name == "require-gpu" else f"--fsdp-{name}={texts[0]}"
    assert getattr(settings(pytester, typed), field) == values[0]


def test_settings_in_pyproject(pytester: pytest.Pytester) -> None:
    pytester.makepyprojecttoml('[tool.pytest.ini_options]\nfsdp_world_size = "2,4"\nfsdp_timeout = 7\n')
    assert settings(pytester).world_sizes == (2, 4)
    assert settings(pytester).timeout == 7.0


def test_options_that_a_rerun_command_repeats(pytester: pytest.Pytester) -> None:
    pytester.makefile(".ini", other="[pytest]\nfsdp_timeout = 9")
    typed = ["-c", "other.ini", "-pno:cacheprovider", "--rootdir=.", "--fsdp-world-size", "2,4", "-q", "-k", "x"]
    assert settings(pytester, *typed, "--fsdp-require-gpu").given == (
        *("-c", "other.ini", "-pno:cacheprovider", "--rootdir=."),
        *("--fsdp-world-size=2,4", "--fsdp-require-gpu"),
    )


@pytest.mark.parametrize(
    ("typed", "hidden"),
    [
        ("--hf-token=S tests/a.py", "--hf-token=... tests/a.py"),
        ("--hf-token S tests/a.py --keys S S -xvs -- S", "--hf-token ... tests/a.py --keys ... ... -xvs -- ..."),
        ("-TS -T S -vTS --pin -5", "-T... -T ... -v... --pin ..."),
        ("--hf-token '--S S' --lf @S", "--hf-token ... --lf ..."),
        ("-k 'a or b' -m slow -n2 -ra -p no:x -c my.ini", "-k 'a or b' -m slow -n2 -ra -p no:x -c my.ini"),
        ("--fsdp-timeout 3 --fsdp-report=out --fsdp-token=S", "--fsdp-timeout 3 --fsdp-report=out --fsdp-token=..."),
        (
            "-o hf=S -ohf=S --override-ini=hf=S -vohf=S -vo hf=S",
            "-o hf=... -ohf=... --override-ini=hf=... -v... -v... ...",
        ),
        ("-o fsdp_timeout=3 -o python_files=a.py -o hf=", "-o fsdp_timeout=3 -o python_files=a.py -o hf="),
        ("-o 'addopts=-q --hf S'", "-o 'addopts=-q --hf ...'"),
    ],
)
def test_values_of_unknown_options_are_hidden(typed: str, hidden: str) -> None:
    assert shlex.join(hide_values(shlex.split(typed), ["tests/a.py"])) == hidden


@pytest.mark.parametrize(
    ("name", "texts", "expected"),
    [
        (
            "world-size",
            ("0", "-1", "two", "2,2", "2,", ""),
            "expected a positive int, or a list of distinct ones such as 1,2,4",
        ),
        ("device", ("tpu", "CUDA"), "choose auto, cpu, cuda or standin"),
        ("backend", ("mpi",), "choose auto, gloo or nccl"),
        ("engine", ("RAY", "slurm"), "choose local or ray"),
        ("timeout", ("0", "-3", "soon", "nan", "inf"), "expected a positive number of seconds below 1e9"),
    ],
)
def test_a_wrong_value_names_its_source(
    pytester: pytest.Pytester, name: str, texts: tuple[str, ...], expected: str
) -> None:
    for text in texts:
        with pytest.raises(pytest.UsageError, match=rf"^--fsdp-{name}: invalid value {text!r} \({expected}\)$"):
            settings(pytester, f"--fsdp-{name}={text}")
    ini = f"fsdp_{name.replace('-', '_')}"
    pytester.makeini(f"[pytest]\n{ini} = {texts[0]}")
    with pytest.raises(pytest.UsageError, match=rf"^ini option {ini}: invalid value {texts[0]!r} \({expected}\)$"):
        settings(pytester)


def test_a_wrong_switch(pytester: pytest.Pytester) -> None:
    pytester.makeini("[pytest]\nfsdp_require_gpu = perhaps")
    with pytest.raises(
        pytest.UsageError, match=r"^ini option fsdp_require_gpu: invalid value 'perhaps' \(choose true or"
    ):
        settings(pytester)


@pytest.mark.skipif(importlib.util.find_spec("ray") is not None, reason="Ray is installed here")
def test_ray_is_not_installed(project: Project) -> None:
    project.write("test_it.py", LOADER)
    assert errors(project.collect("--fsdp-engine=ray")) == [
        "--fsdp-engine=ray needs Ray, which is not installed; install it with: pip install 'pytest-fsdp-meta[ray]'"
    ]


@pytest.mark.parametrize(
    ("typed", "hint"),
    [
        ("--fsdp-wrold-size=2", "did you mean '--fsdp-world-size'?"),
        ("--fsdp_report=x", "did you mean '--fsdp-report'?"),
        ("--fdsp-report", "did you mean '--fsdp-report'?"),
        ("--fsdp-list-check", "did you mean '--fsdp-list-checks'?"),
    ],
)
def test_a_mistyped_option_is_one_line_with_the_nearest_one(project: Project, typed: str, hint: str) -> None:
    (message,) = errors(project.collect(typed, "--fsdp-device=cpu"))
    assert message.startswith(f"{typed.partition('=')[0]}: there is no such option; {hint}")


@pytest.mark.parametrize("where", ["-o", "pyproject.toml"])
def test_a_mistyped_key_of_the_ini_file_is_one_line_with_the_nearest_one(project: Project, where: str) -> None:
    key = "fsdp_world_sizes"
    if where != "-o":
        project.write(where, f"[tool.pytest.ini_options]\n{key} = '1'\n")
    (message,) = errors(project.collect(*([f"-o{key}=1"] if where == "-o" else [])))
    assert message == f"ini option {key}: there is no such option; did you mean 'fsdp_world_size'?"


def test_keys_of_others_in_the_ini_file_are_left_to_pytest(project: Project) -> None:
    project.write("conftest.py", "def pytest_addoption(parser): parser.addini('fsdp_reports', '', type='pathlist')")
    project.write("pytest.ini", "[pytest]\nfsdp_reports = x\nfdsp_reports = x\nfsdp_of_others = x\n")
    project.write("test_it.py", "def test_x(): ...")
    project.collect("-ofsdp_timeout=7").assert_outcomes(passed=1, warnings=2)


@pytest.mark.parametrize(
    ("typed", "other"),
    [
        ("--fsdp-allow-missing", "an earlier run: --fsdp-compare=OLD/report.json"),
        ("--fsdp-memory-reserve=3%", "--fsdp-device-memory=SIZE"),
    ],
)
def test_an_option_that_does_nothing_without_another_one(pytester: pytest.Pytester, typed: str, other: str) -> None:
    name, _, value = typed.removeprefix("--fsdp-").partition("=")
    with pytest.raises(pytest.UsageError, match=f"^--fsdp-{name} requires {other}$"):
        settings(pytester, typed)
    pytester.makeini(f"[pytest]\nfsdp_{name.replace('-', '_')} = {value or 'true'}")
    assert settings(pytester) != Settings()  # in the ini file, for the runs that have the other option


def test_options_of_others_are_left_to_pytest(project: Project) -> None:
    project.write("conftest.py", "def pytest_addoption(parser): parser.addoption('--fsdp-reports')")
    project.write("test_it.py", "def test_option(pytestconfig): assert pytestconfig.getoption('--fsdp-reports') == 'x'")
    project.collect("--fsdp-reports=x").assert_outcomes(passed=1)
    result = project.collect("--maxfial=2", "--fsdp-zzz")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert "unrecognized arguments: --maxfial=2 --fsdp-zzz" in "\n".join(result.errlines)


@pytest.mark.parametrize("args", [(), ("-n2",), ("--collect-only",), ("--fsdp-list-checks",)])
def test_a_wrong_value_ends_the_run(project: Project, args: tuple[str, ...]) -> None:
    project.write("test_it.py", LOADER)
    result = project.collect("--fsdp-world-size=0", *args)
    if "--fsdp-list-checks" in args:
        assert result.ret == 0
        return
    assert errors(result) == [
        "--fsdp-world-size: invalid value '0' (expected a positive int, or a list of distinct ones such as 1,2,4)"
    ]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--fsdp-device=cuda"], "--fsdp-device=cuda: this machine has no GPU that torch can use; use cpu or auto"),
        (["--fsdp-require-gpu"], "--fsdp-require-gpu: a world of 2 would run on the CPU, this machine has 0 GPUs"),
    ],
)
def test_a_missing_device(project: Project, monkeypatch: pytest.MonkeyPatch, args: list[str], message: str) -> None:
    monkeypatch.setattr("pytest_fsdp_meta.worlds.ForkServerEngine.count_gpus", lambda engine: 0)
    project.write("test_it.py", LOADER + LOADER.replace("test_x", "test_y"))
    assert errors(project.collect(*args)) == [f"test_it.py::test_x and 1 more: @fsdp_conformance: {message}"]


def test_devices_need_to_exist_only_for_tests_that_are_selected(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pytest_fsdp_meta.worlds.ForkServerEngine.count_gpus", lambda engine: 0)
    project.write("test_it.py", LOADER + "def test_plain(): ...")
    project.collect("--fsdp-device=cuda", "-k", "plain").assert_outcomes(passed=1, deselected=1)


def test_a_missing_device_is_no_error_where_nothing_runs(project: Project) -> None:
    project.write("test_plain.py", "def test_x(): ...")
    project.collect("--fsdp-device=cuda").assert_outcomes(passed=1)
    project.write("test_plain.py", LOADER)
    assert project.collect("--fsdp-device=cuda", "--collect-only").ret == 0


def test_help_names_the_ini_option(project: Project) -> None:
    text = " ".join(project.collect("--help").stdout.str().split())
    for option in OPTIONS:
        assert f"{option.flag}" in text
        assert f"[ini: {option.ini}]" in text
    assert "--fsdp-list-checks list all checks and exit" in text


def test_list_checks(project: Project) -> None:
    project.write(
        "conftest.py",
        CHECK.format(name="experts_are_balanced", after="['no_meta_params']", value="[experts_are_balanced]"),
    )
    project.write("test_it.py", "syntax error")
    result = project.collect("--fsdp-list-checks", "-n2")
    assert result.ret == 0
    assert "  no_meta_params: no parameter is on the meta device" in result.outlines
    assert result.outlines[-2:] == ["own", "  experts_are_balanced: every expert has its share"]
    assert "test session starts" not in result.stdout.str()


@pytest.mark.parametrize(
    "code",
    [
        "import pytest; assert pytest.main(['--fsdp-list-checks']) == 0",
        "import pytest; assert pytest.main(['-p', 'no:cacheprovider', '--co', 'test_loader.py']) == 0",
        "import pytest; assert pytest.main(['-p', 'no:cacheprovider', 'test_plain.py']) == 0",
    ],
)
def test_no_torch_is_imported(project: Project, code: str) -> None:
    project.write("test_plain.py", "def test_x(): ...")
    project.write("test_loader.py", LOADER)
    command = [sys.executable, "-c", f"{code}\nimport sys; assert 'torch' not in sys.modules"]
    done = subprocess.run(command, cwd=project.path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
