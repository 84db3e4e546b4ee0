"""Pickles that need more memory than their size, or more time than reading them: refused at once.

Each set is loaded in its own process that may not grow by more than `ALLOWED`.

    python -m tests.formats.test_hostile_pickles FILE...
"""

from __future__ import annotations

import json
import pickle
import resource
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from reshard.algebra.dtypes import BY_NAME
from reshard.algebra.storage import Storage, StoredTensor
from reshard.base.errors import ReshardError
from reshard.containers.torchfiles import pickles, untrusted
from reshard.containers.torchfiles.read import load_pickle

if TYPE_CHECKING:
    from tests.genuine.megatron import Genuine

ALLOWED = 256 << 20
FEW = 1 << 20
"""The peak memory that loading a few bytes may take."""

_BUILD_RANGE = b"\x80\x02cbuiltins\nrange\n\x8a\x05\x00\x00\x00\x00\x02\x85R"
"""range(8589934592)"""
_NESTED = b"K\x01" + b"2\x86" * 60
"""A pair of a pair … of ones, each twice the same object: 2⁶⁰ ones when printed."""

CRAFTED = {
    "LONG_BINPUT": b"\x80\x02Nr\xff\xff\xff\x7f.",
    "LONG_BINPUT behind many opcodes": b"\x80\x02" + b"N0" * 3000 + b"Nr\xff\xff\xff\x0f.",
    "LONG_BINPUT behind a string": b"\x80\x02X\x03\x00\x00\x00abcr\xff\xff\xff\x0f.",
    "PUT": b"Np1000000000\n.",
    "PUT with a zero byte": b"Np1000000000\x00\n.",
    "BYTEARRAY8": b"\x80\x05\x96\x00\x00\x00\x00\x02\x00\x00\x00x.",
    "BINBYTES8": b"\x80\x05\x8e\x00\x00\x00\x00\x02\x00\x00\x00x.",
    "BINUNICODE8": b"\x80\x05\x8d\x00\x00\x00\x00\x02\x00\x00\x00x.",
    "BINBYTES": b"\x80\x05B\xff\xff\xff\x7fx.",
    "BINUNICODE": b"\x80\x02X\xff\xff\xff\x7fx.",
    "BINSTRING": b"\x80\x02T\xff\xff\xff\x7fx.",
    "LONG4": b"\x80\x02\x8b\xff\xff\xff\x7fx.",
    "FRAME": b"\x80\x04\x95\x00\x00\x00\x00\x02\x00\x00\x00N.",
    "a shape of a range": b"\x80\x02ctorch\nSize\n" + _BUILD_RANGE[2:] + b"\x85R.",
    "a set of a range": b"\x80\x02cbuiltins\nset\n" + _BUILD_RANGE[2:] + b"\x85R.",
    "a tensor with a range for a shape": b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n((X\x07\x00\x00\x00storage"
    b"ctorch\nFloatStorage\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpuK\x10tQK\x00"
    + _BUILD_RANGE[2:]
    + b"(K\x01t\x89}tR.",
    "arguments in a range": b"\x80\x02ctorch._tensor\n_rebuild_from_type_v2\n(ctorch._utils\n_rebuild_parameter\nN"
    + _BUILD_RANGE[2:]
    + b"NtR.",
    "a storage called by a nest": b"\x80\x02(X\x05\x00\x00\x00other" + _NESTED + b"NNNtQ.",
    "a codec called by a nest": b"\x80\x02c_codecs\nencode\n(X\x01\x00\x00\x00x" + _NESTED + b"tR.",
    "a nest as a key": b"\x80\x02}" + _NESTED + b"Ns.",
    "a nest among keys": b"\x80\x02}(K\x05N" + _NESTED + b"Nu.",
    "a nest from the memo": b"\x80\x02}" + _NESTED + b"q\x05" + b"0" + b"N0h\x05Ns.",
    "a nest from a line of the memo": b"\x80\x02}" + _NESTED + b"p5\n0N0g5\nNs.",
    "a nest that was memoized late": b"\x80\x04}" + _NESTED + b"N0\x94" + b"0h\x00Ns.",
    "a nest in a dict of a mark": b"\x80\x02(" + _NESTED + b"Nd.",
    "a nest in a set": b"\x80\x04\x8f(" + _NESTED + b"\x90.",
    "a nest in a frozen set": b"\x80\x04(" + _NESTED + b"\x91.",
    "a nest in a set of a list": b"\x80\x02cbuiltins\nset\n(]" + _NESTED + b"atR.",
    "a nest in an ordered dict": b"\x80\x02ccollections\nOrderedDict\n(]" + _NESTED + b"N\x86atR.",
    "a nest in a shape": b"\x80\x02}ctorch\nSize\n" + _NESTED + b"\x85RNs.",
    "a nest of slices": b"\x80\x02cbuiltins\nslice\n" + _NESTED + b"\x85R.",
    "a nest for a parameter": b"\x80\x02}ctorch._utils\n_rebuild_parameter\n" + _NESTED + b"\x89N\x87RNs.",
    "a key too deep for the stack": b"\x80\x02}K\x01" + b"\x85" * 300_000 + b"Ns.",
    "a broad nest as a key": b"\x80\x02}K\x01q\x01"
    + b"".join(b"(" + b"h\x01" * 999 + b"tq\x01" for _ in range(6))
    + b"Ns.",
    "a nest that is no key": b"\x80\x02}(]" + _NESTED + b"\x86Nu.",
}


def load(data: bytes) -> str:
    """reshard's error for a pickle; "" if it can be read."""
    try:
        load_pickle(data, "x.pt", lambda key, nbytes: Storage("x.pt", 0, 1 << 20))
    except ReshardError as error:
        return str(error)
    return ""


def pickles_of(path: Path) -> bytes:
    """The pickle in a torch file, or the file itself if it is a pickle."""
    if not zipfile.is_zipfile(path):
        return path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        return archive.read(next(name for name in archive.namelist() if name.endswith("data.pkl")))


def elsewhere(*words: object) -> dict[str, tuple[str, int]]:
    """The output of this module when it is run with these arguments."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.formats.test_hostile_pickles", *map(str, words)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    result: dict[str, tuple[str, int]] = json.loads(done.stdout)
    return result


def test_a_few_bytes_take_a_few_bytes() -> None:
    for name, (said, taken) in elsewhere().items():
        assert said and "MemoryError" not in said, name
        assert taken < FEW, name


def test_what_is_honest_is_read() -> None:
    """Memos as long as in honest pickles, in each protocol, and a harmless range."""
    for protocol in range(6):
        for count in (10, 300, 70_000):
            content = [str(index) for index in range(count)]
            assert pickles.loads(pickle.dumps(content, protocol), "x.pt") == content
        content = [
            True,
            1.5,
            1 << 3000,
            "é" * 300,
            b"x",
            bytearray(b"x" * 300),
            {("a", (1,)): ()},
            {2, (3, 4)},
        ]
        assert pickles.loads(pickle.dumps([content, (content, content)], protocol), "x.pt")[1][1] == content
    assert pickles.loads(pickle.dumps(range(5), 2), "x.pt") == range(5)
    endless = pickles.loads(_BUILD_RANGE + b".", "x.pt")
    assert (endless.qualname, endless.args) == ("builtins.range", (1 << 33,))


def test_an_object_stays_what_it_is() -> None:
    """No state in a pickle changes the class of an object, or replaces its methods."""
    other = b"X\x09\x00\x00\x00__class__ctorch\nOther\ns"
    assert "a pickle cannot be read" in load(b"\x80\x02cargparse\nNamespace\n)\x81N}" + other + b"\x86b.")
    items = b"X\x05\x00\x00\x00itemsN"
    found = pickles.loads(b"\x80\x02ccollections\nOrderedDict\n)R(K\x01K\x02u}" + items + b"sb.", "x.pt")
    assert list(found.items()) == [(1, 2)]
    found = pickles.loads(b"\x80\x02cargparse\nNamespace\n)\x81}(" + items + b"K\x01K\x02ub.", "x.pt")
    assert vars(found) == {"items": None}


def test_no_container_is_walked_through_twice() -> None:
    """Lists that contain another list twice, as a pickle can make them, and one that contains itself."""
    tensor = StoredTensor(Storage("x.pt", 0, 4), BY_NAME["float32"], (1,), (1,))
    nest: Any = {"step": 3, "tensors": [tensor]}
    for _ in range(60):
        nest = {"a": nest, "b": nest}
    endless: list[Any] = [nest]
    endless.append(endless)
    assert list(untrusted.stored_in(endless)) == [tensor]
    assert list(untrusted.values_of(nest, "step")) == [3]
    assert untrusted.number_of(nest, 1000) == 1001 and untrusted.number_of([[1], {"a": 2}], 1000) == 5


@pytest.mark.thorough
def test_mutated_pickles_of_frameworks(genuine: Callable[..., Genuine]) -> None:
    pytest.importorskip("megatron.core")
    source = genuine("qwen2-tp2-pp2")
    files = [source.iteration() / ".metadata", source.iteration() / "common.pt"]
    files += list(source.iteration("torch").glob("mp_rank_00_000/*.pt"))
    files += list((Path(__file__).parents[1] / "data" / "fsdp_ranks").rglob("*rank_0.pt"))[:2]
    elsewhere(*files)


def fuzz(samples: list[bytes]) -> None:
    """Mutate and load: only a ReshardError or none, and no lack of memory."""

    @settings(max_examples=500, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(st.data())
    def once(data: st.DataObject) -> None:
        pickled = bytearray(data.draw(st.sampled_from(samples)))
        for _ in range(data.draw(st.integers(1, 3))):
            at = data.draw(st.integers(0, len(pickled)))
            new = data.draw(st.sampled_from(OPCODES) | st.binary(max_size=3))
            pickled[at : at + data.draw(st.integers(0, 4))] = new
        assert "MemoryError" not in load(bytes(pickled))

    once()


OPCODES = [
    b"r\xff\xff\xff\x7f",
    b"p999999999\n",
    b"\x96",
    b"\x8e",
    b"\x8d",
    b"\x8b",
    b"X",
    b"B",
    b"T",
    b"\x95",
    b"r",
]


def main() -> None:
    """Load with little memory: crafted pickles, or mutations of the pickles in files."""
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    samples = [pickles_of(Path(word)) for word in sys.argv[1:]]
    resource.setrlimit(resource.RLIMIT_AS, (size + ALLOWED, size + ALLOWED))
    result = {}
    if samples:
        fuzz(samples)
    for name, data in CRAFTED.items() if not samples else ():
        load(b"\x80\x02N.")
        begin = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        said = load(data)
        result[name] = (said, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - begin) * 1024)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
