"""Images of records: where they stand in messages, and the files or bytes that contain them.

A standard row with images has messages whose contents are lists of parts, as TRL's collator takes them, and `images`
in the order of the parts `{"type": "image"}`. Pillow opens an image when its batch is made.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from reshard.base.errors import Problem

DataRow = dict[str, Any]

IMAGE_MARK = "<image>"
"""The place of an image in the text of records for LLaVA, LLaMA-Factory and ms-swift."""
IMAGE_KEYS = ("image", "path", "url")
"""Keys of an image part for its file, as in chat templates of transformers."""
TEMPLATE_COLUMNS = ("tools", "chat_template_kwargs")
"""Columns that chat templates use besides the messages. TRL's collator for images leaves them out."""
CHAT_ROLES = ("system", "user", "assistant", "tool")
"""Roles in chats with images (`trl.data_utils.prepare_multimodal_messages`)."""


def with_images(clean: DataRow, row: Mapping[str, Any]) -> DataRow:
    """A standard row with the images of `row`. Without images, contents that are lists of texts become strings."""
    given = _given_images(row)
    chats = {key: turns for key, turns in clean.items() if _is_chat(turns)}
    marked = not _images(chain(*chats.values()))
    read = text_of if marked and not given else partial(_in_parts, marked=marked)
    chats = {key: [_with(turn, read) for turn in turns] for key, turns in chats.items()}
    if read is text_of:
        return {**clean, **chats}
    places = _images(chain(*chats.values()))
    first = next((turn for turn in chain(*chats.values()) if turn.get("role") == "user"), None)
    if first and not places:
        places = [{"type": "image"} for _ in given]
        first["content"] = [*places, *first["content"]] if _is_parts(first["content"]) else places
    rest = iter(given)
    images = [image for part in places if (image := _payload(part) or next(rest, None)) is not None]
    for part in places:
        part.clear()
        part["type"] = "image"
    return {**clean, **chats, "images": [*images, *rest]}


def _given_images(row: Mapping[str, Any]) -> list[Any]:
    """The images in the columns of a row: in `images`, or the one in `image`."""
    value = row.get("image") if row.get("images") is None else row["images"]
    if value is None:
        return []
    return value if isinstance(value, list) else [value]


def _is_chat(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, Mapping) and "role" in each for each in value)


def _with(turn: DataRow, read: Callable[[Any], Any]) -> DataRow:
    return {**turn, "content": read(turn["content"])} if "content" in turn else turn


def _images(turns: Iterable[DataRow]) -> list[DataRow]:
    """The parts of messages that are images."""
    contents = (turn.get("content") for turn in turns)
    return [part for content in contents if isinstance(content, list) for part in content if _is_image(part)]


def _is_image(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "image"


def _is_text(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)


def _is_parts(content: Any) -> bool:
    """Whether a content is a list of parts that are texts or images."""
    return isinstance(content, list) and all(_is_text(part) or _is_image(part) for part in content)


def _payload(part: Mapping[str, Any]) -> Any:
    return next((part[key] for key in IMAGE_KEYS if part.get(key) is not None), None)


def _in_parts(content: Any, *, marked: bool) -> Any:
    """A content as a list of parts; `marked` texts have marks in the places of images. Others are unchanged."""
    content = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not _is_parts(content):
        return content
    return [
        piece
        for part in content
        for piece in (_pieces(part["text"], marked) if _is_text(part) else [{**part}])
    ]


def _pieces(text: str, marked: bool) -> list[DataRow]:
    """The parts of a text between and at its marks."""
    found = re.split(f"({IMAGE_MARK})", text) if marked else [text]
    kept = [piece for piece in found if piece] or [""]
    return [
        {"type": "image"} if marked and piece == IMAGE_MARK else {"type": "text", "text": piece}
        for piece in kept
    ]


def text_of(content: Any) -> Any:
    """The text of a content that is a list of parts, with a mark for each image; other contents are unchanged."""
    if not _is_parts(content):
        return content
    return "".join(IMAGE_MARK if _is_image(part) else part["text"] for part in content)


def faults(clean: DataRow, method: str) -> Iterator[Problem]:
    """The problems of the images of a standard row, without opening them."""
    if "images" not in clean:
        return
    chats = {key: value for key, value in clean.items() if _is_chat(value)}
    if method != "sft" or not chats:
        yield Problem(
            "images-not-for-method",
            "images need SFT and messages",
            expected='`reshard train sft`, and messages with {"type": "image"} in their content',
            found=f"{method}, and the columns {', '.join(clean)}",
            remedy="write the record as messages, or leave its images out",
        )
        return
    images, places = clean["images"], [key for key, turns in chats.items() for _ in _images(turns)]
    if len(places) != len(images):
        yield Problem(
            "images-and-places-differ",
            "a record has more images than places for them, or fewer",
            expected=f'{len(images)} places: parts {{"type": "image"}}, or {IMAGE_MARK} in the text',
            found=f"{len(places)} places",
            remedy="write one place for each image",
        )
    for wrong in [each for each in images if not _is_image_file(each)]:
        yield Problem(
            "image-not-a-file",
            "an image is not a file",
            expected='a path, relative to the data file, or {"bytes": …, "path": …}',
            found=f"{wrong!r:.60}",
            remedy="download images before the run, and write their paths",
        )
    yield from _unseen(clean, chats, places)


def _is_image_file(value: Any) -> bool:
    if isinstance(value, Mapping):
        return isinstance(value.get("bytes"), bytes) or _is_path(value.get("path"))
    return _is_path(value)


def _is_path(value: Any) -> bool:
    return isinstance(value, str) and bool(value) and not re.match(r"(https?|data|s3|gs):", value)


def _unseen(clean: DataRow, chats: Mapping[str, Any], places: list[str]) -> Iterator[Problem]:
    """Problems of what TRL's collator for images refuses, or leaves out without a word."""
    ignored: list[str] = [key for key in TEMPLATE_COLUMNS if key in clean]
    ignored += ["an image in the completion"] if "completion" in places else []
    for turn in chain(*chats.values()):
        where = turn["role"] == "tool" and _images([turn])
        ignored += ["an image in a message of a tool"] if where else []
        ignored += [] if turn["role"] in CHAT_ROLES else [f"the role {turn['role']}"]
    if ignored:
        yield unsupported(ignored)


def unsupported(ignored: list[str]) -> Problem:
    """The problem of what TRL does not support in data with images."""
    return Problem(
        "trl-ignores-beside-images",
        "TRL does not support this in data with images",
        found=", ".join(dict.fromkeys(ignored)),
        remedy="leave it out of the records",
    )


def located(image: Any, folder: Path) -> DataRow:
    """An image as `datasets` stores it: its bytes, or its path, which may be relative to the folder of the data."""
    value = image if isinstance(image, Mapping) else {"path": image}
    stored, path = value.get("bytes"), value.get("path")
    return {"bytes": stored, "path": str(folder / path) if path and stored is None else path}


def misplaced(row: DataRow, clean: DataRow) -> Iterator[Problem]:
    """The problems of images where TRL does not look for them: it takes the column `images` and parts of messages."""
    if "images" not in clean:
        return
    turns = [turn for value in row.values() if _is_chat(value) for turn in value]
    marked = any(IMAGE_MARK in str(turn.get("content")) for turn in turns)
    if marked or row.get("images") != clean["images"]:
        yield Problem(
            "images-not-in-column",
            "the images of a record are not where TRL takes them from",
            expected='"images": [PATH, …], and a part {"type": "image"} in the messages for each',
            found=f"{IMAGE_MARK} in the text" if marked else f"the columns {', '.join(row)}",
            remedy="write the paths into the column images, and the parts into the messages",
        )
    elif relative := [
        each for each in clean["images"] if isinstance(each, str) and not Path(each).is_absolute()
    ]:
        yield Problem(
            "image-path-relative",
            "the path of an image is relative",
            rule="datasets opens images from the working folder of the run",
            found=relative[0],
            remedy="write absolute paths",
        )


def unreadable(row: DataRow, folder: Path) -> Iterator[Problem]:
    """The problems of images that are missing or damaged. Without Pillow, only whether their files exist."""
    for image in row.get("images", []):
        yield from _opened(located(image, folder))


def _opened(image: DataRow) -> Iterator[Problem]:
    """Problems of an image, which is read to its end.

    PNG has a checksum for each chunk, so that only other formats need to be decoded, which takes 30 times as long.
    """
    stored, path = image["bytes"], image["path"]
    if stored is None and not Path(path).is_file():
        yield Problem(
            "image-missing",
            "an image does not exist",
            found=path,
            remedy="check its path, which is relative to the data file, or leave the record out",
        )
        return
    try:
        from PIL import Image
    except ImportError:
        return
    try:
        with Image.open(path if stored is None else io.BytesIO(stored)) as opened:
            opened.draft("RGB", (1, 1))  # decodes a JPEG at an eighth of its size
            (opened.verify if opened.format == "PNG" else opened.load)()
    except Exception as error:  # whatever Pillow raises for a damaged file
        yield Problem(
            "image-not-readable",
            "an image cannot be read",
            found=f"{path}: {error}",
            remedy="copy or download it again, or leave the record out",
        )
