"""SFT on images: TRL's collator makes the pixels and tokens of each batch; records are stored as they are."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from reshard.base.errors import ReshardError
from reshard.training.data import read_records
from reshard.training.data.mix import DataMix
from reshard.training.data.record_images import has_processor
from reshard.training.data.records import DataRow
from reshard.training.data.token_files import write_stream
from reshard.training.data.tokens import LossCoverage, Sample, asking_template
from reshard.training.run import Run

CHAT_COLUMNS = ("messages", "prompt", "completion")


def is_seen(run: Run, *mixes: DataMix | None) -> bool:
    """Whether a record has images. Only models with a processor for them are asked, since all may have to be read."""
    if run.method != "sft" or not has_processor(run.model):
        return False
    paths = [path for mix in mixes if mix for path in mix.paths]
    return any("images" in row for path in paths for row in read_records(path, "sft", **run.reading))


def store(run: Run, path: Path, file: Path) -> None:
    """Write the records of a source to an Arrow file: chats as JSON, images as paths or bytes."""
    import pyarrow as arrow

    image = arrow.struct({"bytes": arrow.binary(), "path": arrow.string()})
    rows = (_stored(row) for row in read_records(path, run.method, **run.reading))
    write_stream(file, {"images": arrow.list_(image)}, rows, arrow.string())


def _stored(row: DataRow) -> DataRow:
    chats = {key: json.dumps(row[key]) for key in CHAT_COLUMNS if key in row}
    return {**chats, "images": row.get("images", [])}


def opened(columns: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """A transform of `datasets` for stored records: images are opened when they are used, as `datasets` opens them."""
    from datasets import Image

    decode = {"images": lambda images: [Image().decode_example(image) for image in images]}
    return {key: [decode.get(key, json.loads)(each) for each in column] for key, column in columns.items()}


def processor_of(run: Run, options: Mapping[str, Any], tokenizer: Any) -> Any:
    """The processor of a model, with the tokenizer of the run and its template. Raises ReshardError."""
    from transformers import AutoProcessor

    try:
        processor = AutoProcessor.from_pretrained(
            str(run.model), trust_remote_code=bool(options["trust_remote_code"])
        )
    except (
        Exception
    ) as error:  # whatever transformers raises for a config, or for a package that is not installed
        raise ReshardError(
            "processor-unreadable",
            "the processor of the model cannot be loaded",
            file=str(run.model),
            found=f"{type(error).__name__}: {error}".strip().split("\n")[0],
            remedy="pip install pillow torchvision, which most processors need; or copy the files of "
            "the base model",
        ) from None
    if options.get("chat_template_path") or not processor.chat_template:
        processor.chat_template = tokenizer.chat_template
    processor.tokenizer = tokenizer
    return processor


def prepare(run: Run, arguments: Any, options: Mapping[str, Any], tokenizer: Any, columns: list[str]) -> Any:
    """What TRL processes records of these columns with; for images the processor. Sets the arguments that depend on it.

    Texts alone leave the vision tower without gradients, which DDP has to know (as in TRL 1.16, for processors).
    """
    if has_processor(run.model) and arguments.ddp_find_unused_parameters is None:
        arguments.ddp_find_unused_parameters = True
    if "images" not in columns:
        return tokenizer
    learning = learning_of(options, columns)
    arguments.assistant_only_loss, arguments.completion_only_loss = (
        learning.assistant_only,
        learning.completion_only,
    )
    return processor_of(run, options, tokenizer)


def samples_of(run: Run, options: Mapping[str, Any], tokenizer: Any) -> Callable[[DataRow], list[Sample]]:
    """A function that makes the tokens of a record whose images are sizes, by TRL's collator. Raises ReshardError."""
    wrong = [f"--{name}" for name in ("packing", "padding_free") if options.get(name)]
    wrong += ["--truncation_mode keep_end"] if options.get("truncation_mode") == "keep_end" else []
    if wrong:  # TRL refuses them, when the ranks have loaded everything
        raise ReshardError(
            "option-not-for-images",
            "TRL does not support this for records with images",
            found=" and ".join(wrong),
            remedy="leave it out",
        )
    processor = processor_of(run, options, tokenizer)
    return lambda row: _sample(row, processor, options)


def learning_of(options: Mapping[str, Any], columns: Any) -> LossCoverage:
    """What the loss covers: TRL finds the turns of the assistant in chats only."""
    chat = "messages" in columns
    return LossCoverage(
        chat and bool(options.get("assistant_only_loss")),
        not chat and options.get("completion_only_loss") is not False,
    )


def _sample(row: DataRow, processor: Any, options: Mapping[str, Any]) -> list[Sample]:
    from PIL import Image

    chats = {key: row[key] for key in CHAT_COLUMNS if key in row}
    blank = [Image.new("RGB", (width, height)) for height, width in row.get("images", [])]
    limit = int(options.get("max_length") or 0)
    learning = learning_of(options, chats)
    with asking_template([turn for turns in chats.values() for turn in turns]):
        batch = collator_of(processor, learning, None)([{**chats, "images": blank}])
    ids, labels = batch["input_ids"][0].tolist(), batch["labels"][0].tolist()
    if blank and 0 < limit < len(ids):
        _check_cut(processor, learning, limit, {**chats, "images": blank}, len(ids))
    return [Sample(ids, [label != -100 for label in labels])]


def collator_of(processor: Any, learning: LossCoverage, limit: int | None) -> Any:
    """TRL's collator as its trainer makes it. Raises ReshardError if it cannot tell what the assistant says."""
    from trl.chat_template_utils import get_training_chat_template, has_generation_markers
    from trl.trainer.sft_trainer import DataCollatorForVisionLanguageModeling

    template = None
    try:
        if learning.assistant_only and not has_generation_markers(processor.chat_template):
            template = get_training_chat_template(processor)
    except ValueError:
        raise ReshardError(
            "chat-template-without-marks",
            "the chat template does not mark what the assistant says",
            file=str(processor.tokenizer.name_or_path),
            rule="with images, TRL needs {% generation %} in the template, or a template that it knows",
            remedy="pass --chat_template_path with a template that has the marks, or --assistant_only_loss false; or "
            "write the records as prompt and completion",
        ) from None
    return DataCollatorForVisionLanguageModeling(
        processor,
        max_length=limit,
        completion_only_loss=learning.completion_only,
        assistant_only_loss=learning.assistant_only,
        chat_template=template,
    )


def _check_cut(processor: Any, learning: LossCoverage, limit: int, example: DataRow, length: int) -> None:
    """Raise ReshardError if the maximum length would cut image tokens off: the model would refuse the batch."""
    try:
        collator_of(processor, learning, limit)([example])
    except ValueError:
        raise ReshardError(
            "image-tokens-cut",
            "the maximum length cuts image tokens off",
            expected=f"all images within --max_length {limit}",
            found=f"a record of {length} tokens",
            remedy="pass --max_length none, or a larger one; or make the images smaller",
        ) from None
