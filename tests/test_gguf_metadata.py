"""The metadata of GGUF files are those that llama.cpp's own converter writes.

`tests.genuine.llama_cpp remember` made the folders of tests/data/gguf: files of tiny models, and what the converter
made of them. `test_gguf_peer.py` does the same again, and lets llama.cpp read tokens.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, models
from transformers import AutoConfig

from reshard.base.errors import ReshardError
from reshard.formats.gguf.config_of_metadata import config_of
from reshard.formats.gguf.general_metadata import card_of, named, size_label, titled
from reshard.formats.gguf.hyperparameters import ARCHITECTURES, hyperparameters, model_type
from reshard.formats.gguf.metadata import Metadata, ModelFacts, metadata
from reshard.formats.gguf.pretokenizers import named_by_splits
from reshard.formats.gguf.sentencepiece import CONTROL, NORMAL, USER_DEFINED
from reshard.formats.gguf.tokenizer_metadata import merged_pieces
from reshard.formats.gguf.typed_metadata import TypedMetadata
from reshard.formats.gguf.value_types import Value, ValueType
from reshard.formats.gguf.write import rotary_divisors
from tests.genuine.huggingface import LLAMA3_ROPE

DATA = Path(__file__).parent / "data" / "gguf"
FAMILIES = sorted(each.name for each in DATA.iterdir())
OF_TENSORS = {"general.file_type", "general.quantization_version", "general.alignment"}
ROWS = 512


def files_of(folder: Path) -> dict[str, bytes]:
    """The files beside the weights, as `metadata` takes them."""
    return {
        each.name: each.read_bytes()
        for each in folder.iterdir()
        if each.suffix != ".safetensors" and each.name not in ("config.json", "metadata.json")
    }


def read_config(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return config


def of(folder: Path, facts: ModelFacts, **changed: Any) -> Metadata:
    config = {**read_config(folder), **changed}
    return metadata(config, files_of(folder), ARCHITECTURES[model_type(config)], facts)


def facts_of(family: str, parameters: tuple[int, int, int, int] = (1, 1, 0, 0)) -> ModelFacts:
    return ModelFacts(f"Tiny-{family}-1M-Instruct", parameters, ROWS)


def plain(values: Mapping[str, Value]) -> dict[str, Any]:
    """Types and values as the scripts of the peer write them."""

    def one(kind: ValueType, value: Any) -> Any:
        if kind is ValueType.FLOAT32:
            return float(np.float32(value))
        return value.decode() if isinstance(value, bytes) else value

    return {
        key: [["ARRAY", value.item.name], [one(value.item, each) for each in value.value]]
        if value.item is not None
        else [[value.type.name], one(value.type, value.value)]
        for key, value in values.items()
    }


@pytest.mark.parametrize("family", FAMILIES)
def test_every_key_is_that_of_llama_cpps_converter(family: str) -> None:
    theirs = json.loads((DATA / family / "metadata.json").read_text())
    found = of(DATA / family, facts_of(family, tuple(theirs["parameters"])))
    ours = plain(found.values)
    expected = {key: value for key, value in theirs["metadata"].items() if key not in OF_TENSORS}
    assert ours.keys() == expected.keys()
    for key, value in expected.items():
        assert ours[key] == value, key
    assert not found.warnings


SIZES = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
}
OLD = {
    "llama": {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}},
    "qwen2": {"rope_theta": 1e6, "rope_scaling": {"type": "yarn", "factor": 4.0, "attention_factor": 1.5}},
    "qwen3": {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e6, "beta_fast": 16}},
    "mixtral": {"rope_theta": 5e5, "rope_scaling": None},
    "gpt_oss": {"rope_theta": 5e5},
    "gemma3_text": {"rope_theta": 5e5, "rope_local_base_freq": 2e4},
    "deepseek_v3": {
        "num_key_value_heads": 4,
        "rope_theta": 2e4,
        "rope_scaling": {
            "type": "yarn",
            "factor": 40,
            "original_max_position_embeddings": 4096,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 1.0,
            "mscale_all_dim": 0.7,
        },
    },
}


@pytest.mark.parametrize("spelled", ["assumed", "old"])
@pytest.mark.parametrize("family", [name for name in ARCHITECTURES if name != "gemma3"])
def test_what_a_config_leaves_out_is_what_transformers_assumes(family: str, spelled: str) -> None:
    """llama.cpp's converter reads the config that transformers completes."""
    stated = {"model_type": family, **SIZES, **(OLD.get(family, {}) if spelled == "old" else {})}
    whole = AutoConfig.for_model(**stated).to_dict()
    found, expected = TypedMetadata(), TypedMetadata()
    hyperparameters(stated, ARCHITECTURES[family], found)
    hyperparameters(whole, ARCHITECTURES[family], expected)
    assert plain(found.values) == plain(expected.values)
    assert len(found.values) >= 8


def test_the_language_model_of_gemma_3_with_its_tower() -> None:
    text = read_config(DATA / "gemma3")
    whole = {"model_type": "gemma3", "text_config": text, "vision_config": {}}
    found = metadata(whole, files_of(DATA / "gemma3"), "gemma3", facts_of("gemma3"))
    assert plain(found.values) == plain(of(DATA / "gemma3", facts_of("gemma3")).values)


def test_a_router_of_deepseek_is_sigmoid_even_if_the_config_does_not_say_so() -> None:
    """transformers does not store what it always computes, and llama.cpp would compute a softmax."""
    config = read_config(DATA / "deepseek_v3")
    del config["scoring_func"]
    found = metadata(config, files_of(DATA / "deepseek_v3"), "deepseek2", facts_of("deepseek_v3"))
    assert found.values["deepseek2.expert_gating_func"].value == 2


@pytest.mark.parametrize("family", ["gemma", "gemma2"])
def test_a_rope_that_llama_cpp_does_not_expect_is_described(family: str) -> None:
    """Its converter leaves it out for these, and llama.cpp would compute the one of published models."""
    config = {**read_config(DATA / family), "rope_theta": 50000.0}
    found = metadata(config, files_of(DATA / family), family, facts_of(family))
    assert found.values[f"{family}.rope.freq_base"].value == 50000.0


@pytest.mark.parametrize(
    "name, parameters, expected",
    [
        ("meta-llama/Llama-3.1-8B-Instruct", 8 * 10**9, ("Llama-3.1", "Instruct", None, "8B")),
        ("Qwen3-30B-A3B", 30 * 10**9, ("Qwen3", None, None, "30B-A3B")),
        ("Mistral-7B-Instruct-v0.3", 7 * 10**9, ("Mistral", "Instruct", "v0.3", "7B")),
        ("checkpoint-500", 10**9, ("checkpoint", None, "500", None)),
        ("output", 10**9, (None, None, None, None)),
    ],
)
def test_a_name_is_taken_apart(name: str, parameters: int, expected: tuple[str | None, ...]) -> None:
    parts = named(name, parameters)
    assert (parts.basename, parts.finetune, parts.version, parts.size_label) == expected


def test_sizes_and_titles() -> None:
    assert titled("my-model-v2-8B") == "My Model v2 8B"
    assert size_label((8030261248, 8030261248, 0, 0)) == "8.0B"
    assert size_label((30 * 10**9, 2 * 10**9, 22 * 10**7, 128)) == "128x2.2B"


@pytest.mark.parametrize(
    "readme", [b"", b"# no matter", b"---\n- a\n---\n", b"---\na: [\n---\n", b"---\nb: \xff\n"]
)
def test_a_model_card_that_cannot_be_read_says_nothing(readme: bytes) -> None:
    assert not card_of(readme).get("a")


def test_without_a_tokenizer_llama_cpp_gets_what_it_needs_to_load_the_model() -> None:
    found = metadata(read_config(DATA / "qwen2"), {}, "qwen2", facts_of("qwen2"))
    named = {key: value.value for key, value in found.values.items() if key.startswith("tokenizer.")}
    assert named == {"tokenizer.ggml.model": "none"}
    assert found.values["qwen2.vocab_size"].value == ROWS
    assert [each.code for each in found.warnings] == ["gguf-without-tokenizer"]


def changed(family: str, **update: Any) -> dict[str, bytes]:
    """The files of a family with a changed tokenizer.json."""
    files = files_of(DATA / family)
    tokenizer = {**json.loads(files["tokenizer.json"]), **update}
    return {**files, "tokenizer.json": json.dumps(tokenizer).encode()}


def test_added_tokens_change_nothing_but_the_tokens() -> None:
    files = files_of(DATA / "qwen3")
    tokenizer = json.loads(files["tokenizer.json"])
    last = max(each["id"] for each in tokenizer["added_tokens"])
    new = {"id": last + 1, "content": "<|new|>", "special": False, "normalized": False}
    files = changed("qwen3", added_tokens=[*tokenizer["added_tokens"], new])
    found = metadata(read_config(DATA / "qwen3"), files, "qwen3", facts_of("qwen3"))
    assert found.values["tokenizer.ggml.pre"].value == "qwen2" and not found.warnings
    assert found.values["tokenizer.ggml.tokens"].value[last + 1] == "<|new|>"
    assert found.values["tokenizer.ggml.token_type"].value[last + 1 : last + 3] == [3, 5]


def test_a_pre_tokenizer_that_llama_cpp_does_not_have_is_that_of_the_family_with_a_warning() -> None:
    split = {"type": "Split", "pattern": {"Regex": "[a-z]+"}, "behavior": "Isolated", "invert": False}
    files = changed("qwen3", pre_tokenizer=split)
    found = metadata(read_config(DATA / "qwen3"), files, "qwen3", facts_of("qwen3"))
    assert found.values["tokenizer.ggml.pre"].value == "qwen2"
    assert [each.code for each in found.warnings] == ["gguf-pre-tokenizer-unknown"]


def test_a_tokenizer_of_another_family_keeps_its_pre_tokenizer() -> None:
    """SmolLM is a Llama whose tokenizer splits digits: the family alone would name the wrong one."""
    digits = {"type": "Digits", "individual_digits": True}
    level = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}
    steps = {"type": "Sequence", "pretokenizers": [digits, level]}
    files = changed("llama", pre_tokenizer=steps)
    found = metadata(read_config(DATA / "llama"), files, "llama", facts_of("llama"))
    assert found.values["tokenizer.ggml.pre"].value == "smollm" and not found.warnings
    assert named_by_splits({"pre_tokenizer": level, "model": {}}) == "gpt-2"


def test_the_matches_of_an_expression_may_be_what_is_left_of_a_text() -> None:
    """As in the tokenizers that Xenova converted from tiktoken."""
    tokenizer = json.loads((DATA / "gpt_oss" / "tokenizer.json").read_text())
    for step in tokenizer["pre_tokenizer"]["pretokenizers"][:-1]:
        step |= {"behavior": "Removed", "invert": True}
    assert named_by_splits(tokenizer) == "gpt-4o"
    tokenizer["pre_tokenizer"]["pretokenizers"][0]["invert"] = False
    assert named_by_splits(tokenizer) is None


def test_llama_3_without_ignored_merges_has_another_pre_tokenizer() -> None:
    tokenizer = json.loads((DATA / "llama" / "tokenizer.json").read_text())
    assert named_by_splits(tokenizer) == "llama-bpe"
    tokenizer["model"]["ignore_merges"] = False
    assert named_by_splits(tokenizer) == "smaug-bpe"


def test_tokens_without_a_row_are_left_out_with_a_warning() -> None:
    new = {"id": ROWS, "content": "[PAD]", "special": True, "normalized": False}
    tokenizer = json.loads((DATA / "llama" / "tokenizer.json").read_text())
    files = changed("llama", added_tokens=[*tokenizer["added_tokens"], new])
    found = metadata(read_config(DATA / "llama"), files, "llama", facts_of("llama"))
    assert len(found.values["tokenizer.ggml.tokens"].value) == ROWS
    (warning,) = found.warnings
    assert warning.code == "gguf-tokens-without-rows" and warning.found == "[PAD]"


def test_vocabulary_and_merges_in_files_of_their_own() -> None:
    """The files of slow tokenizers, which older folders have."""
    files = files_of(DATA / "qwen2")
    model = json.loads(files.pop("tokenizer.json"))["model"]
    merges = "#version: 0.2\n" + "\n".join(" ".join(each) for each in model["merges"]) + "\n"
    files |= {"vocab.json": json.dumps(model["vocab"]).encode(), "merges.txt": merges.encode()}
    found = metadata(read_config(DATA / "qwen2"), files, "qwen2", facts_of("qwen2")).values
    expected = of(DATA / "qwen2", facts_of("qwen2")).values
    for key in ("model", "pre", "tokens", "token_type", "merges"):
        assert found[f"tokenizer.ggml.{key}"] == expected[f"tokenizer.ggml.{key}"], key


@pytest.mark.parametrize(
    "family, name, content",
    [
        ("mistral", "tokenizer.model", b"\x0a\xff\xff\xff\xff\x0f"),
        ("mistral", "tokenizer.model", b"\x0a\x03\x0d\x00\x00"),
        ("mistral", "tokenizer.model", b""),
        ("qwen2", "tokenizer.json", b"{"),
        ("qwen2", "tokenizer.json", b'{"model": {"vocab": ["a"]}}'),
    ],
)
def test_a_damaged_tokenizer_is_named(family: str, name: str, content: bytes) -> None:
    files = {**files_of(DATA / family), name: content}
    config = read_config(DATA / family)
    with pytest.raises(ReshardError, match=name) as raised:
        metadata(config, files, ARCHITECTURES[config["model_type"]], facts_of(family))
    assert [each.code for each in raised.value.problems] == ["gguf-tokenizer-unreadable"]


@pytest.mark.parametrize(
    ("trained", "code", "found"),
    [
        (models.Unigram([("a", 0.0)]), "gguf-tokenizer-not-bpe", "a model of type Unigram"),
        (models.WordPiece({"a": 0}, unk_token="a"), "gguf-tokenizer-not-bpe", "a model of type WordPiece"),
        (models.WordLevel({"a": 0}, unk_token="a"), "gguf-tokenizer-not-bpe", "a model of type WordLevel"),
        (None, "gguf-tokenizer-unknown", "tekken.json"),
    ],
)
def test_a_tokenizer_that_only_other_engines_read_is_named(trained: Any, code: str, found: str) -> None:
    files = {"tokenizer.json": Tokenizer(trained).to_str().encode()} if trained else {"tekken.json": b"{}"}
    with pytest.raises(ReshardError, match=r"--no-tokenizer") as raised:
        metadata(read_config(DATA / "mistral"), files, "llama", facts_of("mistral"))
    (problem,) = raised.value.problems
    assert (problem.code, problem.found) == (code, found)


@pytest.mark.parametrize(
    "family, key, value",
    [
        ("mistral", "sliding_window", 128),
        ("qwen3_moe", "norm_topk_prob", False),
        ("qwen2", "use_sliding_window", True),
        ("gemma3", "query_pre_attn_scalar", 99),
        ("gemma3", "sliding_window_pattern", 3),
        ("gpt_oss", "swiglu_limit", 1.5),
        ("gemma2", "query_pre_attn_scalar", 99),
        ("gemma2", "layer_types", ["full_attention"] * 2),
        ("llama", "hidden_act", "gelu"),
        ("gemma2", "final_logit_softcapping", None),
        ("gemma3", "attn_logit_softcapping", 50.0),
        ("llama", "rope_scaling", {"rope_type": "dynamic", "factor": 2.0}),
        ("qwen3", "rope_scaling", LLAMA3_ROPE),
    ],
)
def test_what_llama_cpp_computes_differently_is_a_warning(family: str, key: str, value: Any) -> None:
    changes = {key: value, "layer_types": None} if "pattern" in key else {key: value}
    if key == "use_sliding_window":
        changes["sliding_window"] = 128
    (warning,) = of(DATA / family, facts_of(family), **changes).warnings
    assert warning.code == "gguf-computed-differently" and warning.severity == "warning"


def read_back(family: str, config: Mapping[str, Any], divisors: Any = None) -> dict[str, Any] | None:
    """The config that the metadata of a config imply."""
    values = metadata(
        config, files_of(DATA / family), ARCHITECTURES[model_type(config)], facts_of(family)
    ).values
    last = f"blk.{config['num_hidden_layers'] - 1}.attn_norm.weight"
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (ROWS, 64), last: (64,)}
    shapes |= {} if config["tie_word_embeddings"] else {"output.weight": (ROWS, 64)}
    return config_of(values, shapes, divisors)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_config_that_is_read_back_describes_the_same_model(family: str) -> None:
    config = read_config(DATA / family)
    config |= {"rope_scaling": None} if family == "llama" else {}
    found = read_back(family, config)
    assert found is not None and found["model_type"] == {"mistral": "llama"}.get(family, config["model_type"])
    ours, expected = TypedMetadata(), TypedMetadata()
    arch = ARCHITECTURES[model_type(config)]
    hyperparameters(found, arch, ours)
    hyperparameters(config, arch, expected)
    assert plain(ours.values) == plain(expected.values)
    whole = AutoConfig.for_model(**{key: value for key, value in config.items() if key != "rope_parameters"})
    told = AutoConfig.for_model(**found)
    free = (
        "sliding_window",
        "max_window_layers",
        "dtype",
        "transformers_version",
        "architectures",
        "model_type",
    )
    computed = {
        "hidden_act",
        "hidden_activation",
        "layer_types",
        "query_pre_attn_scalar",
        "tie_word_embeddings",
    }
    for key in (computed & whole.to_dict().keys()) - set(free):
        if (family, key) != ("gemma", "hidden_act"):
            assert getattr(told, key) == getattr(whole, key), key


def test_the_scaling_of_llama_3_is_read_back_from_its_divisors() -> None:
    config = read_config(DATA / "llama")
    scaling = {**config["rope_scaling"], "factor": 32.0, "rope_theta": 500000.0}
    scaling |= {"original_max_position_embeddings": 8192}
    config |= {"rope_scaling": scaling, "head_dim": 64}
    divisors = rotary_divisors(config)
    found = read_back("llama", config, divisors)
    assert found is not None and found["rope_parameters"] == scaling
    assert read_back("llama", config, [1.0, *divisors[1:-1], 7.0]) is None


WRONG: tuple[Any, ...] = (None, 7, -1, 1e300, "x", True, [], [None], {}, {"type": "Sequence"})


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The places of values in JSON, of long lists and objects only the first."""
    yield path
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in islice(inner, 12):
        yield from places(each, (*path, key))


def replaced(value: Any, path: tuple[Any, ...], other: Any) -> Any:
    if not path:
        return other
    key, *rest = path
    changed = dict(value) if isinstance(value, dict) else list(value)
    changed[key] = replaced(changed[key], tuple(rest), other)
    return changed


@pytest.mark.parametrize(
    "family, name",
    [
        ("llama", "tokenizer.json"),
        ("deepseek_v3", "tokenizer.json"),
        ("gemma3", "tokenizer_config.json"),
        ("llama", "tokenizer_config.json"),
        ("qwen2", "generation_config.json"),
        ("gpt_oss", "config.json"),
        ("gemma3", "config.json"),
        ("deepseek_v3", "config.json"),
    ],
)
@pytest.mark.core("gpt_oss-config.json", "qwen2-generation_config.json")
def test_values_of_other_kinds_are_refused_or_left_out(family: str, name: str) -> None:
    """Whatever a file says, what comes of it can be written, or is refused as a problem of that file."""
    files, config = files_of(DATA / family), read_config(DATA / family)
    content = config if name == "config.json" else json.loads(files[name])
    refused = 0
    for path in places(content):
        for wrong in WRONG:
            changed = replaced(content, path, wrong)
            given = (config, {**files, name: json.dumps(changed).encode()})
            if name == "config.json":
                given = (changed if isinstance(changed, dict) else {}, files)
            try:
                found = metadata(*given, ARCHITECTURES[config["model_type"]], facts_of(family))
            except ReshardError as error:
                refused += 1
                assert all(each.file or each.code == "gguf-tokenizer-unknown" for each in error.problems), (
                    error
                )
                continue
            plain(found.values)
    assert refused > 0


def test_listed_special_tokens_are_control_tokens() -> None:
    """As in `all_special_ids` of transformers, which llama.cpp's converter asks, whatever `added_tokens` says."""
    added = [{"id": at, "content": text, "special": False} for at, text in ((1, "<one>"), (2, "<two>"))]
    model = {"type": "BPE", "byte_fallback": True, "vocab": {"a": 0}, "merges": []}
    settings = {"additional_special_tokens": ["<one>"], "chat_template": "<two>"}
    files = {
        "tokenizer.json": json.dumps({"model": model, "added_tokens": added}).encode(),
        "tokenizer_config.json": json.dumps(settings).encode(),
    }
    assert merged_pieces(files, 3).types == [NORMAL, CONTROL, USER_DEFINED]
