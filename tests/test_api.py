"""The public API of `import reshard`: functions and types, for people, type checkers and notebooks."""

from __future__ import annotations

import doctest
import inspect
import json
import pydoc
import re
import subprocess
import sys
import traceback
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from safetensors.torch import load_file as torch_file
from transformers import AutoModelForCausalLM

import reshard
from reshard.cli import COMMANDS
from reshard.families.dialect import HUB
from tests.commandline import reshard as command
from tests.exchange.test_transfer_plan import RECORDINGS, SIZES

DOCS = Path(__file__).parents[1] / "docs"
SOURCE = Path(reshard.__file__).parent
FUNCTIONS = (
    *(
        "convert",
        "described_trainer",
        "doctor",
        "from_pretrained",
        "inspect",
        "load_into",
        "open",
    ),
    *("stream", "support", "train", "transfer_plan", "verify", "weight_sender", "weight_source"),
)
COMMANDS_ALONE = ("help", "mcp", "serve", "watch")
IN_MODULES = {"guard": "run"}
"""Functions of modules that do what a command does."""
LOG = """Traceback (most recent call last):
  File "train.py", line 3, in <module>
    loss.backward()
torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.11 GiB of \
which 1.20 GiB is free.
"""


@pytest.fixture(scope="module")
def place(hf_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files that the examples name: a model, a Megatron run, a fine-tuned model and a log."""
    folder = tmp_path_factory.mktemp("examples")
    (folder / "model").symlink_to(hf_model("qwen3"))
    (folder / "moe").symlink_to(hf_model("qwen3_moe", **SIZES))
    (folder / "recordings").symlink_to(RECORDINGS / "qwen3_moe")
    reshard.convert(folder / "model", folder / "run", to="megatron", tp=2, pp=2)
    reshard.convert(folder / "model", folder / "tuned", to="huggingface")
    file = folder / "tuned" / "model.safetensors"
    tensors: dict[str, Any] = load_file(file)
    tensors["model.layers.1.mlp.up_proj.weight"] = tensors["model.layers.1.mlp.up_proj.weight"] + 0.25
    save_file(tensors, file, metadata={"format": "pt"})
    (folder / "train.log").write_text(LOG)
    return folder


# ------------------------------------------------------------------------------------------- what there is


def test_everything_is_visible_and_nothing_else_is_there() -> None:
    public = {name for name in dir(reshard) if not name.startswith("_")}
    assert {*dir(reshard)} == {*reshard.__all__, "guard"} and public == {*dir(reshard)} - {"__version__"}
    assert all(getattr(reshard, name) is not None for name in reshard.__all__)
    assert [name for name in FUNCTIONS if not inspect.isfunction(getattr(reshard, name))] == []
    with pytest.raises(AttributeError, match="convrt"):
        getattr(reshard, "convrt")  # noqa: B009


def test_each_command_is_a_function() -> None:
    assert {*COMMANDS} <= {*FUNCTIONS, *COMMANDS_ALONE, *IN_MODULES}
    assert all(callable(getattr(import_module(f"reshard.{name}"), call)) for name, call in IN_MODULES.items())
    page = (DOCS / "python.md").read_text(encoding="utf-8")
    names = [*FUNCTIONS, *map(".".join, IN_MODULES.items())]
    assert [name for name in names if f"`reshard.{name}`" not in page] == []


def test_no_function_has_the_name_of_a_module() -> None:
    modules = {path.relative_to(SOURCE).with_suffix("").as_posix() for path in SOURCE.rglob("*.py")}
    assert [name for name in FUNCTIONS if {name, f"{name}/__init__"} & modules] == []


def test_doctor_says_what_the_command_says(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    found = reshard.doctor("train.log")
    told = json.loads(json.dumps([each.as_dict() for each in found]))
    assert told == command("doctor", "train.log", "--json").json["findings"]
    assert [each.code for each in found] == [each.code for each in reshard.doctor("train.log")]
    with pytest.raises(reshard.ReshardError, match="pass either of them"):
        reshard.doctor("train.log", python="python")
    with pytest.raises(reshard.ReshardError, match="python"):
        reshard.doctor(python="no/such/python")


def test_help_shows_the_functions_with_their_signatures() -> None:
    text = pydoc.plain(pydoc.render_doc(reshard))
    functions = text[text.index("\nFUNCTIONS\n") : text.index("\nVERSION\n")]
    for name in FUNCTIONS:
        assert re.search(rf"(?m)^    {name}\(", functions), name
        first = (inspect.getdoc(getattr(reshard, name)) or "").splitlines()[0]
        assert f"        {first}" in functions


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_parameter_is_documented(name: str) -> None:
    function = getattr(reshard, name)
    text = inspect.getdoc(function) or ""
    sections = dict(re.findall(r"(?ms)^(\w+)\n-+\n(.*?)(?=^\w+\n-+\n|\Z)", text))
    told = re.findall(r"(?m)^(\S[^:\n]*?) : ", sections.get("Parameters", ""))
    names = [each.lstrip("*") for line in told for each in line.split(", ")]
    assert names == [*inspect.signature(function).parameters]
    assert "Returns" in sections and ">>> " in sections["Examples"]
    assert name == "support" or "ReshardError" in sections["Raises"]


def test_the_page_about_python_runs(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = DOCS / "python.md"
    for name in ("model", "run", "tuned"):
        (tmp_path / name).symlink_to(place / name)
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"(?ms)^```python\n(.*?)^```$", page.read_text(encoding="utf-8"))
    assert len(blocks) >= 3
    for block in blocks:
        exec(compile(block, str(page), "exec"), {})


def test_steps_are_averaged_as_the_page_about_converters_says(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "step-10").symlink_to(place / "run")
    (tmp_path / "step-20").symlink_to(place / "tuned")
    monkeypatch.chdir(tmp_path)
    page = DOCS / "coming-from.md"
    (block,) = re.findall(r"(?ms)^```python\n(.*?)^```$", page.read_text(encoding="utf-8"))
    exec(compile(block, str(page), "exec"), {})
    average, *steps = (
        torch_file(each / "model.safetensors") for each in (Path("average"), place / "model", place / "tuned")
    )
    assert {*average} == {*steps[0]}
    for name, tensor in average.items():
        mean = torch.stack([step[name].float() for step in steps]).mean(0)
        assert torch.equal(tensor, mean.to(steps[0][name].dtype)), name
    loaded, report = AutoModelForCausalLM.from_pretrained("average", output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    assert not torch.equal(
        average["model.layers.1.mlp.up_proj.weight"], steps[0]["model.layers.1.mlp.up_proj.weight"]
    )
    assert len(reshard.open("average")) == len(loaded.state_dict())


@pytest.mark.parametrize("name", [*FUNCTIONS, "LazyTensor"])
def test_examples_run(name: str, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    runner = doctest.DocTestRunner(optionflags=flags)
    function = getattr(reshard, name)
    (found,) = doctest.DocTestFinder(recurse=False).find(function, name, globs={"reshard": reshard})
    said: list[str] = []
    runner.run(found, out=said.append)
    assert runner.tries and not runner.failures, "".join(said)


CHECKED = """
import reshard
reveal_type(reshard.open("a"))
reveal_type(reshard.train("sft"))
reveal_type(reshard.verify("a", "b"))
reveal_type(reshard.verify("a"))
reveal_type(reshard.verify(a="a", b="b", proof=True))
reveal_type(reshard.inspect("a", 100, html="page.html"))
reveal_type(reshard.convert("a", "b"))
reveal_type(reshard.ReshardError)
reveal_type(reshard.open("a")["x"].torch(device="cpu"))
with reshard.open("a") as weights:
    reveal_type(weights)
    reveal_type(weights.state_dict("cpu", "bfloat16"))
reshard.convrt("a", "b")
reshard.convert("a", "b", tpp=2)
reshard.verify("a", logits=True)
reshard.open("a", bas="b")
"""


@pytest.mark.slow
def test_type_checkers_see_the_same(tmp_path: Path) -> None:
    file = tmp_path / "user.py"
    file.write_text(CHECKED)
    words = ["-m", "mypy", "--config-file=", "--ignore-missing-imports", "--follow-imports=silent", str(file)]
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, cwd=tmp_path, check=False)
    told = re.findall(r'Revealed type is "(.*?)"', done.stdout)
    assert [each.rpartition(".")[2] for each in told[:7]] == [
        "Weights",
        "TrainingRun",
        "Comparison",
        "Integrity",
        "Proof",
        "Inspection",
        "Conversion",
    ]
    assert [each.replace("torch._tensor.", "torch.") for each in told[8:]] == [
        "torch.Tensor",
        "reshard.commands.weights.Weights",
        "dict[str, torch.Tensor]",
    ]
    errors = re.findall(r"error: (.*?)  \[", done.stdout)
    wrong = ("convrt", "tpp", '"Verify"', '"OfStep"')
    assert len(errors) == len(wrong), done.stdout
    assert all(word in error for word, error in zip(wrong, errors, strict=True)), errors


def test_importing_loads_nothing_that_may_not_be_needed() -> None:
    code = "import sys, reshard; dir(reshard); print(*{each.partition('.')[0] for each in sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {*done.stdout.split()} & {"numpy", "torch", "click", "rich", "yaml"}


# ------------------------------------------------------------------------------------------- what is wrong


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda: reshard.convert("a", "b", to="hugginface"), "did you mean huggingface?"),
        (lambda: reshard.convert("a", "b", trust="chekpoint"), "did you mean trust='checkpoint'?"),
        (lambda: reshard.convert("a", "b", to=3), "to=3"),  # type: ignore[arg-type]
        (lambda: reshard.convert("a", "b", tp=0, pp="2"), "tp=0"),  # type: ignore[arg-type]
        (lambda: reshard.convert("a", "b", tp=0, pp="2"), "pp='2'"),  # type: ignore[arg-type]
        (lambda: reshard.convert("a", "b", strip="_orig_mod."), "strip="),  # type: ignore[arg-type]
        (lambda: reshard.convert("a", "b", stages=(-1, 2)), "stages=(-1, 2)"),
        (lambda: reshard.convert("a", "b", trust="me", engine="x"), "trust='me'"),
        (lambda: reshard.convert("a", "b", memory="much"), "--memory"),
        (lambda: reshard.convert("a", "b", memory=None), "memory is not a size"),
        *[
            (partial(reshard.convert, "a", "b", **{name: None}), f"{name}=None")
            for name in ("tp", "pp", "vpp", "ep", "stages")
        ],
        *[
            (partial(reshard.convert, "a", "b", **{name: value}), f"{name} is not a size")
            for name in ("max_shard_size", "memory")
            for value in (0, -5, True, float("nan"), float("inf"), "0GB", "-1", "0.0001k")
        ],
        *[
            (partial(reshard.convert, "a", "b", **{name: value}), f"{name}={value!r}")
            for name in ("tp", "etp", "workers", "vocab_divisible_by")
            for value in (0, True, 2.0, float("nan"), 10**30)
        ],
        *[
            (partial(function, "a", "b", lora_alpha=value), f"lora_alpha={value!r}")
            for function in (reshard.convert, lambda path, _, **options: reshard.open(path, **options))
            for value in (True, "2", float("nan"), float("inf"), 10**400)
        ],
        *[
            (partial(reshard.train, "sft", **{name: value}), f"{name}={value!r}")
            for name in ("nproc", "nnodes", "tp")
            for value in (-1, True, 1.5, "2", float("inf"))
        ],
        (lambda: reshard.train("sft", nproc=0, pp=0), "nproc=0"),
        (lambda: reshard.train("sft", nproc=0, pp=0), "pp=0"),
        (lambda: reshard.inspect("a", html=3), "html=3"),  # type: ignore[arg-type]
        (lambda: reshard.convert("a", None), "dst=None"),  # type: ignore[arg-type]
        (lambda: reshard.open(None), "path=None"),  # type: ignore[arg-type]
        (lambda: reshard.open("a", iteration="last"), "iteration='last'"),
        (lambda: reshard.inspect(""), "path=''"),
        (lambda: reshard.verify("a", 3), "b=3"),  # type: ignore[call-overload]
        (lambda: reshard.verify("a", logits=True), "only one is given"),  # type: ignore[call-overload]
        (lambda: reshard.train("ppo"), "method='ppo'"),  # type: ignore[arg-type]
        (lambda: reshard.train("sft", output="out"), "--model is missing"),
    ],
)
def test_wrong_arguments_are_said_so(call: Callable[[], object], told: str) -> None:
    with pytest.raises(reshard.ReshardError, match=re.escape(told).replace("_", "[_-]")):
        call()


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"pp": 2**31 - 1}, "layers cannot be divided"),
        ({"tp": 2, "vocab_divisible_by": 2**31 - 1}, "padded to too many rows"),
    ],
)
def test_a_number_that_is_far_too_large_is_refused_in_no_time_and_memory(
    place: Path, tmp_path: Path, wrong: dict[str, Any], told: str
) -> None:
    with pytest.raises(reshard.ReshardError, match=told):
        reshard.convert(place / "model", tmp_path / "out", to="megatron", **wrong)
    assert not (tmp_path / "out").exists()


# ------------------------------------------------------------------------------------------- how it shows


def test_what_is_returned_is_short_to_see_and_true_if_all_is_well(place: Path, tmp_path: Path) -> None:
    run, model, tuned = (str(place / name) for name in ("run", "model", "tuned"))
    found, equal, differs = reshard.inspect(run), reshard.verify(run, model), reshard.verify(model, tuned)
    made = reshard.convert(run, tmp_path / "hf")
    whole, proof = reshard.verify(tmp_path / "hf"), reshard.verify(run, tmp_path / "hf", proof=True)
    assert equal and whole and proof and not differs
    assert repr(reshard.open(run)).startswith("<Weights megatron ")
    assert repr(found).startswith("<Inspection qwen3, <Checkpoint megatron ")
    assert "equal bit for bit" in repr(equal) and "1 tensor different" in repr(differs)
    assert repr(made).startswith("<Conversion <Plan megatron → huggingface: 47 tensors in ")
    for each in (reshard.open(run), found, equal, differs, made, made.plan, whole, proof):
        assert len(repr(each)) < 400 and "\n" not in repr(each), type(each)


def test_a_notebook_shows_what_inspect_prints(place: Path) -> None:
    found = reshard.inspect(place / "run")
    html = found._repr_html_()
    for name, value in found.rows().items():
        assert f">{name}<" in html and f">{value}<" in html
        assert f"{name:<10} {value}" in str(found)
    assert found.next in html.replace("&#x27;", "'") and found.next in str(found)
    differs = reshard.verify(place / "model", place / "tuned")
    assert "model.layers.1.mlp.up_proj.weight" in differs._repr_html_()


def test_foreign_text_is_no_markup_in_a_notebook() -> None:
    problem = reshard.Problem("x-y", "<script>alert(1)</script>", found="\x1b[31m")
    found = reshard.commands.inspection.Inspection(
        reshard.Checkpoint(Path("<b>"), "huggingface", HUB, {}, Path()), None, [problem], [], ""
    )
    assert "<script>" not in found._repr_html_() and "<b>" not in found._repr_html_()
    assert "\x1b" not in found._repr_html_() + str(found)


def test_the_guard_is_there_without_an_import_of_its_own() -> None:
    assert reshard.guard.check.__module__ == "reshard.runs.guard.in_script"


def test_a_dtype_that_does_not_exist_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(reshard.ReshardError, match="cannot be converted to this dtype"):
        reshard.open(tmp_path, dtype="int7")


def test_findings_are_short_in_a_list_and_whole_in_print(tmp_path: Path) -> None:
    (tmp_path / "train.log").write_text(
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB\n"
    )
    (found,) = reshard.doctor(tmp_path / "train.log")
    assert repr([found]) == f"[<Finding cuda-out-of-memory, error, {found.certainty}: {found.message}>]"
    assert str(found).splitlines()[1] == f"  where: {tmp_path}/train.log:1  {found.places[0].text}"
    assert "\\n" not in str(found) and "\n  fix: " in str(found)


@pytest.mark.parametrize("wrong", [{"dtype": np.dtype("float32")}, {"dtype": 5}, {"family": 5}])
def test_what_is_no_name_is_refused_as_such(tmp_path: Path, wrong: dict[str, Any]) -> None:
    (name,) = wrong
    for call in (reshard.open, partial(reshard.convert, dst=tmp_path / "out")):
        with pytest.raises(reshard.ReshardError, match=f"wrong value for {name}"):
            call(tmp_path, **wrong)  # type: ignore[operator]


CALLS: dict[str, Callable[[], object]] = {
    "convert": lambda: reshard.convert("a", "b", tpp=2),  # type: ignore[call-arg]
    "train": lambda: reshard.train("a", tpp=2),  # type: ignore[call-arg]
    "inspect": lambda: reshard.inspect("a", stp=2),  # type: ignore[call-arg]
    "verify": lambda: reshard.verify("a", "b", bas="c"),  # type: ignore[call-overload]
    "doctor": lambda: reshard.doctor(pythn="a"),
    "guard.run": lambda: reshard.guard.run(["true"], stal=2),  # type: ignore[call-arg]
    "open": lambda: reshard.open("a", bas="c"),  # type: ignore[call-arg]
    "stream": lambda: reshard.stream("a", bas="c"),
    "from_pretrained": lambda: reshard.from_pretrained("a", bas="c"),
}


@pytest.mark.parametrize("function", CALLS)
def test_an_unknown_argument_is_an_error_with_a_suggestion(function: str) -> None:
    with pytest.raises(reshard.ReshardError, match="did you mean ") as error:
        CALLS[function]()
    assert isinstance(error.value, TypeError) and error.value.problems[0].code == "argument-unknown"


def test_errors_are_not_chained_copies(tmp_path: Path) -> None:
    """An error with more problems takes the place of the one that it repeats."""
    for call in (
        lambda: reshard.convert(tmp_path / "a", tmp_path / "b"),
        lambda: reshard.verify(tmp_path / "a", tmp_path / "b"),
    ):
        with pytest.raises(reshard.ReshardError) as error:
            call()
        assert "".join(traceback.format_exception(error.value)).count("Traceback") == 1
