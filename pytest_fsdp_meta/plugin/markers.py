"""Define the markers ``@fsdp_conformance``, ``@fsdp_spmd`` and ``fsdp_world``, and check their arguments."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, Protocol, TypeVar, overload

from pytest_fsdp_meta.catalogue import Catalogue
from pytest_fsdp_meta.evidence import shards_data
from pytest_fsdp_meta.loader.call import BODY
from pytest_fsdp_meta.text import did_you_mean, printable
from pytest_fsdp_meta.worlds import DEFAULT_MESH_DIM, SCOPES, resolve_mesh

if TYPE_CHECKING:
    import pytest

F = TypeVar("F", bound=Callable[..., Any])

MARK = "fsdp_conformance"
SPMD = "fsdp_spmd"
WORLD = "fsdp_world"
"""The name of a mark, and of the fixture that it configures."""


def register(config: pytest.Config) -> None:
    """Describe the markers for ``pytest --markers`` and ``--strict-markers``."""
    for marker in (
        f"{MARK}(world_size, mesh, only, skip, xfail, ...): the test is a loader; run the checks on it",
        f"{SPMD}(world_size, mesh, scope, timeout, process_group): run the body of the test on every rank",
        f"{WORLD}(world_size, mesh, scope, timeout, process_group): configure the fixture fsdp_world",
    ):
        config.addinivalue_line("markers", marker)


P = ParamSpec("P")


class Decorator(Protocol[P]):
    """With or without arguments, as ``@fsdp_conformance`` and ``@fsdp_conformance(world_size=4)``."""

    @overload
    def __call__(self, function: F, /) -> F: ...
    @overload
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Callable[[F], F]: ...


def _decorator(what: str, consequence: str) -> Callable[[Callable[P, Any]], Decorator[P]]:
    """Make a decorator of a function that has its name, its arguments and its docstring.

    Arguments are checked during collection, which reports all wrong ones at once, also unknown ones.
    """

    def make(documented: Callable[P, Any]) -> Decorator[P]:
        known = inspect.signature(documented).parameters

        @functools.wraps(documented)
        def decorate(*positional: Any, **given: Any) -> Any:
            import pytest

            mark = getattr(pytest.mark, documented.__name__)
            if len(positional) == 1 and callable(positional[0]) and not given:
                return mark(_guarded(positional[0], what, consequence))
            given = {
                name: value for name, value in given.items() if name not in known or value is not known[name].default
            }
            marked = mark.with_args(*positional, **given)
            return lambda function: marked(_guarded(function, what, consequence))

        return decorate

    return make


@_decorator("is a loader for pytest-fsdp-meta", "no check ran")
def fsdp_conformance(
    *,
    world_size: int | Sequence[int] | None = None,
    mesh: Mapping[str, int] | None = None,
    only: str | Collection[str] | None = None,
    skip: Mapping[str, str] | None = None,
    xfail: Mapping[str, str] | None = None,
    tolerance: float | Mapping[str, float] | None = None,
    steps: int = 3,
    timeout: float | None = None,
    process_group: Literal["plugin", "loader"] = "plugin",
    simulate: bool | int | Sequence[int] | None = None,
    simulate_ranks: Sequence[int] | None = None,
) -> Any:
    """Mark a test as a loader: its body runs on every rank, and each check of the catalogue becomes one pytest item.

    ``world_size``: an int or a tuple of ints. ``mesh``: ``{"dp_replicate": 2, "dp_shard": -1}``. ``only``: check ids;
    ``skip`` and ``xfail``: ``{id: reason}``. ``tolerance``: a relative tolerance, or ``{id: tolerance}``. ``steps``:
    training steps for parity. ``timeout``: seconds for one call to the ranks. ``process_group``: "plugin", or "loader"
    when the loader calls ``init_process_group`` itself. ``simulate``: a world size or a tuple of them, or True for that
    of ``mesh``: some ranks of such a world run, without values and without a network, and the checks that need neither
    judge them. ``simulate_ranks``: which ranks, besides rank 0, instead of those at both ends of each mesh dimension.
    The arguments are checked when pytest collects the test.

    The same as ``@pytest.mark.fsdp_conformance``, except that the test fails where the plugin is not active.
    """


@_decorator("runs on ranks of pytest-fsdp-meta", "it did not run")
def fsdp_spmd(
    *,
    world_size: int | Sequence[int] | None = None,
    mesh: Mapping[str, int] | None = None,
    scope: Literal["function", "module", "session"] | None = None,
    timeout: float | None = None,
    process_group: Literal["plugin", "loader"] = "plugin",
) -> Any:
    """Run the whole body of a test on every rank; the test passes when every rank passes.

    ``world_size`` and ``mesh`` as for a loader. ``scope``: "function" (default: a fresh world for the test), "module"
    or "session" (the ranks are kept for the next test with the same world). ``timeout``: seconds for the body.
    ``process_group``: "plugin", or "loader" when the body calls ``init_process_group`` itself. The argument ``fsdp`` is
    the rank; other fixtures run in the pytest process, and their values are sent to the ranks. ``pytest.skip`` and
    ``pytest.xfail`` count when all ranks call them.

    The same as ``@pytest.mark.fsdp_spmd``, except that the test fails where the plugin is not active.
    """


def _guarded(function: Any, what: str, consequence: str) -> Any:
    """Replace a test, or each test of a class, by one that fails; this plugin, if active, runs the original."""
    if hasattr(function, BODY):
        return function  # decorated twice: pytest uses the arguments of the inner decorator
    if isinstance(function, type):
        for name, value in list(vars(function).items()):
            if name.startswith("test") and inspect.isfunction(value):
                setattr(function, name, _guarded(value, what, consequence))
        return function

    @functools.wraps(function)
    def guard(*_: Any, **__: Any) -> None:
        import pytest

        pytest.fail(
            f"{function.__name__} {what}, whose plugin is not active, so {consequence}; "
            "install pytest-fsdp-meta and remove '-p no:fsdp-meta'",
            pytrace=False,
        )

    setattr(guard, BODY, function)
    return guard


@dataclass(frozen=True)
class ConformanceSpec:
    """The checked arguments of ``@fsdp_conformance``: the checks, the meshes and the settings of a run."""

    meshes: tuple[Mapping[str, int], ...]
    checks: tuple[str, ...]
    skip: Mapping[str, str] = field(default_factory=dict)
    xfail: Mapping[str, str] = field(default_factory=dict)
    tolerance: Mapping[str, float] = field(default_factory=dict)
    steps: int = 3
    timeout: float | None = None
    process_group: str = "plugin"
    simulate: bool = False
    """Whether only some ranks of each world run, without values."""
    simulate_ranks: tuple[int, ...] = ()
    """Those that run, besides rank 0; empty: both ends of each mesh dimension."""

    @property
    def expected(self) -> tuple[str, ...]:
        """The checks that run unless pytest deselects them: those that the author does not skip."""
        return tuple(check for check in self.checks if check not in self.skip)


def read_conformance_spec(
    positional: tuple[Any, ...],
    arguments: Mapping[str, Any],
    default_sizes: tuple[int, ...],
    catalogue: Catalogue,
    simulated_sizes: tuple[int, ...] = (),
) -> ConformanceSpec:
    """Check the arguments of a loader's marker. Raises ValueError with one line: the argument, the problem, the fix.

    With ``simulated_sizes``, loaders are simulated at these sizes instead of running.
    """
    _require_known(positional, arguments, fsdp_conformance)
    skip = _reasons("skip", arguments.get("skip"), catalogue)
    xfail = _reasons("xfail", arguments.get("xfail"), catalogue)
    both = sorted(skip.keys() & xfail.keys())
    if both:
        raise ValueError(f"{both[0]!r} is in both skip and xfail; remove it from one")
    process_group = _process_group(arguments.get("process_group", "plugin"))
    unsimulated = _why_not_simulated(arguments) if simulated_sizes else ""
    simulated = _simulated_meshes(arguments, () if unsimulated else simulated_sizes)
    checks = _only(arguments.get("only"), catalogue)
    for argument, ids in (("skip", skip), ("xfail", xfail)):
        left_out = [id for id in ids if id not in checks]
        if left_out:
            raise ValueError(f"{argument}: {left_out[0]!r} is not selected by only=...; remove it from {argument}")
    if arguments.get("only") is None:
        checks = tuple(catalogue.ids_for(simulated is not None))
    if unsimulated:
        skip, xfail = dict.fromkeys(checks, unsimulated), {}
    return ConformanceSpec(
        meshes=simulated or _meshes(arguments.get("world_size"), arguments.get("mesh"), default_sizes),
        checks=checks,
        skip=skip,
        xfail=xfail,
        tolerance=_tolerance(arguments.get("tolerance"), catalogue),
        steps=_positive_int("steps", arguments.get("steps", 3)),
        timeout=_seconds(arguments.get("timeout")),
        process_group=process_group,
        simulate=simulated is not None,
        simulate_ranks=_ranks(arguments.get("simulate_ranks")),
    )


@dataclass(frozen=True)
class WorldMarkerSpec:
    """The checked arguments of ``@fsdp_spmd`` or ``@pytest.mark.fsdp_world``: the worlds and their lifetime."""

    meshes: tuple[Mapping[str, int], ...]
    scope: str = "function"
    timeout: float | None = None
    process_group: str = "plugin"


def read_world_marker_spec(
    positional: tuple[Any, ...], arguments: Mapping[str, Any], default_sizes: tuple[int, ...]
) -> WorldMarkerSpec:
    """Check the arguments of such a marker. Raises ValueError with one line: the argument, the problem, the fix."""
    _require_known(positional, arguments, fsdp_spmd)
    scope = arguments.get("scope", "function")
    if scope not in SCOPES:
        raise ValueError(f"scope={scope!r} should be 'function', 'module' or 'session'")
    process_group = _process_group(arguments.get("process_group", "plugin"))
    if process_group == "loader" and scope != "function":
        raise ValueError(
            f"scope={scope!r} keeps the ranks for other tests, but with process_group='loader' each test creates "
            "its own process group; remove scope"
        )
    return WorldMarkerSpec(
        meshes=_meshes(arguments.get("world_size"), arguments.get("mesh"), default_sizes),
        scope=scope,
        timeout=_seconds(arguments.get("timeout")),
        process_group=process_group,
    )


def _require_known(positional: tuple[Any, ...], arguments: Mapping[str, Any], decorator: Callable[..., Any]) -> None:
    known = tuple(inspect.signature(decorator).parameters)
    if positional:
        raise ValueError(f"unexpected positional argument {positional[0]!r}; the arguments are {', '.join(known)}")
    for name in arguments:
        if name not in known:
            hint = did_you_mean(name, known, f"the arguments are {', '.join(known)}")
            raise ValueError(f"unknown argument {name!r}{hint}")


def _why_not_simulated(arguments: Mapping[str, Any]) -> str:
    """Return why ``--fsdp-simulate`` leaves out a loader that would run; empty if it does not."""
    mesh = arguments.get("mesh")
    if arguments.get("simulate") is not None:
        return ""  # the author has decided
    if isinstance(mesh, Mapping) and -1 not in mesh.values() and not any(map(shards_data, mesh)):
        return f"--fsdp-simulate: mesh {dict(mesh)} has no dimension that shards data and could be larger"
    return ""


def _simulated_meshes(arguments: Mapping[str, Any], option: tuple[int, ...]) -> tuple[Mapping[str, int], ...] | None:
    simulate, mesh = arguments.get("simulate"), arguments.get("mesh")
    if simulate is None and option:
        return tuple(_grown(mesh, size) for size in option)
    if simulate is None or simulate is False:
        return None
    if simulate is True:
        is_open = mesh is None or (isinstance(mesh, Mapping) and -1 in mesh.values())
        if is_open and arguments.get("world_size") is None:
            raise ValueError("simulate=True needs a size: write simulate=1024, or give every size of the mesh")
        return _meshes(arguments.get("world_size"), mesh, ())
    if arguments.get("world_size") is not None:
        raise ValueError(f"simulate={simulate!r} is the size of the world; remove world_size")
    try:
        return _meshes(simulate, mesh, ())
    except ValueError as error:
        raise ValueError(str(error).replace("world_size", "simulate")) from None


def _ranks(value: Any) -> tuple[int, ...]:
    ranks = value if isinstance(value, list | tuple) else () if value is None else (value,)
    if not all(isinstance(rank, Integral) and not isinstance(rank, bool) and int(rank) >= 0 for rank in ranks):
        raise ValueError(f"simulate_ranks={value!r} should be a list of ranks such as [1, 511]")
    return tuple(int(rank) for rank in ranks)


def _grown(mesh: Any, size: int) -> Mapping[str, int]:
    """Return a loader's mesh with this many ranks: the dimension that shards data takes what the others leave."""
    try:
        if not isinstance(mesh, Mapping) or -1 in mesh.values():
            return _meshes(size, mesh, ())[0]
        resolved = resolve_mesh(mesh, None)
        return resolve_mesh({**resolved, next(filter(shards_data, resolved)): -1}, size)
    except ValueError as error:
        raise ValueError(f"--fsdp-simulate={size}: {error}") from None


def _meshes(world_size: Any, mesh: Any, default_sizes: tuple[int, ...]) -> tuple[Mapping[str, int], ...]:
    if world_size is None:
        sizes: tuple[int, ...] | None = None
    else:
        listed = world_size if isinstance(world_size, (tuple, list)) else (world_size,)
        sizes = tuple(_positive_int("world_size", size) for size in listed)
        if not sizes or len(set(sizes)) != len(sizes):
            raise ValueError(f"world_size={world_size!r} should be a positive int or a tuple of distinct positive ints")
    if mesh is None:
        return tuple({DEFAULT_MESH_DIM: size} for size in sizes or default_sizes)
    if not isinstance(mesh, Mapping):
        raise ValueError(f"mesh={mesh!r} should be a dict of dimension names to sizes, such as {{'dp_shard': 2}}")
    if sizes is None and not any(isinstance(size, Integral) and size == -1 for size in mesh.values()):
        return (resolve_mesh(mesh, None),)
    return tuple(resolve_mesh(mesh, size) for size in sizes or default_sizes)


def _only(only: Any, catalogue: Catalogue) -> tuple[str, ...]:
    if only is None:
        return tuple(catalogue.ids())
    listed = [only] if isinstance(only, str) else only
    if not isinstance(listed, Collection) or not len(listed) or not all(isinstance(id, str) for id in listed):
        raise ValueError(f"only={only!r} should name one check or more (pytest --fsdp-list-checks lists them)")
    selected = {_known_id("only", id, catalogue) for id in listed}
    return tuple(id for id in catalogue.ids() if id in selected)


def _reasons(name: str, reasons: Any, catalogue: Catalogue) -> dict[str, str]:
    if reasons is None:
        return {}
    if not isinstance(reasons, Mapping) or not all(isinstance(text, str) and text.strip() for text in reasons.values()):
        raise ValueError(
            f"{name}={reasons!r} should be a dict of check ids to reasons, such as {{'loss_parity': 'bf16 router'}}"
        )
    # Reports show a reason on one line, and a terminal must not obey it.
    return {_known_id(name, id, catalogue): printable(" ".join(text.split())) for id, text in reasons.items()}


def _known_id(name: str, id: Any, catalogue: Catalogue) -> str:
    if not isinstance(id, str):
        raise ValueError(f"{name}: {id!r} should be a check id, a string (pytest --fsdp-list-checks lists them)")
    try:
        return catalogue[id].id
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def _tolerance(tolerance: Any, catalogue: Catalogue) -> dict[str, float]:
    if tolerance is None:
        return {}
    by_id = tolerance if isinstance(tolerance, Mapping) else {"*": tolerance}
    for id, value in by_id.items():
        if id != "*" and not catalogue[_known_id("tolerance", id, catalogue)].tolerance:
            ids = ", ".join(check.id for check in catalogue if check.tolerance)
            raise ValueError(f"tolerance: check {id!r} has no tolerance; the checks that have one are {ids}")
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1e9:
            raise ValueError(
                f"tolerance={tolerance!r} should be a relative tolerance such as 1e-5, or a dict by check id"
            )
    return {id: float(value) for id, value in by_id.items()}


def _positive_int(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, Integral) or value < 1:  # Integral includes numpy's integers
        raise ValueError(f"{name}={value!r} should be a positive int")
    return int(value)


def _seconds(value: Any) -> float | None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 1e9):
        raise ValueError(f"timeout={value!r} should be a positive number of seconds below 1e9")
    return None if value is None else float(value)


def _process_group(value: Any) -> str:
    if not isinstance(value, str) or value not in ("plugin", "loader"):
        raise ValueError(f"process_group={value!r} should be 'plugin' or 'loader'")
    return str(value)
