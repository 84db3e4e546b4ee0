"""Every remedy that contains a command leads somewhere: it is run on the input that produced it.

A case makes the input and names the command that fails. The test takes the flags and commands out of the remedy that
the real run printed, changes the command as a user would, and runs it: the problem must be gone.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from reshard.cli import cli
from tests.bad_input.damage import edit_config, edit_tensors
from tests.commandline import reshard
from tests.test_codes import ALL

Originals = Callable[[str], Path]
Problem = dict[str, str]


@dataclass(frozen=True)
class Case:
    """An input, and a command that one problem refuses.

    `make` copies originals into a folder; the `words` of the command are relative to it. `given` has what a user fills
    in for a placeholder or an option without a value.
    """

    make: Mapping[str, str]
    words: str
    given: Mapping[str, str] = field(default_factory=dict)
    change: Callable[[Path], object] = lambda there: None


def _no_tokenizer(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.name.startswith(("tokenizer", "vocab", "merges", "special_tokens")):
            path.unlink()


def _no_tracker(folder: Path) -> None:
    (folder / "latest_checkpointed_iteration.txt").unlink()
    (folder / "release").rename(folder / "iter_0000010")
    shutil.copytree(folder / "iter_0000010", folder / "iter_0000020")


def _track(folder: Path, step: str) -> None:
    (folder / "release").rename(folder / "iter_0000010")
    (folder / "latest_checkpointed_iteration.txt").write_text(step)


def _cast(folder: Path, part: str, dtype: Any = np.float16) -> None:
    edit_tensors(
        folder,
        lambda tensors: tensors.update({k: v.astype(dtype) for k, v in tensors.items() if part in k}),
    )


def _infinite(folder: Path) -> None:
    def change(tensors: dict[str, Any]) -> None:
        tensors["model.norm.weight"][0] = np.inf

    edit_tensors(folder, change)


def _wrap(folder: Path) -> None:
    path = folder / "model.safetensors"
    save_file({f"_orig_mod.{k}": v for k, v in load_file(path).items()}, path, metadata={"format": "pt"})


def _unknown_family(folder: Path) -> None:
    """Tensors and a config that no family has."""
    rows = np.zeros((4, 4), np.float32)
    save_file({"wte.weight": rows, "h.0.attn.weight": rows}, folder / "model.safetensors")
    (folder / "config.json").write_text(
        json.dumps({"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]})
    )


def _config_gone(there: Path) -> None:
    for path in (there / "ckpt").rglob("config.json"):
        path.unlink()


def _converted(there: Path) -> None:
    assert reshard("convert", "ckpt", "dst").code == 0


def _from_elsewhere(there: Path) -> None:
    """The same, where the source has no record of its own."""
    (there / "ckpt" / "reshard.json").unlink()
    _converted(there)


TWO = {"ckpt": "torch_dist", "base": "qwen3"}
MOE = {"src": "qwen3_moe"}
SRC = {"src": "qwen3"}
TO_MEGATRON = "convert src dst --to megatron"
CASES: dict[str, list[Case]] = {
    "tokenizer-not-beside-checkpoint": [
        Case(TWO, "convert ckpt dst", {"DIR": "base"}, lambda there: _no_tokenizer(there / "ckpt"))
    ],
    "tokenizer-not-in-base": [
        Case(
            TWO,
            "convert ckpt dst --base base",
            {},
            lambda there: [_no_tokenizer(each) for each in there.iterdir()],
        )
    ],
    "weights-without-tokenizer": [
        Case(
            TWO,
            "inspect ckpt",
            {"SRC": "ckpt", "DST": "dst", "DIR": "base"},
            lambda there: _no_tokenizer(there / "ckpt"),
        )
    ],
    "tracker-missing": [
        Case(TWO, "convert ckpt dst", {"N": "10"}, lambda there: _no_tracker(there / "ckpt")),
    ],
    "tracker-unreadable": [
        Case(TWO, "convert ckpt dst", {"N": "10"}, lambda there: _track(there / "ckpt", "seven")),
    ],
    "tracked-iteration-missing": [
        Case(TWO, "convert ckpt dst", {"--iteration": "10"}, lambda there: _track(there / "ckpt", "7")),
    ],
    "iteration-not-found": [
        Case(
            TWO,
            "convert ckpt dst --iteration 11",
            {"--iteration": "10"},
            lambda there: _track(there / "ckpt", "10"),
        )
    ],
    "iteration-contradicts-path": [
        Case(
            TWO,
            "convert ckpt/iter_0000010 dst --iteration 11",
            {},
            lambda there: _track(there / "ckpt", "10"),
        )
    ],
    "iterations-not-found": [Case(SRC, f"{TO_MEGATRON} --iteration 5")],
    "megatron-model-without-experts": [Case(SRC, f"{TO_MEGATRON} --ep 2")],
    "virtual-stages-without-pipeline": [Case(SRC, f"{TO_MEGATRON} --vpp 2", {"--pp": "2"})],
    "layers-not-divisible": [
        Case(SRC, f"{TO_MEGATRON} --pp 5"),
        Case(SRC, f"{TO_MEGATRON} --pp 2 --vpp 3"),
        Case(SRC, f"{TO_MEGATRON} --pp 3 --stages 1,2,2"),
        Case(SRC, f"{TO_MEGATRON} --stages 4,0"),
    ],
    "size-not-divisible": [Case(SRC, f"{TO_MEGATRON} --tp 3"), Case(MOE, f"{TO_MEGATRON} --ep 3")],
    "source-already-hugging-face": [
        Case(SRC, "convert src dst", {"--dtype": "bfloat16", "--quantize": "fp8", "--max-shard-size": "1MB"})
    ],
    "format-without-layout": [Case(TWO, "convert ckpt dst --tp 2")],
    "engine-not-for-format": [Case(TWO, "convert ckpt dst --engine mcore-bridge")],
    "dtype-not-convertible": [Case(SRC, f"{TO_MEGATRON} --dtype int4", {"--dtype": "bfloat16"})],
    "format-unknown": [Case(SRC, "convert src dst --to megatorn"), Case(SRC, "convert src dst --to onnx")],
    "format-only-read": [Case(SRC, "convert src dst --to fsdp-ranks")],
    "family-not-found": [
        Case(SRC, f"{TO_MEGATRON} --family qwen33"),
        Case(SRC, f"{TO_MEGATRON} --family zzz", {"--family": "qwen3"}),
    ],
    "model-type-unsupported": [
        Case(SRC, TO_MEGATRON, {"NAME": "llama"}, lambda there: _unknown_family(there / "src"))
    ],
    "megatron-core-lacks-family": [
        Case(SRC, TO_MEGATRON, {}, lambda there: edit_config(there / "src", model_type="olmo2")),
    ],
    "model-type-unknown": [
        Case(SRC, TO_MEGATRON, {}, lambda there: edit_config(there / "src", model_type="frob"))
    ],
    "destination-not-empty": [Case({**TWO, "dst": "qwen3"}, "convert ckpt dst")],
    "merge-without-adapter": [Case(TWO, "convert ckpt dst --merge --base base", {"DIR": "base"})],
    "adapter-not-in-source": [Case(SRC, "convert src dst --to peft", {"--to": "megatron"})],
    "private-without-push": [Case(SRC, f"{TO_MEGATRON} --private")],
    "stacked-layers-dtypes-differ": [
        Case(SRC, TO_MEGATRON, {}, lambda there: _cast(there / "src", "layers.2.input_layernorm"))
    ],
    "fused-dtypes-differ": [
        Case(SRC, TO_MEGATRON, {}, lambda there: _cast(there / "src", "layers.2.self_attn.q_proj"))
    ],
    "tensor-not-finite": [Case(SRC, f"{TO_MEGATRON} --strict", {}, lambda there: _infinite(there / "src"))],
    "wrapper-in-names": [Case(SRC, TO_MEGATRON, {}, lambda there: _wrap(there / "src"))],
    "memory-too-small": [Case(SRC, f"{TO_MEGATRON} --memory 1B")],
    "proof-output-first": [Case(TWO, "verify dst ckpt --proof", {}, _from_elsewhere)],
    "proof-made-from-another": [Case(TWO, "verify base dst --proof", {}, _converted)],
    "command-unknown": [Case(SRC, "inpsect src"), Case(SRC, "frobnicate src")],
    "option-not-known": [
        Case(SRC, f"{TO_MEGATRON} --tensor-parallel-size 2"),
        Case(SRC, "inspect src --frob"),
    ],
    "catalogue-entry-unknown": [Case({}, "doctor --explain frob")],
    "push-format-not-for-hub": [Case(SRC, f"{TO_MEGATRON} --push-to-hub Org/Name --dry-run")],
    "quantized-output-unsupported": [Case(SRC, f"{TO_MEGATRON} --quantize fp8")],
    "executor-unknown": [Case(SRC, f"{TO_MEGATRON} --on frob")],
}


ELSEWHERE = ("train/", "engines/", "oracle/", "guard.py")
"""Problems of runs and of frameworks that are loaded, which tests/train and the tests of `--logits` make."""
NOT_HERE = {
    "the Hub, a store or another machine": """
        hub-dataset-not-cached hub-dataset-split-missing hub-dataset-unreadable mpi-without-ranks
        push-needs-local-folder repository-name-malformed repository-not-empty store-not-writable
        upload-changed-before worker-plans-differently""",
    "the memory, the disk or a bug": "disk-too-small out-of-memory unexpected-error value-of-wrong-kind",
    "standard input, or a command of the shell": """
        notebook-unreadable stdin-empty stdin-not-text target-empty target-not-a-regular-file target-not-text""",
    "another release of reshard": "digest-kind-unknown proof-plan-differs record-without-plan",
    "a terabyte": "vocabulary-padded-too-far",
}
"""What an input needs that a test cannot make here, and the codes of such problems."""
NO_CASE_YET = """
    adapter-ambiguous adapter-base-family-unknown adapter-base-not-named adapter-base-unknown
    adapter-covers-some-linears adapter-misfits-base adapter-module-unknown adapter-name-unknown
    adapter-optimizer-unsupported adapter-strengths-differ arguments-lack-parts base-config-quantized base-quantized
    config-contradicts-arguments config-contradicts-itself config-differs-from-arguments config-incomplete-for-family
    config-not-beside-checkpoint config-size-differs config-sizes-impossible convert-family-not-for-engine
    convert-megatron-lacks-family dcp-iteration-mismatch deepspeed-latest-missing deepspeed-step-not-found
    deepspeed-tracker-missing
    delta-net-layout-unsupported digest-record-missing engine-computes-another-model engine-without-head
    executor-address-malformed expert-biases-tensor-parallel experts-differ family-not-for-engine family-unknown
    flat-tensor-size-differs format-dtype-fixed fused-adapter-dtypes-differ internevo-layout-fixed
    internlm-iteration-not-found internlm-layers-not-divisible internlm-model-without-experts iteration-folder-missing
    legacy-layout-unsupported legacy-mixed-layers-unsupported lora-alpha-not-finite lora-alpha-unknown
    megatron-adapter-misfits-base megatron-bridge-adapter-unsupported merge-base-unknown model-unknown
    nothing-to-quantize optimizer-state-missing-for-layers optimizer-state-partial optimizer-state-shape-differs
    page-needs-two-checkpoints proof-arguments-wrong proof-not-planned quantization-method-differs
    quantized-scales-wrong quantized-source-not-finite record-modified stacked-experts-fp8-unsupported
    tensor-has-no-place tensor-missing tensor-shape-differs tensor-transposed tensor-unknown
    tensors-misfit-names-in-memory vocabulary-size-differs weight-not-divisible-into-blocks weights-fewer-than-config
    weights-quantized"""
"""Codes whose remedy no case tries yet. Add a case rather than a code."""


def test_every_remedy_with_a_command_has_a_case() -> None:
    typed = re.compile(r"--[a-z]|reshard [a-z]+ ")
    told = {
        each.code
        for each in ALL
        if typed.search(each.named.get("remedy", "")) and not each.file.startswith(ELSEWHERE)
    }
    excused = set(" ".join([*NOT_HERE.values(), NO_CASE_YET]).split())
    assert sorted(told - CASES.keys() - excused) == []
    assert sorted(excused & CASES.keys()) == [] == sorted(excused - told)


LEAVING_OUT = re.compile(r"(?:leave out|remove|without)\s+(--[\w-]+)")
WORD = re.compile(r"--[\w-]+(?: from)?(?:[ =](?!or\b|and\b|for\b|to\b|with\b|in\b|is\b|so\b)[\w./:,+-]+)?")
COMMAND = re.compile(r"(?<![\w/])reshard (?:--help|[a-z]+-?[a-z]+)(?: [^\s;,`]+)*")


def options_of(command: str) -> dict[str, bool]:
    """The options of a command, and whether each takes a value."""
    found = cli.get_command(click.Context(cli), command)
    assert found
    return {
        name: not option.is_flag
        for option in found.params
        if isinstance(option, click.Option)
        for name in [*option.opts, *option.secondary_opts]
    }


def attempts(remedy: str, words: list[str], given: Mapping[str, str]) -> Iterator[list[str]]:
    """The commands that a user would type after reading a remedy."""
    if near := re.fullmatch(r"did you mean (.+)\?", remedy):
        yield _corrected(words, near[1])
        return
    for match in COMMAND.finditer(remedy):
        yield [given.get(word, word) for word in shlex.split(match[0])[1:]]
    remedy = COMMAND.sub("", remedy)
    for match in LEAVING_OUT.finditer(remedy):
        yield without(words, match[1])
    remedy = LEAVING_OUT.sub("", remedy)
    for clause in re.split(r"; |, (?!--)| or (?=--)|\)", remedy):
        flags = [
            re.split(r"[ =]", match[0].replace(" from", ""), maxsplit=1) for match in WORD.finditer(clause)
        ]
        if flags:
            changed = words if words[0] != "inspect" else ["convert", words[1], "dst"]
            for flag, *value in flags:
                changed = with_option(changed, flag, value[0].rstrip(",.") if value else None, given)
            yield changed


def _corrected(words: list[str], near: str) -> list[str]:
    """The command with the word that was meant."""
    from reshard.suggest import closest

    if near.startswith("--"):
        unknown = next(each for each in words if each.startswith("--") and each not in options_of(words[0]))
        return [near if each == unknown else each for each in words]
    wrong = next(each for each in words if closest(each, [near], cutoff=0.5) and each != near)
    return [near if each == wrong else each for each in words]


def without(words: list[str], flag: str) -> list[str]:
    if flag not in words:
        return words
    at = words.index(flag)
    return words[:at] + words[at + 1 + options_of(words[0])[flag] :]


def with_option(words: list[str], flag: str, value: str | None, given: Mapping[str, str]) -> list[str]:
    known = options_of(words[0])
    assert flag in known, f"{words[0]} has no {flag}"
    words = without(words, flag)
    if not known[flag]:
        return [*words, flag]
    value = given.get(flag) or given.get(value or "", value or "")
    assert value, f"no value for {flag}"
    return [*words, flag, value]


def problems_in(words: Sequence[str]) -> list[Problem]:
    printed = reshard(*words, *(["--json"] if "--list" not in words and "--help" not in words else []))
    assert "Traceback" not in printed.err
    content = json.loads(printed.out) if printed.out.startswith("{") else {}
    found: list[Problem] = content.get("problems", [])
    return found


@pytest.mark.parametrize("code", CASES)
def test_a_remedy_leads_somewhere(
    code: str, originals: Originals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number, case in enumerate(CASES[code]):
        tried, at = 1, 0
        while at < tried:
            there = tmp_path / f"{number}-{at}"
            there.mkdir()
            monkeypatch.chdir(there)
            for name, original in case.make.items():
                shutil.copytree(originals(original), name)
            case.change(there)
            words = case.words.split()
            before = problems_in(words)
            matching = [each for each in before if each["code"] == code]
            assert matching, f"{case.words} ends in {before}"
            problem = matching[0]
            commands = [*attempts(problem["remedy"], words, case.given)]
            assert commands, f"no command in {problem['remedy']}"
            tried = len(commands)
            after = problems_in(commands[at])
            told = f"{case.words} → {problem['remedy']} → {' '.join(commands[at])} → {after}"
            same = [
                each
                for each in after
                if each["code"] in (code, "option-not-known", "value-invalid", "argument-missing")
                and each.get("tensor") == problem.get("tensor")
            ]
            assert not same, told
            at += 1
