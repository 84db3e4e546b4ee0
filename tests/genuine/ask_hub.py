"""What huggingface_hub finds at HF_ENDPOINT: `python -m tests.genuine.ask_hub QUESTIONS` prints the answers as JSON.

QUESTIONS is a JSON list of lists: the name of a function below or of huggingface_hub, and its arguments; a last
argument that is an object has those with names. What a function raises is answered with the name of its type.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any

import huggingface_hub
from huggingface_hub import HfApi, HfFileSystem
from huggingface_hub.utils import tqdm


def refs(model: str) -> dict[str, str]:
    """The commits of all branches."""
    return {each.name: each.target_commit for each in HfApi().list_repo_refs(model).branches}


def info(model: str, **options: Any) -> list[Any]:
    """The commit, and the sizes of all files."""
    found = HfApi().model_info(model, files_metadata=True, **options)
    return [found.sha, {each.rfilename: each.size for each in found.siblings or []}]


def tree(model: str, path: str | None = None, **options: Any) -> dict[str, int | None]:
    """The sizes of files; None for folders."""
    return {each.path: getattr(each, "size", None) for each in HfApi().list_repo_tree(model, path, **options)}


def paths_info(model: str, paths: list[str], **options: Any) -> dict[str, Any]:
    """The sizes of files that are named; None for folders."""
    found = HfApi().get_paths_info(model, paths, **options)
    return {each.path: getattr(each, "size", None) for each in found}


def safetensors(model: str, **options: Any) -> dict[str, Any]:
    """The dtype and shape of all tensors, and in all how many parameters each dtype has."""
    found = HfApi().get_safetensors_metadata(model, **options)
    tensors = {
        name: [each.dtype, each.shape]
        for file in found.files_metadata.values()
        for name, each in file.tensors.items()
    }
    return {"tensors": tensors, "count": found.parameter_count, "sharded": found.sharded}


def safetensors_file(model: str, path: str, **options: Any) -> list[str]:
    """The names of the tensors of a file."""
    return sorted(HfApi().parse_safetensors_file_metadata(model, path, **options).tensors)


def ranges(url: str, spans: list[list[int]]) -> list[str]:
    """Ranges of a file in hexadecimal digits, read by fsspec's cat and by seeking in an open file."""
    files = HfFileSystem(block_size=1 << 10)
    with files.open(url) as opened:
        sought = [opened.read(end - begin) for begin, end in spans if opened.seek(begin) == begin]
    cut = [files.cat_file(url, start=begin, end=end) for begin, end in spans]
    assert sought == cut
    return [each.hex() for each in cut]


def listed(url: str) -> list[str]:
    """All files below a folder."""
    return sorted(HfFileSystem().find(url))


def killing(model: str, path: str, process: int, **options: Any) -> list[Any]:
    """Download a file, and kill a process with SIGKILL when a first part has come; also the sizes of all parts."""
    parts: list[int] = []

    class Killing(tqdm):
        def update(self, n: float | None = 1) -> bool | None:
            if not parts:
                os.kill(process, signal.SIGKILL)
            parts.append(int(n or 0))
            return super().update(n)

    return [huggingface_hub.hf_hub_download(model, path, tqdm_class=Killing, **options), parts]


def named(model: str) -> list[str]:
    """Models that a search finds."""
    return sorted(each.id for each in HfApi().list_models(search=model))


def answer(question: list[Any]) -> Any:
    """The answer to one question."""
    name, *words = question
    options = words.pop() if words and isinstance(words[-1], dict) else {}
    ask = globals().get(name) or getattr(huggingface_hub, name)
    try:
        found = ask(*words, **options)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return asdict(found) if is_dataclass(found) and not isinstance(found, type) else found


if __name__ == "__main__":
    asked = json.loads(sys.argv[1])
    print(json.dumps([answer(each) for each in asked], default=lambda each: str(Path(each))))
