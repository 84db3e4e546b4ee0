"""Logs of hundreds of ranks and hundreds of megabytes: the rank that failed first is found, in bounded memory."""

from __future__ import annotations

import base64
import gc
import json
import os
import random
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from itertools import chain
from pathlib import Path

import pytest

from reshard.base.errors import ReshardError
from reshard.runs.doctor.log_diagnosis import diagnose_text
from reshard.runs.doctor.python_api import doctor
from reshard.runs.doctor.text.line_prefixes import cleaned
from reshard.runs.doctor.text.log_thinning import FIRST_LINES, MAX_CHARACTERS, thinned
from tests.doctor.test_expressions import GENERAL

HEAD = Path(__file__).parent / "head"
CLEAN = Path(__file__).parent / "clean"
FIRST = 137
"""The rank that fails first."""
LOST = """Traceback (most recent call last):
  File "/home/user/train/finetune.py", line 36, in <module>
    train()
  File "/home/user/venv/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", line 81, in wrapper
    return func(*args, **kwargs)
torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:2356, remote process exited or there was a \
network error, NCCL version 2.21.5
""".splitlines()


def failing() -> list[str]:
    """The traceback of one rank, from a real log."""
    lines = (HEAD / "device_map" / "finetune.log").read_text().splitlines()
    return [line.removeprefix("[rank0]: ") for line in lines if line.startswith("[rank0]: ")]


def long_log(steps: int, ranks: int = 512) -> Iterator[str]:
    """Lines of a run: real warnings from every rank, a line per step from every rank, and then a failure.

    Rank `FIRST` fails with its own traceback; before it is printed completely, all others lose that rank, and their
    tracebacks come in between.
    """
    rng = random.Random(0)
    banner = (CLEAN / "trainer-transformers-5.23.log").read_text().splitlines()
    yield from (f"[rank{rank}]: {line}" for line in banner for rank in range(ranks))
    for step in range(steps):
        for rank in range(ranks):
            loss = rng.random()
            yield (
                f"2025-05-21T10:{step // 60 % 60:02d}:{step % 60:02d}.{rank:06d}Z stderr F [rank{rank}]: "
                f"step {step} loss {loss:.4f} grad_norm {loss * 3:.3f} lr 9.9e-06 tokens/s {rng.randrange(9999)}"
            )
    yield from (f"[rank{FIRST}]: {line}" for line in failing()[:3])
    queues = [[f"[rank{FIRST}]: {line}" for line in failing()[3:]]]
    queues += [[f"[rank{rank}]: {line}" for line in LOST] for rank in range(ranks) if rank != FIRST]
    while queues:
        queue = rng.choice(queues)
        yield queue.pop(0)
        if not queue:
            queues.remove(queue)
    yield from (f"[rank{rank}]: terminating" for rank in range(ranks) for _ in range(20))


def test_the_first_rank_to_fail_is_found_among_hundreds() -> None:
    found = diagnose_text("log", long_log(steps=60))
    assert found[0].code == "device-map-distributed" and found[0].certainty == "sure"
    assert found[0].places[0].text.startswith("ValueError: You can't train a model")
    assert any(f"on rank {FIRST}," in evidence for evidence in map(str, found[0].evidence))


@pytest.mark.thorough
def test_lines_keep_their_numbers_and_their_order() -> None:
    lines = list(long_log(steps=60))
    kept = list(thinned(lines))
    assert len(kept) < len(lines) / 2
    numbers = [number for number, _, _ in kept]
    assert numbers == sorted(set(numbers)) and numbers[:FIRST_LINES] == list(range(1, FIRST_LINES + 1))
    assert all(cleaned(lines[number - 1]).endswith(text) for number, _, text in kept)


@pytest.mark.thorough
def test_what_happens_once_in_the_middle_of_a_long_log_is_kept() -> None:
    step = "step {} loss 0.1"
    once = "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7, OpType=ALLREDUCE"
    lines = chain(
        (step.format(i) for i in range(50_000)), [once], (step.format(i) for i in range(50_000, 100_000))
    )
    kept = [(number, text) for number, _, text in thinned(lines)]
    assert (50_001, once) in kept and len(kept) < 20_000


@pytest.mark.parametrize(
    "said", ["RuntimeError: CUDA error: an illegal memory access", "slurmstepd: error: frob Killed"]
)
def test_a_failure_without_a_traceback_is_kept_among_lines_that_all_differ(said: str) -> None:
    """Samples that a run prints differ in every word, so that they use up the room for new lines."""
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefgh", k=7)) for _ in range(1_000)]
    samples = [" ".join(rng.choices(words, k=15)) for _ in range(40_000)]
    kept = list(thinned([*samples[:25_000], said, *samples[25_000:]]))
    assert (25_001, "", said) in kept and len(kept) < 25_000


def long_lines(length: int) -> dict[str, str]:
    """Lines as in logs, each with the given number of characters."""
    rng = random.Random(0)
    record = json.dumps(
        [{"step": i, "loss": rng.random(), "text": "lorem ipsum"} for i in range(length // 60)]
    )
    return {
        "letters": "a" * length,
        "base64": base64.b64encode(rng.randbytes(length * 3 // 4)).decode(),
        "minified JSON": record,
        "a progress bar": "\r".join(f" {i} %|{chr(0x2588) * 9}| {i}/9" for i in range(length // 20)),
        "Chinese": "损失" * (length // 2),
        "names": "[rank0]: " + "model.layers.0.mlp." * (length // 19),
    }


@pytest.mark.parametrize("kind", long_lines(1))
@pytest.mark.thorough
def test_a_line_of_any_length_hides_no_failure(kind: str, tmp_path: Path) -> None:
    """Ten million characters at once, and twenty thousand occasionally: in seconds of processor time."""
    once, often = long_lines(10_000_000)[kind], long_lines(20_000)[kind]
    lines = [once, *failing(), once]
    for each in (
        lines,
        [line for failed in failing() for line in (f"[rank1]: {often}", f"[rank0]: {failed}")],
    ):
        path = tmp_path / "run.log"
        path.write_text("\n".join(each))
        begin = time.process_time()
        found = doctor(path)
        assert time.process_time() - begin < 5
        assert [each.code for each in found] == ["device-map-distributed"] and found[0].certainty == "sure"
        assert found[0].places[0].line == each.index(next(line for line in each if "ValueError:" in line)) + 1


def test_a_failure_in_a_long_line_is_shown_with_what_is_near_it() -> None:
    (found,) = diagnose_text("log", "ValueError: no frobs: " + "x" * 50_000 + " but the grob is 7")
    assert "no frobs" in found.places[0].text and len(str(found.rule)) < 5_000
    (found,) = diagnose_text("log", "FrobError: " + "lorem " * 50_000)
    assert found.places[0].text.endswith(" …") and len(found.places[0].text) < 400


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16"])
def test_a_traceback_deep_in_a_line_of_json_is_found(encoding: str, tmp_path: Path) -> None:
    path = tmp_path / "error.json.log"
    record = {
        "rank": 0,
        "before": "损失 0.1 " * 600_000,
        "py_callstack": "\n".join(failing()),
        "after": "x " * 1_500_000,
    }
    path.write_text(json.dumps(record, ensure_ascii=False), encoding=encoding)
    (found,) = doctor(path)
    assert found.code == "device-map-distributed" and found.places[0].text.startswith(
        "ValueError: You can't train"
    )


@pytest.mark.thorough
def test_lines_that_all_differ_take_no_more_room_than_others() -> None:
    rng = random.Random(0)
    lines = (base64.b64encode(rng.randbytes(3_000)).decode() for _ in range(25_000))
    kept = list(thinned(lines))
    assert kept[-1][0] == 25_000 and sum(len(text) for _, _, text in kept) <= 3 * MAX_CHARACTERS + 4_000


@pytest.mark.slow
def test_a_prefix_of_its_own_on_every_line_takes_no_time() -> None:
    rng = random.Random(0)
    ids = ("".join(rng.choices("abcdef0123456789", k=32)) for _ in range(2_000))
    lines = [f"{each} {line}" for each in ids for line in failing()[:1] + failing()[-3:]]
    begin = time.process_time()
    found = diagnose_text("log", lines)
    assert found[0].code == "device-map-distributed" and time.process_time() - begin < 15  # it took minutes


def large_log(kind: str, size: int) -> Iterator[str]:
    """Text of `size` bytes or more, with a failure: steps before it, noise around it, or a single line before it."""
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefghijklmnop", k=rng.randrange(3, 10))) for _ in range(5_000)]
    failure = "".join(f"[rank3]: {line}\n" for line in failing())
    chunk, written, step, told = " ".join(rng.choices(words, k=50_000)), 0, 0, False
    while written < size:
        step += 1
        text = f"{{'loss': {rng.random():.4f}, 'learning_rate': {rng.random():.3e}, 'epoch': {step / 1000:.2f}}}\n"
        if kind == "noise":
            text = f"[rank{rng.randrange(64)}]: " + " ".join(rng.choices(words, k=12)) + "\n"
        yield chunk if kind == "a line" else text
        written += len(chunk if kind == "a line" else text)
        if kind == "noise" and not told and written > size / 2:
            yield failure
            told = True
    if not told:
        yield "\n" + failure


def measured(path: Path, *options: str) -> tuple[str, str, resource.struct_rusage]:
    """Output, messages and resource use of `reshard doctor` on a log; its peak is never below this process's."""
    command = [sys.executable, "-m", "reshard", "doctor", str(path), *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as run:
        assert run.stdout and run.stderr
        told = run.stdout.read(), run.stderr.read()
        _, status, used = os.wait4(run.pid, 0)
        run.returncode = os.waitstatus_to_exitcode(status)
    assert run.returncode == 1, told
    return *told, used


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["steps", "noise", "a line"])
def test_memory_does_not_grow_with_a_log(kind: str, tmp_path: Path) -> None:
    memory = []
    for size in (100_000_000, 200_000_000):
        path = tmp_path / f"{size}.log"
        with path.open("w") as file:
            file.writelines(large_log(kind, size))
        out, err, used = measured(path, "--quiet")
        assert out.count("\n") == 1 and "device-map-distributed, sure" in out and not err, (out, err)
        memory.append(used.ru_maxrss << 10)
    assert memory[1] < 450e6 and memory[1] - memory[0] < 100e6, memory


@pytest.mark.slow
def test_two_hundred_megabytes_take_less_than_a_minute_and_a_gigabyte(tmp_path: Path) -> None:
    path = tmp_path / "run.log"
    with path.open("w") as file:
        for line in long_log(steps=3600):
            file.write(line + "\n")
    assert path.stat().st_size > 200e6
    out, _, used = measured(path, "--lang", "en")
    seconds = used.ru_utime + used.ru_stime  # not of the wall: the machine runs other work, too
    memory = used.ru_maxrss << 10
    assert "device-map-distributed, sure" in out
    assert seconds < 60 and memory < 1 << 30, (seconds, memory)
    print(f"{path.stat().st_size / 1e6:.0f} MB in {seconds:.0f} s and {memory / 2**20:.0f} MiB")


UNITS = [
    *GENERAL,
    "\u00a0",
    "\u3000",
    "\u200b",
    ", ",
    "- ",
    "a:\n",
    "\\\n",
    "ValueError: a\n",
    "import a\n",
    "[rank0]: a\n",
]
"""What texts repeat: single characters, pieces of logs and code, very many short lines."""
MEASURED = 0.4
"""Seconds below which a text is quick, however its duration grows."""
CLOCK = 0.03
"""Seconds by which two measurements of one duration differ."""


def duration(path: Path, text: str) -> float:
    """Seconds of processor time of a diagnosis.

    Without the garbage collector, which would visit everything that other tests have left in this process.
    """
    path.write_text(text)
    gc.disable()
    begin = time.process_time()
    with suppress(ReshardError):  # no config
        doctor(path)
    took = time.process_time() - begin
    gc.enable()
    return took


KINDS = ("run.log", "train.py", "config.yaml", "config.json", "launch.sh")


@pytest.mark.parametrize(
    "kind, units",
    [
        *((kind, UNITS[at :: len(KINDS) // 2]) for at, kind in enumerate(KINDS)),
        *(pytest.param(kind, UNITS, marks=pytest.mark.slow) for kind in KINDS),
    ],
    ids=[f"{kind}-{units}" for units in ("some", "all") for kind in KINDS],
)
@pytest.mark.thorough
def test_twice_the_input_costs_twice_the_time(kind: str, units: list[str], tmp_path: Path) -> None:
    """Every unit in two or three kinds of files; in `make test-all`, in all of them."""
    path, slow = tmp_path / kind, []
    duration(path, "a b c")  # loads what the doctor knows
    for unit in units:
        once = twice = float("inf")
        for _ in range(8):  # other work on the machine disturbs durations: the least of each counts
            twice = min(twice, duration(path, unit * (60_000 // len(unit))))
            if twice < MEASURED:
                break
            once = min(once, duration(path, unit * (30_000 // len(unit))))
            if twice <= 2.2 * once + CLOCK:
                break
        else:
            slow.append(f"{unit!r}: {once:.2f} s, then {twice:.2f} s")
    assert not slow
    assert min(duration(path, " " * 60_000) for _ in range(3)) < 0.5
