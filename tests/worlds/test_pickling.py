"""What functions that are sent by value keep."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

from pytest_fsdp_meta.worlds.system.pickling import dumps


def test_functions_sent_by_value_keep_their_file() -> None:
    """Cloudpickle drops it from 3.1.3 on; messages would name a line of torch, or of "<dynamic-code>"."""

    class Local:
        def method(self) -> Callable[[], int]:
            return lambda: 1

    def function() -> Any:
        return Local().method

    again = pickle.loads(dumps(function))
    codes = [one.__code__ for one in (again, again(), again()())]
    assert [code.co_filename for code in codes] == [__file__] * 3
    assert again()()() == 1
