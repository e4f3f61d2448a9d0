"""``torch.standin``: what torch and frameworks call on the module of a device, as they do on ``torch.cuda``.

Beside it, the collectives of tensors on the stand-in.
"""

from __future__ import annotations

import contextlib
import importlib.util
import warnings
from collections.abc import Callable, Iterator
from importlib.machinery import ExtensionFileLoader
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from pytest_fsdp_meta.standin.build import MODULE, NAME, library

MEMORY = 2**33
"""Bytes that a device says it has; it takes what the host has."""
CAPABILITY = (8, 0)
"""The compute capability that a device says it has: of a GPU with bfloat16."""
OPERATORS = (
    *("broadcast_", "reduce_", "gather_", "scatter_", "send", "recv_", "recv_any_source_", "barrier"),
    *("allreduce_", "allreduce_coalesced_", "alltoall_", "alltoall_base_"),
    *("allgather_", "_allgather_base_", "allgather_coalesced_", "allgather_into_tensor_coalesced_"),
    *("reduce_scatter_", "_reduce_scatter_base_", "reduce_scatter_tensor_coalesced_"),
)
"""torch's operators of c10d; each gets its tensors, and a process group."""
_libraries: list[torch.library.Library] = []


def register(devices: int) -> None:
    """Load the compiled device into this process, give it this number of devices, and let it send their tensors."""
    loader = ExtensionFileLoader(MODULE, str(library()))
    spec = importlib.util.spec_from_file_location(MODULE, loader.path, loader=loader)
    assert spec is not None
    core = importlib.util.module_from_spec(spec)
    torch.utils.rename_privateuse1_backend(NAME)
    loader.exec_module(core)
    core.set_device_count(devices)
    torch._register_device_module(NAME, DeviceModule(core))
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    collectives = torch.library.Library("c10d", "IMPL")
    with warnings.catch_warnings():
        # torch has its own for this dispatch key, which look for a backend of the device.
        warnings.filterwarnings("ignore", message="Warning only once for all operators", category=UserWarning)
        for name in OPERATORS:
            collectives.impl(name, _on_cpu(name), "PrivateUse1", allow_override=True)
    _libraries.append(collectives)  # torch uses the implementations as long as it is referenced


class DeviceModule(ModuleType):
    """The functions of ``torch.cuda`` that do not name CUDA. Work is done when a call returns, so nothing waits."""

    def __init__(self, core: Any) -> None:
        super().__init__(f"torch.{NAME}")
        self.core = core
        self.Stream, self.Event, self.device = _stream_class(self), _Event, _device_class(self)

    def as_cpu(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a CPU tensor with the same memory."""
        return self.core.as_cpu(tensor)

    def index_of(self, device: Any = None) -> int:
        """Return the index of a device, an index, a string or None, as all functions of ``torch.cuda`` accept them."""
        if isinstance(device, int):
            return device
        given = torch.device(NAME if device is None else device)
        if given.type != NAME:
            raise ValueError(f"Expected a {NAME} device, but got: {given}")
        index = given.index
        return int(self.core.current_device()) if index is None else index

    _initialized = True  # else torch.utils.checkpoint does not restore the random state of the device

    def is_available(self) -> bool:
        return True

    is_initialized = is_available

    def init(self) -> None:
        return

    _lazy_init = init

    def _is_in_bad_fork(self) -> bool:
        return False

    def device_count(self) -> int:
        return int(self.core.device_count())

    def current_device(self) -> int:
        return int(self.core.current_device())

    def set_device(self, device: Any) -> None:
        self.core.set_device(self.index_of(device))

    def get_device_name(self, device: Any = None) -> str:
        return "stand-in"

    def get_device_capability(self, device: Any = None) -> tuple[int, int]:
        return CAPABILITY

    def get_device_properties(self, device: Any = None) -> SimpleNamespace:
        major, minor = CAPABILITY
        return SimpleNamespace(name=self.get_device_name(device), total_memory=MEMORY, major=major, minor=minor)

    def synchronize(self, device: Any = None) -> None:
        return

    def current_stream(self, device: Any = None) -> torch.Stream:
        return self.Stream(device)

    default_stream = current_stream

    def set_stream(self, stream: torch.Stream) -> None:
        return

    def stream(self, stream: torch.Stream | None) -> contextlib.AbstractContextManager[torch.Stream | None]:
        return contextlib.nullcontext(stream)

    def empty_cache(self) -> None:
        return

    def ipc_collect(self) -> None:
        return

    def memory_allocated(self, device: Any = None) -> int:
        return int(self.core.memory_held(self.index_of(device)))

    memory_reserved = memory_allocated

    def max_memory_allocated(self, device: Any = None) -> int:
        return int(self.core.memory_peak(self.index_of(device)))

    max_memory_reserved = max_memory_allocated

    def reset_peak_memory_stats(self, device: Any = None) -> None:
        self.core.reset_memory_peak(self.index_of(device))

    def mem_get_info(self, device: Any = None) -> tuple[int, int]:
        return max(MEMORY - self.memory_allocated(device), 0), MEMORY

    def manual_seed(self, seed: int) -> None:
        self._generator(None).manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        for index in range(self.device_count()):
            self._generator(index).manual_seed(seed)

    def initial_seed(self) -> int:
        return int(self._generator(None).initial_seed())

    def get_rng_state(self, device: Any = NAME) -> torch.Tensor:
        return self._generator(device).get_state()

    def set_rng_state(self, state: torch.Tensor, device: Any = NAME) -> None:
        self._generator(device).set_state(state)

    def get_rng_state_all(self) -> list[torch.Tensor]:
        return [self.get_rng_state(index) for index in range(self.device_count())]

    def set_rng_state_all(self, states: list[torch.Tensor]) -> None:
        for index, state in enumerate(states):
            self.set_rng_state(state, index)

    @property
    def default_generators(self) -> tuple[torch.Generator, ...]:
        return tuple(self._generator(index) for index in range(self.device_count()))

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16, torch.float32]

    def is_bf16_supported(self, including_emulation: bool = True) -> bool:
        return True

    def _generator(self, device: Any) -> torch.Generator:
        generator: torch.Generator = self.core.default_generator(self.index_of(device))
        return generator


def _stream_class(module: DeviceModule) -> type[torch.Stream]:
    class Stream(torch.Stream):  # type: ignore[misc]
        def __new__(cls, device: Any = None, priority: int = 0, **other: Any) -> Any:
            return super().__new__(cls, device=torch.device(NAME, module.index_of(device)), priority=priority)

    return Stream


class _Event:
    """Make a ``torch.Event``: another one's ``elapsed_time`` takes no instance of a subclass."""

    def __new__(cls, enable_timing: bool = False, **other: Any) -> Any:
        return torch.Event(device=NAME, enable_timing=enable_timing)


def _device_class(module: DeviceModule) -> type:
    class device:
        """Make a device the current one in a with block; None and a negative index change nothing."""

        def __init__(self, device: Any) -> None:
            self._index = -1 if device is None else module.index_of(device)
            self._before = -1

        def __enter__(self) -> None:
            self._before = module.current_device()
            if self._index >= 0:
                module.set_device(self._index)

        def __exit__(self, *error: object) -> None:
            module.set_device(self._before)

    return device


def _on_cpu(name: str) -> Callable[..., Any]:
    """Return a function that runs the operator on CPU tensors with the same memory, and returns the given tensors."""
    operator = getattr(torch.ops.c10d, name).default
    as_cpu = torch.get_device_module(NAME).as_cpu

    def run(*args: Any, **kwargs: Any) -> Any:
        devices = {tensor.device for tensor in _tensors(args)}
        if len(devices) > 1:
            raise RuntimeError(f"c10d::{name}: all tensors should be on one device, not {sorted(map(str, devices))}")
        given = args[0]
        done = operator(*[_lowered(arg, as_cpu) for arg in args], **kwargs)
        # Operators that change tensors return them beside the work that is to be waited for.
        return (given, done[1]) if isinstance(done, tuple) else done

    return run


def _lowered(value: Any, as_cpu: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        return as_cpu(value)
    return [_lowered(each, as_cpu) for each in value] if isinstance(value, (list, tuple)) else value


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _tensors(each)
