"""SFT on images: records are checked before the start, losses are those of plain TRL, and the final folder loads."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from reshard.base.errors import ReshardError
from reshard.checks.environment import Environment
from reshard.training import trl
from reshard.training.data import read_records
from reshard.training.data.record_images import ImageViewer
from reshard.training.finish import finish
from reshard.training.preflight import preflight
from reshard.training.run import Run
from tests.environments import python
from tests.train.conftest import chats, write_lines
from tests.train.trl_plans import resumed, run_of
from tests.train.trl_runs import Ran, train

pytest.importorskip("PIL", reason="no Pillow: pip install pillow torchvision")

from PIL import Image

from tests.train.vision import VARIABLE, as_trl_wants, colours, make_vision_model, paint, plain_losses

NOWHERE = Environment({}, [], None, {})
NAME = os.environ.get(VARIABLE, "gemma3")
EVAL = {"eval_steps": None, "eval_on_start": False}


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_vision_model(NAME, tmp_path_factory.mktemp(NAME))


@pytest.fixture(scope="session")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `data.jsonl` and the images that it names."""
    folder = paint(tmp_path_factory.mktemp("pictures"))
    write_lines(folder / "data.jsonl", colours())
    return folder


@pytest.fixture(scope="session")
def ran(model: Path, pictures: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Ran]:
    done: dict[bool, Ran] = {}

    def get(lora: bool = False) -> Ran:
        if lora not in done:
            output = tmp_path_factory.mktemp("out")
            run = run_of("one", "sft", model, pictures / "data.jsonl", output, lora, 1, EVAL)
            done[lora] = train(run, 1)
            assert not done[lora].failed, done[lora].log
        return done[lora]

    return get


@pytest.mark.thorough
def test_losses_are_those_of_plain_trl_to_the_bit(
    ran: Callable[..., Ran], pictures: Path, tmp_path: Path
) -> None:
    one = ran()
    rows = as_trl_wants(colours(), pictures)
    assert one.losses == plain_losses(one.run, rows, tmp_path, config={"assistant_only_loss": True})
    assert one.losses[0] - one.losses[-1] > 1


@pytest.mark.slow
def test_an_adapter_is_that_of_plain_trl_and_of_the_language_model_only(
    ran: Callable[..., Ran], pictures: Path, tmp_path: Path
) -> None:
    from peft import LoraConfig
    from safetensors import safe_open

    one = ran(lora=True)
    config = LoraConfig(
        r=16,
        lora_alpha=32,
        task_type="CAUSAL_LM",
        target_modules="all-linear",
        exclude_modules=r".*(visual|vision_tower|multi_modal_projector).*",
    )
    rows = as_trl_wants(colours(), pictures)
    plain = plain_losses(one.run, rows, tmp_path, config={"assistant_only_loss": True}, peft_config=config)
    assert one.losses == plain
    with safe_open(one.trained.checkpoint / "adapter_model.safetensors", "pt") as file:
        assert all(".language_model.layers." in name for name in file.keys())  # noqa: SIM118


@pytest.mark.thorough
def test_a_run_goes_on_as_if_it_had_not_been_killed(ran: Callable[..., Ran], tmp_path: Path) -> None:
    again = resumed(ran(), tmp_path, ranks=1)
    assert not again.failed, again.log
    assert again.losses == ran().losses[2:]
    assert again.trained.digests == ran().trained.digests


@pytest.mark.thorough
@pytest.mark.parametrize("lora", [False, True])
def test_the_final_folder_answers_about_an_image(lora: bool, ran: Callable[..., Ran], pictures: Path) -> None:
    from transformers import AutoModelForImageTextToText, AutoProcessor

    done = finish(ran(lora).run)
    assert done.whole, [str(problem) for problem in done.problems]
    folder = done.merged or done.final
    names = {file.name for file in folder.iterdir()}
    assert names >= {"preprocessor_config.json", "processor_config.json", "chat_template.jinja"}
    processor = AutoProcessor.from_pretrained(folder)
    trained, told = AutoModelForImageTextToText.from_pretrained(folder, output_loading_info=True)
    assert not any(told[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    chat = [{"role": "user", "content": [{"type": "image", "image": Image.open(pictures / "1.png")}]}]
    batch = processor.apply_chat_template([chat], tokenize=True, return_dict=True, return_tensors="pt")
    assert trained.generate(**batch, max_new_tokens=2).shape[1] > batch["input_ids"].shape[1]


@pytest.mark.thorough
def test_texts_alone_train_a_model_that_sees(model: Path, tmp_path: Path) -> None:
    data = write_lines(tmp_path / "chats.jsonl", chats())
    run = run_of("one", "sft", model, data, tmp_path / "out", False, 1, EVAL)
    assert preflight(run, environment=NOWHERE).problems == []
    done = train(run, 1)
    assert not done.failed, done.log
    assert trl.ENGINE.check(run, done.trained, done.trained.checkpoint) == []


@pytest.mark.slow
def test_texts_among_images_are_trained_on_too(model: Path, pictures: Path, tmp_path: Path) -> None:
    rows = [*colours(8), *chats()[:8]]
    data = write_lines(pictures / "mixed.jsonl", rows)
    run = run_of("one", "sft", model, data, tmp_path / "out", False, 1, EVAL)
    assert preflight(run, environment=NOWHERE).problems == []
    done = train(run, 1)
    assert not done.failed, done.log
    parts = [
        {"messages": [{**t, "content": [{"type": "text", "text": t["content"]}]} for t in row["messages"]]}
        for row in rows[8:]
    ]
    plain = as_trl_wants([*rows[:8], *parts], pictures)
    assert done.losses == plain_losses(run, plain, tmp_path, config={"assistant_only_loss": True})


@pytest.mark.thorough
def test_prompts_with_images_and_completions_are_those_of_plain_trl(
    model: Path, pictures: Path, tmp_path: Path
) -> None:
    rows = [{"prompt": row["messages"][:1], "completion": row["messages"][1:]} for row in colours()]
    data = write_lines(pictures / "prompts.jsonl", rows)
    run = run_of("one", "sft", model, data, tmp_path / "out", False, 1, EVAL)
    assert preflight(run, environment=NOWHERE).problems == []
    done = train(run, 1)
    assert not done.failed, done.log
    plain = as_trl_wants(colours(), pictures).map(
        lambda row: {"prompt": row["messages"][:1], "completion": row["messages"][1:]},
        remove_columns="messages",
    )
    assert done.losses == plain_losses(run, plain, tmp_path)


@pytest.mark.slow
def test_two_ranks_have_the_losses_of_one(ran: Callable[..., Ran], tmp_path: Path) -> None:
    for plan in ("ddp", "fsdp2"):
        run = ran().run
        options = {**run.options, "per_device_train_batch_size": 2}
        both = train(replace(run, output=tmp_path / plan, parallel=plan, options=options), 2)
        assert not both.failed, both.log
        assert both.losses == pytest.approx(ran().losses, abs=1e-4)


def test_images_are_found_in_every_usual_form(pictures: Path, tmp_path: Path) -> None:
    question, answer = {"role": "user", "content": "What?"}, {"role": "assistant", "content": "Red."}
    as_text = [{"type": "text", "text": "Red."}]
    seen = [{"type": "image"}, {"type": "text", "text": "What?"}]
    marked = {"from": "human", "value": "What?<image>"}
    forms = [
        ({"messages": [question, answer], "images": ["a.png"]}, seen),
        ({"messages": [question, answer], "image": {"bytes": None, "path": "a.png"}}, seen),
        ({"conversations": [marked, {"from": "gpt", "value": "Red."}], "image": "a.png"}, seen[::-1]),
        ({"messages": [{**question, "content": seen}, answer], "images": ["a.png"]}, seen),
        (
            {"messages": [{**question, "content": [{"type": "image", "path": "a.png"}, seen[1]]}, answer]},
            seen,
        ),
    ]
    for row, parts in forms:
        (found,) = read_records(write_lines(tmp_path / "data.jsonl", [row]), "sft")
        assert found["images"] == [{"bytes": None, "path": str(tmp_path / "a.png")}]
        assert [turn["content"] for turn in found["messages"]] == [parts, as_text]


def test_parts_that_are_texts_are_one_text(tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "What is "}, {"type": "text", "text": "it?"}]
    row = {"messages": [{"role": "user", "content": parts}, {"role": "assistant", "content": "Red."}]}
    (found,) = read_records(write_lines(tmp_path / "data.jsonl", [row]), "sft")
    assert found["messages"][0]["content"] == "What is it?"


def test_images_of_parquet_are_bytes(model: Path, pictures: Path, tmp_path: Path) -> None:
    from datasets.table import embed_table_storage

    rows = as_trl_wants(colours(4), pictures).with_format("arrow").map(embed_table_storage, batched=True)
    rows.to_parquet(str(tmp_path / "data.parquet"))
    stored = [row["images"][0]["bytes"] for row in read_records(tmp_path / "data.parquet", "sft")]
    assert stored == [(pictures / f"{n}.png").read_bytes() for n in range(4)]
    run = run_of("one", "sft", model, tmp_path / "data.parquet", tmp_path / "out", False, 1, EVAL)
    found = preflight(run, environment=NOWHERE)
    assert found.problems == [] and found.lengths and found.lengths.records == 4


def test_lengths_count_the_tokens_of_images(model: Path, pictures: Path, tmp_path: Path) -> None:
    from transformers import AutoProcessor

    run = run_of("one", "sft", model, pictures / "data.jsonl", tmp_path, False, 1, EVAL)
    found = preflight(run, environment=NOWHERE)
    processor = AutoProcessor.from_pretrained(model)
    rows = as_trl_wants(colours(), pictures)
    texts = [processor.apply_chat_template(row["messages"]) for row in rows]
    ids = [
        processor(text=[text], images=[row["images"]], add_special_tokens=False)["input_ids"][0]
        for text, row in zip(texts, rows, strict=True)
    ]
    assert found.problems == [] and found.lengths
    assert (found.lengths.tokens, found.lengths.longest) == (sum(map(len, ids)), max(map(len, ids)))
    assert [each.code for each in found.warnings if "vision" in each.code] == ["memory-without-vision-tower"]


def wrong(rows: list[dict[str, Any]], model: Path, folder: Path, **more: Any) -> list[tuple[str, str]]:
    """Code and place of each problem of rows before the start."""
    data = write_lines(folder / "data.jsonl", rows)
    run = replace(Run("sft", model, data, folder / "out"), **more)
    return [
        (each.code, (each.file or "").removeprefix(str(folder)))
        for each in preflight(run, environment=NOWHERE).problems
    ]


def test_images_that_are_missing_or_damaged_are_named_by_line(model: Path, tmp_path: Path) -> None:
    rows = colours(3)
    paint(tmp_path, 2)
    Image.effect_noise((64, 64), 50).save(tmp_path / "whole.jpg")
    (tmp_path / "1.png").write_bytes((tmp_path / "whole.jpg").read_bytes()[:900])
    assert wrong(rows, model, tmp_path) == [
        ("image-not-readable", "/data.jsonl:2"),
        ("image-missing", "/data.jsonl:3"),
    ]


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF"])
def test_an_image_of_any_format_is_read_to_its_end(kind: str, tmp_path: Path) -> None:
    file = tmp_path / "image"
    Image.effect_noise((64, 48), 50).convert("RGB").save(file, kind)
    whole, row = file.read_bytes(), {"images": [{"bytes": None, "path": str(file)}]}
    assert ImageViewer()(row)["images"] == [(48, 64)]
    changed = bytearray(whole)
    changed[len(whole) // 2] ^= 255
    for damaged in (whole[: len(whole) // 2], *([bytes(changed)] if kind == "PNG" else [])):
        file.write_bytes(damaged)
        with pytest.raises(ReshardError) as caught:
            ImageViewer()(row)
        assert [each.code for each in caught.value.problems] == ["image-not-readable"]


@pytest.mark.parametrize("images", [[], ["0.png"] * 2])
def test_images_and_places_must_match(images: list[str], model: Path, tmp_path: Path) -> None:
    rows = colours(1)
    rows[0]["messages"][0]["content"][0] = {"type": "image"}
    rows[0]["images"] = images
    paint(tmp_path, 1)
    assert wrong(rows, model, tmp_path) == [("images-and-places-differ", "/data.jsonl:1")]


def test_models_and_methods_without_images_refuse_them(
    model: Path, tiny: Callable[..., Path], tmp_path: Path
) -> None:
    rows = colours(1)
    paint(tmp_path, 1)
    place = ("images-not-trainable", "/data.jsonl:1")
    assert wrong(rows, tiny("qwen3"), tmp_path) == [place]
    assert place in wrong(rows, tiny("qwen3"), tmp_path, engine="megatron")
    turns = rows[0]["messages"]
    pair = {"prompt": turns[:1], "chosen": turns[1:], "rejected": [{"role": "assistant", "content": "No."}]}
    assert ("images-not-for-method", "/data.jsonl:1") in wrong([pair], model, tmp_path, method="dpo")


def test_what_trl_would_refuse_or_ignore_is_refused_before_the_start(model: Path, tmp_path: Path) -> None:
    rows = colours(1)
    paint(tmp_path, 1)
    codes = [
        wrong(rows, model, tmp_path, options={"packing": True, "max_length": 64}),
        wrong(rows, model, tmp_path, options={"max_length": 12}),
        wrong([{**rows[0], "tools": [{"name": "look"}]}], model, tmp_path),
        wrong([rows[0], {**chats()[0], "tools": [{"name": "look"}]}], model, tmp_path),
        wrong([{"text": "a", "image": "0.png"}], model, tmp_path),
        wrong([{**rows[0], "images": ["https://a.org/b.png"]}], model, tmp_path),
    ]
    assert [{code for code, _ in each} for each in codes] == [
        {"option-not-for-images"},
        {"image-tokens-cut"},
        {"trl-ignores-beside-images"},
        {"trl-ignores-beside-images"},
        {"images-not-for-method"},
        {"images-and-places-differ", "image-not-a-file"},
    ]


@pytest.mark.slow
@pytest.mark.skipif(NAME != "gemma3", reason="this is that run")
def test_all_of_this_holds_for_qwen() -> None:
    """Its processor needs torchvision."""
    words = [python("vision"), "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not slow", __file__]
    paths = os.pathsep.join(
        [str(Path(__file__).with_name("torchvision_ops")), os.environ.get("PYTHONPATH", "")]
    )
    environment = {**os.environ, VARIABLE: "qwen2_5_vl", "PYTHONPATH": paths}
    done = subprocess.run(
        words, env=environment, capture_output=True, text=True, cwd=Path(__file__).parents[2]
    )
    assert done.returncode == 0, done.stdout
