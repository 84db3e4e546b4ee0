"""llama.cpp judges the metadata of GGUF files: its converter writes the same, and its library reads the same tokens.

The converter knows how published tokenizers split text by a hash; for the tokenizers that are trained here, that lookup
alone is replaced (`tests/genuine/llama_cpp.py`).
"""

from __future__ import annotations

import json
import shutil
import struct
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import reshard
from reshard.formats.gguf import container, write
from reshard.formats.gguf.general_metadata import named, size_label, titled
from reshard.formats.gguf.hyperparameters import ARCHITECTURES, model_type
from reshard.formats.gguf.metadata import ModelFacts, metadata
from reshard.formats.gguf.value_types import Value, ValueType
from reshard.transfer.source_files import Sources
from tests.environments import python
from tests.genuine.gguf_models import FAMILIES, POSITIONS, ROWS, TOKENS
from tests.genuine.huggingface import CORPUS, LLAMA3_ROPE
from tests.genuine.llama_cpp import run, source
from tests.test_gguf import NOT_LOADED, make_not_loaded
from tests.test_gguf_metadata import OF_TENSORS, files_of, plain, read_config

pytestmark = pytest.mark.slow
NDArray = np.ndarray[Any, Any]


class Peer(NamedTuple):
    """Folders of tiny models, and what llama.cpp's converter makes of them in one type, by family."""

    folder: Path
    outtype: str

    def model(self, family: str) -> Path:
        return self.folder / f"Tiny-{family}-1M-Instruct"

    def file(self, family: str) -> Path:
        return self.folder / f"{family}-{self.outtype}.gguf"

    def metadata(self, family: str) -> Any:
        """The metadata of a file as llama.cpp reads them, and its numbers of parameters."""
        return json.loads((self.folder / f"{family}.json").read_text())

    def logits(self, family: str) -> Path:
        return self.folder / f"{family}.npy"


@pytest.fixture(scope="module")
def peer(tmp_path_factory: pytest.TempPathFactory) -> Peer:
    """All models and files in float32, with their metadata and logits; one process makes everything."""
    made = Peer(tmp_path_factory.mktemp("gguf"), "f32")
    ids = np.random.default_rng(0).integers(0, TOKENS, POSITIONS)
    np.save(made.folder / "ids.npy", ids)
    jobs: list[Sequence[object]] = []
    for family, declared in FAMILIES.items():
        file = made.file(family)
        jobs += [
            ["make", family, made.model(family)],
            ["convert", source(), made.model(family), file, "f32", declared.pre],
            ["metadata", source(), file, made.folder / f"{family}.json"],
            ["logits", file, made.folder / "ids.npy", made.logits(family)],
        ]
    run(*jobs)
    return made


@pytest.mark.parametrize("family", FAMILIES)
def test_the_converter_writes_the_same_metadata(family: str, peer: Peer) -> None:
    folder, theirs = peer.model(family), peer.metadata(family)
    arch = ARCHITECTURES[model_type(read_config(folder))]
    facts = ModelFacts(folder.name, tuple(theirs["parameters"]), ROWS)
    ours = plain(metadata(read_config(folder), files_of(folder), arch, facts).values)
    expected = {key: value for key, value in theirs["metadata"].items() if key not in OF_TENSORS}
    assert expected.keys() == ours.keys()
    assert not [key for key in ours if ours[key] != expected[key]]


class HalfGelu(torch.nn.Module):
    """GELU as ggml looks it up on a CPU: in a table of half-precision values (`GGML_GELU_FP16` in its vec.h)."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = torch.nn.functional.gelu(x.half().float(), approximate="tanh").half().float()
        return torch.where(x <= -10, 0.0, torch.where(x >= 10, x, found))


def logits_of_transformers(folder: Path, ids: NDArray) -> NDArray:
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    if model.config.model_type.startswith("gemma"):
        for layer in model.model.layers:
            layer.mlp.act_fn = HalfGelu()
    with torch.inference_mode():
        logits: NDArray = model(torch.tensor(ids)[None]).logits[0].numpy()
        return logits


def assert_same_logits(ours: NDArray, peer: Peer, family: str) -> None:
    """Whether llama.cpp computes the logits of transformers."""
    reference = logits_of_transformers(peer.model(family), np.load(peer.folder / "ids.npy"))
    assert ours.shape == reference.shape == (POSITIONS, ROWS)
    assert (ours.argmax(-1) == reference.argmax(-1)).all()
    assert np.abs(ours - reference).max() <= 1e-3 * np.abs(reference).max()


@pytest.mark.parametrize("family", FAMILIES)
def test_llama_cpp_computes_the_logits_of_transformers_from_its_own_file(family: str, peer: Peer) -> None:
    assert_same_logits(np.load(peer.logits(family)), peer, family)


def data_of(file: Path) -> dict[str, Any]:
    """Type, shape and bytes of every tensor."""
    content = container.read(file, Sources())
    data = file.read_bytes()
    return {
        name: (info.kind.name, info.shape, data[info.offset : info.offset + info.nbytes])
        for name, info in content.infos.items()
    }


@pytest.mark.parametrize("family", FAMILIES)
def test_a_converted_model_is_the_file_of_the_converter(family: str, peer: Peer, tmp_path: Path) -> None:
    """Every tensor has the same bytes, and llama.cpp computes the logits of transformers."""
    reshard.convert(peer.model(family), tmp_path / "ours.gguf")
    ours, theirs = data_of(tmp_path / "ours.gguf"), data_of(peer.file(family))
    assert ours.keys() == theirs.keys()
    assert not [name for name in ours if ours[name] != theirs[name]]
    jobs = (
        ["metadata", source(), tmp_path / "ours.gguf", tmp_path / "ours.json"],
        ["logits", tmp_path / "ours.gguf", peer.folder / "ids.npy", tmp_path / "ours.npy"],
    )
    run(*jobs)
    assert json.loads((tmp_path / "ours.json").read_text()) == peer.metadata(family)
    assert_same_logits(np.load(tmp_path / "ours.npy"), peer, family)


def test_llama_cpp_loads_a_model_without_a_tokenizer(peer: Peer, tmp_path: Path) -> None:
    reshard.convert(peer.model("qwen3"), tmp_path / "ours.gguf", no_tokenizer=True)
    run(["logits", tmp_path / "ours.gguf", peer.folder / "ids.npy", tmp_path / "ours.npy"])
    assert_same_logits(np.load(tmp_path / "ours.npy"), peer, "qwen3")


@pytest.mark.parametrize("key", NOT_LOADED)
def test_llama_cpp_loads_none_of_the_models_that_are_refused(
    key: str, peer: Peer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(write, "not_loaded", lambda *_: [])
    reshard.convert(make_not_loaded(key, tmp_path / "source"), tmp_path / "ours.gguf", no_tokenizer=True)
    with pytest.raises(subprocess.CalledProcessError):
        run(["logits", tmp_path / "ours.gguf", peer.folder / "ids.npy", tmp_path / "ours.npy"])


@pytest.mark.parametrize("family", ["mistral", "mixtral"])
def test_llama_cpp_computes_llama3_scaling_of_its_whole_architecture(
    family: str, peer: Peer, tmp_path: Path
) -> None:
    """The file has divisors of frequencies, as the converter's has."""
    folder = shutil.copytree(peer.model(family), tmp_path / peer.model(family).name)
    config = read_config(folder)
    config["rope_scaling"] = {**LLAMA3_ROPE, "original_max_position_embeddings": 64}
    (folder / "config.json").write_text(json.dumps(config))
    ours, theirs = tmp_path / "ours.gguf", tmp_path / "theirs.gguf"
    reshard.convert(folder, ours)
    run(
        ["convert", source(), folder, theirs, "f32", FAMILIES[family].pre],
        ["logits", ours, peer.folder / "ids.npy", tmp_path / "ours.npy"],
    )
    assert data_of(ours) == data_of(theirs)
    expected = logits_of_transformers(folder, np.load(peer.folder / "ids.npy"))
    assert np.abs(np.load(tmp_path / "ours.npy") - expected).max() <= 1e-3 * np.abs(expected).max()


TEXTS = [
    *CORPUS.read_text(encoding="utf-8").splitlines(),
    "Hello world",
    "I'll say 12345 things, don't you?",
    "你好，世界！ ÉCOLE été naïve",
    "a\tb   c\n",
    "1.5e10 == 0x7f;",
]
SIZES = {
    ValueType.UINT32: "<I",
    ValueType.INT32: "<i",
    ValueType.FLOAT32: "<f",
    ValueType.BOOL: "<?",
}


def _stored(kind: ValueType, value: Any) -> bytes:
    if kind is ValueType.STRING:
        text = value if isinstance(value, bytes) else value.encode()
        return struct.pack("<Q", len(text)) + text
    return struct.pack(SIZES[kind], value)


def _written(value: Value) -> bytes:
    if value.item is None:
        return struct.pack("<I", value.type) + _stored(value.type, value.value)
    items = b"".join(_stored(value.item, each) for each in value.value)
    return struct.pack("<IIQ", value.type, value.item, len(value.value)) + items


def with_metadata_alone(folder: Path, file: Path) -> Path:
    """A GGUF file without tensors, from which llama.cpp loads the vocabulary."""
    arch = ARCHITECTURES[model_type(read_config(folder))]
    values = metadata(
        read_config(folder), files_of(folder), arch, ModelFacts(folder.name, (1, 1, 0, 0), ROWS)
    ).values
    content = b"".join(_stored(ValueType.STRING, key) + _written(value) for key, value in values.items())
    file.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, len(values)) + content)
    return file


def tokens_of(file: Path, folder: Path) -> list[list[int]]:
    (folder / "texts.json").write_text(json.dumps(TEXTS))
    run(["tokens", file, folder / "texts.json", folder / "tokens.json"])
    found: list[list[int]] = json.loads((folder / "tokens.json").read_text())
    return found


def assert_same_tokens(folder: Path, where: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    found = tokens_of(with_metadata_alone(folder, where / "ours.gguf"), where)
    assert found == [tokenizer.encode(text) for text in TEXTS]


@pytest.mark.parametrize("family", [name for name in FAMILIES if FAMILIES[name].pre != "default"])
def test_llama_cpp_makes_the_same_tokens_of_texts(family: str, peer: Peer, tmp_path: Path) -> None:
    assert_same_tokens(peer.model(family), tmp_path)


def resaved(folder: Path, where: Path) -> Path:
    """The folder as transformers 5 saves its tokenizer: without tokenizer.model."""
    shutil.copytree(folder, where)
    code = (
        "import sys; from transformers import AutoTokenizer; from pathlib import Path\n"
        "tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])\n"
        "for name in ('tokenizer.model', 'tokenizer_config.json'): (Path(sys.argv[2]) / name).unlink()\n"
        "tokenizer.save_pretrained(sys.argv[2])"
    )
    subprocess.run([python("llama-cpp"), "-c", code, folder, where], check=True, timeout=300)
    assert not (where / "tokenizer.model").exists() and (where / "tokenizer.json").is_file()
    return where


@pytest.mark.parametrize("family", ["mistral", "gemma3"])
def test_pieces_without_their_model_keep_the_order_of_merges(family: str, peer: Peer, tmp_path: Path) -> None:
    assert_same_tokens(resaved(peer.model(family), tmp_path / "resaved"), tmp_path)


def test_the_converter_writes_scores_that_lose_the_order_of_merges(peer: Peer, tmp_path: Path) -> None:
    """Why scores differ from the converter's here: llama.cpp makes other tokens with its own.

    It also refuses such a Gemma 3, and writes fewer tokens than the embedding has rows.
    """
    folder, file = resaved(peer.model("mistral"), tmp_path / "resaved"), tmp_path / "theirs.gguf"
    run(
        ["convert", source(), folder, file, "f32", "default"],
        ["metadata", source(), file, tmp_path / "theirs.json"],
    )
    theirs = json.loads((tmp_path / "theirs.json").read_text())
    expected, facts = theirs["metadata"], ModelFacts(folder.name, tuple(theirs["parameters"]), ROWS)
    ours = plain(metadata(read_config(folder), files_of(folder), "llama", facts).values)
    differing = {key for key in expected.keys() | ours.keys() if ours.get(key) != expected.get(key)}
    of_tokens = {f"tokenizer.ggml.{key}" for key in ("scores", "token_type", "tokens")}
    assert differing - OF_TENSORS == of_tokens
    tokens = expected["tokenizer.ggml.tokens"][1]
    assert ours["tokenizer.ggml.tokens"][1][: len(tokens)] == tokens
    assert set(expected["tokenizer.ggml.scores"][1]) == {-1000.0}
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokens_of(file, tmp_path) != [tokenizer.encode(text) for text in TEXTS]


NAMES = [
    *("meta-llama/Llama-3.1-8B-Instruct", "Qwen3-30B-A3B", "Mistral-7B-Instruct-v0.3", "checkpoint-500"),
    *("output", "./here", "a model of mine", "gemma-3-4b-it", "bloom-7b1", "Phi-3-mini-4k-instruct", "0"),
    *(
        "org/DeepSeek-R1-Distill-Qwen-1.5B",
        "Mixtral-8x7B-v0.1",
        "tiny-q8_0-fp16",
        "a--b",
        "v2",
        "iter_0000003",
    ),
    *("Qwen2.5-Coder-32B-Instruct-1M", "model-small-7B", "x-large", "org/sub/model-1b"),
]


def test_names_are_taken_apart_as_by_the_converter(tmp_path: Path) -> None:
    asked = [(name, size) for name in NAMES for size in (0, 1_100_000, 8 * 10**9, 10**12 + 1)]
    (tmp_path / "names.json").write_text(json.dumps(asked))
    run(["names", source(), tmp_path / "names.json", tmp_path / "parts.json"])
    for (name, size), theirs in zip(asked, json.loads((tmp_path / "parts.json").read_text()), strict=True):
        parts = named(name, size)
        ours = [
            parts.name,
            parts.organization,
            parts.basename,
            parts.finetune,
            parts.version,
            parts.size_label,
        ]
        assert ours == theirs[:6], (name, size)
        assert titled(parts.name or "") == theirs[6]
        assert (size_label((size, 0, 0, 0)) or theirs[7]) == theirs[7]
