"""The tokens of a sample with a loss, the packing of samples into rows, and the rows of each step."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reshard.algebra.layout import Layout
from reshard.base.errors import ReshardError
from reshard.training.data.tokens import LossCoverage, Sample, load_tokenizer, samples
from reshard.training.megatron.options import read
from reshard.training.megatron.packed_rows import (
    IGNORED_LABEL,
    INPUTS,
    LABELS,
    SAMPLES,
    RowOrder,
    SampleCounts,
    key_of,
    make_rows,
    packed,
    pieces_of,
    put_together,
    rank_tokens,
    sample_bounds,
)
from reshard.training.run import Run
from tests.train.conftest import chats, write_lines

Tiny = Callable[..., Path]


@pytest.fixture(scope="module")
def tokenizer(tiny: Tiny) -> Any:
    return load_tokenizer(tiny("qwen3"))


def learned(record: dict[str, Any], tokenizer: Any) -> str:
    """The text of the tokens with a loss."""
    (sample,) = samples(record, tokenizer, LossCoverage(assistant_only=True))
    return str(tokenizer.decode([token for token, wanted in zip(*sample, strict=True) if wanted]))


TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "One and one?"},
    {"role": "assistant", "content": "Two."},
    {"role": "user", "content": "And one more?"},
    {"role": "assistant", "content": "Three."},
]


def test_of_a_chat_all_answers_are_learned_with_their_ends(tokenizer: Any) -> None:
    text = learned({"messages": TALK}, tokenizer)
    assert text == "Two.<|im_end|>\nThree.<|im_end|>\n"


def test_the_marks_of_a_template_go_before_rendering(tiny: Tiny) -> None:
    marking = load_tokenizer(tiny("qwen3"))
    marking.chat_template = (
        "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
        "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] }}{% endgeneration %}"
        "{% else %}{{ message['content'] }}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    )
    assert learned({"messages": TALK}, marking) == "Two.Three."


def test_of_a_template_that_rewrites_the_past_all_answers_are_learned(tiny: Tiny) -> None:
    thinking = load_tokenizer(tiny("qwen3"))
    thinking.chat_template = (
        "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
        "{% if message['role'] == 'assistant' and loop.last %}{{ '<think></think>' }}{% endif %}"
        "{{ message['content'] + '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    assert learned({"messages": TALK}, thinking) == "Two.<|im_end|><think></think>Three.<|im_end|>\n"


def test_of_a_prompt_and_its_completion_the_completion_is_learned(tokenizer: Any) -> None:
    assert learned({"prompt": "One and one are", "completion": " two."}, tokenizer) == " two.<|im_end|>"
    turns = {"prompt": TALK[:2], "completion": TALK[2:3]}
    assert learned(turns, tokenizer) == "Two.<|im_end|>\n"


def test_of_plain_text_everything_is_learned(tokenizer: Any) -> None:
    assert learned({"text": "All of it."}, tokenizer) == "All of it.<|im_end|>"


def test_a_chat_without_a_template_is_refused(tiny: Tiny) -> None:
    bare = load_tokenizer(tiny("qwen3"))
    bare.chat_template = None
    with pytest.raises(ReshardError, match="no chat template"):
        samples({"messages": TALK}, bare)


def test_a_sample_is_learned_one_token_ahead() -> None:
    (piece,) = pieces_of([Sample([5, 6, 7, 8], [False, False, True, True])], 16, 1, SampleCounts())
    assert (piece.inputs.tolist(), piece.labels.tolist()) == ([5, 6, 7], [IGNORED_LABEL, 7, 8])


def test_long_text_goes_on_in_the_next_piece_and_no_token_is_lost() -> None:
    tokens = list(range(100, 123))
    pieces = list(pieces_of([Sample(tokens, [True] * 23)], 8, 1, SampleCounts()))
    assert [piece.inputs.tolist() for piece in pieces] == [tokens[0:8], tokens[8:16], tokens[16:22]]
    assert [token for piece in pieces for token in piece.labels] == tokens[1:]


def test_a_long_chat_is_cut_and_counted() -> None:
    counts = SampleCounts()
    samples = [Sample(list(range(20)), [index >= 5 for index in range(20)])] * 2
    samples.append(Sample(list(range(20)), [index >= 15 for index in range(20)]))
    pieces = list(pieces_of(samples, 8, 1, counts))
    assert len(pieces) == 2
    assert list(counts.notes(8)) == [
        "3 of 3 samples are longer than seq_length 8 and were cut",
        "1 of 3 samples were skipped: the loss covers none of their tokens",
    ]


@given(st.lists(st.integers(1, 32), max_size=60))
def test_packing_fills_rows_and_keeps_every_piece(lengths: list[int]) -> None:
    rows = packed(lengths, 32)
    assert sorted(index for row in rows for index in row) == list(range(len(lengths)))
    sums = sorted(sum(lengths[index] for index in row) for row in rows)
    assert all(total <= 32 for total in sums)
    assert len(sums) < 2 or sums[0] + sums[1] > 32  # no two rows could have been one


def test_rows_number_their_samples_and_their_padding() -> None:
    samples = [Sample([1, 2, 3, 4], [True] * 4), Sample([5, 6], [True] * 2)]
    pieces = list(pieces_of(samples, 8, 1, SampleCounts()))
    (row,) = put_together(pieces, 8, pack=True)
    assert row[INPUTS].tolist() == [1, 2, 3, 5, 0, 0, 0, 0]
    assert row[LABELS].tolist() == [2, 3, 4, 6, *[IGNORED_LABEL] * 4]
    assert row[SAMPLES].tolist() == [0, 0, 0, 1, 2, 2, 2, 2]
    assert len(put_together(pieces, 8, pack=False)) == 2


def test_a_step_takes_the_same_rows_at_every_layout() -> None:
    order = RowOrder(10, seed=3)
    for step in range(5):
        alone = order.of_step(step, 8, 0, 1)
        shared = [row for rank in range(4) for row in order.of_step(step, 8, rank, 4)]
        assert shared == alone
    epoch = [row for step in range(5) for row in order.of_step(step, 2, 0, 1)]
    assert sorted(epoch) == list(range(10))
    assert epoch != [row for step in range(5, 10) for row in order.of_step(step, 2, 0, 1)]


def test_context_parallel_ranks_take_equal_parts_of_every_sample() -> None:
    pieces = list(pieces_of([Sample(list(range(n)), [True] * n) for n in (9, 14, 4)], 40, 4, SampleCounts()))
    (row,) = put_together(pieces, 40, pack=True)
    assert {bound % 4 for bound in sample_bounds(row[SAMPLES])} == {0}
    parts = [rank_tokens(row[SAMPLES], rank, 2) for rank in range(2)]
    assert sorted(np.concatenate(parts)) == list(range(40))
    for part in parts:
        assert np.bincount(row[SAMPLES][part]).tolist() == (np.bincount(row[SAMPLES]) // 2).tolist()
    low, high = sample_bounds(row[SAMPLES])[:2]
    quarter = (high - low) // 4
    assert parts[0][: 2 * quarter].tolist() == [*range(quarter), *range(3 * quarter, 4 * quarter)]


def test_rows_depend_on_the_data_and_not_on_the_layout(tiny: Tiny, tmp_path: Path) -> None:
    data = write_lines(tmp_path / "chats.jsonl", chats())
    run = Run("sft", tiny("qwen3"), data, tmp_path / "out", "megatron", options={"seq_length": 128})
    spread = Run(
        "sft", run.model, data, run.output, "megatron", layout=Layout(tp=2, pp=2), options=run.options
    )
    before = key_of(run, read(run))
    assert before == key_of(spread, read(spread))
    rows, counts, _ = make_rows(run, read(run))
    assert counts.samples == 64
    assert len(rows) == 32
    data.write_text(data.read_text() + json.dumps(chats()[0]) + "\n")
    assert key_of(run, read(run)) != before
