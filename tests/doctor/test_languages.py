"""The doctor's Chinese texts are Chinese: English appears only in code, quotations and names."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

import reshard
from reshard.base.errors import Problem
from reshard.base.languages import LANGUAGES
from reshard.base.translations import translated, translations
from reshard.runs.checks import phrases, rules
from reshard.runs.checks.finding import Finding
from reshard.runs.checks.machine_checks import check_machine
from reshard.runs.doctor.entries.catalogue_entry import catalogue
from reshard.runs.doctor.log_diagnosis import diagnose_text
from tests.commandline import reshard as command
from tests.doctor import test_configs, test_environment, test_scripts

HEAD = Path(__file__).parent / "head"
_QUOTED = re.compile(r"\{\w+\}|```.*?```|`[^`]*`|“[^”]*”|\"[^\"]*\"|'[^']*'", re.DOTALL)
_ENGLISH = re.compile(
    r"(?<![\w./=-])(?:the|is|are|was|were|of|that|it|its|has|have|no|not|there|from|for|with|which|does|do|must"
    r"|cannot|missing|here|this|these|be|been|by|at least|instead|first|when|then|because)(?![\w./=-])"
)
"""Words that every English sentence has, and no name."""


def english_in(text: str) -> list[str]:
    """The English parts of a text, outside of code and quotations."""
    return _ENGLISH.findall(_QUOTED.sub("", text))


def said(finding: Finding) -> Iterator[str]:
    """All Chinese text of a finding; lines of logs and files, which places show, are quotations."""
    yield from (text.zh for text in (finding.message, finding.rule, finding.remedy, *finding.evidence))
    yield from (place.text for place in finding.places if place.target == "environment")


def assert_chinese(findings: list[Finding]) -> None:
    assert findings
    wrong = [(finding.code, text) for finding in findings for text in said(finding) if english_in(text)]
    assert wrong == []


def test_the_check_knows_english() -> None:
    assert english_in("`code` the log shows 'what is it' of it") == ["the", "of", "it"]
    assert not english_in("“the log”里有 `the model`,见 transformers 4.51.3、Hugging Face")


def test_every_text_of_the_data_is_chinese() -> None:
    wrong = [
        text["zh"]
        for path in (
            *Path(rules.__file__).parent.glob("*.yaml"),
            Path(phrases.__file__).with_name("words.yaml"),
        )
        for text in _texts(yaml.safe_load(path.read_text(encoding="utf-8")))
        if english_in(text["zh"])
    ]
    problems = (text for fields in translations().values() for text in fields.values())
    assert wrong + [text for text in problems if english_in(text)] == []


def _texts(content: object) -> Iterator[dict[str, str]]:
    if isinstance(content, dict):
        if "zh" in content:
            yield content
        else:
            for each in content.values():
                yield from _texts(each)


def test_findings_of_logs() -> None:
    excerpts = {entry.id: entry.excerpt for entry in catalogue().values() if entry.patterns}
    found = [
        each for excerpt in excerpts.values() for each in diagnose_text("log", f"peft 0.17.0\n{excerpt}")
    ]
    assert excerpts.keys() <= {finding.code for finding in found}
    assert_chinese([finding for finding in found if finding.code in catalogue()])


def test_findings_of_the_head_failures() -> None:
    logs = sorted(HEAD.rglob("*.log"))
    assert len(logs) >= 5
    for log in logs:
        assert_chinese(reshard.doctor(log, *log.parent.glob("*.py")))


@pytest.mark.parametrize("case", test_environment.BROKEN)
def test_findings_of_environments(case: str) -> None:
    changes, _ = test_environment.BROKEN[case]
    assert_chinese(check_machine(test_environment.environment(**changes)))


def test_findings_of_scripts(tmp_path: Path) -> None:
    for _, body, _ in test_scripts.TRAPS.values():
        assert_chinese(test_scripts.diagnosed(tmp_path, body))


def test_findings_of_configs(tmp_path: Path) -> None:
    for content, _, _ in test_configs.TRAPS.values():
        assert_chinese(reshard.doctor(test_configs.written(tmp_path, content)))


def _without_config(folder: Path) -> None:
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink(missing_ok=True)


def _cut_short(folder: Path) -> None:
    path = max(folder.glob("*.safetensors"), key=lambda each: each.stat().st_size)
    path.write_bytes(path.read_bytes()[:-100])


def _of_another_size(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 1, "use_cache": False}))


def _vocabulary(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": 77, "num_attention_heads": 16}))


def _no_weights(folder: Path) -> None:
    for path in folder.glob("*.safetensors"):
        path.unlink()


DAMAGES = (_without_config, _cut_short, _of_another_size, _vocabulary, _no_weights)


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__.strip("_"))
def test_findings_of_checkpoints(
    hf_model: Callable[..., Path], tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(hf_model("qwen3"), folder)
    damage(folder)
    found = reshard.doctor(folder)
    assert_chinese(found)
    assert not any("“" in finding.message.zh for finding in found)  # what is quoted was not translated
    assert not english_in(command("doctor", folder, "--lang", "zh").out.replace(str(folder), ""))


def test_what_is_not_known_is_quoted() -> None:
    lost = Problem("frob-lost", "a frob of the file was lost", tensor="a")
    assert translated(lost, "message").zh == "“a frob of the file was lost”"
    sizes = Problem(
        "config-size-differs",
        "the config and the checkpoint disagree on layers",
        values={"key": "num_layers"},
    )
    assert translated(sizes, "message").zh == "config 与检查点的 num_layers 不一致"


def test_json_keeps_its_shape(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    log.write_text(catalogue()["dtensor-mixed-cat"].excerpt)
    shown = {
        lang: command("doctor", log, "--json", *lang).json["findings"][0] for lang in ((), ("--lang", "zh"))
    }
    plain, chinese = shown.values()
    assert plain.keys() == chinese.keys()
    assert all(isinstance(line, str) for each in (plain, chinese) for line in each["evidence"])
    assert plain["title"].keys() == {"en", "zh"} and chinese["title"] == plain["title"]["zh"]
    assert plain["evidence"] and "最先" in chinese["evidence"][0] and "first failure" in plain["evidence"][0]


def test_certainties_are_told_in_both_languages() -> None:
    (found,) = diagnose_text("log", "RuntimeError: self and mat2 must have the same dtype")
    assert [phrases.aside(found).of(language) for language in LANGUAGES] == [
        "(dtypes-differ, likely)",
        "（dtypes-differ，很可能）",
    ]
