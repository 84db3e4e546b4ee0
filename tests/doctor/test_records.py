"""Values of another type than a schema has: of a config, and of a column of data."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from reshard.runs.doctor.log_diagnosis import diagnose_text

pydantic = pytest.importorskip("pydantic")


def test_pydantic_says_which_key_has_which_type() -> None:
    class Config(pydantic.BaseModel, extra="forbid"):  # type: ignore[name-defined,misc,call-arg]
        datasets: list[dict[str, str]]
        known: int

    with pytest.raises(pydantic.ValidationError) as caught:
        Config(datasets={"path": "c4"}, known=1)
    (found,) = diagnose_text("log", f"pydantic_core._pydantic_core.ValidationError: {caught.value}\n")
    assert found.code == "value-of-other-type" and "`datasets`" in found.remedy.en
    assert "Input should be a valid list, and the value is of type dict: {'path': 'c4'}" in found.rule.en
    with pytest.raises(pydantic.ValidationError) as caught:
        Config(datasets=[], known=1, unknown=2)
    found = diagnose_text("log", f"pydantic_core._pydantic_core.ValidationError: {caught.value}\n")[0]
    assert found.code != "value-of-other-type"


def test_a_column_of_several_types_is_named(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import json as reader

    file = tmp_path / "a.jsonl"
    file.write_text("\n".join(json.dumps({"id": value}) for value in ("one", 2)))
    for read in (
        lambda: reader.read_json(file),
        lambda: pyarrow.array([1, "a"]),
        lambda: pyarrow.array([[1], 2]),
    ):
        with pytest.raises(pyarrow.lib.ArrowException) as caught:
            read()
        said = f"pyarrow.lib.{type(caught.value).__name__}: {caught.value}"
        assert diagnose_text("log", said)[0].code == "column-mixes-types", said
