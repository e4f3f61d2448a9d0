"""What a test may ask for: ``fsdp`` on the ranks, ``fsdp_world`` in the pytest process."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import pytest

from pytest_fsdp_meta.plugin.fixture_worlds import FixtureWorlds
from pytest_fsdp_meta.plugin.pickling import Unsendable, pack_run
from pytest_fsdp_meta.plugin.spmd_rank import FUNCTION

FIXTURE_WORLDS = pytest.StashKey[FixtureWorlds]()
OF_RANKS = ("rank", "local_rank", "world_size", "device", "mesh", "barrier")


class FsdpWorld:
    """The ranks of the test that asked for it. ``run`` calls a function on every one of them."""

    def __init__(self, keeper: FixtureWorlds) -> None:
        self._keeper = keeper

    @property
    def size(self) -> int:
        return self._keeper.case.spec.size

    @property
    def mesh(self) -> Mapping[str, int]:
        """Sizes by dimension name; the mesh itself is on the ranks: ``current().mesh``."""
        return dict(self._keeper.case.spec.mesh)

    @property
    def device_type(self) -> str:
        return self._keeper.case.spec.device_type

    @property
    def backend(self) -> str:
        return self._keeper.case.spec.backend

    def run(self, function: Callable[..., Any] | str, /, *args: Any, **kwargs: Any) -> list[Any]:
        """Calls ``function`` ("module:name", or any callable that cloudpickle can send) on every rank.

        Returns the results in rank order. Raises WorldError, with every failed rank's traceback, when a rank raises,
        ends or does not answer in time: the ranks are ended then, and the next call gets fresh ones. Raises ValueError
        for arguments that cannot be sent and results that cannot be read, outside of a test that asked for it, and
        while another thread's call runs. A skip or xfail on all ranks is the test's.
        """
        __tracebackhide__ = True
        if isinstance(function, str) and re.fullmatch(r"[\w.]+:\w+", function):
            results = self._keeper.call(function, args, kwargs)
        elif callable(function):
            try:
                packed = pack_run(function, args, kwargs)
            except Unsendable as error:
                raise ValueError(str(error)) from None
            results = self._keeper.call(FUNCTION, packed, {})
        else:
            raise ValueError(f"fsdp_world.run: {function!r} should be a function, or its name as 'module:name'")
        self._keeper.ear.warn()  # here, where pytest.warns and the like may be waiting for it
        return results

    def outputs(self) -> list[str]:
        """What each rank has written to stdout and stderr."""
        return self._keeper.outputs()

    def __reduce__(self) -> NoReturn:
        raise TypeError("fsdp_world exists in the pytest process only; what runs on ranks takes plain values")

    def __repr__(self) -> str:
        return f"<fsdp_world of {self.size} ({self.backend} on {self.device_type})>"


class OnRanksOnly:
    """What ``fsdp`` is in the pytest process, where pytest and Hypothesis evaluate it, and nobody else should."""

    def __getattr__(self, name: str) -> NoReturn:
        __tracebackhide__ = True
        if name not in OF_RANKS:
            raise AttributeError(name)  # pytest, Hypothesis and printers ask any value for what it may have
        pytest.fail(
            f"fsdp.{name}: 'fsdp' exists on the ranks only; a loader or an SPMD test asks for it as an argument",
            pytrace=False,
        )

    def __repr__(self) -> str:
        return "fsdp"


# Of session scope, although each test gets its own rank or world: a value of function scope would be the same for
# all examples of a @given test, of which Hypothesis rightly warns, and ours is not.
@pytest.fixture(scope="session")
def fsdp() -> OnRanksOnly:
    """On a rank: rank, local_rank, world_size, device (with its index), mesh, barrier()."""
    return OnRanksOnly()


@pytest.fixture(scope="session")
def fsdp_world(pytestconfig: pytest.Config) -> FsdpWorld:
    """Ranks of a process group: fsdp_world.run(function, *args) calls it on each; @pytest.mark.fsdp_world sizes it."""
    return FsdpWorld(pytestconfig.stash[FIXTURE_WORLDS])
