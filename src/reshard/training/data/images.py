"""Images of records: where they stand in messages, and the files or bytes that contain them.

A standard row with images has messages whose contents are lists of parts, as TRL's collator takes them, and `images`
in the order of the parts `{"type": "image"}`. Pillow opens an image when its batch is made.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from reshard.base.errors import Problem, ReshardError

Row = dict[str, Any]

MARK = "<image>"
"""The place of an image in the text of records for LLaVA, LLaMA-Factory and ms-swift."""
PAYLOADS = ("image", "path", "url")
"""Keys of an image part for its file, as in chat templates of transformers."""
BESIDE = ("tools", "chat_template_kwargs")
"""Columns that TRL's collator for images leaves out."""
ROLES = ("system", "user", "assistant", "tool")
"""Roles in chats with images (`trl.data_utils.prepare_multimodal_messages`)."""
ROTATED = 5
"""The first of EXIF's orientations in which width and height are swapped."""


def has_processor(folder: Path) -> bool:
    """Whether a model's folder has the config of a processor, and so the model sees images."""
    from reshard.folders.companions import find_companions  # which imports numpy, and --help needs none
    from reshard.transfer.sources import Sources

    return any(name.endswith("processor_config.json") for name in find_companions(Sources(), folder).files)


def with_images(clean: Row, row: Mapping[str, Any]) -> Row:
    """A standard row with the images of `row`. Without images, contents that are lists of texts become strings."""
    given = _column(row)
    chats = {key: value for key, value in clean.items() if _is_chat(value)}
    parts = [part for turn in _turns(chats) for part in _parts(turn)]
    if not given and not any(map(_is_image, parts)):
        return {**clean, **{key: [_joined(turn) for turn in chats[key]] for key in chats}}
    marked = not any(map(_is_image, parts))
    chats = {key: [_in_parts(turn, marked) for turn in value] for key, value in chats.items()}
    parts = [part for turn in _turns(chats) for part in _parts(turn) if _is_image(part)]
    if not parts and (first := next((turn for turn in _turns(chats) if turn.get("role") == "user"), None)):
        parts = [{"type": "image"} for _ in given]
        first["content"] = [*parts, *_parts(first)]
    rest = iter(given)
    images = [image for part in parts if (image := _payload(part) or next(rest, None)) is not None]
    for part in parts:
        part.clear()
        part["type"] = "image"
    return {**clean, **chats, "images": [*images, *rest]}


def _column(row: Mapping[str, Any]) -> list[Any]:
    value = row.get("image") if row.get("images") is None else row["images"]
    return value if isinstance(value, list) else [] if value is None else [value]


def _is_chat(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, Mapping) and "role" in each for each in value)


def _turns(chats: Mapping[str, Any]) -> list[Any]:
    return [turn for turns in chats.values() for turn in turns]


def _parts(turn: Mapping[str, Any]) -> list[Any]:
    content = turn.get("content")
    return content if isinstance(content, list) and all(isinstance(part, dict) for part in content) else []


def _is_image(part: Mapping[str, Any]) -> bool:
    return part.get("type") == "image"


def _is_text(part: Mapping[str, Any]) -> bool:
    return part.get("type") == "text" and isinstance(part.get("text"), str)


def _payload(part: Mapping[str, Any]) -> Any:
    return next((part[key] for key in PAYLOADS if part.get(key) is not None), None)


def _joined(turn: Row) -> Row:
    parts = _parts(turn)
    if not parts or not all(map(_is_text, parts)):
        return turn
    return {**turn, "content": "".join(part["text"] for part in parts)}


def _in_parts(turn: Row, marked: bool) -> Row:
    """A message whose content is a list of parts; `marked` text has marks in the places of images."""
    content = turn.get("content")
    if isinstance(content, str):
        pieces = re.split(f"({MARK})", content) if marked else [content]
        found = [
            {"type": "image"} if piece == MARK else {"type": "text", "text": piece}
            for piece in pieces
            if piece
        ]
        return {**turn, "content": found or [{"type": "text", "text": ""}]}
    parts = _parts(turn)
    known = parts and all(_is_image(part) or _is_text(part) for part in parts)
    plain = [
        dict(part) if _is_image(part) else {"type": "text", "text": part["text"]} for part in parts if known
    ]
    return {**turn, "content": plain} if known else turn


def text_of(content: Any) -> Any:
    """The text of a content that is a list of parts, with a mark for each image; other contents are unchanged."""
    if not isinstance(content, list) or not all(isinstance(part, dict) for part in content):
        return content
    if not all(_is_image(part) or _is_text(part) for part in content):
        return content
    return "".join(MARK if _is_image(part) else part["text"] for part in content)


def faults(clean: Row, method: str) -> Iterator[Problem]:
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
    images = clean["images"]
    places = [
        key for key, turns in chats.items() for turn in turns for part in _parts(turn) if _is_image(part)
    ]
    if len(places) != len(images):
        yield Problem(
            "images-and-places-differ",
            "a record has more images than places for them, or fewer",
            expected=f'{len(images)} places: parts {{"type": "image"}}, or {MARK} in the text',
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


def _unseen(clean: Row, chats: Mapping[str, Any], places: list[str]) -> Iterator[Problem]:
    """Problems of what TRL's collator for images refuses, or leaves out without a word."""
    ignored: list[str] = [key for key in BESIDE if key in clean]
    ignored += ["an image in the completion"] if "completion" in places else []
    for turn in _turns(chats):
        where = turn["role"] == "tool" and any(map(_is_image, _parts(turn)))
        ignored += ["an image in a message of a tool"] if where else []
        ignored += [] if turn["role"] in ROLES else [f"the role {turn['role']}"]
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


def located(image: Any, folder: Path) -> Row:
    """An image as `datasets` stores it: its bytes, or its path, which may be relative to the folder of the data."""
    value = image if isinstance(image, Mapping) else {"path": image}
    stored, path = value.get("bytes"), value.get("path")
    return {"bytes": stored, "path": str(folder / path) if path and stored is None else path}


@dataclass
class Viewer:
    """Opens the images of records before a run, and puts their sizes, height and width in pixels, in their place.

    `refusal` is the problem of records with images, if the run cannot train on them. `seen` counts the records with
    images, `beside` has the columns of others that TRL leaves out if there are images.
    """

    refusal: Problem | None = None
    seen: int = 0
    beside: set[str] = field(default_factory=set)

    def __call__(self, row: Row) -> Row:
        """A record with sizes. Raises ReshardError for images that are missing or damaged."""
        if "images" not in row:
            self.beside.update(row.keys() & set(BESIDE))
            return row
        self.seen += 1
        if self.refusal:
            raise ReshardError(self.refusal)
        sizes = [_size(image) for image in row["images"]]
        if problems := [each for each in sizes if isinstance(each, Problem)]:
            raise ReshardError(problems)
        return {**row, "images": sizes}


def _size(image: Row) -> Any:
    """The size of an image, which is decoded to see that it is complete; or its problem."""
    from PIL import Image

    stored, path = image["bytes"], image["path"]
    try:
        with Image.open(path if stored is None else io.BytesIO(stored)) as opened:
            width, height = opened.size
            swapped = opened.getexif().get(0x0112, 1) >= ROTATED
            opened.draft("RGB", (1, 1))  # decodes a JPEG at an eighth of its size
            opened.load()
    except Exception as error:  # whatever Pillow raises for a damaged file
        there = stored is not None or Path(path).is_file()
        return Problem(
            "image-not-readable" if there else "image-missing",
            "an image cannot be read" if there else "an image does not exist",
            found=f"{path}: {error}" if there else path,
            remedy="copy or download it again, or leave the record out",
        )
    return (width, height) if swapped else (height, width)
