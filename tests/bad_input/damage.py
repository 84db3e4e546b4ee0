"""Ways to damage a checkpoint, and checks of the refusals."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.numpy import load_file, save_file

from reshard.containers.dcp_metadata import DcpMetadata, read_metadata, write_metadata
from reshard.transfer.source_files import Sources
from tests.commandline import Result, listing, reshard

MEGATRON = ("--to", "megatron")
QUERY = "model.layers.1.self_attn.q_proj.weight"
Copy = Callable[[str], Path]
Problems = list[dict[str, str]]


def refused(*words: object) -> Problems:
    """Run a command that must be refused, and return the problems that it reports.

    Nothing may change in the parent of the destination (or of the only path).
    """
    paths = [word for word in words if isinstance(word, Path)]
    parent = paths[-1].parent
    before = listing(parent)
    plain, machine = reshard(*words), reshard(*words, "--json")
    assert (plain.code, machine.code) == (2, 2), plain
    assert plain.out == "" and "Traceback" not in plain.err + machine.err
    assert listing(parent) == before
    problems: Problems = machine.json["problems"]
    first = problems[0]
    for field in first.keys() - {"code", "severity"}:
        assert first[field] in plain.err
    assert "message" in first and (first.keys() & {"remedy", "expected"})
    return problems


def refusal(*words: object) -> dict[str, str]:
    """The only problem of a command that must be refused."""
    (problem,) = refused(*words)
    return problem


def converted(*words: object) -> Result:
    """Run a conversion that must succeed."""
    result = reshard("convert", *words)
    assert result.code == 0, result.err
    return result


def convert(src: Path, *flags: object) -> tuple[object, ...]:
    """The arguments of a conversion to `dst`, next to the source."""
    return ("convert", src, src.parent / "dst", *flags)


def find(folder: Path, name: str) -> Path:
    (path,) = folder.rglob(name)
    return path


def cut(path: Path, share: float) -> Path:
    os.truncate(path, int(path.stat().st_size * share))
    return path


def flip(path: Path, at: int) -> Path:
    content = bytearray(path.read_bytes())
    content[at] ^= 0x10
    path.write_bytes(content)
    return path


def edit_config(folder: Path, **changes: Any) -> None:
    """Change keys of config.json; ... removes a key."""
    path = folder / "config.json"
    config = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not ...}))


def edit_tensors(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the tensors of a folder with one safetensors file."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def edit_rank(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the model of a legacy rank, as torch itself would save it."""
    content = torch.load(path, weights_only=False)
    change(content["model"])
    torch.save(content, path)


def edit_index(folder: Path, change: Callable[[dict[str, str]], object]) -> None:
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    change(index["weight_map"])
    path.write_text(json.dumps(index))


def replace_folder(path: Path, by: Path) -> None:
    shutil.rmtree(path)
    shutil.copytree(by, path)


def edit_metadata(folder: Path, change: Callable[[DcpMetadata], object]) -> None:
    """Change the `.metadata` of a distributed checkpoint in `folder`."""
    metadata = read_metadata(folder / ".metadata", Sources())
    for tensor in metadata.tensors.values():
        tensor.chunks = [chunk._replace(file=Path(chunk.file).name) for chunk in tensor.chunks]
    for key, chunk in metadata.objects.items():
        metadata.objects[key] = chunk._replace(file=Path(chunk.file).name)
    change(metadata)
    (folder / ".metadata").write_bytes(write_metadata(metadata))
