"""`reshard average`: sums of torch and of Megatron-LM's tool, for sources of any format, and what is refused."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import reshard as api
from reshard.model.averaged_tensor import AveragedTensor, fused_multiply_add
from tests.bad_input.damage import edit_config, flip
from tests.commandline import reshard

GENUINE = Path(__file__).parent / "data" / "megatron_average"
"""Checkpoints of megatron-core, and their average by its tool (`tests/genuine/make_megatron_average.py`)."""
WEIGHTS = (0.5, 0.3, 0.2)
NORM = "model.norm.weight"

Models = Callable[..., Path]


@pytest.fixture(scope="module")
def three(hf_model: Models) -> list[Path]:
    return [hf_model("qwen3", dtype="bfloat16", seed=seed) for seed in range(3)]


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def by_torch(folders: Sequence[Path], weights: Sequence[float]) -> dict[str, torch.Tensor]:
    """The sums in float32, as Megatron-LM's tool and torch's users add them."""
    found = {name: torch.zeros(each.shape) for name, each in tensors(folders[0]).items()}
    for folder, weight in zip(folders, weights, strict=True):
        for name, tensor in tensors(folder).items():
            found[name].add_(tensor, alpha=weight)
    return found


def edited(source: Path, out: Path, edit: Callable[[dict[str, torch.Tensor]], object]) -> Path:
    shutil.copytree(source, out)
    found = tensors(out)
    edit(found)
    save_file(found, out / "model.safetensors", metadata={"format": "pt"})
    return out


# ------------------------------------------------------------------------------------------------ the sums


@pytest.mark.core("weights1-bfloat16", "weights2-float32")
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("weights", [None, (3, 1, 1), (0.5, 0.3, 0.2), (1.5, -1, 0.5)])
def test_sums_are_those_of_torch(
    hf_model: Models, tmp_path: Path, dtype: str, weights: tuple[float, ...] | None
) -> None:
    folders = [hf_model("qwen3_moe", dtype=dtype, seed=seed) for seed in range(3)]
    shares = [each / sum(weights or (1, 1, 1)) for each in weights or (1, 1, 1)]
    wanted = by_torch(folders, shares)
    api.average(folders, tmp_path / "wide", weights=weights, dtype="float32")
    api.average(folders, tmp_path / "same", weights=weights)
    kinds = {name: each.dtype for name, each in tensors(folders[0]).items()}
    same = tensors(tmp_path / "same")
    for name, tensor in tensors(tmp_path / "wide").items():
        assert torch.equal(tensor, wanted[name]), name
        assert same[name].dtype == kinds[name]
        assert torch.equal(same[name], wanted[name].to(kinds[name])), name
    assert same.keys() == wanted.keys() and len(same) > 100


def test_sums_are_near_those_in_float64(three: list[Path], tmp_path: Path) -> None:
    api.average(three, tmp_path / "out", weights=WEIGHTS, dtype="float32")
    sources = [tensors(folder) for folder in three]
    for name, tensor in tensors(tmp_path / "out").items():
        terms = np.array(
            [each[name].double().numpy() * np.float32(w) for each, w in zip(sources, WEIGHTS, strict=True)]
        )
        error = np.abs(tensor.double().numpy() - terms.sum(0))
        assert (error <= 1.5 * np.spacing(np.abs(terms).sum(0).astype(np.float32))).all(), name


def test_two_halves_are_rounded_once(three: list[Path], tmp_path: Path) -> None:
    """Half of a float is exact, so that the sum of two halves is the exact average, rounded."""
    api.average(three[:2], tmp_path / "out", dtype="float32")
    first, second = map(tensors, three[:2])
    for name, tensor in tensors(tmp_path / "out").items():
        assert torch.equal(tensor, ((first[name].double() + second[name].double()) / 2).float()), name


def test_a_sum_in_the_middle_of_two_floats_is_rounded_as_the_exact_one() -> None:
    """In float64, the sum is just the middle, from where it would be rounded to the wrong side."""
    total = np.full(40, 1 + 2.0**-23, np.float32)
    values = np.full(40, 2.0**-24 * (1 + 2.0**-23), np.float32) * np.repeat(np.float32([1, -1]), 20)
    weight = np.float64(np.float32(1 - 2.0**-23))
    assert (fused_multiply_add(total, values, weight).astype(np.float32) != total + values * weight).any()
    wanted = torch.from_numpy(total.copy()).add_(torch.from_numpy(values), alpha=float(weight))
    assert np.array_equal(fused_multiply_add(total, values, weight).astype(np.float32), wanted.numpy())


@pytest.mark.parametrize("tp", [1, 2])
def test_the_average_is_that_of_megatrons_tool(tmp_path: Path, tp: int) -> None:
    sources = [GENUINE / str(seed) for seed in (1, 2, 3)]
    options: dict[str, Any] = {"to": "megatron", "tp": tp, "no_tokenizer": True, "dtype": "float32"}
    api.average(sources, tmp_path / "out", weights=WEIGHTS, **options)
    assert api.verify(GENUINE / "merged", tmp_path / "out").equal
    assert not api.verify(GENUINE / "1", tmp_path / "out").equal


# ------------------------------------------------------------------------------------- sources and targets


@pytest.fixture(scope="module")
def mixed(three: list[Path], hf_model: Models, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The same models in four formats and layouts."""
    made = tmp_path_factory.mktemp("mixed")
    api.convert(three[1], made / "megatron", to="megatron", tp=2, pp=2)
    api.convert(three[2], made / "dcp", to="dcp")
    last = hf_model("qwen3", dtype="bfloat16", seed=3)
    api.convert(last, made / "deepspeed", to="deepspeed")
    return [three[0], made / "megatron", made / "dcp", made / "deepspeed"]


MEGATRON = {"to": "megatron", "tp": 2, "pp": 2}


@pytest.mark.thorough
@pytest.mark.parametrize("options", [{}, MEGATRON, {"to": "dcp"}], ids=["hf", "megatron", "dcp"])
def test_formats_and_layouts_may_differ(
    mixed: list[Path], hf_model: Models, tmp_path: Path, options: dict[str, Any]
) -> None:
    plain = [hf_model("qwen3", dtype="bfloat16", seed=seed) for seed in range(4)]
    api.average(plain, tmp_path / "plain", weights=(1, 2, 3, 4), dtype="bfloat16")
    api.average(mixed, tmp_path / "out", weights=(1, 2, 3, 4), dtype="bfloat16", **options)
    assert api.verify(tmp_path / "plain", tmp_path / "out").equal
    assert api.verify(tmp_path / "out").equal
    for source in mixed:
        proof = api.verify(source, tmp_path / "out", proof=True)
        assert proof and proof.recorded and proof.source.averaged == 4


def test_each_element_is_computed_once(
    three: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where ranks have columns of a weight, of which each needs short runs."""
    counted: list[int] = []
    summed = AveragedTensor._summed

    def counting(self: AveragedTensor, inputs: Any, begin: int, end: int, read: Any) -> Any:
        counted.append(end - begin)
        return summed(self, inputs, begin, end, read)

    monkeypatch.setattr(AveragedTensor, "_summed", counting)
    api.average(three, tmp_path / "out", to="megatron", tp=4)
    assert sum(counted) == api.inspect(three[0]).checkpoint.parameters


def test_a_checkpoint_without_a_config_has_that_of_the_last(three: list[Path], tmp_path: Path) -> None:
    api.convert(three[0], tmp_path / "dcp", to="dcp")
    (tmp_path / "dcp" / "config.json").unlink()
    api.average([tmp_path / "dcp", three[1]], tmp_path / "out")
    api.average(three[:2], tmp_path / "plain")
    assert api.verify(tmp_path / "plain", tmp_path / "out").equal


def test_config_and_tokenizer_are_those_of_the_last(three: list[Path], tmp_path: Path) -> None:
    last = shutil.copytree(three[1], tmp_path / "last")
    edit_config(last, eos_token_id=3, rms_norm_eps=0.5)
    (last / "chat_template.jinja").write_text("of the last")
    told = reshard("average", three[0], last, tmp_path / "out")
    assert told.code == 0 and f"eos_token_id is 2 in {three[0]}: the output has 3, as {last}" in told.err
    assert "rms_norm_eps is 1e-06" in told.err
    assert json.loads((tmp_path / "out" / "config.json").read_text())["rms_norm_eps"] == 0.5
    assert (tmp_path / "out" / "chat_template.jinja").read_text() == "of the last"


def test_a_tied_head_is_stored_or_not(hf_model: Models, tmp_path: Path) -> None:
    tied = [hf_model("qwen3", dtype="bfloat16", seed=seed, tie_word_embeddings=True) for seed in (0, 1)]

    def store_head(found: dict[str, torch.Tensor]) -> None:
        found["lm_head.weight"] = found["model.embed_tokens.weight"].clone()

    stored = edited(tied[0], tmp_path / "stored", store_head)
    api.average([stored, tied[1]], tmp_path / "out")
    assert "lm_head.weight" not in tensors(tmp_path / "out")
    assert torch.equal(tensors(tmp_path / "out")[NORM], by_torch(tied, (0.5, 0.5))[NORM].bfloat16())


def test_biases_of_routers_are_averaged_in_float32(hf_model: Models, tmp_path: Path) -> None:
    models = [hf_model("deepseek_v3", dtype="bfloat16", seed=seed) for seed in (0, 1)]
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    for index, model in enumerate(models):
        values = torch.arange(8, dtype=torch.float32) * (index + 1.001)
        bias = lambda found, to=values: found.update({name: to[: len(found[name])].clone()})  # noqa: E731
        models[index] = edited(model, tmp_path / str(index), bias)
    told = reshard("average", *models, tmp_path / "out")
    assert told.code == 0 and "the biases of routers are averaged as well" in told.err
    found = tensors(tmp_path / "out")[name]
    assert found.dtype == torch.float32 and torch.equal(found, by_torch(models, (0.5, 0.5))[name])


def test_quantized_checkpoints_are_dequantized_with_a_dtype(three: list[Path], tmp_path: Path) -> None:
    quantized = []
    for index, model in enumerate(three[:2]):
        api.convert(model, tmp_path / f"fp8-{index}", quantize="fp8")
        api.convert(tmp_path / f"fp8-{index}", tmp_path / f"plain-{index}", dtype="bfloat16")
        quantized.append(tmp_path / f"fp8-{index}")
    refused = reshard("average", *quantized, tmp_path / "out", "--json")
    assert [each["code"] for each in refused.json["problems"]] == ["average-of-quantized"] * 2
    api.average(quantized, tmp_path / "out", dtype="bfloat16")
    api.average([tmp_path / "plain-0", tmp_path / "plain-1"], tmp_path / "plain")
    assert api.verify(tmp_path / "plain", tmp_path / "out").equal
    assert api.verify(quantized[1], tmp_path / "out", proof=True)


# ------------------------------------------------------------------------------- what nobody should lose


def test_the_record_names_all_checkpoints(three: list[Path], tmp_path: Path) -> None:
    assert reshard("average", *three, tmp_path / "out", "--weights", "2,1,1", "-q").code == 0
    record = json.loads((tmp_path / "out" / "reshard.json").read_text())
    assert record["options"]["average"] == {"paths": list(map(str, three)), "weights": [0.5, 0.25, 0.25]}
    assert record["source"]["variant"] == "average of 3 checkpoints" and len(record["source"]["files"]) == 3
    assert api.verify(tmp_path / "out").equal
    flip(tmp_path / "out" / "model.safetensors", -5)
    assert not api.verify(tmp_path / "out").equal


def test_a_proof_tells_other_weights(three: list[Path], tmp_path: Path) -> None:
    """It counts elements; the weights are part of the recorded plan."""
    api.average(three, tmp_path / "out")
    proof = api.verify(three[0], tmp_path / "out", proof=True)
    assert proof and proof.recorded
    assert (proof.source.used, proof.target.computed) == (3 * proof.target.elements, proof.target.elements)
    assert not api.verify(three[0], tmp_path / "out").equal


def test_a_killed_run_goes_on(three: list[Path], tmp_path: Path) -> None:
    options: dict[str, Any] = {"max_shard_size": "60kB", "workers": 1, "weights": WEIGHTS}
    api.average(three, tmp_path / "whole", **options)
    if not (child := os.fork()):
        written: list[int] = []

        def die(nbytes: int) -> None:
            written.append(nbytes)
            if sum(written) > 200_000:
                os._exit(9)

        api.average(three, tmp_path / "out", on_bytes=die, **options)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9 and not (tmp_path / "out").exists()
    notes: list[int] = []
    api.average(three, tmp_path / "out", on_resume=lambda note, nbytes: notes.append(nbytes), **options)
    assert notes and notes[0] > 0 and api.verify(tmp_path / "out").equal
    for path in (tmp_path / "whole").glob("*.safetensors"):
        assert path.read_bytes() == (tmp_path / "out" / path.name).read_bytes()


def test_other_weights_do_not_continue_a_run(three: list[Path], tmp_path: Path) -> None:
    plans = [
        api.average(three[:2], tmp_path / "out", weights=weights, overwrite=True)
        and json.loads((tmp_path / "out" / "reshard.json").read_text())["plan"]
        for weights in ((1, 1), (1, 2), (1, 1))
    ]
    assert plans[0] != plans[1] and plans[0] == plans[2]


def test_nan_is_a_warning_or_an_error(three: list[Path], tmp_path: Path) -> None:
    def damage(found: dict[str, torch.Tensor]) -> None:
        found[NORM][3] = torch.nan

    broken = edited(three[0], tmp_path / "broken", damage)
    told = reshard("average", three[1], broken, tmp_path / "out")
    assert told.code == 0 and f"NaN or Inf in {NORM}" in told.err
    assert torch.isnan(tensors(tmp_path / "out")[NORM]).nonzero().tolist() == [[3]]
    assert reshard("average", three[1], broken, tmp_path / "strict", "--strict").code == 2
    assert not (tmp_path / "strict").exists()


@pytest.mark.parametrize(("dtype", "large"), [("float16", 6e4), ("float32", 3e38)])
def test_a_sum_that_does_not_fit_is_refused(
    hf_model: Models, tmp_path: Path, dtype: str, large: float
) -> None:
    pair = [
        edited(
            hf_model("qwen3", dtype=dtype, seed=index),
            tmp_path / str(index),
            lambda found, value=value: found[NORM].fill_(value),
        )
        for index, value in enumerate((large, -large))
    ]
    assert reshard("average", *pair, tmp_path / "out", "--weights", "3,2").code == 0
    (problem,) = refused(*pair, tmp_path / "other", "--weights", "3,-2")
    assert problem["tensor"] == NORM and not (tmp_path / "other").exists()


# ---------------------------------------------------------------------------------------- what is refused


def refused(*words: object) -> list[dict[str, str]]:
    """The problems of a command that writes nothing."""
    told = reshard("average", *words, "--json")
    assert told.code == 2 and "Traceback" not in told.err
    problems: list[dict[str, str]] = told.json["problems"]
    return problems


def test_all_differences_are_told_at_once(hf_model: Models, three: list[Path], tmp_path: Path) -> None:
    shorter = hf_model("qwen3", dtype="bfloat16", num_hidden_layers=2, layer_types=None)
    wide = hf_model("qwen3", dtype="float32", seed=1)
    problems = refused(shorter, wide, three[0], tmp_path / "out")
    assert {each["code"] for each in problems} == {
        *("average-configs-differ", "average-tensor-missing", "average-dtype-differs")
    }
    (missing,) = (each for each in problems if each["code"] == "average-tensor-missing")
    assert missing["found"] == f"not in {shorter}" and "and 19 more" in missing["tensor"]
    assert not (tmp_path / "out").exists()


def test_vocabularies_of_other_sizes_are_refused(three: list[Path], tmp_path: Path) -> None:
    def cut(found: dict[str, torch.Tensor]) -> None:
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            found[name] = found[name][:-2].clone()

    smaller = edited(three[0], tmp_path / "smaller", cut)
    edit_config(smaller, vocab_size=281)
    (problem,) = refused(smaller, three[1], tmp_path / "out")
    assert problem["code"] == "average-shape-differs"
    assert problem["tensor"] == "model.embed_tokens.weight, lm_head.weight"
    assert f"[281, 64] in {smaller}, [283, 64] in {three[1]}" in problem["found"]


def test_integers_must_be_the_same(tmp_path: Path) -> None:
    """Position ids and counts of a model whose family is not declared."""
    folders = []
    for index, step in enumerate((1, 1, 2)):
        folder = tmp_path / str(index)
        folder.mkdir()
        (folder / "config.json").write_text('{"model_type": "mine"}')
        ids = torch.arange(0, 8 * step, step)
        save_file({"x.weight": torch.full((4, 4), float(index)), "x.ids": ids}, folder / "model.safetensors")
        folders.append(folder)
    api.average(folders[:2], tmp_path / "out", no_tokenizer=True)
    found = tensors(tmp_path / "out")
    assert found["x.weight"].unique().tolist() == [0.5] and found["x.ids"].tolist() == list(range(8))
    problems = refused(*folders, tmp_path / "other", "--no-tokenizer")
    assert {each["code"] for each in problems} == {"average-integers-differ"}
    told = " ".join(each["file"] + each["expected"] for each in problems)
    assert all(str(folder) in told for folder in folders) and not (tmp_path / "other").exists()


def test_adapters_are_refused(three: list[Path], tmp_path: Path) -> None:
    adapter = Path(__file__).parent / "data" / "megatron_lora" / "swift-tp2"
    (problem,) = refused(adapter, three[0], tmp_path / "out")
    assert problem["code"] == "average-of-adapters" and "--merge" in problem["remedy"]


def test_a_checkpoint_is_given_once(three: list[Path], tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(three[0])
    (problem,) = refused(three[0], three[1], tmp_path / "link", tmp_path / "out")
    assert problem["code"] == "average-checkpoint-twice" and str(three[0]) in problem["found"]


@pytest.mark.parametrize("at", [0, 1])
def test_the_output_is_none_of_the_checkpoints(three: list[Path], tmp_path: Path, at: int) -> None:
    copies = [shutil.copytree(path, tmp_path / str(index)) for index, path in enumerate(three[:2])]
    (problem,) = refused(*copies, copies[at], "--overwrite")
    assert problem["code"] in ("source-is-destination", "destination-contains-input")
    assert all(api.verify(*pair).equal for pair in zip(three, copies, strict=False))


def test_a_folder_and_its_own_file_are_one_checkpoint(three: list[Path], tmp_path: Path) -> None:
    (problem,) = refused(three[0], three[1], three[0] / "model.safetensors", tmp_path / "out")
    assert problem["code"] == "average-checkpoint-twice"
    assert problem["file"] == str(three[0] / "model.safetensors") and str(three[0]) in problem["found"]


def test_tokenizers_with_other_ids_are_refused(three: list[Path], tmp_path: Path) -> None:
    """Rows of two tokens would be averaged. Tokens that only one of them has are no contradiction."""
    other, more = (Path(shutil.copytree(three[1], tmp_path / name)) for name in ("other", "more"))
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    first, second, *_ = (token for token, number in vocab.items() if number > 20)
    changed = {**vocab, first: vocab[second], second: vocab[first]}
    model = {**tokenizer["model"], "vocab": changed}
    (other / "tokenizer.json").write_text(json.dumps({**tokenizer, "model": model}))
    (problem,) = refused(other, three[0], tmp_path / "out")
    assert problem["code"] == "average-tokenizers-differ" and "2 ids differ" in problem["found"]
    api.average([other, three[0]], tmp_path / "without", no_tokenizer=True)
    added = {**tokenizer["added_tokens"][0], "id": 900, "content": "<more>"}
    added_tokens = [*tokenizer["added_tokens"], added]
    (more / "tokenizer.json").write_text(json.dumps({**tokenizer, "added_tokens": added_tokens}))
    assert refused(other, more, three[0], tmp_path / "out")[0]["file"] == str(other)
    api.average([more, three[0]], tmp_path / "more tokens")


def test_settings_that_only_one_config_has_are_noted(three: list[Path], tmp_path: Path) -> None:
    other = Path(shutil.copytree(three[1], tmp_path / "other"))
    edit_config(other, residual_scale=2.5)
    for paths in ([other, three[0]], [three[0], other]):
        notes = api.average(paths, tmp_path / "out", dry_run=True).plan.notes
        assert [note for note in notes if f"residual_scale=2.5: only in the config of {other}" in note]
    notes = api.average(three[:2], tmp_path / "out", dry_run=True).plan.notes
    assert not [note for note in notes if "only in the config" in note]


def test_a_proof_takes_none_but_the_averaged(three: list[Path], tmp_path: Path) -> None:
    api.average(three[:2], tmp_path / "out")
    told = reshard("verify", three[2], tmp_path / "out", "--proof", "--json")
    (problem,) = told.json["problems"]
    assert told.code == 2 and problem["code"] == "proof-not-averaged"
    assert str(three[0]) in problem["expected"] and str(three[1]) in problem["remedy"]


@pytest.mark.parametrize(
    ("weights", "shares"),
    [((1e308, 1e308), [0.5, 0.5]), ((1e308, 5e307), [2 / 3, 1 / 3]), ((5e-324, 5e-324), [0.5, 0.5])],
)
def test_weights_of_any_size_are_divided(
    weights: tuple[float, ...], shares: list[float], three: list[Path], tmp_path: Path
) -> None:
    first, *_ = api.average(three[:2], tmp_path / "out", weights=weights, dry_run=True).plan.notes
    assert first == f"the average of {three[0]} × {shares[0]:.6g}, {three[1]} × {shares[1]:.6g}"


def test_a_share_beyond_float32_is_refused(three: list[Path], tmp_path: Path) -> None:
    (problem,) = refused(*three, tmp_path / "out", "--weights=1e300,-1e300,1")
    assert problem["code"] == "average-weights-wrong"


@pytest.mark.parametrize("weights", ["1", "1,2,3", "1,-1", "-2,1", "1e308,-1e308"])
def test_weights_that_cannot_be_used(three: list[Path], tmp_path: Path, weights: str) -> None:
    (problem,) = refused(*three[:2], tmp_path / "out", f"--weights={weights}")
    assert problem["code"] == "average-weights-wrong"


def test_words_that_cannot_be_used(three: list[Path], tmp_path: Path) -> None:
    assert refused(three[0], tmp_path / "out")[0]["code"] == "average-of-one"
    for words in ("1,x", "1,nan", "1,inf"):
        assert refused(*three[:2], tmp_path / "out", "--weights", words)[0]["code"] == "value-invalid"
    missing = refused(tmp_path / "a", tmp_path / "b", three[0], tmp_path / "out")
    assert [each["file"] for each in missing] == [str(tmp_path / "a"), str(tmp_path / "b")]
    with pytest.raises(api.ReshardError, match="wrong value for weights"):
        api.average(three[:2], tmp_path / "out", weights=0.5)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="unexpected keyword argument 'merge'"):
        api.average(three[:2], tmp_path / "out", merge=True)  # type: ignore[call-arg]
    with pytest.raises(api.ReshardError, match="two or more"):
        api.average(three[0], tmp_path / "out")  # type: ignore[arg-type]
