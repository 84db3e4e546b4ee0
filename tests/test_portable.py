"""inspect, convert, verify and doctor need nothing that only Linux has.

Each command runs in a process without it: names of `os`, `fcntl`, `signal` and `select`, functions of glibc, the
file systems of the kernel. On a system that never had them nothing is removed, so this file also runs on macOS, with
numpy, safetensors and pytest alone: `pytest --noconftest tests/test_portable.py`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

ELSEWHERE = """
import ctypes, fcntl, functools, os, select, signal, sys

sys.platform = "darwin"
LINUX = {
    os: "O_DIRECT O_TMPFILE O_PATH O_NOATIME copy_file_range eventfd fdatasync fallocate memfd_create pidfd_open"
    " posix_fadvise posix_fallocate preadv pwritev sched_getaffinity sched_setaffinity sendfile setns splice"
    " getxattr setxattr listxattr POSIX_FADV_DONTNEED",
    fcntl: "F_OFD_GETLK F_OFD_SETLK F_OFD_SETLKW F_SETPIPE_SZ F_GETPIPE_SZ F_ADD_SEALS F_NOTIFY F_SETLEASE",
    signal: "SIGPWR SIGPOLL SIGRTMIN SIGRTMAX SIGSTKFLT SIGCLD sigtimedwait sigwaitinfo",
    select: "epoll EPOLLIN",
}
for module, names in LINUX.items():
    for name in names.split():
        if hasattr(module, name):
            delattr(module, name)

HIDDEN = ("/proc", "/sys", "/dev/shm")
LIBRARY = ("fallocate", "prctl", "sync_file_range", "malloc_trim", "mallopt", "renameat2", "syscall")


def is_hidden(path):
    return isinstance(path, (str, os.PathLike)) and os.fspath(path).startswith(HIDDEN)


def hook(event, arguments):
    if event in ("open", "os.listdir", "os.scandir") and is_hidden(arguments[0]):
        raise FileNotFoundError(2, "No such file or directory", arguments[0])
    if event == "ctypes.dlsym" and arguments[1] in LIBRARY:
        raise AttributeError(arguments[1])


def hiding(call):
    @functools.partial  # no method of a class that has it as an attribute: pathlib of Python 3.10
    def seen(path, *arguments, **options):
        if is_hidden(path):
            raise FileNotFoundError(2, "No such file or directory", path)
        return call(path, *arguments, **options)

    return seen


sys.addaudithook(hook)
os.stat, os.lstat, os.statvfs = hiding(os.stat), hiding(os.lstat), hiding(os.statvfs)
"""
RUN = f"{ELSEWHERE}\nfrom reshard.cli import main\nmain()\n"

H, HEADS, LAYERS, VOCABULARY = 64, 4, 2, 256
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": H,
    "intermediate_size": 2 * H,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}


def reshard(*words: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", RUN, *map(str, words)], capture_output=True, text=True, timeout=300
    )


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A Llama of two layers with random weights; its embedding is large enough for direct writes on Linux."""
    shapes = {"model.embed_tokens.weight": (VOCABULARY, H), "lm_head.weight": (VOCABULARY, H)}
    shapes["model.norm.weight"] = (H,)
    for layer in range(LAYERS):
        name = f"model.layers.{layer}"
        shapes |= {f"{name}.{norm}.weight": (H,) for norm in ("input_layernorm", "post_attention_layernorm")}
        shapes |= {f"{name}.self_attn.{part}_proj.weight": (H, H) for part in "qkvo"}
        shapes |= {f"{name}.mlp.{part}_proj.weight": (2 * H, H) for part in ("gate", "up")}
        shapes[f"{name}.mlp.down_proj.weight"] = (H, 2 * H)
    random = np.random.default_rng(0)
    folder = tmp_path / "model"
    folder.mkdir()
    tensors = {name: random.standard_normal(shape, np.float32) for name, shape in shapes.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


@pytest.mark.thorough
def test_a_model_is_converted_there_and_back(model: Path, tmp_path: Path) -> None:
    there, back = tmp_path / "megatron", tmp_path / "back"
    commands = (
        ("inspect", model),
        ("convert", model, there, "--to", "megatron", "--tp", 2, "--no-tokenizer"),
        ("inspect", there),
        ("convert", there, back, "--no-tokenizer", "--verify"),
        ("verify", model, there),
        ("verify", back),
        ("verify", there, back, "--proof"),
    )
    for words in commands:
        done = reshard(*words)
        assert done.returncode == 0, done.stderr
    before, after = (load_file(folder / "model.safetensors") for folder in (model, back))
    assert before.keys() == after.keys()
    assert all(np.array_equal(before[name], after[name]) for name in before)


@pytest.mark.thorough
def test_damage_is_found(model: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    assert reshard("convert", model, copy, "--to", "huggingface", "--no-tokenizer").returncode == 0
    with (copy / "model.safetensors").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"?")
    done = reshard("verify", copy)
    assert done.returncode == 1 and "model.safetensors" in done.stdout + done.stderr


@pytest.mark.thorough
def test_the_doctor_looks_at_the_machine_and_at_a_log(tmp_path: Path) -> None:
    seen = reshard("doctor", "--json")
    assert seen.returncode in (0, 1), seen.stderr
    assert json.loads(seen.stdout)["environment"]["python"].startswith(sys.version.split()[0])
    log = tmp_path / "train.log"
    log.write_text(
        "Traceback (most recent call last):\n"
        '  File "train.py", line 3, in <module>\n'
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total"
        " capacity of 79.11 GiB of which 1.10 GiB is free.\n"
    )
    told = reshard("doctor", log, "--lang", "en")
    assert told.returncode == 1 and "memory" in told.stdout, told.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="nothing is taken away elsewhere")
def test_the_processes_have_lost_what_only_linux_has() -> None:
    code = f"""{ELSEWHERE}
from pathlib import Path
from reshard.transfer import sink
assert not Path("/proc/self/status").exists() and not hasattr(os, "preadv")
assert sink._fallocate(0, 1, 0, 0) is None
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
