"""`reshard watch` follows genuine runs: each step once, whatever is deleted, killed or written meanwhile."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from peft import PeftModel
from transformers import AutoModelForCausalLM

import reshard as api
from reshard.runs.follow.follower import moved_bytes, rate_limit
from tests.commandline import apart, listing, reshard
from tests.watch.watching import content, told, watch_once, watching

STEPS = ("iter_0000010", "iter_0000020", "iter_0000030")
PLAIN = ("--no-tokenizer",)
SLOW = ("--limit-rate", "600kB")
"""A rate at which a conversion lasts for seconds, so that something can happen in the middle of it."""


def begun(out: Path, name: str) -> Callable[[], bool]:
    """Whether the conversion of a step has begun to write, and has not ended."""
    return lambda: any(out.glob(f".{name}.partial-*/output/*.safetensors"))


def only(run: Path, *names: str) -> None:
    """Delete all other steps of a run."""
    for name in {*STEPS} - {*names}:
        shutil.rmtree(run / name)


def converted(out: Path) -> list[str]:
    return sorted(path.name for path in out.iterdir() if path.is_dir())


# ------------------------------------------------------------------------------------------- each step once


def test_steps_of_megatron_become_what_convert_writes(run: Path, tmp_path: Path) -> None:
    before = listing(run)
    code, events, err = watch_once(run, "--to", tmp_path / "out", *PLAIN)
    assert (code, err) == (0, "")
    assert told(events) == [("converted", name) for name in STEPS]
    assert told(events, "found") == [("found", name) for name in STEPS]
    assert listing(run) == before, "nothing is written into the run"
    for name in STEPS:
        api.convert(run / name, tmp_path / "apart" / name, no_tokenizer=True)
        assert content(tmp_path / "out" / name) == content(tmp_path / "apart" / name)
    assert watch_once(run, "--to", tmp_path / "out", *PLAIN) == (0, [], "")


def test_steps_of_the_trainer_become_models_that_load(trainer_steps: Path, tmp_path: Path) -> None:
    code, events, _ = watch_once(trainer_steps, "--to", tmp_path / "out", "--dtype", "bfloat16")
    names = [f"checkpoint-{step}" for step in (1, 2, 3)]
    assert code == 0 and told(events) == [("converted", name) for name in names]
    assert [each["step"] for each in events] == [1, 1, 2, 2, 3, 3]
    loaded = [AutoModelForCausalLM.from_pretrained(tmp_path / "out" / name) for name in names]
    norms = [float(model.model.layers[0].mlp.up_proj.weight.float().norm()) for model in loaded]
    assert len({*norms}) == 3, "each is another step"
    api.convert(trainer_steps / names[2], tmp_path / "apart", to="huggingface", dtype="bfloat16")
    assert content(tmp_path / "out" / names[2]) == content(tmp_path / "apart")


@pytest.mark.slow
def test_adapters_stay_adapters_or_are_merged(
    lora_steps: Path, hf_model: Callable[..., Path], tmp_path: Path
) -> None:
    base = hf_model("qwen3")
    assert watch_once(lora_steps, "--to", tmp_path / "lora", "--keep", 1)[0] == 0
    assert converted(tmp_path / "lora") == ["checkpoint-3"], "older ones are not converted in vain"
    PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), tmp_path / "lora/checkpoint-3")
    code, events, _ = watch_once(lora_steps, "--to", tmp_path / "merged", "--merge", "--base", base)
    assert code == 0 and len(told(events, "converted")) == 3
    api.convert(lora_steps / "checkpoint-3", tmp_path / "apart", merge=True, base=base)
    assert content(tmp_path / "merged/checkpoint-3") == content(tmp_path / "apart")


@pytest.mark.slow
def test_a_run_is_followed_while_the_trainer_deletes_its_steps(
    hf_model: Callable[..., Path], tmp_path: Path
) -> None:
    run, out = tmp_path / "run", tmp_path / "out"
    run.mkdir()
    words = (hf_model("qwen3"), run, "12", "--limit", "2")
    with watching(tmp_path, run, "--to", out, "--every", "1s") as watch:
        trainer = subprocess.Popen([sys.executable, "-m", "tests.watch.trainer_run", *map(str, words)])
        watch.until(lambda: trainer.poll() is not None)
        assert trainer.returncode == 0
        watch.until(lambda: ("converted", "checkpoint-12") in told(watch.events))
        assert watch.end(signal.SIGTERM) == 128 + signal.SIGTERM
        assert "the same command goes on" in watch.err
        assert not told(watch.events, "failed")
        assert converted(out) == sorted(name for _, name in told(watch.events, "converted"))
    for folder in out.iterdir():
        assert folder.name.startswith(".") or api.verify(folder).equal
    api.convert(run / "checkpoint-12", tmp_path / "apart", to="huggingface")
    assert content(out / "checkpoint-12") == content(tmp_path / "apart")


# -------------------------------------------------------------------------------- what happens to a step


def test_a_step_that_is_deleted_while_it_is_read_is_skipped(run: Path, tmp_path: Path) -> None:
    only(run, *STEPS[:2])
    out = tmp_path / "out"
    with watching(tmp_path, run, "--to", out, *PLAIN, *SLOW, "--every", "1s") as watch:
        watch.until(begun(out, STEPS[0]))
        shutil.rmtree(run / STEPS[0])
        watch.until(lambda: ("converted", STEPS[1]) in told(watch.events))
        assert told(watch.events)[:2] == [("skipped", STEPS[0]), ("converted", STEPS[1])]
        (event,) = [each for each in watch.events if each["event"] == "skipped"]
        assert event["reason"] == "it was deleted"
        assert not [*out.glob(f".{STEPS[0]}.*")] and not (out / STEPS[0]).exists()


@pytest.mark.slow
def test_a_step_that_changes_while_it_is_read_is_done_later(run: Path, tmp_path: Path) -> None:
    only(run, STEPS[0])
    out, shard = tmp_path / "out", run / STEPS[0] / "__0_0.distcp"
    with watching(tmp_path, run, "--to", out, *PLAIN, *SLOW, "--every", "1s") as watch:
        watch.until(begun(out, STEPS[0]))
        os.utime(shard)
        watch.until(lambda: ("converted", STEPS[0]) in told(watch.events))
        of_step = [event for event, name in told(watch.events) if name == STEPS[0]]
        assert of_step == ["skipped", "converted"]


def test_a_step_that_is_not_complete_is_taken_when_it_is(run: Path, tmp_path: Path) -> None:
    out, shard = tmp_path / "out", run / STEPS[1] / "__1_0.distcp"
    whole = shard.read_bytes()
    shard.write_bytes(whole[: len(whole) // 2])
    (run / "latest_checkpointed_iteration.txt").write_text("20")
    with watching(tmp_path, run, "--to", out, *PLAIN, "--every", "1s") as watch:
        watch.until(lambda: ("skipped", STEPS[2]) in told(watch.events))
        assert told(watch.events) == [("converted", STEPS[0]), ("skipped", STEPS[1]), ("skipped", STEPS[2])]
        shard.write_bytes(whole)
        (run / "latest_checkpointed_iteration.txt").write_text("30")
        watch.until(lambda: len(told(watch.events, "converted")) == 3)
    assert content(out / STEPS[1]).keys() == content(out / STEPS[0]).keys()
    assert api.verify(run / STEPS[1], out / STEPS[1]).equal


def test_a_step_of_the_trainer_waits_for_its_state(trainer_steps: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(trainer_steps, tmp_path / "run"))
    state = run / "checkpoint-2/trainer_state.json"
    text = state.read_text()
    state.unlink()
    _, events, _ = watch_once(run, "--to", tmp_path / "out")
    assert ("skipped", "checkpoint-2") in told(events)
    state.write_text(text)
    assert told(watch_once(run, "--to", tmp_path / "out")[1]) == [("converted", "checkpoint-2")]


@pytest.mark.slow
def test_a_run_of_which_only_the_final_model_is_left_is_still_followed(
    trainer_steps: Path, tmp_path: Path
) -> None:
    run = Path(shutil.copytree(trainer_steps, tmp_path / "run"))
    with watching(tmp_path, run, "--to", tmp_path / "out", "--every", "1s") as watch:
        watch.until(lambda: len(told(watch.events, "converted")) == 3)
        for step in run.iterdir():
            shutil.rmtree(step)
        shutil.copytree(trainer_steps / "checkpoint-3", run, dirs_exist_ok=True)
        watch.until(lambda: len(list(run.glob("*.safetensors"))) == 1)
        shutil.copytree(trainer_steps / "checkpoint-3", tmp_path / "checkpoint-4")
        (tmp_path / "checkpoint-4").rename(run / "checkpoint-4")
        watch.until(lambda: ("converted", "checkpoint-4") in told(watch.events))


def test_a_step_that_cannot_be_converted_is_named_and_the_next_is_done(run: Path, tmp_path: Path) -> None:
    (tmp_path / "out" / STEPS[0]).mkdir(parents=True)
    (tmp_path / "out" / STEPS[0] / "mine.txt").write_text("mine")
    code, events, _ = watch_once(run, "--to", tmp_path / "out", *PLAIN)
    assert code == 1 and told(events)[0] == ("failed", STEPS[0])
    assert [each["problems"][0]["code"] for each in events if "problems" in each] == ["destination-not-empty"]
    assert told(events, "converted") == [("converted", name) for name in STEPS[1:]]
    assert content(tmp_path / "out" / STEPS[0]) == {"mine.txt": b"mine"}


# ------------------------------------------------------------------------------------- ended and started again


def test_a_killed_watch_goes_on_and_does_nothing_twice(run: Path, tmp_path: Path) -> None:
    out, later = tmp_path / "out", tmp_path / "later"
    (run / STEPS[1]).rename(later)
    assert told(watch_once(run, "--to", out, *PLAIN)[1]) == [
        ("converted", STEPS[0]),
        ("converted", STEPS[2]),
    ]
    later.rename(run / STEPS[1])
    with watching(tmp_path, run, "--to", out, *PLAIN, *SLOW) as watch:
        watch.until(begun(out, STEPS[1]))
        watch.end(signal.SIGKILL)
    code, events, _ = watch_once(run, "--to", out, *PLAIN)
    assert code == 0 and told(events) == [("converted", STEPS[1])]
    assert converted(out) == [*STEPS], "and nothing else is left"


@pytest.mark.slow
def test_a_folder_that_was_written_before_the_kill_is_not_written_again(run: Path, tmp_path: Path) -> None:
    watch_once(run, "--to", tmp_path / "out", *PLAIN)
    before = listing(tmp_path / "out" / STEPS[2])
    state = tmp_path / "out/.reshard-watch.json"
    content = json.loads(state.read_text())
    del content["done"][STEPS[2]]
    state.write_text(json.dumps(content))
    _, events, _ = watch_once(run, "--to", tmp_path / "out", *PLAIN)
    assert told(events) == [("converted", STEPS[2])] and events[-1]["bytes"] == 0
    assert listing(tmp_path / "out" / STEPS[2]) == before


@pytest.mark.slow
def test_what_a_kill_left_of_a_step_that_is_gone_is_removed(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with watching(tmp_path, run, "--to", out, *PLAIN, *SLOW) as watch:
        watch.until(begun(out, STEPS[0]))
        watch.end(signal.SIGKILL)
    shutil.rmtree(run / STEPS[0])
    watch_once(run, "--to", out, *PLAIN)
    assert converted(out) == [*STEPS[1:]]


@pytest.mark.parametrize("number", [pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGTERM])
def test_a_signal_ends_it_in_the_middle_of_a_conversion(
    number: signal.Signals, run: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    with watching(tmp_path, run, "--to", out, *PLAIN, "--limit-rate", "1kB") as watch:
        watch.until(begun(out, STEPS[0]))
        assert watch.end(number) == 128 + number
        assert watch.err.startswith("interrupted") and "Traceback" not in watch.err
    assert not (out / STEPS[0]).exists()
    assert watch_once(run, "--to", out, *PLAIN)[0] == 0 and converted(out) == [*STEPS]


@pytest.mark.slow
def test_only_one_watch_does_the_same(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with watching(tmp_path, run, "--to", out, *PLAIN) as watch:
        watch.until(lambda: len(told(watch.events, "converted")) == 3)
        second = reshard("watch", run, "--to", out, *PLAIN, "--once", "--json")
        assert second.code == 2 and second.json["problems"][0]["code"] == "destination-in-use"
        assert watch_once(run, "--to", tmp_path / "elsewhere", *PLAIN)[0] == 0
    assert watch_once(run, "--to", out, *PLAIN) == (0, [], "")


@pytest.mark.slow
def test_a_folder_is_of_one_run(run: Path, trainer_steps: Path, tmp_path: Path) -> None:
    watch_once(run, "--to", tmp_path / "out", *PLAIN)
    found = reshard("watch", trainer_steps, "--to", tmp_path / "out", "--once", "--json")
    assert found.code == 2 and found.json["problems"][0]["code"] == "watch-state-of-another-run"


# ------------------------------------------------------------------------------------------------- --keep


def test_only_the_newest_folders_stay(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    for name in ("iter_0000001", "notes"):
        (out / name).mkdir(parents=True)
        (out / name / "reshard.json").write_text("{}")
    command = f"{shlex_python()} {{path}}"
    code, events, _ = watch_once(run, "--to", out, "--keep", 2, "--run", command, *PLAIN)
    assert code == 0 and told(events, "removed") == [("removed", STEPS[0])]
    assert converted(out) == ["iter_0000001", *STEPS[1:], "notes"]
    assert watch_once(run, "--to", out, "--keep", 2, "--run", command, *PLAIN) == (0, [], "")
    (out / STEPS[1] / "results.txt").write_text("mine")
    assert watch_once(run, "--to", out, "--keep", 1, "--run", "true {path}", *PLAIN)[0] == 0
    assert converted(out) == ["iter_0000001", *STEPS[1:], "notes"]
    assert (out / STEPS[1] / "results.txt").read_text() == "mine"


def shlex_python() -> str:
    """A program that fails unless its argument is a model."""
    return f"{sys.executable} -c 'import sys, os; os.stat(sys.argv[1] + \"/config.json\")'"


# -------------------------------------------------------------------------------------------------- --run


def test_a_command_gets_the_path_and_the_step(run: Path, tmp_path: Path) -> None:
    script = tmp_path / "eval.sh"
    script.write_text(
        f'#!/bin/sh\ntest -f "$1/config.json" || exit 9\necho "$@" >> {tmp_path}/ran\nexit "$3"\n'
    )
    script.chmod(0o755)
    words = (run, "--to", tmp_path / "out", *PLAIN)
    code, events, _ = watch_once(*words, "--run", f"{script} {{path}} '{{name}} {{x}}' 0")
    assert code == 0 and told(events, "ran") == [("ran", name) for name in STEPS]
    lines = (tmp_path / "ran").read_text().splitlines()
    assert lines == [f"{tmp_path}/out/{name} {name} {{x}} 0" for name in STEPS]
    assert told(events)[:2] == [("converted", STEPS[0]), ("ran", STEPS[0])], "one step at a time"
    code, events, _ = watch_once(*words, "--run", f"{script} {{path}} - {{step}}")
    assert code == 1 and [each["status"] for each in events if each["event"] == "failed"] == [10, 20, 30]
    code, events, _ = watch_once(*words, "--run", f"{script} {{path}} - {{step}}")
    assert code == 1 and len(told(events, "failed")) == 3, "what failed is done again by the next watch"
    assert watch_once(*words, "--run", f"{script} {{path}} '{{name}} {{x}}' 0") == (0, [], "")


@pytest.mark.slow
def test_what_a_command_prints_is_no_event(run: Path, tmp_path: Path) -> None:
    words = (run, "--to", tmp_path / "out", *PLAIN, "--run", "echo noise {step}")
    done = apart("watch", *words, "--once")
    assert done.stderr.splitlines() == ["noise 10", "noise 20", "noise 30"]
    assert (
        f"{STEPS[0]}: ran: echo noise 10" in done.stdout.splitlines() and len(done.stdout.splitlines()) == 9
    )


def test_a_command_ends_with_the_watch(run: Path, tmp_path: Path) -> None:
    script = tmp_path / "eval.sh"
    script.write_text(
        f"#!/bin/sh\necho $$ > {tmp_path}/shell\nsleep 1000 &\necho $! > {tmp_path}/child\nwait\n"
    )
    script.chmod(0o755)
    pids = [tmp_path / "shell", tmp_path / "child"]
    with watching(tmp_path, run, "--to", tmp_path / "out", *PLAIN, "--run", str(script)) as watch:
        watch.until(lambda: pids[1].exists() and pids[1].read_text().strip())
        assert watch.end(signal.SIGTERM) == 128 + signal.SIGTERM
    for each in pids:
        status = Path(f"/proc/{each.read_text().strip()}/status")
        assert not status.exists() or "\nState:\tZ" in status.read_text()


DOWNLOAD = """
import sys
from huggingface_hub import snapshot_download
name, revision, folder = sys.argv[1:]
snapshot_download(name, revision=revision, local_dir=f"{folder}/{revision}")
"""


@pytest.mark.slow
def test_without_folders_a_command_gets_a_run_that_is_served(run: Path, tmp_path: Path) -> None:
    pytest.importorskip("uvicorn")
    (tmp_path / "download.py").write_text(DOWNLOAD)
    command = f"{sys.executable} {tmp_path}/download.py {{path}} {{revision}} {tmp_path}/down"
    before = listing(run)
    environment = {"HF_HUB_OFFLINE": "0", "XDG_STATE_HOME": str(tmp_path / "state")}
    words = (run, "--run", command, "--dtype", "float16", *PLAIN)
    code, events, err = watch_once(*words, **environment)
    assert code == 0, err
    assert told(events) == [("ran", name) for name in STEPS]
    for name in STEPS:
        api.convert(run / name, tmp_path / "apart" / name, no_tokenizer=True, dtype="float16")
        assert content(tmp_path / "apart" / name).items() <= content(tmp_path / "down" / name).items()
    assert listing(run) == before and watch_once(*words, **environment)[1] == []


# -------------------------------------------------------------------------------------------- what is printed


REFUSED = {
    "run-not-found": "nothing --to out",
    "run-is-a-checkpoint": "run/iter_0000010 --to out",
    "watch-without-action": "run",
    "watch-into-run": "run --to run",
    "keep-without-folder": "run --push-to-hub Org/Name --keep 2",
    "private-without-push": "run --to out --private",
    "run-command-not-found": "run --to out --run evla.sh",
    "value-invalid": "run --to out --run 'x",
    "run-holds-several": ". --to out",
    "repository-name-malformed": "run --push-to-hub a/b/c",
    "base-not-found": "run --to out --base nothing",
}


@pytest.mark.parametrize("code", REFUSED)
def test_what_cannot_work_is_refused_before_the_start(
    code: str, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(run, tmp_path / "other")
    monkeypatch.chdir(tmp_path)
    found = reshard("watch", *REFUSED[code].split(" ", REFUSED[code].count(" ")), "--once", "--json")
    assert found.code == 2 and [each["code"] for each in found.json["problems"]] == [code]
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_what_it_writes_itself_is_no_step(run: Path, tmp_path: Path) -> None:
    assert watch_once(run, "--to", run / "hf", *PLAIN)[0] == 0
    assert watch_once(run, "--to", run / "hf", *PLAIN) == (0, [], "")


# ------------------------------------------------------------------------------------------------- the rate


class Clock:
    """A clock that only sleeping moves, and the bytes that were moved, which nothing else reads."""

    def __init__(self) -> None:
        self.now, self.moved, self.slept = 0.0, 1000, list[float]()

    def wait(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


def test_the_rate_counts_what_is_read_and_written() -> None:
    clock = Clock()
    limit = rate_limit(100, clock, lambda: clock.now, lambda: clock.moved)  # type: ignore[arg-type]
    for moved, slept in ((300, 3.0), (50, 0.5)):
        clock.moved += moved
        limit(1)
        assert clock.slept.pop() == slept
    clock.now += 10
    clock.moved += 100
    limit(1)
    assert clock.slept == [0.0], "it is slower than it may be"


def test_where_the_system_counts_nothing_as_much_is_read_as_written() -> None:
    clock = Clock()
    limit = rate_limit(100, clock, lambda: clock.now, lambda: 0)  # type: ignore[arg-type]
    limit(50)
    assert clock.slept == [1.0]


@pytest.mark.skipif(sys.platform != "linux", reason="Linux counts them")
def test_moved_bytes_are_counted(tmp_path: Path) -> None:
    before = moved_bytes()
    (tmp_path / "file").write_bytes(bytes(1 << 20))
    (tmp_path / "file").read_bytes()
    after = moved_bytes()
    assert before is not None and after is not None and (2 << 20) <= after - before < (3 << 20)
