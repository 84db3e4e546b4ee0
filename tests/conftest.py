"""Fixtures that are expensive to make and shared by many tests."""

from __future__ import annotations

import errno
import fcntl
import gc
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

from tests.jobs import PARTS, is_in

if TYPE_CHECKING:
    from tests.genuine.megatron import Genuine

pytest_plugins = ("tests.core", "tests.summary")

# Importing torch and transformers makes a million objects, which the collector would examine again and again.
gc.disable()


def pytest_collection_finish() -> None:
    """Collect garbage in the tests, but not what was imported for them."""
    gc.freeze()
    gc.enable()


def pytest_sessionfinish() -> None:
    """End the process from which ranks were forked: it would outlive a process of pytest-xdist."""
    if warm := sys.modules.get("tests.genuine.warm"):
        warm.close()


# Before any test imports torch: ranks are processes, and there are more of them than cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

# How long an example takes depends on what else the machine does.
settings.register_profile("any load", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any load")

# A shell that starts a job in the background has it ignore Ctrl-C, nohup the end of its terminal, and what the tests
# start would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


LONGEST = (
    *("tests/test_megatron_reading.py", "tests/test_families.py", "tests/test_megatron_writing.py"),
    *("tests/test_optimizer", "tests/guard/test_stall.py"),
    *("tests/test_megatron_", "tests/genuine/", "tests/internlm/"),
    *("tests/test_recognition.py", "tests/test_fsdp_ranks.py", "tests/test_dcp_format.py"),
    *("tests/doctor/test_reproduce.py", "tests/doctor/test_long_logs.py", "tests/stores/test_uploading.py"),
    *(
        "tests/fuzz/",
        "tests/faults/",
        "tests/bad_input/",
        "tests/train/",
        "tests/guard/",
        "tests/test_demo.py",
    ),
)
"""Files whose tests take longest, the longest first: so that no process runs one alone at the end."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--part`."""
    parser.addoption(
        "--part", choices=[*PARTS, "smoke"], help="Run the tests of one part: see tests/jobs.py."
    )


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out the files of other parts."""
    part = config.getoption("part")
    if part is None or not collection_path.name.startswith("test_") or collection_path.suffix != ".py":
        return None
    return None if is_in(part, collection_path) else True


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Start with the files that take longest."""
    items.sort(
        key=lambda item: next((at for at, name in enumerate(LONGEST) if item.nodeid.startswith(name)), 99)
    )


@pytest.fixture(scope="session")
def hf_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Make a folder of `tests.genuine.huggingface.VARIANTS`, once per session; see `make_model`."""
    from tests.genuine.huggingface import make_model

    made: dict[str, Path] = {}

    def get(name: str, **options: object) -> Path:
        key = f"{name}-{sorted(options.items())}"
        if key not in made:
            made[key] = make_model(name, tmp_path_factory.mktemp(name), **options)
        return made[key]

    return get


@pytest.fixture(scope="session")
def once(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, Callable[[Path], object]], Path]:
    """Get a folder by its name, which is filled once for all workers."""
    base = tmp_path_factory.getbasetemp()
    base = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base

    def get(name: str, fill: Callable[[Path], object]) -> Path:
        folder, filled = base / name, Path(f"{base / name}.filled")
        folder.parent.mkdir(exist_ok=True)
        with open(f"{folder}.lock", "w") as lock:
            fcntl.lockf(lock, fcntl.LOCK_EX)
            if not filled.exists():
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir()
                fill(folder)
                filled.touch()
        return folder

    return get


@pytest.fixture(scope="session")
def genuine(once: Callable[..., Path], transformer_engine: Executor) -> Callable[..., Genuine]:
    """Get a checkpoint of `tests.genuine.megatron.ALL`, made once for all workers; see `make`."""
    from tests.genuine import megatron as variants

    def get(name: str, megatron: str | None = None) -> Genuine:
        folder = once(f"megatron/{megatron or 'installed'}-{name}", partial(make, name, megatron))
        return variants.existing(name, folder)

    def make(name: str, megatron: str | None, out: Path) -> None:
        if megatron is None and variants.ALL[name].spec == "te":
            transformer_engine.submit(variants._make_here, name, out).result(timeout=120)
        else:
            variants.make(name, out, megatron)

    return get


@pytest.fixture(scope="session")
def transformer_engine() -> Iterator[Executor]:
    """A process in which megatron-core finds TransformerEngine and builds its modules.

    megatron-core decides this on import, so the process that runs the tests cannot do both.
    """
    from tests.genuine import fake_te

    with ProcessPoolExecutor(1, mp_context=get_context("spawn"), initializer=fake_te.install) as pool:
        yield pool


@pytest.fixture
def no_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system without locks."""

    def flock(descriptor: int, how: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", flock)
