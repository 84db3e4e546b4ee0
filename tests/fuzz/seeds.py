"""Genuine inputs to start with: files of frameworks in tests/data, and texts as in documentation."""

from __future__ import annotations

import gzip
import io
import json
import shutil
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from tests.work import extract_all

TESTS = Path(__file__).parents[1]
DATA = TESTS / "data"
MOST = 64 << 10
"""The largest seed in bytes."""


def files(*patterns: str, below: Path = DATA, most: int = 40) -> list[bytes]:
    """The different contents of files whose paths match."""
    found = (
        path.read_bytes() for pattern in patterns for path in sorted(below.glob(pattern)) if path.is_file()
    )
    return list(dict.fromkeys(content for content in found if len(content) <= MOST))[:most]


def archive() -> bytes:
    """A small `.nemo` archive: the files of one rank."""
    out = io.BytesIO()
    with tarfile.open(DATA / "nemo/lora-1.nemo") as old, tarfile.open(fileobj=out, mode="w") as new:
        for member in old.getmembers():
            if member.isfile() and "rank_01" not in member.name and "rank_001" not in member.name:
                content = old.extractfile(member)
                member.name = f"./{Path(member.name).name}"
                new.addfile(member, content)
    return out.getvalue()


def unpacked(folder: Path) -> Path:
    """The same archive, unpacked."""
    with tarfile.open(fileobj=io.BytesIO(archive())) as found:
        extract_all(found, folder)
    return folder


def nemo_configs() -> list[bytes]:
    """The configs in NeMo's archives."""
    found = []
    for path in sorted(DATA.glob("nemo/*.nemo")):
        with tarfile.open(path) as opened:
            content = opened.extractfile("./model_config.yaml")
            found.append(content.read() if content else b"")
    return found


def pickles(*patterns: str) -> list[bytes]:
    """The pickles in torch files whose paths match."""
    return list(dict.fromkeys(_pickle(content) for content in files(*patterns, most=100)))[:40]


def _pickle(content: bytes) -> bytes:
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        return archive.read(next(name for name in archive.namelist() if name.endswith("data.pkl")))


def notebook(code: str, printed: str) -> bytes:
    """A notebook of one cell, and its output."""
    error = {"output_type": "error", "ename": "ValueError", "evalue": "no", "traceback": printed.splitlines()}
    stream = {"output_type": "stream", "name": "stdout", "text": printed.splitlines(keepends=True)}
    cell = {"cell_type": "code", "source": code.splitlines(keepends=True), "outputs": [stream, error]}
    return json.dumps({"cells": [cell], "metadata": {}, "nbformat": 4, "nbformat_minor": 5}).encode()


def logs() -> list[bytes]:
    """Complete logs, and failures as frameworks print them."""
    return files("doctor/clean/*.log", "data/train/*.log", "doctor/tracebacks/*", below=TESTS)


def scripts() -> list[bytes]:
    """Scripts that train, and that make failures happen."""
    return files("doctor/reproduce/*.py", "doctor/head/*.py", "genuine/make_*.py", below=TESTS)


HEADERS: tuple[dict[str, object], ...] = (
    {"a": {"dtype": "F32", "shape": [1, 2], "data_offsets": [0, 8]}},
    {
        "__metadata__": {"format": "pt"},
        "a.weight": {"dtype": "BF16", "shape": [2, 3], "data_offsets": [0, 12]},
        "b.weight": {"dtype": "F8_E4M3", "shape": [4], "data_offsets": [12, 16]},
        "c": {"dtype": "I64", "shape": [], "data_offsets": [16, 24]},
        "d": {"dtype": "U8", "shape": [0, 7], "data_offsets": [24, 24]},
        "e": {"dtype": "F4", "shape": [2, 4], "data_offsets": [24, 28]},
    },
)


def safetensors_file(header: dict[str, object], nbytes: int = 28) -> bytes:
    """A file with this header."""
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + bytes(range(nbytes))


def safetensors() -> list[bytes]:
    """Small files, and one by transformers."""
    small = [safetensors_file(header, size) for header, size in zip(HEADERS, (8, 28), strict=True)]
    return [*small, *files("peers/mcore-bridge/*/model.safetensors")]


def vocabularies() -> list[bytes]:
    """The parts of tokenizer files that reshard reads."""
    added = [{"id": 259, "content": "<|end|>", "special": True}]
    return [
        json.dumps({"model": {"type": "BPE", "vocab": {"a": 0, "b": 1}}, "added_tokens": added}).encode(),
        json.dumps({"model": {"type": "Unigram", "vocab": [["a", -1.0], ["b", -2.0]]}}).encode(),
        json.dumps({"auto_map": {"AutoTokenizer": ["tokenization_x.X", None]}, "eos_token": "</s>"}).encode(),
        json.dumps({"added_tokens_decoder": {"259": added[0]}, "chat_template": "{{ x }}"}).encode(),
    ]


ARGUMENTS = [
    *(
        "--memory 1GiB --tp 2",
        "--memory 5.5 mb",
        "--tp 1 --pp 2 --vpp 1",
        "--stages 1,1 --pp 2",
        "--ep 2 --etp 1",
    ),
    *("--on slurm:partition=p,nodes=2 --dtype x", "--on slurm:cluster=local --tp 0"),
    *("--iteration release", "--iteration 3", "--family mistral", "--engine mcore-bridge", "--trust config"),
    *("--dtype bfloat16", "--quantize fp8", "--max-shard-size 5GB", "--vocab-divisible-by 64", "--workers 3"),
    *(
        "--transformer-impl local",
        "--strip _orig_mod",
        "--merge --adapter default --lora-alpha 16",
        "--to dcp",
    ),
    *(
        "--base . --no-tokenizer --with-optimizer --strict --no-checksum --no-resume --verify --overwrite --json",
    ),
]
SIZES = ["5GB", "1GiB", "512 MiB", "7", "1.5k", "2tb"]
JOURNAL = "\n".join(
    (
        '{"command":"reshard convert a b","folder":"/tmp","bytes":4096,"version":"1","sources":"2","options":"3"}',
        '{"replicas":"equal"}',
        '{"file":"model.safetensors","written":{"finished":1024,"batches":[[0,1],[2,3]],'
        '"begun":{"1":[1024,1536,77,false,[1,7e4,"float16"]]},"late":[[3,"00ff"]],"nonfinite":["a"],'
        '"overflowed":[["a",8,1,7e4,"float16"]],"state":null,"digest":"","elsewhere":null},'
        '"passed":{"/tmp/f":[[0,8,5]]},"unchecked":[["x","/tmp/f",0,8,5]],"checked":[]}',
        '{"file":"model.safetensors","written":{"finished":0,"batches":[],"begun":{},"late":[],"nonfinite":[],'
        '"overflowed":[],"state":null,"digest":"","elsewhere":null}}',
        '{"file":"model.safetensors","written":{"finished":4096,"batches":[],"begun":{},"late":[],"nonfinite":[],'
        '"overflowed":[],"state":[1,2,3,"b"],"digest":"0f","elsewhere":null}}',
    )
)
MARKER = json.dumps(
    {
        "about": "",
        "reshard": "1",
        "run": "host:user",
        "host": "h",
        "command": "reshard convert a s3://b",
        "folder": "/tmp",
        "total": 9,
        "uploaded": 3,
        "ended": False,
        "files": ["a"],
        "old": ["b/c"],
        "journal": "",
    }
)
URLS = [
    *(
        "s3://bucket/a/b",
        "gs://b/c?d",
        "hf://datasets/a/b@main/c",
        "http://u:p@host:80/a%20b?sig=x#y",
        "az://c@a/b",
    ),
    "https://[::1]/a/../b",
]
LAUNCHES = [
    "export GPUS=8\nCUDA_VISIBLE_DEVICES=0,1 torchrun --nproc_per_node $GPUS \\\n  --nnodes=2 train.py --bf16\n",
    "#SBATCH --nodes=2\naccelerate launch --num_processes 4 --config_file a.yaml train.py\n"
    "torchrun --nproc_per_node 8 pretrain_gpt.py --tensor-model-parallel-size 3 --pipeline-model-parallel-size 2\n",
    "NPROC_PER_NODE=4 megatron sft --tensor_model_parallel_size ${TP:-2} --model x\ndeepspeed --num_gpus 2 t.py\n",
]
YAMLS = [
    "distributed_type: FSDP\nfsdp_config:\n  fsdp_version: 2\n  fsdp_state_dict_type: SHARDED_STATE_DICT\n"
    "mixed_precision: bf16\nnum_processes: 8\nmachine_rank: 0\n",
    "### model\nmodel_name_or_path: a/b\nstage: sft\nfinetuning_type: lora\nlora_rank: 8\ncutoff_len: 2048\n"
    "per_device_train_batch_size: 1\nlearning_rate: 1.0e-4\nbf16: true\ndeepspeed: examples/ds_z3_config.json\n",
    "a: &base\n  x: 1\nb:\n  <<: *base\n  y: [1, 2, {z: null}]\nc: 2021-01-01\nd: !!str 3\n",
    "trainer:\n  n_gpus_per_node: 8\n  nnodes: 1\nactor_rollout_ref:\n  actor:\n    strategy: fsdp\n",
]
JSONS = [
    '{"train_batch_size": "auto", "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4,\n'
    ' "bf16": {"enabled": true}, "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"},\n'
    ' "stage3_gather_16bit_weights_on_model_save": true}, // why\n "optimizer": {"type": "AdamW",},}\n',
    '{"compute_environment": "LOCAL_MACHINE", "distributed_type": "DEEPSPEED", "num_processes": 2}',
]
_ASK, _ANSWER = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
_CALL = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": {"name": "f"}}]}
_TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
ROWS: tuple[list[dict[str, object]], ...] = (
    [{"messages": [_ASK, _ANSWER]}, {"messages": [{"role": "system", "content": "s"}, _ASK, _ANSWER]}],
    [{"messages": [_ASK, _CALL, {"role": "tool", "content": "1"}, _ANSWER], "tools": [_TOOL]}],
    [{"messages": [_ASK, _ANSWER], "tools": json.dumps([_TOOL]), "chat_template_kwargs": {"enable": False}}],
    [{"system": "s", "conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}],
    [{"prompt": "a", "completion": "b"}, {"prompt": "c", "completion": "d"}],
    [{"prompt": [_ASK], "completion": [_ANSWER], "source": "x"}],
    [{"text": "a b"}, {"text": "c"}],
    [{"prompt": [_ASK], "chosen": [_ANSWER], "rejected": [_ASK], "score": 0.5}],
    [{"chosen": "a b", "rejected": "a c"}, {"prompt": "c", "chosen": "a", "rejected": "b"}],
    [{"prompt": [_ASK], "answer": 3, "cases": [[1, 2], [3]]}, {"prompt": [_ASK], "answer": 4, "cases": []}],
    [{"instruction": "i", "input": "", "output": "o"}],
)
"""Records to train on, in each shape that some method accepts, and one that none does."""


def rows_as(write: Callable[[list[dict[str, object]]], bytes]) -> list[bytes]:
    """Each of `ROWS` as a file."""
    return [write(rows) for rows in ROWS]


def as_lines(rows: list[dict[str, object]]) -> bytes:
    """JSON Lines."""
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def as_array(rows: list[dict[str, object]]) -> bytes:
    """One array of JSON."""
    return json.dumps(rows).encode()


def as_compressed(rows: list[dict[str, object]]) -> bytes:
    """Compressed JSON Lines."""
    return gzip.compress(as_lines(rows), mtime=0)


def as_parquet(rows: list[dict[str, object]]) -> bytes:
    """Parquet, with the column types that it supports."""
    import pyarrow as arrow
    from pyarrow import parquet

    file = io.BytesIO()
    plain = [{key: json.dumps(value) if isinstance(value, dict) else value for key, value in row.items()}
             for row in rows]  # fmt: skip
    parquet.write_table(arrow.Table.from_pylist(plain), file)
    return file.getvalue()


def encoded(*texts: str) -> list[bytes]:
    """Texts as in files."""
    return [text.encode() for text in texts]


def copied(source: str, folder: Path) -> Path:
    """A copy of a folder of tests/data."""
    return Path(shutil.copytree(DATA / source, folder))
