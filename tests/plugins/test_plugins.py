"""Packages that add a family or a format by an entry point: used like reshard's own, or skipped with a warning."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import reshard
from tests.commandline import apart
from tests.judges import assert_same_tensors, tensors_of

PACKAGE = Path(__file__).parent / "reshard_toy"
POINTS = {"reshard.formats": {"toy": "reshard_toy:FORMAT"}, "reshard.families": {"toy": "reshard_toy:FAMILY"}}
Points = dict[str, dict[str, str]]
Run = Callable[..., subprocess.CompletedProcess[str]]


def install(site: Path, name: str, points: Points, code: str = "") -> None:
    """A distribution as an installer leaves it: a package, and a folder of metadata next to it."""
    if code:
        (site / f"{name}.py").write_text(code)
    info = site / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    sections = (
        f"[{group}]\n" + "".join(f"{key} = {value}\n" for key, value in entries.items())
        for group, entries in points.items()
    )
    (info / "entry_points.txt").write_text("\n".join(sections))


@pytest.fixture
def site(tmp_path: Path) -> Path:
    folder = tmp_path / "site"
    folder.mkdir()
    shutil.copytree(PACKAGE, folder / PACKAGE.name)
    return folder


@pytest.fixture
def run(site: Path) -> Run:
    """`reshard` in its own process, with the packages of `site` installed."""

    def command(*words: Any) -> subprocess.CompletedProcess[str]:
        done = apart(*words, PYTHONPATH=path_with(site), COLUMNS="200")
        assert "Traceback" not in done.stderr, done.stderr
        return done

    return command


def path_with(site: Path) -> str:
    return os.pathsep.join((str(site), str(Path(reshard.__file__).parents[1])))


@pytest.mark.thorough
def test_a_format_and_a_family_of_another_package(
    hf_model: Callable[..., Path], site: Path, run: Run, tmp_path: Path
) -> None:
    install(site, "reshard_toy", POINTS)
    model = tmp_path / "model"
    shutil.copytree(hf_model("llama"), model)
    config = json.loads((model / "config.json").read_text())
    config |= {"model_type": "toy", "architectures": ["ToyForCausalLM"]}
    (model / "config.json").write_text(json.dumps(config))

    known = json.loads(run("support", "--json").stdout)
    what = "one file of bytes, and an index"
    row = {"name": "toy", "what": what, "read": True, "written": True, "judged": [], "aliases": []}
    assert row in known["formats"]
    assert "toy" in [family["name"] for family in known["families"]]
    done = run("convert", model, tmp_path / "toy", "--to", "toy")
    assert done.returncode == 0 and "a toy of 39 tensors" in done.stderr
    assert json.loads((tmp_path / "toy" / "reshard.json").read_text())["family"] == "toy"
    found = json.loads(run("inspect", tmp_path / "toy", "--json").stdout)
    assert (found["format"], found["family"], found["tensors"]) == ("toy", "toy", 39)
    (warning,) = found["problems"]
    assert warning["message"] == "no framework has confirmed the conversion of this family"
    assert run("verify", model, tmp_path / "toy").returncode == 0
    sharded = run("convert", tmp_path / "toy", tmp_path / "sharded", "--to", "megatron", "--tp", 2)
    assert sharded.returncode == 0, sharded.stderr
    assert run("verify", tmp_path / "toy", tmp_path / "sharded").returncode == 0
    assert run("convert", tmp_path / "sharded", tmp_path / "back", "--to", "huggingface").returncode == 0
    assert_same_tensors(tensors_of(tmp_path / "back"), tensors_of(model))
    refused = run("convert", model, tmp_path / "no", "--to", "toy", "--tp", 2)
    assert refused.returncode == 2 and "toy has no parallel layout" in refused.stderr
    other = run("convert", hf_model("llama"), tmp_path / "no", "--to", "toy")
    assert other.returncode == 2 and "the family llama is not available for this engine" in other.stderr

    data = bytearray((tmp_path / "toy" / "toy.bin").read_bytes())
    data[-1] ^= 1
    (tmp_path / "toy" / "toy.bin").write_bytes(data)
    assert run("verify", model, tmp_path / "toy").returncode == 1


BROKEN: dict[str, tuple[str, Points, str]] = {
    "does not import": (
        "import a_module_that_nobody_has",
        {"reshard.formats": {"bad": "broken:FORMAT"}},
        "ModuleNotFoundError: No module named 'a_module_that_nobody_has'",
    ),
    "lacks what it names": (
        "",
        {"reshard.families": {"bad": "broken:FAMILY"}},
        "AttributeError: module 'broken' has no attribute 'FAMILY'",
    ),
    "was made for another version": (
        "from reshard.formats.contract import Format\nFORMAT = Format('bad')",
        {"reshard.formats": {"bad": "broken:FORMAT"}},
        "TypeError: Format.__init__() missing",
    ),
    "is no format": (
        "FORMAT = 'bad'",
        {"reshard.formats": {"bad": "broken:FORMAT"}},
        "broken:FORMAT is a str",
    ),
    "takes the name of a format": (
        "from dataclasses import replace\nfrom reshard_toy import FORMAT as toy\nFORMAT = replace(toy, name='dcp')",
        {"reshard.formats": {"bad": "broken:FORMAT"}},
        "dcp in broken 1.0, and in reshard",
    ),
    "takes the name of a family by an alias": (
        "from dataclasses import replace\nfrom reshard_toy import FAMILY as toy\n"
        "FAMILY = replace(toy, name='bad', aliases={'llama': {}})",
        {"reshard.families": {"bad": "broken:FAMILY"}},
        "llama in broken 1.0, and in reshard",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
@pytest.mark.thorough
def test_what_cannot_be_used_is_left_out_with_a_warning(name: str, site: Path, run: Run) -> None:
    code, points, words = BROKEN[name]
    install(site, "broken", points, code or "#")
    done = run("support", "--json")
    assert done.returncode == 0 and done.stderr.count("warning:") == 1
    assert words in done.stderr and "broken 1.0" in done.stderr
    known = json.loads(done.stdout)
    assert not {"bad"} & {each["name"] for rows in (known["formats"], known["families"]) for each in rows}


def test_a_broken_package_stands_in_the_way_of_nothing(
    hf_model: Callable[..., Path], site: Path, run: Run, tmp_path: Path
) -> None:
    code, points, words = BROKEN["does not import"]
    install(site, "broken", points, code)
    done = run("convert", hf_model("llama"), tmp_path / "out", "--to", "dcp")
    assert done.returncode == 0 and words in done.stderr
    refused = run("convert", hf_model("llama"), tmp_path / "no", "--to", "bad")
    assert refused.returncode == 2 and words in refused.stderr and "--to bad" in refused.stderr


def test_the_first_of_two_packages_with_one_name_is_used(site: Path, run: Run) -> None:
    install(site, "reshard_toy", POINTS)
    again = "from reshard_toy import FORMAT"
    install(site, "zebra", {"reshard.formats": {"toy": "zebra:FORMAT"}}, again)
    done = run("support", "--json")
    assert "toy in zebra 1.0, and in reshard_toy 1.0" in done.stderr
    assert [each["name"] for each in json.loads(done.stdout)["formats"]].count("toy") == 1


def test_a_format_that_cannot_look_at_a_path_is_passed_over(
    hf_model: Callable[..., Path], site: Path, run: Run
) -> None:
    code = (
        "from dataclasses import replace\nfrom reshard_toy import FORMAT as toy\n"
        "FORMAT = replace(toy, name='bad', detect=lambda path: path.nothing)"
    )
    install(site, "broken", {"reshard.formats": {"bad": "broken:FORMAT"}}, code)
    done = run("inspect", hf_model("llama"), "--json")
    assert done.returncode == 0 and json.loads(done.stdout)["format"] == "huggingface"
    assert "the format bad failed to detect" in done.stderr and "AttributeError" in done.stderr


def test_a_package_may_be_imported_before_reshard(site: Path) -> None:
    install(site, "reshard_toy", POINTS)
    environment = {**os.environ, "PYTHONPATH": path_with(site)}
    code = "import reshard_toy, reshard.formats as f; print(f.FORMATS['toy'] is reshard_toy.FORMAT)"
    line = [sys.executable, "-W", "error", "-c", code]
    done = subprocess.run(line, env=environment, capture_output=True, text=True)
    assert done.stdout == "True\n", done.stderr
