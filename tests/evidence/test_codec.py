"""Dataclasses converted to JSON and back, and the errors for data that does not fit."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from pytest_fsdp_meta.evidence.codec import from_plain, to_plain, write_whole
from tests.docs.report_schema import schema_of


@dataclass(frozen=True)
class Inner:
    """A first paragraph."""

    name: str | None
    numbers: tuple[float, ...] = ()
    pair: tuple[int, str] = (0, "")


@dataclass(frozen=True)
class Outer:
    inner: tuple[Inner, ...]
    by_name: Mapping[str, Inner] = field(default_factory=dict)
    names: frozenset[str] = frozenset()
    flag: bool = False
    perhaps: Inner | None = None


FULL = Outer(
    (Inner("a", (1.5, math.inf, -math.inf), (3, "x")), Inner(None)),
    {"it's <b>": Inner("b")},
    frozenset({"z", "y"}),
    True,
    Inner("c"),
)


def test_all_kinds_of_fields_survive_a_round_trip() -> None:
    text = json.dumps(to_plain(FULL), allow_nan=False)
    assert from_plain(Outer, json.loads(text)) == FULL


def test_nan_survives_a_round_trip() -> None:
    back = from_plain(Inner, json.loads(json.dumps(to_plain(Inner("a", (math.nan,))), allow_nan=False)))
    assert math.isnan(back.numbers[0])


def test_missing_fields_get_their_default_and_unknown_fields_are_ignored() -> None:
    assert from_plain(Outer, {"inner": [{"name": "a", "new": 1}]}) == Outer((Inner("a"),))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({}, "Outer: 'inner' is missing"),
        ([], "Outer: [], but should be dict"),
        ({"inner": [{"name": 1}]}, "Outer.inner[0].name: 1, but should be str"),
        ({"inner": [], "flag": 1}, "Outer.flag: 1, but should be bool"),
        ({"inner": [{"name": "a", "pair": [1]}]}, "Outer.inner[0].pair: 1 items, but should be 2"),
        ({"inner": [{"name": "a", "numbers": ["one"]}]}, "Outer.inner[0].numbers[0]: 'one', but should be float"),
        (
            {"inner": [{"name": "a", "numbers": [10**400]}]},
            "Outer.inner[0].numbers[0]: the number is too large for a float",
        ),
        ({"inner": [{"name": "a", "pair": [-(2**65), ""]}]}, "Outer.inner[0].pair[0]: the number is too large"),
        ({"inner": [], "by_name": {"k": {}}}, "Outer.by_name['k']: 'name' is missing"),
    ],
)
def test_errors_name_the_path_of_the_wrong_value(data: object, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        from_plain(Outer, data)


def test_texts_are_read_as_printable_ones() -> None:
    read = from_plain(Outer, {"inner": [{"name": "\x1b[2J\ud800\n\ta"}], "by_name": {"\x1b]0;": {"name": None}}})
    assert read == Outer((Inner("\\x1b[2J\\ud800\n\ta"),), {"\\x1b]0;": Inner(None)})


def test_no_link_is_followed_when_a_file_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    victim, path = tmp_path / "victim", tmp_path / "report.json"
    victim.write_text("mine")
    path.symlink_to(victim)
    write_whole(path, b"first")
    assert (victim.read_text(), path.is_symlink(), path.read_text()) == ("mine", False, "first")
    monkeypatch.setattr("secrets.token_hex", lambda count: "guessed")
    (tmp_path / ".report.json.guessed").symlink_to(victim)
    with pytest.raises(FileExistsError):
        write_whole(path, b"second")
    assert (victim.read_text(), path.read_text()) == ("mine", "first")


def test_schema_of_a_dataclass() -> None:
    schema = schema_of(Inner, "Things")
    assert schema["title"] == "Things"
    inner = schema["$defs"]["Inner"]
    assert inner["required"] == ["name"]
    assert inner["description"] == "A first paragraph."
    assert inner["properties"]["name"] == {"anyOf": [{"type": "string"}, {"type": "null"}]}
    assert inner["properties"]["pair"]["prefixItems"] == [{"type": "integer"}, {"type": "string"}]
