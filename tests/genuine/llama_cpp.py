"""llama.cpp: its converter from Hugging Face folders, and the library that loads a GGUF file.

Both come from the source distribution of llama-cpp-python. The commands, many in one process:

    python -m tests.genuine.llama_cpp JOBS.json        a list of commands, in the environment `llama-cpp`:

    make FAMILY FOLDER                          a tiny model of tests/genuine/gguf_models.py
    convert SOURCE FOLDER OUT.gguf OUTTYPE PRE  as convert_hf_to_gguf.py
    metadata SOURCE FILE.gguf OUT.json          the metadata, and the numbers of parameters
    logits FILE.gguf TOKENS.npy OUT.npy         of one sequence, at all positions
    tokens FILE.gguf TEXTS.json OUT.json        the ids of texts
    names SOURCE NAMES.json OUT.json            what the converter makes of names of models
    quantize FILE.gguf OUT.gguf NUMBER          as llama-quantize, to a type of llama.h

The converter identifies how a tokenizer splits text by a hash of what it makes of a fixed text. It knows the hashes of
published tokenizers, not that of one which was trained a moment ago: PRE replaces the lookup, and nothing else. It is
"default" where nothing is to be looked up.

`python -m tests.genuine.llama_cpp remember tests/data/gguf` makes what tests without llama.cpp compare.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import runpy
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tests.environments import CACHE, LLAMA_CPP, python
from tests.work import extract_all


def source() -> Path:
    """The folder of llama.cpp's source, fetched on first use."""
    folder, ready = CACHE / "llama-cpp-source", CACHE / "llama-cpp-source" / LLAMA_CPP
    interpreter = python("llama-cpp")
    with (CACHE / "llama-cpp-source.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # tests run side by side
        if not ready.exists():
            pip = [interpreter, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
            alone = ["--no-deps", "--no-build-isolation", "--no-binary", ":all:"]
            subprocess.run([*pip, *alone, "--dest", folder, LLAMA_CPP], check=True)
            with tarfile.open(next(folder.glob("*.tar.gz"))) as archive:
                extract_all(archive, folder)
            ready.touch()
    return next(folder.glob("*/vendor/llama.cpp"))


def run(*jobs: Sequence[object]) -> None:
    """Run commands in the environment, in one process."""
    words = json.dumps([[str(word) for word in job] for job in jobs])
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        file.write(words)
        file.flush()
        command = [python("llama-cpp"), "-m", "tests.genuine.llama_cpp", file.name]
        subprocess.run(command, check=True, timeout=1800)


def _make(family: str, folder: str) -> None:
    from tests.genuine.gguf_models import make

    make(family, Path(folder))


def _convert(source: str, folder: str, file: str, outtype: str, pre: str) -> None:
    sys.path.insert(0, source)
    from conversion.base import TextModel

    looked_up = TextModel.get_vocab_base_pre
    if pre != "default":
        TextModel.get_vocab_base_pre = lambda *_: pre
    sys.argv = ["convert_hf_to_gguf.py", folder, "--outfile", file, "--outtype", outtype]
    try:
        runpy.run_path(f"{source}/convert_hf_to_gguf.py", run_name="__main__")
    finally:
        TextModel.get_vocab_base_pre = looked_up


def _metadata(source: str, file: str, out: str) -> None:
    """The metadata by key, each with the names of its types, and how many parameters there are."""
    sys.path.insert(0, f"{source}/gguf-py")
    from gguf import GGUFReader, GGUFWriter

    def plain(value: Any) -> Any:
        return [plain(each) for each in value] if isinstance(value, list) else value

    reader, found = GGUFReader(file), {}
    for key, field in reader.fields.items():
        if not key.startswith("GGUF."):
            found[key] = [[each.name for each in field.types], plain(field.contents())]
    counted = GGUFWriter(None, "llama")
    for tensor in reader.tensors:
        shape = [int(size) for size in reversed(tensor.shape)]
        counted.add_tensor_info(tensor.name, shape, np.dtype(np.float32), 0)
    content = {"metadata": found, "parameters": counted.get_total_parameter_count()}
    Path(out).write_text(json.dumps(content, ensure_ascii=False) + "\n")


def _llama() -> Any:
    import llama_cpp

    llama_cpp.llama_backend_init()
    return llama_cpp


def _loaded(api: Any, file: str, *, vocab_only: bool = False) -> Any:
    parameters = api.llama_model_default_params()
    parameters.vocab_only, parameters.use_mmap = vocab_only, True
    model = api.llama_model_load_from_file(file.encode(), parameters)
    assert model, f"llama.cpp does not load {file}"
    return model


def _logits(file: str, tokens: str, out: str) -> None:
    """The logits of one sequence at all positions."""
    api = _llama()
    model, ids = _loaded(api, file), np.load(tokens).astype(np.int32)
    parameters = api.llama_context_default_params()
    parameters.n_ctx = parameters.n_batch = parameters.n_ubatch = len(ids)
    parameters.n_threads = parameters.n_threads_batch = 1
    parameters.type_k = parameters.type_v = api.GGML_TYPE_F32
    parameters.flash_attn_type = 0  # off: it computes in half precision
    context = api.llama_init_from_model(model, parameters)
    batch = api.llama_batch_init(len(ids), 0, 1)
    batch.n_tokens = len(ids)
    for index, number in enumerate(ids):
        batch.token[index], batch.pos[index], batch.logits[index] = int(number), index, 1
        batch.n_seq_id[index], batch.seq_id[index][0] = 1, 0
    assert api.llama_decode(context, batch) == 0
    rows = api.llama_vocab_n_tokens(api.llama_model_get_vocab(model))
    found = np.ctypeslib.as_array(api.llama_get_logits(context), shape=(len(ids), rows))
    np.save(out, found)


def _tokens(file: str, texts: str, out: str) -> None:
    """The ids of texts, with the tokens that a prompt begins and ends with."""
    api = _llama()
    vocabulary = api.llama_model_get_vocab(_loaded(api, file, vocab_only=True))
    found = []
    for text in json.loads(Path(texts).read_text()):
        encoded = text.encode()
        ids = (ctypes.c_int32 * (len(encoded) + 8))()
        count = api.llama_tokenize(vocabulary, encoded, len(encoded), ids, len(ids), True, True)
        assert count >= 0
        found.append(list(ids[:count]))
    Path(out).write_text(json.dumps(found))


def _names(source: str, names: str, out: str) -> None:
    """What the converter makes of names of models, each with a number of parameters."""
    sys.path.insert(0, f"{source}/gguf-py")
    from gguf import Metadata, size_label

    found = []
    for name, parameters in json.loads(Path(names).read_text()):
        parts = Metadata.get_model_id_components(name, parameters)
        found.append([*parts, parts[0] and Metadata.id_to_title(parts[0]), size_label(parameters, 0, 0, 0)])
    Path(out).write_text(json.dumps(found))


def remember(folder: Path) -> None:
    """Write what tests without llama.cpp compare: the small files of models, and the metadata that they become."""
    from tests.genuine.gguf_models import FAMILIES

    with tempfile.TemporaryDirectory() as where:
        for name, family in FAMILIES.items():
            made, file, kept = Path(where) / f"Tiny-{name}-1M-Instruct", Path(where) / name, folder / name
            kept.mkdir(parents=True, exist_ok=True)
            converted = ["convert", source(), made, file, "f32", family.pre]
            run(["make", name, made], converted, ["metadata", source(), file, kept / "metadata.json"])
            for each in made.iterdir():
                if each.suffix != ".safetensors":
                    shutil.copy(each, kept)


def _quantize(file: str, out: str, number: str) -> None:
    api = _llama()
    parameters = api.llama_model_quantize_default_params()
    parameters.ftype, parameters.nthread = int(number), 1
    assert not api.llama_model_quantize(file.encode(), out.encode(), parameters), f"{file} is not quantized"


COMMANDS = {
    "make": _make,
    "convert": _convert,
    "metadata": _metadata,
    "logits": _logits,
    "tokens": _tokens,
    "names": _names,
    "quantize": _quantize,
}

if __name__ == "__main__":
    if sys.argv[1] == "remember":
        remember(Path(sys.argv[2]))
    else:
        for name, *words in json.loads(Path(sys.argv[1]).read_text()):
            COMMANDS[name](*words)
