from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models
from transformers import AutoTokenizer

from reshard.errors import ReshardError
from reshard.formats.companions import content_of, find_companions
from tests.genuine.huggingface import make_model


def write(folder: Path, **contents: object) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in contents.items():
        text = content if isinstance(content, str) else json.dumps(content)
        (folder / name.replace("__", ".")).write_text(text)
    return folder


def test_all_that_transformers_wrote_travels_except_weights(tmp_path: Path) -> None:
    folder = make_model("qwen3", tmp_path, max_shard_size="100KB")
    companions = find_companions(folder)
    weights = {path.name for path in folder.glob("model*")}
    assert len(weights) > 2
    assert companions.files.keys() == {path.name for path in folder.iterdir()} - weights
    assert companions.has_tokenizer
    assert companions.vocab_size == len(AutoTokenizer.from_pretrained(folder))
    assert companions.config == json.loads((folder / "config.json").read_text())


def test_added_tokens_count(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(make_model("qwen3", tmp_path / "model"))
    tokenizer.add_tokens(["<one>", "<two>"])
    tokenizer.save_pretrained(tmp_path / "more")
    assert find_companions(tmp_path / "more").vocab_size == len(tokenizer) == 285


def test_a_unigram_vocabulary_is_a_list(tmp_path: Path) -> None:
    tokenizer = Tokenizer(models.Unigram([("<unk>", 0.0), ("a", -1.0), ("b", -2.0)], unk_id=0))
    tokenizer.add_special_tokens(["<s>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert find_companions(tmp_path).vocab_size == tokenizer.get_vocab_size() == 4


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["tokenizer.json"], True),
        (["tokenizer.model", "tokenizer_config.json"], True),
        (["vocab.json", "merges.txt"], True),
        (["qwen.tiktoken"], True),
        (["tekken.json"], True),
        (["vocab.json"], False),
        (["tokenizer_config.json", "special_tokens_map.json", "config.json"], False),
        ([], False),
    ],
)
def test_what_makes_a_tokenizer(names: list[str], expected: bool, tmp_path: Path) -> None:
    for name in names:
        (tmp_path / name).write_text("{}")
    companions = find_companions(tmp_path)
    assert companions.has_tokenizer is expected
    assert companions.files.keys() == set(names)


def test_a_vocabulary_of_two_files(tmp_path: Path) -> None:
    write(tmp_path, vocab__json={"a": 0, "b": 1}, merges__txt="", added_tokens__json={"<end>": 4})
    assert find_companions(tmp_path).vocab_size == 5


def test_a_sentencepiece_model_does_not_tell_its_size_here(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"\x00\xff")
    assert find_companions(tmp_path).vocab_size is None


def test_templates_processors_and_nothing_that_describes_the_folder(tmp_path: Path) -> None:
    names = ["chat_template.jinja", "additional_chat_templates/tool.jinja", "video_preprocessor_config.json"]
    others = [
        "README.md",
        "LICENSE",
        "model.safetensors.index.json",
        "training_args.bin",
        "trainer_state.json",
    ]
    for name in names + others:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("{}")
    assert find_companions(tmp_path).files.keys() == set(names)


def test_python_files_travel_if_the_config_or_the_tokenizer_names_code(tmp_path: Path) -> None:
    for where in ("config", "tokenizer_config", "neither"):
        folder = write(tmp_path / where, modeling_x__py="", helpers__py="", config__json={})
        if where != "neither":
            write(folder, **{f"{where}__json": {"auto_map": {"AutoModel": "modeling_x.X"}}})
        python = {name for name in find_companions(folder).files if name.endswith(".py")}
        assert python == (set() if where == "neither" else {"modeling_x.py", "helpers.py"})


def test_the_first_folder_counts(tmp_path: Path) -> None:
    inner = write(tmp_path / "iter_0000002", config__json={"from": "inner"})
    outer = write(tmp_path, config__json={"from": "outer"}, tokenizer__json="{}")
    companions = find_companions(inner, outer, tmp_path / "absent")
    assert companions.config == {"from": "inner"}
    assert companions.files["tokenizer.json"] == outer / "tokenizer.json"
    assert find_companions(tmp_path / "absent").config is None


def test_a_broken_config_is_named(tmp_path: Path) -> None:
    write(tmp_path, config__json="{")
    with pytest.raises(ReshardError, match=r"config\.json cannot be read") as caught:
        find_companions(tmp_path)
    assert caught.value.problems[0].file == str(tmp_path / "config.json")
    write(tmp_path, config__json="[]")
    with pytest.raises(ReshardError, match="expected: a JSON object"):
        find_companions(tmp_path)


def test_the_config_of_a_tokenizer_is_spelled_for_both_generations_of_transformers(tmp_path: Path) -> None:
    of_5 = {
        "tokenizer_class": "TokenizersBackend",
        "extra_special_tokens": ["<|im_start|>"],
        "pad_token": "x",
    }
    file = tmp_path / "tokenizer_config.json"
    file.write_text(json.dumps(of_5))
    assert json.loads(content_of(file.name, file)) == {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "additional_special_tokens": ["<|im_start|>"],
        "pad_token": "x",
    }


def test_the_config_of_another_tokenizer_stays_as_it_is(tmp_path: Path) -> None:
    file = tmp_path / "tokenizer_config.json"
    file.write_text('{"tokenizer_class":"Qwen2Tokenizer","extra_special_tokens":{"image_token":"<i>"}}')
    assert content_of(file.name, file) == file.read_bytes()
