"""Weights in running modules: the state and the logits are those of what transformers loads from the Hub's folder."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3ForCausalLM

import reshard
from reshard import ReshardError
from reshard.algebra.tensors import cells_of
from tests.bad_input.damage import flip
from tests.environments import python
from tests.test_weights import DATA

Models = Callable[..., Path]
TOKENS = torch.arange(24).reshape(2, 12) % 100


def converted(source: Path, folder: Path, **options: Any) -> Path:
    reshard.convert(source, folder, **options)
    return folder


def assert_same_model(found: Any, folder: Path) -> None:
    """State and logits equal, bit for bit, those of the model that transformers loads from `folder`."""
    expected = AutoModelForCausalLM.from_pretrained(folder).eval()
    theirs, ours = expected.state_dict(), found.state_dict()
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert ours[name].dtype == tensor.dtype and torch.equal(ours[name], tensor), name
    with torch.inference_mode():
        assert torch.equal(found.eval()(TOKENS).logits, expected(TOKENS).logits)


LAYOUTS: dict[str, dict[str, Any]] = {
    "qwen3": {"to": "megatron", "tp": 2, "pp": 2},
    "qwen3_moe": {"to": "megatron", "tp": 2, "ep": 2},
    "deepseek_v3": {"to": "megatron-legacy", "pp": 2},
    "glm4_moe": {"to": "megatron", "tp": 2},
    "gpt_oss": {"to": "dcp"},
    "mixtral": {"to": "deepspeed"},
    "llama_tied": {"to": "megatron", "tp": 2},
}


@pytest.mark.core("qwen3_moe", "gpt_oss", "llama_tied")
@pytest.mark.parametrize("family", LAYOUTS)
def test_from_pretrained_is_that_of_transformers(family: str, hf_model: Models, tmp_path: Path) -> None:
    """Layers for multi-token prediction, which deepseek_v3 and glm4_moe have, are built by neither."""
    source = hf_model("llama", tie_word_embeddings=True) if family == "llama_tied" else hf_model(family)
    run = converted(source, tmp_path / "run", **LAYOUTS[family])
    assert_same_model(reshard.from_pretrained(run), source)


def test_from_pretrained_takes_a_dtype_and_dequantizes(hf_model: Models, tmp_path: Path) -> None:
    source = hf_model("qwen3_moe")
    plain = converted(source, tmp_path / "plain", dtype="bfloat16")
    assert_same_model(reshard.from_pretrained(source, dtype="bfloat16"), plain)
    fp8 = converted(source, tmp_path / "fp8", dtype="bfloat16", quantize="fp8")
    again = converted(fp8, tmp_path / "again", dtype="bfloat16")
    assert_same_model(reshard.from_pretrained(fp8, dtype="bfloat16"), again)


class WithMore(Qwen3ForCausalLM):
    """A model whose checkpoints may lack a module, as those of RADIO and of SeamlessM4T."""

    _keys_to_ignore_on_load_missing = (r"more\.",)

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.more = torch.nn.Linear(64, 64)
        self.post_init()


def test_what_a_checkpoint_may_lack_is_initialized(hf_model: Models) -> None:
    source = hf_model("qwen3")
    torch.use_deterministic_algorithms(True)  # fills memory without values with NaN
    try:
        found = reshard.from_pretrained(source, WithMore)
    finally:
        torch.use_deterministic_algorithms(False)
    assert not found.more.bias.any() and 0.01 < found.more.weight.std() < 0.03
    expected = AutoModelForCausalLM.from_pretrained(source).state_dict()
    assert all(torch.equal(found.state_dict()[name], tensor) for name, tensor in expected.items())


def test_the_model_names_the_folder_that_it_is_from(hf_model: Models) -> None:
    found = reshard.from_pretrained(hf_model("qwen3"))
    assert found.name_or_path == found.config._name_or_path == str(hf_model("qwen3"))


def test_a_larger_model_does_not_initialize_it_again(hf_model: Models) -> None:
    found = reshard.from_pretrained(hf_model("qwen3"))
    found.init_weights()
    assert_same_model(found, hf_model("qwen3"))


def test_from_pretrained_of_what_an_engine_saved(tmp_path: Path) -> None:
    source = DATA / "verl" / "fsdp1"
    folder = converted(source, tmp_path / "hf", no_tokenizer=True)
    assert_same_model(reshard.from_pretrained(source), folder)


def test_a_module_of_its_own_dtype_is_filled(hf_model: Models, tmp_path: Path) -> None:
    source = hf_model("qwen3_moe")
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(source)).to(torch.bfloat16)
    loaded = reshard.load_into(model, converted(source, tmp_path / "run", to="megatron", tp=2))
    expected = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16).state_dict()
    assert loaded.tensors == len(expected) and not loaded.left_out
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, expected[name].to(torch.bfloat16)), name


@pytest.mark.parametrize("wrap", ["module", "_orig_mod"])
def test_wrappers_in_names_do_not_matter(wrap: str, hf_model: Models) -> None:
    source = hf_model("qwen3")
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(source))
    reshard.load_into(
        torch.nn.ModuleDict({wrap: model}) if wrap == "module" else torch.compile(model), source
    )
    assert_same_model(model, source)


@pytest.mark.parametrize(("how", "ranks"), [("fsdp", 2), ("tp", 2), ("fsdp-tp", 4)])
@pytest.mark.thorough
def test_each_rank_reads_only_its_own_part(how: str, ranks: int, hf_model: Models, tmp_path: Path) -> None:
    source = hf_model("qwen3")
    layout: dict[str, Any] = {"to": "dcp"} if how == "fsdp" else {"to": "megatron", "tp": 2, "pp": 2}
    run = converted(source, tmp_path / "run", **layout)
    launch = [
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--local-addr=127.0.0.1",
        f"--nproc-per-node={ranks}",
    ]
    words = [sys.executable, *launch, "-m", "tests.live.sharded", str(run), str(source), how]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    told = re.findall(r"rank \d: read (\d+) for (\d+), holds (\d+)", done.stdout)
    assert len(told) == ranks and all(filled == held for _, filled, held in told), told
    if (
        how == "fsdp"
    ):  # rows of each tensor; with tensor parallelism, the gaps in short rows of columns are read too
        assert all(read == held for read, _, held in told), told


@pytest.mark.parametrize(
    ("how", "code"), [("fsdp1", "live-module-in-fsdp1"), ("partial", "live-tensor-is-partial")]
)
@pytest.mark.slow
def test_what_is_sharded_otherwise_is_refused(how: str, code: str, hf_model: Models) -> None:
    source = str(hf_model("qwen3"))
    launch = ["-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1", "--nproc-per-node=2"]
    words = [sys.executable, *launch, "-m", "tests.live.sharded", source, source, how]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.stdout.count(f"refused: ['{code}']") == 2, done.stdout + done.stderr[-3000:]


@pytest.mark.slow
def test_zero3_is_refused_until_it_is_gathered(hf_model: Models) -> None:
    words = [python("deepspeed"), "-m", "tests.live.zero3", str(hf_model("qwen3"))]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert "refused: ['live-module-in-zero3']" in done.stdout, done.stderr[-3000:]
    assert "gathered: True" in done.stdout, done.stderr[-3000:]


@pytest.mark.slow
def test_no_second_copy_is_in_memory(hf_model: Models, tmp_path: Path) -> None:
    """A model of 240 MB: the process grows by little more."""
    source = hf_model("qwen3", hidden_size=1024, intermediate_size=4096, num_hidden_layers=4, vocab_size=1024)
    run = converted(source, tmp_path / "run", to="megatron", tp=2, no_tokenizer=True)
    code = (
        "import sys, torch, transformers, reshard\n"
        "from transformers.models.qwen3 import modeling_qwen3\n"
        "from reshard.transfer.memory_budget import resident\n"
        "weights = reshard.open(sys.argv[1]); len(weights)\n"
        "before = resident()[1]\n"
        "model = reshard.from_pretrained(weights, memory='32MiB', workers=2)\n"
        "print(resident()[1] - before, sum(each.nbytes for each in model.parameters()))"
    )
    done = subprocess.run([sys.executable, "-c", code, str(run)], capture_output=True, text=True, check=True)
    grown, held = map(int, done.stdout.split())
    assert held > 200e6 and grown < held + (64 << 20), (grown, held)


# ------------------------------------------------------------------------------------------- what is wrong


def refused(module: torch.nn.Module, path: Path, **options: Any) -> dict[str, list[str]]:
    before = {name: tensor.clone() for name, tensor in module.state_dict().items() if not tensor.is_meta}
    with pytest.raises(ReshardError) as caught:
        reshard.load_into(module, path, **options)
    for name, tensor in before.items():
        assert torch.equal(module.state_dict()[name], tensor), name
    found: dict[str, list[str]] = {}
    for problem in caught.value.problems:
        found.setdefault(problem.code, []).append(problem.tensor or "")
    return found


def built(folder: Path, **changes: Any) -> Any:
    config = AutoConfig.from_pretrained(folder)
    for key, value in changes.items():
        setattr(config, key, value)
    return AutoModelForCausalLM.from_config(config)


def test_everything_that_does_not_fit_is_named_and_nothing_changes(hf_model: Models) -> None:
    source = hf_model("qwen3")
    found = refused(built(source, num_hidden_layers=5, layer_types=["full_attention"] * 5), source)
    assert found.keys() == {"live-tensor-not-in-checkpoint"}
    found = refused(built(source, num_hidden_layers=1), source)
    assert found.keys() == {"live-tensor-not-in-module"}
    found = refused(built(source, intermediate_size=32), source)
    assert found.keys() == {"live-tensor-shape-differs"}
    assert refused(built(hf_model("qwen3_moe")), source).keys() >= {"live-tensor-not-in-checkpoint"}


def test_damage_that_is_found_while_reading_is_told_with_what_was_changed(
    hf_model: Models, tmp_path: Path
) -> None:
    run = converted(hf_model("qwen3"), tmp_path / "run", to="megatron")
    storage = next(cells.storage for cells in cells_of(reshard.open(run)["model.norm.weight"].tensor.view))
    flip(Path(storage.path), storage.offset)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(run))
    with pytest.raises(ReshardError) as caught:
        reshard.load_into(model, run)
    *damage, changed = caught.value.problems
    assert {each.code for each in damage} == {"checksum-mismatch"}
    assert changed.code == "live-module-overwritten"
    assert f"up to {len(model.state_dict())} tensors" in str(changed.found)


def test_a_module_on_meta_is_refused_with_its_buffers(hf_model: Models) -> None:
    with torch.device("meta"):
        model = built(hf_model("qwen3"))
    found = refused(model, hf_model("qwen3"))
    assert found.keys() == {"live-tensor-on-meta"}
    assert any("inv_freq" in name for name in found["live-tensor-on-meta"])


def test_a_quantized_source_is_refused_unless_it_is_dequantized(hf_model: Models, tmp_path: Path) -> None:
    fp8 = converted(hf_model("qwen3"), tmp_path / "fp8", dtype="bfloat16", quantize="fp8")
    model = built(hf_model("qwen3"))
    assert "live-tensor-not-in-module" in refused(model, fp8)
    reshard.load_into(model, fp8, dtype="bfloat16")


def test_a_checkpoint_without_config_is_refused(hf_model: Models, tmp_path: Path) -> None:
    run = converted(hf_model("qwen3"), tmp_path / "run", to="dcp")
    (run / "config.json").unlink()
    with pytest.raises(ReshardError, match=r"config\.json"):
        reshard.from_pretrained(run)
    assert_same_model(reshard.from_pretrained(run, base=hf_model("qwen3")), hf_model("qwen3"))


def test_an_adapter_needs_its_base(tmp_path: Path) -> None:
    with pytest.raises(ReshardError):
        reshard.from_pretrained(DATA / "verl" / "fsdp2-lora" / "actor")


def test_a_module_that_ties_what_differs_is_refused(hf_model: Models, tmp_path: Path) -> None:
    source = hf_model("qwen3")
    found = refused(built(source, tie_word_embeddings=True), source, verify=False)
    assert found == {"live-tied-tensors-differ": ["lm_head.weight"]}
    model = AutoModelForCausalLM.from_pretrained(source)
    model.lm_head.weight.data.copy_(model.model.embed_tokens.weight)
    model.save_pretrained(tmp_path / "equal")
    tied = built(source, tie_word_embeddings=True)
    reshard.load_into(tied, tmp_path / "equal")
    assert torch.equal(tied.lm_head.weight, model.lm_head.weight)


def test_what_a_state_dict_copies_or_leaves_out_is_refused(hf_model: Models) -> None:
    source = hf_model("qwen3")
    copied, left_out = built(source), built(source)
    copied.register_state_dict_post_hook(
        lambda module, state, prefix, meta: state.update({key: each.clone() for key, each in state.items()})
    )
    left_out.register_state_dict_post_hook(
        lambda module, state, prefix, meta: state.__delitem__("model.norm.weight")
    )
    assert len(refused(copied, source)["live-tensor-is-a-copy"]) > 3
    assert refused(left_out, source)["live-parameter-not-in-state-dict"] == ["model.norm.weight"]
    expanded = built(source)
    expanded.model.norm.weight = torch.nn.Parameter(torch.zeros(1).expand(64))
    assert refused(expanded, source) == {"live-tensor-overlaps": ["model.norm.weight"]}


def test_names_with_the_mark_of_a_wrapper_in_them_stay(tmp_path: Path) -> None:
    """HRM has modules called `L_module`, which no wrapper has put there."""
    from tests.genuine.every_type import build

    model: Any = build("hrm_text")
    model.save_pretrained(tmp_path)
    found = reshard.from_pretrained(tmp_path).state_dict()
    assert all(torch.equal(found[name], tensor) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize(
    ("module", "told"),
    [("abc", "module='str'"), ([], "module='list'"), (torch.nn.Linear, "module='type'"), ({}, "'dict'")],
)
def test_what_is_no_module_is_told(module: Any, told: str, hf_model: Models) -> None:
    with pytest.raises(ReshardError, match=told):
        reshard.load_into(module, hf_model("qwen3"))


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"auto": "AutoModel"}, "auto='AutoModel'"),
        ({"build": [1]}, r"build=\[1\]"),
        ({"build": {"nope": 1}}, "nope"),
        ({"trust_remote_code": "yes"}, "trust_remote_code='yes'"),
    ],
)
def test_wrong_arguments_of_from_pretrained_are_told(
    options: dict[str, Any], told: str, hf_model: Models
) -> None:
    with pytest.raises(ReshardError, match=told):
        reshard.from_pretrained(hf_model("qwen3"), **options)


def test_arguments_for_opening_an_open_checkpoint_are_refused(hf_model: Models) -> None:
    weights = reshard.open(hf_model("qwen3"))
    with pytest.raises(ReshardError, match="dtype is for opening it"):
        reshard.from_pretrained(weights, dtype="bfloat16")
    assert refused(built(hf_model("qwen3")), weights, dtype="bfloat16").keys() == {"argument-wrong"}  # type: ignore[arg-type]
