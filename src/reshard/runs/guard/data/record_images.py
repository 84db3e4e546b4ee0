"""Images of records, as TRL takes them: files in the column `images`, and a part of a message in the place of each.

TRL puts them into the places in their order, or before the first text of a user if there are no places
(`trl.data_utils.prepare_multimodal_messages`). Pillow opens an image when its batch is made.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

from reshard.base.errors import Problem

DataRow = dict[str, Any]

IMAGE_MARK = "<image>"
"""The place of an image in the text of records for LLaVA, LLaMA-Factory and ms-swift."""
TEMPLATE_COLUMNS = ("tools", "chat_template_kwargs")
"""Columns that chat templates use besides the messages. TRL's collator for images leaves them out."""
CHAT_ROLES = ("system", "user", "assistant", "tool")
"""Roles in chats with images (`trl.data_utils.prepare_multimodal_messages`)."""


def with_images(clean: DataRow, row: Mapping[str, Any]) -> DataRow:
    """A standard row with the images of `row`. Without images, contents that are lists of texts become strings."""
    chats = _chats(clean)
    images = row.get("images")
    if images is None and row.get("image") is None and not any(map(_places, chain(*chats.values()))):
        return {**clean, **{key: [_as_text(turn) for turn in turns] for key, turns in chats.items()}}
    return {**clean, "images": images if isinstance(images, list) else []}


def _chats(row: Mapping[str, Any]) -> dict[str, list[DataRow]]:
    """The columns that are lists of messages."""
    return {
        key: value
        for key, value in row.items()
        if isinstance(value, list) and all(isinstance(each, Mapping) and "role" in each for each in value)
    }


def _as_text(turn: DataRow) -> DataRow:
    return {**turn, "content": text_of(turn["content"])} if "content" in turn else turn


def _places(turn: Mapping[str, Any]) -> list[DataRow]:
    """The parts of a message that are images."""
    content = turn.get("content")
    return [part for part in content if _is_image(part)] if isinstance(content, list) else []


def _is_image(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "image"


def _is_text(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)


def text_of(content: Any) -> Any:
    """The text of a content that is a list of parts, with a mark for each image; other contents are unchanged."""
    if not isinstance(content, list) or not all(_is_text(part) or _is_image(part) for part in content):
        return content
    return "".join(IMAGE_MARK if _is_image(part) else part["text"] for part in content)


def faults(row: Mapping[str, Any], clean: DataRow, method: str) -> Iterator[Problem]:
    """The problems of the images of a row, whose standard row is `clean`."""
    if "images" not in clean:
        return
    chats = _chats(clean)
    turns = list(chain(*chats.values()))
    if method != "sft" or not chats:
        yield Problem(
            "images-not-for-method",
            "images need SFT and messages",
            expected='`reshard train sft`, and messages with {"type": "image"} in their content',
            found=f"{method}, and the columns {', '.join(clean)}",
            remedy="write the record as messages, or leave its images out",
        )
        return
    marked = any(IMAGE_MARK in str(turn.get("content")) for turn in turns)
    if marked or row.get("images") != clean["images"]:
        yield Problem(
            "images-not-in-column",
            "the images of a record are not where TRL takes them from",
            expected='"images": [PATH, …], and a part {"type": "image"} in the messages for each',
            found=f"{IMAGE_MARK} in the text" if marked else f"the columns {', '.join(row)}",
            remedy="write the paths into the column images, and the parts into the messages",
        )
        return
    yield from _of_places(turns, len(clean["images"]))
    for image in clean["images"]:
        yield from _of_image(image)
    yield from _ignored(clean, chats)


def _of_places(turns: list[DataRow], images: int) -> Iterator[Problem]:
    """A problem if there are more or fewer places than images, and TRL does not make them itself."""
    places = sum(len(_places(turn)) for turn in turns)
    has_text = any(turn["role"] == "user" and isinstance(turn.get("content"), str) for turn in turns)
    if places != images and (places or not has_text):
        yield Problem(
            "images-and-places-differ",
            "a record has more images than places for them, or fewer",
            expected=f'{images} places: parts {{"type": "image"}}',
            found=f"{places} places",
            remedy="write one place for each image",
        )


def _ignored(clean: DataRow, chats: Mapping[str, list[DataRow]]) -> Iterator[Problem]:
    """A problem of what TRL's collator for images refuses, or leaves out without a word."""
    ignored: list[str] = [key for key in TEMPLATE_COLUMNS if key in clean]
    if any(map(_places, chats.get("completion", ()))):
        ignored.append("an image in the completion")
    for turn in chain(*chats.values()):
        if turn["role"] == "tool" and _places(turn):
            ignored.append("an image in a message of a tool")
        if turn["role"] not in CHAT_ROLES:
            ignored.append(f"the role {turn['role']}")
    if ignored:
        yield Problem(
            "trl-ignores-beside-images",
            "TRL does not support this in data with images",
            found=", ".join(dict.fromkeys(ignored)),
            remedy="leave it out of the records",
        )


def _of_image(image: Any) -> Iterator[Problem]:
    """The problem of an image: a path, or as `datasets` stores it, with its bytes or its path."""
    stored, path = (image.get("bytes"), image.get("path")) if isinstance(image, Mapping) else (None, image)
    if isinstance(stored, bytes):
        yield from _unreadable(io.BytesIO(stored), path)
    elif not isinstance(path, str) or not path or re.match(r"(https?|data|s3|gs):", path):
        yield Problem(
            "image-not-a-file",
            "an image is not a file",
            expected='an absolute path, or {"bytes": …, "path": …}',
            found=f"{image!r:.60}",
            remedy="download images before the run, and write their paths",
        )
    elif not Path(path).is_absolute():
        yield Problem(
            "image-path-relative",
            "the path of an image is relative",
            rule="datasets opens images from the working folder of the run",
            found=path,
            remedy="write absolute paths",
        )
    elif not Path(path).is_file():
        yield Problem(
            "image-missing",
            "an image does not exist",
            found=path,
            remedy="check its path, or leave the record out",
        )
    else:
        yield from _unreadable(path, path)


def _unreadable(image: str | io.BytesIO, name: Any) -> Iterator[Problem]:
    """The problem of an image that is damaged, if Pillow is installed.

    PNG has a checksum for each chunk, so that only other formats need to be decoded, which takes 30 times as long.
    """
    try:
        from PIL import Image
    except ImportError:
        return
    try:
        with Image.open(image) as opened:
            opened.draft("RGB", (1, 1))  # decodes a JPEG at an eighth of its size
            (opened.verify if opened.format == "PNG" else opened.load)()
    except Exception as error:  # whatever Pillow raises for a damaged file
        yield Problem(
            "image-not-readable",
            "an image cannot be read",
            found=f"{name}: {error}",
            remedy="copy or download it again, or leave the record out",
        )
