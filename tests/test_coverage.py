"""The coverage argument counts every element of a plan, and fails for a plan that misses one."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

import reshard as api
from reshard.algebra.layout import Layout
from reshard.algebra.multisets import Multiset, total
from reshard.algebra.views import Piece, View
from reshard.commands import coverage
from reshard.commands.coverage import prove
from reshard.formats import open_checkpoint
from reshard.formats.options import OPTIONS_0_2_0, ConversionOptions
from reshard.planning import plan_conversion
from reshard.transfer.plan import OutputFile, Plan, Planned
from tests.bad_input.conftest import originals as originals
from tests.bad_input.damage import converted, find, flip
from tests.commandline import reshard
from tests.genuine.peft import make_adapter


@settings(max_examples=80, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 9), st.lists(st.tuples(st.integers(1, 4), st.integers(1, 7)), max_size=3))
    )
)
def test_multisets_are_equal_if_their_positions_are(parts: list[tuple[int, list[tuple[int, int]]]]) -> None:
    counts = np.zeros(200, int)
    for start, axes in parts:
        places = np.array([start])
        for count, step in axes:
            places = (places[:, None] + step * np.arange(count)).reshape(-1)
        np.add.at(counts, places, 1)
    found = total(Multiset.of(start, axes) for start, axes in parts)
    each = [Multiset.of(place, []).times(int(count)) for place, count in enumerate(counts)]
    assert found == total(each) and found.numel == counts.sum()
    moved = np.roll(counts, 1)
    assert (found == total(Multiset.of(p, []).times(int(n)) for p, n in enumerate(moved))) == (
        not counts.any()
    )
    wide = total(Multiset.of(start, axes, 4) for start, axes in parts)
    assert wide == total(
        Multiset.of(4 * p + i, []).times(int(n)) for p, n in enumerate(counts) for i in range(4)
    )


ROADS = {
    "qwen2_tied": ConversionOptions(to="megatron", tp=2, pp=2, vpp=2),
    "qwen3_moe": ConversionOptions(to="megatron-legacy", tp=2, pp=2, ep=2),
    "deepseek_v3_mtp": ConversionOptions(to="megatron", tp=2, pp=3, ep=4, etp=2),
    "gpt_oss": ConversionOptions(to="dcp"),
    "torch_dist": ConversionOptions(to="huggingface", max_shard_size=100_000),
    "legacy moe": ConversionOptions(to="megatron", tp=4, etp=2),
}


@pytest.mark.parametrize("name", ROADS)
def test_every_element_is_used_once_or_dropped_by_a_rule(originals: Callable[[str], Path], name: str) -> None:
    source = originals(name)
    plan, checkpoint = plan_conversion(source, ROADS[name]), open_checkpoint(source)
    found = prove(plan, checkpoint)
    assert found, found.faults
    counts, files = found.source, found.target
    assert counts.elements == counts.used + counts.copies + sum(counts.unused.values())
    assert checkpoint.parameters <= counts.elements <= checkpoint.parameters + counts.copies
    assert files.elements == counts.used + counts.shared + files.zeros
    parts = (files.bytes_of_tensors, files.bytes_of_headers, files.bytes_copied, files.bytes_between)
    assert files.bytes == plan.nbytes == sum(parts)
    itemsize = plan.outputs[0].dtype.itemsize
    assert plan.dropped.get("vocabulary padding", 0) == itemsize * counts.unused.get("vocabulary padding", 0)
    assert bool(counts.unused) == (name == "torch_dist")


def broken(plan: Plan, name: str, change: Callable[[Piece], Piece]) -> Plan:
    """The plan with the first piece of one tensor changed, in all its blocks too."""

    def source(view: Callable[[], View]) -> Callable[[], View]:
        def changed() -> View:
            first, *others = view().pieces
            return View(view().shape, (change(first), *others))

        return changed

    def spoilt(each: Planned) -> Planned:
        return each._replace(source=source(each.source)) if each.name == name else each

    files = [
        OutputFile(file.path, file.size, [spoilt(block) for block in file.blocks], file.literals)
        for file in plan.files
    ]
    return replace(plan, files=files, outputs=list(map(spoilt, plan.outputs)))


NORM, LINEAR = "model.norm.weight", "model.layers.0.self_attn.q_proj.weight"


@pytest.mark.parametrize(
    ("tensor", "change", "told"),
    [
        (NORM, lambda piece: piece._replace(start=piece.start + 1), ["never used"]),
        (
            LINEAR,
            lambda piece: piece._replace(axes=((piece.numel - 1, 1, 1),)),
            ["never used", "the plan writes"],
        ),
        (LINEAR, lambda piece: piece._replace(at=piece.at + 1), ["some elements twice"]),
        (
            LINEAR,
            lambda piece: piece._replace(axes=((2, 1, 1), (piece.numel // 2, 1, 2))),
            ["used more than once"],
        ),
    ],
)
def test_an_element_that_is_lost_or_taken_twice_is_found(
    originals: Callable[[str], Path], tensor: str, change: Callable[[Piece], Piece], told: list[str]
) -> None:
    source = originals("qwen3")
    plan = plan_conversion(source, ConversionOptions(to="dcp"))
    assert prove(plan, open_checkpoint(source))
    found = prove(broken(plan, tensor, change), open_checkpoint(source))
    assert not found and {fault.tensor for fault in found.faults} == {tensor}, found.faults
    messages = " ".join(fault.message for fault in found.faults)
    assert all(each in messages for each in told), messages


def test_the_proof_names_what_an_output_was_made_of(originals: Callable[[str], Path], tmp_path: Path) -> None:
    source, output = originals("torch_dist"), tmp_path / "hf"
    converted(source, output)
    result = reshard("verify", source, output, "--proof")
    assert result.code == 0, result.err
    found = reshard("verify", source, output, "--proof", "--json").json
    assert found["balanced"] and found["recorded_plan"]
    for count in (found["source"]["elements"], found["source"]["used"], found["target"]["bytes"]):
        assert f"{count:,}" in result.out
    padding = found["source"]["unused"]["vocabulary padding"]
    assert (
        f"{padding:,} dropped: vocabulary padding" in result.out
        and "balanced: the recorded plan" in result.out
    )
    record = json.loads((output / "reshard.json").read_text())
    assert found["source"]["dropped"] == record["dropped"]
    assert found["target"]["bytes"] == sum(each["bytes"] for each in record["files"].values())
    assert api.verify(source, output, proof=True).as_dict() == found


def test_a_plan_that_misses_an_element_is_told(
    originals: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, output = originals("qwen3"), tmp_path / "dcp"
    converted(source, output, "--to", "dcp")
    planned = coverage.plan_conversion

    def spoilt(*words: object) -> Plan:
        return broken(planned(*words), NORM, lambda piece: piece._replace(start=piece.start + 1))

    monkeypatch.setattr(coverage, "plan_conversion", spoilt)
    result = reshard("verify", source, output, "--proof")
    assert result.code == 1 and "unbalanced: 1 problem" in result.out and "Traceback" not in result.err
    assert f"{NORM}: 1 element is never used, the first at byte" in " ".join(result.out.split())


def sign(path: Path, record: dict[str, Any]) -> None:
    """Write a record with its own digest, as an adversary would."""
    zeros = "0" * 32
    head, _, tail = json.dumps({**record, "record": zeros}).rpartition(zeros)
    path.write_text(head + xxhash.xxh3_128_hexdigest((head + zeros + tail).encode()) + tail)


def test_a_record_that_was_edited_proves_nothing(originals: Callable[[str], Path], tmp_path: Path) -> None:
    source, output = originals("torch_dist"), tmp_path / "hf"
    converted(source, output)
    path = output / "reshard.json"
    record = json.loads(path.read_text())
    sign(path, record)
    assert reshard("verify", source, output, "--proof").code == 0
    for name, value in (
        ("dropped", {**record["dropped"], "vocabulary padding": 1}),
        ("dropped", {}),
        ("dtypes", {"float8": 3}),
        ("family", "llama"),
    ):
        edited = {**record, name: value}
        path.write_text(json.dumps(edited))
        result = reshard("verify", source, output, "--proof")
        assert result.code == 2 and "was modified after it was written" in result.err
        sign(path, edited)
        result = reshard("verify", source, output, "--proof")
        assert result.code == 1 and f"reshard.json: {name}: it says" in " ".join(result.out.split()), result
    sign(path, {**record, "dropped": {}, "plan": "of another version"})
    assert "reshard.json: dropped: it says {}" in " ".join(
        reshard("verify", source, output, "--proof").out.split()
    )


def test_a_record_holds_when_a_default_changes(
    originals: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of this version, which records all options, and of 0.2.0, which left out its defaults."""
    source, output, before = originals("torch_dist"), tmp_path / "hf", tmp_path / "before"
    converted(source, output)
    converted(source, before, "--max-shard-size", "5GB")  # the default of 0.2.0
    told = json.loads((output / "reshard.json").read_text())["options"]
    assert told.keys() >= {*OPTIONS_0_2_0, "beside"}
    of_layout = {"tp", "pp", "vpp", "ep", "etp", "dp", "stages", "no_tokenizer"}
    assert (
        told.keys() - {"layout", "tokenizer"} == {each.name for each in fields(ConversionOptions)} - of_layout
    )
    assert OPTIONS_0_2_0["layout"].keys() == {each.name for each in fields(Layout)}
    first = {"to": told["to"]} if told["to"] else {}
    for folder, options, size in ((output, told, 5_000_000_000), (before, first, 5_000_000_000)):
        assert ConversionOptions.of_dict(options).meant == {
            **ConversionOptions().meant,
            "max_shard_size": size,
        }
        record = json.loads((folder / "reshard.json").read_text())
        sign(folder / "reshard.json", {**record, "options": options})
        with monkeypatch.context() as patch:
            patch.setattr("reshard.formats.options.SHARD_SIZE", "50kB")
            assert ConversionOptions().shard_size == 50_000
            result = reshard("verify", source, folder, "--proof")
        assert result.code == 0 and "balanced: the recorded plan" in result.out, result


def test_a_proof_of_something_else_is_refused(originals: Callable[[str], Path], tmp_path: Path) -> None:
    source, output = originals("qwen3"), tmp_path / "mc"
    converted(source, output, "--to", "megatron", "--tp", 2)
    for words, told in (
        ((source, source), "no record with digests found"),
        ((output, source), f"swap them: reshard verify {source} {output} --proof"),
        ((source, tmp_path / "nothing"), "no such file or directory"),
        ((originals("qwen3_moe"), output), "this is not the source that was converted"),
        ((originals("torch_dist"), output), "this is not the source that was converted"),
        ((output,), "--proof needs SRC and DST"),
        ((source, output, "--logits"), "--proof needs SRC and DST"),
        ((tmp_path / "nothing", output), "the output cannot be planned again from this source"),
    ):
        result = reshard("verify", *words, "--proof")
        assert result.code == 2 and told in " ".join(result.err.split()), result.err
        assert "Traceback" not in result.err
    path = output / "reshard.json"
    record = json.loads(path.read_text())
    sign(path, {**record, "options": {**record["options"], "layout": {"tp": 4, "stages": []}}})
    result = reshard("verify", source, output, "--proof")
    assert result.code == 2 and "the output was not written by this plan" in result.err
    for options in (None, {"to": "megatron", "wings": 2}, {"layout": 7}):
        sign(path, {**record, "options": options})
        result = reshard("verify", source, output, "--proof")
        assert result.code == 2 and "does not contain the options of the conversion" in result.err, result.err


def test_a_merged_adapter_leaves_weights_behind_by_name(
    originals: Callable[[str], Path], tmp_path: Path
) -> None:
    base = originals("qwen3")
    adapter = make_adapter(base, tmp_path / "lora", modules_to_save=["lm_head"], target_modules=["q_proj"])
    converted(adapter, tmp_path / "merged", "--merge", "--base", base)
    found = api.verify(adapter, tmp_path / "merged", proof=True)
    rule = "weights that the adapter replaces"
    assert found and found.source.unused.keys() == {rule} and found.source.elsewhere == 0
    assert (
        found.source.dropped[rule]
        == 4 * found.source.unused[rule]
        == open_checkpoint(base).tensors["lm_head.weight"].nbytes
    )


PAGE = Path(__file__).parents[1] / "docs" / "proof.md"


def test_the_page_shows_what_is_printed(
    originals: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (shown,) = re.findall(r"```console\n\$ reshard (.*?)```", PAGE.read_text(encoding="utf-8"), re.S)
    words, _, lines = shown.partition("\n")
    shutil.copytree(originals("torch_dist"), tmp_path / "run")
    converted(tmp_path / "run", tmp_path / "model")
    monkeypatch.chdir(tmp_path)

    def counts(text: str) -> list[str]:
        """Headers and configs have other sizes with other versions of transformers."""
        return [
            re.sub(r" *[\d,]+ (bytes in|of headers|of files)", r"N \1", line) for line in text.splitlines()
        ]

    assert counts(reshard(*words.split()).out) == counts(lines)


def test_the_page_shows_how_to_check_a_source(originals: Callable[[str], Path], tmp_path: Path) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.S)
    exec(compile(code, str(PAGE), "exec"), names := dict[str, Any]())
    source = Path(shutil.copytree(originals("torch_dist"), tmp_path / "run"))
    converted(source, tmp_path / "model")
    assert names["changed_sources"](source, tmp_path / "model") == []
    path = find(source, "__1_0.distcp")
    flip(path, path.stat().st_size // 2)
    find(source, "config.json").unlink()
    assert names["changed_sources"](source, tmp_path / "model") == ["config.json", "release/__1_0.distcp"]
