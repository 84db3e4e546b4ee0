"""Genuine files with one value replaced by another type: readers must report damage, or accept the value.

    python -m tests.bad_input.swap SEED COUNT FOLDER...

Prints a line for each kind of failure that is not a ReshardError; each folder is one checkpoint, and each of its COUNT
copies has another value replaced.
"""

from __future__ import annotations

import json
import pickletools
import random
import resource
import shutil
import sys
import tempfile
import traceback
import zipfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import reshard
from reshard.base.errors import ReshardError
from tests.commandline import Late, within

ALLOWED = 1 << 30
EACH = 10
"""Seconds that planning one conversion may take."""

PLAIN: list[Any] = [
    None,
    True,
    False,
    -1,
    0,
    3,
    10**12,
    1 << 70,
    1e400,
    -0.5,
    float("nan"),
    "",
    "x",
    "²",
    "1",
]
PLAIN += ["../x", "x" * 5000, [], ["x"], [[1]], {}, {"a": 1}, {"a": {"b": []}}]
PICKLED = [
    b"N",
    b"\x88",
    b"J\xff\xff\xff\xff",
    b"K\x00",
    b"K\x03",
    b"\x8a\x06\0\0\0\0\0\x01",
    b"\x8a\x09" + b"\1" * 9,
]
PICKLED += [
    b"G\x7f\xf0\0\0\0\0\0\0",
    b"G?\xf0\0\0\0\0\0\0",
    b"X\0\0\0\0",
    b"X\1\0\0\0x",
    b"X\2\0\0\0\xc2\xb2",
    b"U\1x",
]
PICKLED += [
    b"]",
    b"]K\1a",
    b"](K\1K\2e",
    b"}",
    b"}K\1K\2s",
    b"}X\1\0\0\0xNs",
    b")",
    b"K\1\x85",
    b"K\1K\2\x86",
]
PICKLED += [b"ctorch\nfloat32\n", b"ctorch\nOther\n", b"ctorch\nOther\n)\x81", b"ctorch\nOther\n)R}b"]
PICKLED += [b"cbuiltins\nset\n(]K\1atR", b"cargparse\nNamespace\n)\x81", b"ccollections\nOrderedDict\n)R"]
_VALUES = ")]}" + "NIJKMLGXUTVBC\x88\x89\x8a\x8b\x8c\x8d" + "Rbtseau\x81\x85\x86\x87Q" + "hj"


def swapped(pickled: bytes, chance: random.Random) -> bytes:
    """A pickle with one of its values replaced by another."""
    ops = [(op.code, at) for op, _, at in pickletools.genops(pickled)]
    ends = [*(at for _, at in ops[1:]), len(pickled)]
    frames = [(at, end) for (code, at), end in zip(ops, ends, strict=True) if code == "\x95"]
    places = [end for (code, _), end in zip(ops[:-1], ends, strict=False) if code in _VALUES]
    place, other = chance.choice(places), b"0" + chance.choice(PICKLED)
    pieces, begin = [], 0
    for at, end in [*frames, (len(pickled), 0)]:
        if begin <= place <= at:
            pieces += [pickled[begin:place], other, pickled[place:at]]
            place = -1
        else:
            pieces.append(pickled[begin:at])
        begin = end
    return b"".join(pieces)


def swap_json(content: Any, chance: random.Random) -> Any:
    """JSON with one of its values replaced by another."""
    places: list[tuple[Any, Any]] = []
    waiting = [content]
    while waiting:
        found = waiting.pop()
        keys = (
            list(found) if isinstance(found, dict) else range(len(found)) if isinstance(found, list) else []
        )
        places += [(found, key) for key in keys]
        waiting += [found[key] for key in keys]
    for _ in range(chance.choice([1, 1, 2])):
        holder, key = chance.choice(places)
        with suppress(LookupError):
            holder[key] = chance.choice(PLAIN)
    return content


def swap(file: Path, chance: random.Random) -> None:
    """Replace a value of a file."""
    if file.suffix in (".json", ".yaml"):
        import yaml

        content = yaml.safe_load(file.read_text()) if file.suffix == ".yaml" else json.loads(file.read_text())
        file.write_text(json.dumps(swap_json(content, chance)))
    elif file.suffix == ".safetensors":
        raw = file.read_bytes()
        end = 8 + int.from_bytes(raw[:8], "little")
        header = json.dumps(swap_json(json.loads(raw[8:end]), chance)).encode()
        file.write_bytes(len(header).to_bytes(8, "little") + header + raw[end:])
    elif file.name == ".metadata":
        file.write_bytes(swapped(file.read_bytes(), chance))
    else:
        with zipfile.ZipFile(file) as archive:
            members = {name: archive.read(name) for name in archive.namelist()}
        with zipfile.ZipFile(file, "w") as archive:
            for name, content in members.items():
                archive.writestr(name, swapped(content, chance) if name.endswith("/data.pkl") else content)


def structured(folder: Path) -> list[Path]:
    """The files of a checkpoint with metadata, and those with tensors."""
    suffixes = {".json", ".yaml", ".safetensors", ".pt", ".bin"}
    return sorted(path for path in folder.rglob("*") if path.suffix in suffixes or path.name == ".metadata")


def attempt(folder: Path) -> None:
    """Run everything that reads a checkpoint without writing."""
    with suppress(ReshardError):
        reshard.inspect(folder)
    for target in ("huggingface", "megatron", "peft"):
        with suppress(ReshardError):
            reshard.convert(
                folder, folder.parent / "dst", to=target, dry_run=True, with_optimizer=target == "megatron"
            )
        with suppress(ReshardError):
            reshard.convert(folder, folder.parent / "dst", to=target, dry_run=True)


def failures(folders: list[Path], seed: int, count: int) -> Iterator[str]:
    """Errors other than ReshardError, and where they were raised."""
    chance = random.Random(seed)
    seen: set[str] = set()
    for original in folders * count:
        with tempfile.TemporaryDirectory() as place:
            folder = Path(place) / original.name
            shutil.copytree(original, folder)
            file = chance.choice(structured(folder))
            swap(file, chance)
            try:
                with within(EACH):
                    attempt(folder)
            except (Exception, Late) as error:
                frames = [f for f in traceback.extract_tb(error.__traceback__) if "/reshard/" in f.filename]
                where = " < ".join(f"{Path(f.filename).name}:{f.lineno}" for f in reversed(frames[-3:]))
                told = f"{type(error).__name__} at {where}"
                if told not in seen:
                    seen.add(told)
                    yield f"{original.name}/{file.relative_to(folder)}: {told}: {str(error)[:200]}"


if __name__ == "__main__":
    begin = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (begin + ALLOWED, begin + ALLOWED))
    for line in failures([Path(word) for word in sys.argv[3:]], int(sys.argv[1]), int(sys.argv[2])):
        print(line, flush=True)
