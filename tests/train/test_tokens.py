"""The tokens with a loss, the same on both engines; and the token cache on disk."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from reshard.base.errors import ReshardError
from reshard.training import engine_registry
from reshard.training.data import read_records, token_files
from reshard.training.data.pretokenized import IGNORED_LABEL
from reshard.training.data.token_files import folder_of, open_tokens, tokenize
from reshard.training.data.tokens import LossCoverage, load_tokenizer, samples
from reshard.training.run import Run
from reshard.training.trl.run_data import rows_of
from tests.train.conftest import chats, write_lines
from tests.train.megatron import Seen

Tiny = Callable[..., Path]
ASSISTANT = LossCoverage(assistant_only=True)
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}
TALK: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "One and two?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "3"},
    {"role": "assistant", "content": "Three."},
    {"role": "user", "content": "And one more?"},
    {"role": "assistant", "content": "Four."},
]
TOOL = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}},
}


@pytest.fixture(scope="module")
def tokenizer(tiny: Tiny) -> Any:
    return load_tokenizer(tiny("qwen3"))


def with_template(tokenizer: Any, name: str) -> Any:
    """The tokenizer with a template of a real model, from TRL's collection."""
    import trl

    template = Path(trl.__file__).parent / "chat_templates" / f"{name}.jinja"
    changed = deepcopy(tokenizer)
    changed.bos_token = changed.eos_token
    changed.chat_template = template.read_text(encoding="utf-8")
    return changed


def of_trl(tokenizer: Any, name: str, messages: list[dict[str, Any]]) -> tuple[list[int], list[bool]]:
    """Tokens and their loss mask with TRL's assistant_only_loss, which uses its own template."""
    training = with_template(tokenizer, f"{name}_training")
    found = training.apply_chat_template(
        messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    return list(found["input_ids"]), list(map(bool, found["assistant_masks"]))


@pytest.mark.parametrize("name", ["qwen2_5", "qwen3_instruct_2507", "llama3", "phi3", "qwen3"])
def test_the_assistants_tokens_are_those_of_trl_without_its_template(name: str, tokenizer: Any) -> None:
    """The templates have no {% generation %}; TRL's templates of the same models do."""
    plain = with_template(tokenizer, name)
    assert "generation %}" not in plain.chat_template
    talk = [each for each in TALK if each["role"] in ("system", "user")][:2] + TALK[4:]
    if name == "qwen3":
        talk = talk[:3]  # TRL's template keeps thinking in the past, where the model's own leaves it out
    (sample,) = samples({"messages": talk}, plain, ASSISTANT)
    ids, learned = of_trl(tokenizer, name, talk)
    assert sample.ids == ids
    end = tokenizer("\n", add_special_tokens=False)["input_ids"][0]
    beside = [
        number
        for number, (ours, theirs) in enumerate(zip(sample.learned, learned, strict=True))
        if ours != theirs
    ]
    # Some of TRL's templates learn the end of the line that opens a turn, which nobody has to generate.
    assert all(learned[number] and ids[number] == end and not learned[number - 1] for number in beside)
    assert any(sample.learned) and not all(sample.learned)


def test_with_tools_no_call_is_left_out_and_no_result_is_learned(tokenizer: Any) -> None:
    plain = with_template(tokenizer, "qwen2_5")
    (sample,) = samples({"messages": TALK, "tools": json.dumps([TOOL])}, plain, ASSISTANT)
    learned = plain.decode([token for token, own in zip(*sample, strict=True) if own])
    assert learned == (
        '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call><|im_end|>\n'
        "Three.<|im_end|>\nFour.<|im_end|>\n"
    )
    assert '"name": "add", "parameters"' in plain.decode(sample.ids)


def test_behind_a_prompt_of_messages_the_assistants_turns_are_learned(tokenizer: Any) -> None:
    plain = with_template(tokenizer, "qwen2_5")
    row = {"prompt": TALK[:3], "completion": TALK[3:]}
    for learning, text in {
        ASSISTANT: "Three.<|im_end|>\nFour.<|im_end|>\n",
        LossCoverage(): None,
    }.items():
        (sample,) = samples(row, plain, learning)
        learned = plain.decode([token for token, own in zip(*sample, strict=True) if own])
        assert learned == text if text else "3" in learned and "And one more?" in learned


@pytest.fixture
def run(tiny: Tiny, tmp_path: Path) -> Run:
    rows = [*chats()[:5], {"messages": TALK, "tools": [TOOL]}, {"messages": TALK[1:2] + TALK[4:]}]
    return Run("sft", tiny("qwen3"), write_lines(tmp_path / "data.jsonl", rows), tmp_path / "out")  # type: ignore[arg-type]


def test_both_engines_train_on_the_same_tokens(run: Run, tokenizer: Any) -> None:
    from reshard.training.megatron.options import read
    from reshard.training.megatron.packed_rows import INPUTS, LABELS, make_rows

    options = engine_registry.engine_of(run).options(run)
    with rows_of(run, options, tokenizer, Seen()) as data:
        theirs = [(row["input_ids"], row["labels"]) for row in data.train]
    megatron = replace(run, engine="megatron", options={"seq_length": 512, "pack": False})
    rows, *_ = make_rows(megatron, read(megatron))
    assert len(rows) == len(theirs) == 7
    for row, (ids, labels) in zip(rows, theirs, strict=True):
        count = len(ids) - 1
        assert row[INPUTS, :count].tolist() == ids[:-1]
        assert row[LABELS].tolist() == [*labels[1:], *[IGNORED_LABEL] * (512 - count)]
        assert labels[0] == IGNORED_LABEL and set(labels) != {IGNORED_LABEL}
    assert not list(run.output.glob(".data-*"))


def test_tokens_of_before_are_found_and_those_of_other_data_or_options_are_not(
    run: Run, tokenizer: Any
) -> None:
    folder = run.output / "cache"
    first = tokenize(run, tokenizer, ASSISTANT, folder)
    content = first.files[0].read_bytes()
    again = tokenize(run, tokenizer, ASSISTANT, folder)
    assert (first.found, again.found, again.files) == (0, 1, first.files)
    assert "found in" in again.in_words(folder) and "--no-token-cache" in first.in_words(folder)
    others = {
        tokenize(run, tokenizer, LossCoverage(), folder).files,
        tokenize(replace(run, system="Be brief."), tokenizer, ASSISTANT, folder).files,
        tokenize(run, with_template(tokenizer, "qwen2_5"), ASSISTANT, folder).files,
    }
    (path,) = run.data.paths
    path.write_text(path.read_text() + json.dumps({"messages": TALK}) + "\n")
    others.add(tokenize(run, tokenizer, ASSISTANT, folder).files)
    assert len(others) == 4 and first.files not in others
    assert first.files[0].read_bytes() == content
    assert len(list(folder.iterdir())) == 5


def test_damaged_tokens_are_made_again(run: Run, tokenizer: Any) -> None:
    folder = run.output / "cache"
    (file,) = tokenize(run, tokenizer, ASSISTANT, folder).files
    content = file.read_bytes()
    for damaged in (b"", content[:-100], content[:40]):
        file.write_bytes(damaged)
        assert tokenize(run, tokenizer, ASSISTANT, folder).found == 0
        assert file.read_bytes() == content


def test_wrong_records_leave_no_tokens(run: Run, tokenizer: Any) -> None:
    (path,) = run.data.paths
    path.write_text(path.read_text() + "{}\n")
    with pytest.raises(ReshardError, match="SFT needs other columns"):
        tokenize(run, tokenizer, ASSISTANT, run.output / "cache")
    assert not list((run.output / "cache").iterdir())


def test_data_that_change_while_they_are_read_are_refused(
    run: Run, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (path,) = run.data.paths

    def written_to(*given: Any, **named: Any) -> Any:
        path.write_text(path.read_text() + json.dumps({"messages": TALK}) + "\n")
        return read_records(*given, **named)

    monkeypatch.setattr(token_files, "read_records", written_to)
    with pytest.raises(ReshardError, match="changed while they were read"):
        tokenize(run, tokenizer, ASSISTANT, run.output / "cache")
    assert not list((run.output / "cache").iterdir())


WRITER = """
import sys
from pathlib import Path
from reshard.training.data import read_records
from reshard.training.data.token_files import tokenize
from reshard.training.data.tokens import LossCoverage, load_tokenizer
from reshard.training.run import Run

run = Run.read(Path(sys.argv[1]))
sys.stdin.read(1)
found = tokenize(run, load_tokenizer(run.model), LossCoverage(True), run.output / "cache")
import resource
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10)
"""


def writer(run: Run) -> subprocess.Popen[str]:
    """A process that makes the tokens of a run on request, and prints its peak memory in MiB."""
    run.output.mkdir(exist_ok=True)
    (run.output / "run.json").write_text(json.dumps(run.as_dict()))
    words = [sys.executable, "-c", WRITER, str(run.output)]
    return subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_two_writers_leave_the_same_tokens(run: Run, tokenizer: Any) -> None:
    both = [writer(run), writer(run)]
    for each in both:
        assert each.stdin is not None
        each.stdin.write("x")
        each.stdin.flush()
    assert [each.wait() for each in both] == [0, 0]
    (file,) = (run.output / "cache").iterdir()
    (alone,) = tokenize(run, tokenizer, ASSISTANT, run.output / "other").files
    assert file.read_bytes() == alone.read_bytes()


@pytest.mark.slow
def test_memory_does_not_grow_with_the_data(run: Run, tmp_path: Path) -> None:
    peaks = []
    for count in (2_000, 12_000):
        rows = [{"text": f"{number} " * 200} for number in range(count)]
        data = write_lines(tmp_path / f"{count}.jsonl", rows)  # type: ignore[arg-type]
        out, _ = writer(Run("sft", run.model, data, tmp_path / str(count))).communicate("x")
        peaks.append(int(out))
        written = sum(file.stat().st_size for file in (tmp_path / str(count) / "cache").iterdir())
    assert peaks[1] - peaks[0] < (written >> 20) / 2, (
        peaks
    )  # as lists, tokens take four times what is written


def test_tokens_are_read_by_their_number_through_all_files(run: Run, tokenizer: Any, tmp_path: Path) -> None:
    texts = [{"text": f"{number} " * (number % 7 + 1)} for number in range(3000)]
    whole = Run("sft", run.model, write_lines(tmp_path / "many.jsonl", texts), run.output)  # type: ignore[arg-type]
    folder = tmp_path / "cache"
    files = [
        *tokenize(run, tokenizer, ASSISTANT, folder).files,
        *tokenize(whole, tokenizer, ASSISTANT, folder).files,
    ]
    found = open_tokens(*files)
    assert len(found) == 3007
    for number in (0, 255, 256, 2999):
        (expected,) = samples(texts[number], tokenizer)
        assert found[7 + number].ids.tolist() == expected.ids
        assert np.all(found[7 + number].learned)
    code = f"from reshard.training.data.token_files import open_tokens, Path; open_tokens(Path({str(files[0])!r}))"
    asked = f"{code}; import sys; assert 'pyarrow' in sys.modules and 'pandas' not in sys.modules"
    subprocess.run([sys.executable, "-c", asked], check=True)


def test_the_cache_is_the_users_unless_it_is_switched_off_or_cannot_be_written(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    own = tmp_path / "own"
    assert folder_of(run, own) == tmp_path / "home/reshard/tokens"
    assert folder_of(replace(run, token_cache=False), own) == own
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert folder_of(run, own) == own


def test_the_loss_of_packed_samples_is_that_of_samples_alone(
    run: Run, tiny: Tiny, tokenizer: Any, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM
    from trl import SFTConfig, SFTTrainer

    losses = {}
    for attention in ("sdpa", "eager"):
        model = AutoModelForCausalLM.from_pretrained(run.model, attn_implementation=attention)
        with rows_of(run, engine_registry.engine_of(run).options(run), tokenizer, Seen()) as data:
            for packing in (False, True):
                settings = SFTConfig(
                    str(tmp_path / "trl"),
                    use_cpu=True,
                    bf16=False,
                    report_to="none",
                    max_length=512,
                    packing=packing,
                    per_device_eval_batch_size=8,
                )
                trainer = SFTTrainer(
                    model,
                    settings,
                    train_dataset=data.train,
                    eval_dataset=data.train,
                    processing_class=tokenizer,
                )
                assert (len(trainer.eval_dataset) < 7) == packing
                losses[attention, packing] = trainer.evaluate()["eval_loss"]
    assert list(losses.values()) == pytest.approx([losses["sdpa", False]] * 4, abs=1e-5)


def test_packing_is_refused_for_models_that_carry_a_state_through_a_sequence(run: Run) -> None:
    from transformers import MambaConfig, MambaForCausalLM

    from reshard.training.trl.rank_training import check_packing

    model = MambaForCausalLM(MambaConfig(vocab_size=8, hidden_size=8, num_hidden_layers=1, state_size=2))
    with pytest.raises(ReshardError, match="would see each other in this model"):
        check_packing(run, model)
