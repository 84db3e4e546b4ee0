from __future__ import annotations

import json
import tracemalloc
from pathlib import Path

import pytest
from huggingface_hub import file_download
from tokenizers import Tokenizer, models
from transformers import AutoTokenizer, dynamic_module_utils

from reshard.base.errors import ReshardError
from reshard.base.plain_json import JSON_WEIGHT
from reshard.folders.companions import Companions, check_companions, companion_copy, find_companions
from reshard.transfer import source_files
from reshard.transfer.source_files import Sources
from tests.genuine.huggingface import make_model


def write(folder: Path, **contents: object) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in contents.items():
        text = content if isinstance(content, str) else json.dumps(content)
        (folder / name.replace("__", ".")).write_text(text)
    return folder


def test_all_that_transformers_wrote_travels_except_weights(tmp_path: Path) -> None:
    folder = make_model("qwen3", tmp_path, max_shard_size="100KB")
    companions = find_companions(Sources(), folder)
    weights = {path.name for path in folder.glob("model*")}
    assert len(weights) > 2
    assert companions.files.keys() == {path.name for path in folder.iterdir()} - weights
    assert companions.has_tokenizer
    assert companions.tokenizer.vocab_size == len(AutoTokenizer.from_pretrained(folder))
    assert companions.config == json.loads((folder / "config.json").read_text())


def test_added_tokens_count(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(make_model("qwen3", tmp_path / "model"))
    tokenizer.add_tokens(["<one>", "<two>"])
    tokenizer.save_pretrained(tmp_path / "more")
    assert find_companions(Sources(), tmp_path / "more").tokenizer.vocab_size == len(tokenizer) == 285


def test_a_unigram_vocabulary_is_a_list(tmp_path: Path) -> None:
    tokenizer = Tokenizer(models.Unigram([("<unk>", 0.0), ("a", -1.0), ("b", -2.0)], unk_id=0))
    tokenizer.add_special_tokens(["<s>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert find_companions(Sources(), tmp_path).tokenizer.vocab_size == tokenizer.get_vocab_size() == 4


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
    companions = find_companions(Sources(), tmp_path)
    assert companions.has_tokenizer is expected
    assert companions.files.keys() == set(names)


def test_a_vocabulary_of_two_files(tmp_path: Path) -> None:
    write(tmp_path, vocab__json={"a": 0, "b": 1}, merges__txt="", added_tokens__json={"<end>": 4})
    assert find_companions(Sources(), tmp_path).tokenizer.vocab_size == 5


def test_a_sentencepiece_model_does_not_tell_its_size_here(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"\x00\xff")
    companions = find_companions(Sources(), tmp_path)
    assert (companions.tokenizer.vocab_size, companions.tokenizer.named_ids) == (None, 0)
    decoder = {"0": {"content": "<unk>"}, "32000": {"content": "<pad>"}}
    write(tmp_path, tokenizer_config__json={"added_tokens_decoder": decoder})
    companions = find_companions(Sources(), tmp_path)
    assert (companions.tokenizer.vocab_size, companions.tokenizer.named_ids) == (None, 32001)


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
    assert find_companions(Sources(), tmp_path).files.keys() == set(names)


CODE = {
    "modeling_x__py": "import os\nfrom .helpers import f\nfrom . import unseen\n",
    "helpers__py": "import .deeper\nfrom .modeling_x import X\n",
    "deeper__py": "def broken(:",
    "setup__py": "raise SystemExit",
}


@pytest.mark.parametrize("where", ["config", "tokenizer_config", "preprocessor_config"])
@pytest.mark.parametrize("classes", ["modeling_x.X", [None, "modeling_x.X"]])
def test_python_files_travel_where_auto_map_names_them(where: str, classes: object, tmp_path: Path) -> None:
    """And the files that they import, as transformers loads them; nothing else, and with a note."""
    folder = write(tmp_path, config__json={}, **CODE)
    assert not find_companions(Sources(), folder).code
    write(
        folder, **{f"{where}__json": {"auto_map": {"AutoModel": classes, "AutoConfig": "owner/x--setup.C"}}}
    )
    found = find_companions(Sources(), folder)
    imported = dynamic_module_utils.get_relative_import_files(folder / "modeling_x.py")
    wanted = {"modeling_x.py", *(Path(path).name for path in imported)}
    assert set(found.code) == {name for name in found.files if name.endswith(".py")} == wanted
    assert found.notes == [
        "Python code is copied too, because auto_map names it: modeling_x.py, helpers.py, deeper.py"
    ]


@pytest.mark.parametrize(
    "auto_map", [3, ["modeling_x.X"], {"AutoModel": 3}, {"AutoModel": "../setup.X"}, {"A": [[]]}]
)
def test_an_auto_map_that_names_nothing(auto_map: object, tmp_path: Path) -> None:
    assert not find_companions(Sources(), write(tmp_path, config__json={"auto_map": auto_map}, **CODE)).code


def test_the_first_folder_counts(tmp_path: Path) -> None:
    inner = write(tmp_path / "iter_0000002", config__json={"from": "inner"})
    outer = write(tmp_path, config__json={"from": "outer"}, tokenizer__json="{}")
    companions = find_companions(Sources(), inner, outer, tmp_path / "absent")
    assert companions.config == {"from": "inner"}
    assert companions.files["tokenizer.json"] == outer / "tokenizer.json"
    assert find_companions(Sources(), tmp_path / "absent").config is None


def test_a_broken_config_is_named(tmp_path: Path) -> None:
    write(tmp_path, config__json="{")
    with pytest.raises(ReshardError, match=r"config\.json cannot be read") as caught:
        find_companions(Sources(), tmp_path)
    assert caught.value.problems[0].file == str(tmp_path / "config.json")
    write(tmp_path, config__json="[]")
    with pytest.raises(ReshardError, match="expected: a JSON object"):
        find_companions(Sources(), tmp_path)


def content_of(file: Path) -> bytes:
    """The content to write in place of a file: other bytes, or its own."""
    written = companion_copy(file.name, file, Sources())
    return b"".join(content for _, content in written.literals()) if not written.blocks else file.read_bytes()


def test_the_config_of_a_tokenizer_is_spelled_for_both_generations_of_transformers(tmp_path: Path) -> None:
    of_5 = {
        "tokenizer_class": "TokenizersBackend",
        "extra_special_tokens": ["<|im_start|>"],
        "pad_token": "x",
    }
    file = tmp_path / "tokenizer_config.json"
    file.write_text(json.dumps(of_5))
    assert json.loads(content_of(file)) == {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "additional_special_tokens": ["<|im_start|>"],
        "pad_token": "x",
    }


def test_the_config_of_another_tokenizer_stays_as_it_is(tmp_path: Path) -> None:
    file = tmp_path / "tokenizer_config.json"
    file.write_text('{"tokenizer_class":"Qwen2Tokenizer","extra_special_tokens":{"image_token":"<i>"}}')
    assert content_of(file) == file.read_bytes()


# --------------------------------------------------------------------------------------------- links


def test_links_out_of_a_folder_are_not_followed(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("key")
    folder = write(tmp_path / "model", config__json={"model_type": "x"}, inner__json="{}")
    names = ["x.model", "tokenizer.json", "additional_chat_templates/tool.jinja", "modeling_x.py"]
    for name in names:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).symlink_to(secret)
    (folder / "vocab.json").symlink_to("inner.json")
    (folder / "merges.txt").symlink_to(folder / "merges.txt")
    write(folder, config__json={"auto_map": {"AutoModel": "modeling_x.X"}})
    found = find_companions(Sources(), folder)
    assert found.files.keys() == {"config.json", "vocab.json"}
    assert {path.relative_to(folder).as_posix() for path in found.left_out} == set(names)
    assert all(f"outside its folder, {secret}" in note for note in found.notes) and len(found.notes) == len(
        names
    )
    linked = tmp_path / "link"
    linked.symlink_to(folder)
    assert find_companions(Sources(), linked).files.keys() == found.files.keys()


def test_the_cache_of_the_hub_is_one_folder(tmp_path: Path) -> None:
    """Its snapshots are links to blobs."""
    repository = tmp_path / "models--owner--x"
    snapshot = repository / "snapshots" / "0123"
    for number, name in enumerate(["config.json", "tokenizer.json", "additional_chat_templates/tool.jinja"]):
        blob = repository / "blobs" / f"{number}"
        blob.parent.mkdir(parents=True, exist_ok=True)
        blob.write_text("{}")
        (snapshot / name).parent.mkdir(parents=True, exist_ok=True)
        file_download._create_symlink(str(blob), str(snapshot / name), new_blob=True)
        assert (snapshot / name).is_symlink()
    assert (
        len(find_companions(Sources(), snapshot).files) == 3
        and not find_companions(Sources(), snapshot).left_out
    )
    (snapshot / "x.model").symlink_to(tmp_path / "secret")
    (tmp_path / "secret").write_text("key")
    assert find_companions(Sources(), snapshot).left_out == (snapshot / "x.model",)


def test_a_folder_of_links_to_a_model(tmp_path: Path) -> None:
    """With its own config, which is why people make such folders: the files next to the weights belong to them."""
    model = make_model("qwen3", tmp_path / "model")
    folder = write(tmp_path / "mine", config__json={})
    for path in model.iterdir():
        if path.name != "config.json":
            (folder / path.name).symlink_to(path)
    assert find_companions(Sources(), folder).files.keys() == find_companions(Sources(), model).files.keys()
    (model / "secret").write_text("key")
    (folder / "x.model").symlink_to(model / "secret")
    (folder / "other.safetensors").symlink_to("other.safetensors")
    assert find_companions(Sources(), folder).left_out == (folder / "x.model",)
    (folder / "x.model").unlink()
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").symlink_to(model / "tokenizer.json")  # which is not weights
    assert find_companions(Sources(), folder).files.keys() == {"config.json"}


# -------------------------------------------------------------------------------------------- damage


@pytest.mark.parametrize(
    "content", [b"", b"\0" * 99, b"[1]", b'{"a": ', b"[" * 99999, b"\xff{}", b'{"a": ' + b"9" * 5000]
)
def test_json_that_could_not_be_loaded_is_named(content: bytes, tmp_path: Path) -> None:
    names = ["tokenizer.json", "special_tokens_map.json", "generation_config.json", "processor_config.json"]
    for name in names:
        (tmp_path / name).write_bytes(content)
    write(
        tmp_path,
        tokenizer__model="version https://git-lfs.github.com/spec/v1\n",
        chat_template__jinja="{{ }}",
    )
    files = {path.name: path for path in tmp_path.iterdir()}
    with pytest.raises(ReshardError) as caught:
        check_companions(Companions(files))
    damaged = [problem.file for problem in caught.value.problems]
    assert sorted(map(str, damaged)) == sorted(str(tmp_path / name) for name in [*names, "tokenizer.model"])


@pytest.mark.parametrize(
    "content", [b'{"a": 1' + b" " * 99, b'"a": 1}', b'{"a": "\0\0"}', b'{"a": "\xff"}', b"\xe2{}"]
)
def test_large_json_is_looked_through(
    content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """JSON that is too large to parse is read in windows: it is text from brace to brace, or damaged."""
    monkeypatch.setattr(Sources, "fits", lambda self, nbytes: nbytes < 10 * JSON_WEIGHT)
    monkeypatch.setattr(source_files, "WINDOW_BYTES", 3)
    write(tmp_path, tokenizer__json=' {"a": "\u20ac\u20ac"}\n ', vocab__json="{}")
    found = check_companions(find_companions(Sources(), tmp_path))
    assert found.unparsed == ("tokenizer.json",) and "tokenizer.json" in found.notes[0]
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(ReshardError, match=r"tokenizer\.json cannot be read"):
        check_companions(find_companions(Sources(), tmp_path))


def test_a_large_companion_is_copied_and_not_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    huge = tmp_path / "tokenizer.model"
    with huge.open("wb") as file:
        file.truncate(3 << 30)
    size = 9 << 20
    (tmp_path / "tokenizer.json").write_text(json.dumps({"x": "x" * size}))
    monkeypatch.setattr(Sources, "fits", lambda self, nbytes: nbytes < size)
    tracemalloc.start()
    try:
        found = check_companions(find_companions(Sources(), tmp_path))
        planned = [companion_copy(name, path, Sources()) for name, path in found.files.items()]
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert [file.size for file in planned] == [size + 9, 3 << 30]
    assert peak < 8 << 20
