"""Clients of the Hub take a served checkpoint for the folder that `convert` writes."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

import reshard
from reshard.base.errors import ReshardError
from reshard.formats import detect
from tests.environments import python
from tests.genuine.model_types import SMALL_GEMMA3, make_model_type
from tests.genuine.peft import make_adapter
from tests.serve.hub import Hub, asking, contents, served

Models = Callable[..., Path]
DATA = Path(__file__).parents[1] / "data"
OLDER, NEWER = "iter_0000100", "iter_0000200"
ANSWERED = 10 << 20
"""Bytes that huggingface_hub writes at a time."""


def as_step(model: Path, run: Path, step: str, **layout: int) -> None:
    """Save a model as a step of a Megatron run, the last so far."""
    saved = run.parent.with_name("saved")
    reshard.convert(model, saved, to="megatron", overwrite=True, **layout)
    shutil.copytree(saved, run, dirs_exist_ok=True, ignore=shutil.ignore_patterns("release"))
    (saved / "release").rename(run / step)
    (run / "latest_checkpointed_iteration.txt").write_text(str(int(step.partition("_")[2])))


@pytest.fixture(scope="module")
def place(hf_model: Models, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of several frameworks below `runs`, and below `plain` what `convert` makes of each step."""
    top = tmp_path_factory.mktemp("served")
    runs, plain = top / "runs", top / "plain"
    older, dense = (shutil.copytree(hf_model("qwen3", seed=seed), top / f"hub-{seed}") for seed in (7, 0))
    templates = dense / "additional_chat_templates"
    templates.mkdir()
    (templates / "tool.jinja").write_text("{{ messages[0]['content'] }}")
    as_step(older, runs / "dense", OLDER, tp=2, pp=2)
    as_step(dense, runs / "dense", NEWER, tp=2, pp=2)
    reshard.convert(hf_model("qwen3_moe"), runs / "experts", to="megatron", tp=2, pp=2, ep=2, etp=1)
    reshard.convert(runs / "experts", plain / "experts")
    make_adapter(dense, runs / "adapter", r=4, target_modules=["q_proj", "down_proj"])
    reshard.convert(runs / "dense" / OLDER, plain / OLDER)
    reshard.convert(runs / "dense", plain / NEWER)
    return top


@pytest.fixture(scope="module")
def hub(place: Path) -> Iterator[Hub]:
    with served(place / "home", place / "runs") as running:
        yield running


@pytest.fixture(scope="module")
def answers(hub: Hub, place: Path) -> dict[str, Any]:
    """What huggingface_hub answers, all in one process."""
    model, main = "local/dense", {"revision": NEWER}
    weights = f"hf://{model}@{NEWER}/model.safetensors"
    size = (place / "plain" / NEWER / "model.safetensors").stat().st_size
    spans = [[0, 8], [size - 5, size], [1000, 300_000], [size // 2, size // 2 + 1]]
    questions: dict[str, list[Any]] = {
        "refs": ["refs", model],
        "info": ["info", model],
        "older": ["info", model, {"revision": OLDER}],
        "tree": ["tree", model],
        "all": ["tree", model, {"recursive": True, **main}],
        "below": ["tree", model, "additional_chat_templates"],
        "paths": ["paths_info", model, ["config.json", "additional_chat_templates", "nothing"]],
        "tensors": ["safetensors", model],
        "file": ["safetensors_file", model, "model.safetensors", main],
        "spans": ["ranges", weights, spans],
        "found": ["listed", f"hf://{model}@{NEWER}"],
        "named": ["named", "den"],
        "exists": ["file_exists", model, "config.json"],
        "absent": ["file_exists", model, "nothing.json"],
        "revision": ["revision_exists", model, "iter_0000300"],
        "repository": ["repo_exists", "local/nothing"],
        "no file": ["hf_hub_download", model, "nothing.json"],
        "no revision": ["hf_hub_download", model, "config.json", {"revision": "iter_0000300"}],
        "no repository": ["snapshot_download", "local/nothing"],
        "other owner": ["snapshot_download", "meta/dense"],
        "no folder": ["tree", model, "nothing"],
        "snapshot": ["snapshot_download", model],
        "snapshot of older": ["snapshot_download", model, {"revision": OLDER}],
        "one": ["hf_hub_download", model, "config.json", {"revision": "100"}],
        "some": ["snapshot_download", "local/experts", {"allow_patterns": ["*.json"]}],
    }
    found = dict(zip(questions, hub.asked([*questions.values()]), strict=True))
    cut = (place / "plain" / NEWER / "model.safetensors").read_bytes()
    found["cut"] = [cut[begin:end].hex() for begin, end in spans]
    return found


def sizes(folder: Path) -> dict[str, int]:
    return {name: len(content) for name, content in contents(folder).items()}


def test_steps_are_branches(answers: dict[str, Any]) -> None:
    refs = answers["refs"]
    assert refs.keys() == {"main", OLDER, NEWER}
    assert refs["main"] == refs[NEWER] != refs[OLDER]
    assert [answers["info"][0], answers["older"][0]] == [refs[NEWER], refs[OLDER]]
    assert answers["named"] == ["local/dense"]


def test_files_are_listed_with_their_sizes(answers: dict[str, Any], place: Path) -> None:
    folder, card = "additional_chat_templates", {"README.md", "reshard.json"}
    expected = sizes(place / "plain" / NEWER)
    assert f"{folder}/tool.jinja" in expected
    listed = {name: size for name, size in answers["all"].items() if name not in card}
    assert listed == {**expected, folder: None}
    assert {name: answers["info"][1][name] for name in expected} == expected
    assert answers["info"][1].keys() == {*expected, *card}
    assert answers["tree"].keys() == {*expected, *card, folder} - {f"{folder}/tool.jinja"}
    assert answers["below"].keys() == {f"{folder}/tool.jinja"}
    assert answers["paths"] == {"config.json": expected["config.json"], folder: None}
    assert {name.partition(f"{NEWER}/")[2] for name in answers["found"]} == {*expected, *card}


def test_what_is_not_there_has_the_errors_of_the_hub(answers: dict[str, Any]) -> None:
    assert [answers[each] for each in ("exists", "absent", "revision", "repository")] == [
        *(True, False, False, False)
    ]
    for name, error in (
        ("no file", "RemoteEntryNotFoundError"),
        ("no folder", "RemoteEntryNotFoundError"),
        ("no revision", "RevisionNotFoundError"),
        ("no repository", "RepositoryNotFoundError"),
        ("other owner", "RepositoryNotFoundError"),
    ):
        assert answers[name].startswith(error), answers[name]
    assert f"it has main, {NEWER}, {OLDER}" in answers["no revision"]


def test_headers_of_safetensors_are_read_over_ranges(answers: dict[str, Any], place: Path) -> None:
    with safe_open(place / "plain" / NEWER / "model.safetensors", "pt") as file:
        shapes = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
    assert {name: shape for name, (_, shape) in answers["tensors"]["tensors"].items()} == shapes
    assert answers["tensors"]["count"] == {
        "F32": sum(map(torch.Size.numel, map(torch.Size, shapes.values())))
    }
    assert answers["file"] == sorted(shapes)


def test_ranges_are_those_of_the_file(answers: dict[str, Any]) -> None:
    assert answers["spans"] == answers["cut"]


def test_downloaded_folders_are_those_of_convert(answers: dict[str, Any], place: Path) -> None:
    for name, step in (("snapshot", NEWER), ("snapshot of older", OLDER)):
        assert Path(answers[name]).name == answers["refs"][step]
        assert contents(Path(answers[name])) == contents(place / "plain" / step)
    assert Path(answers["one"]).read_bytes() == (place / "plain" / OLDER / "config.json").read_bytes()
    assert Path(answers["some"], "config.json").exists()
    assert not [*Path(answers["some"]).glob("*.safetensors")]


def test_what_was_downloaded_is_used_again(answers: dict[str, Any], hub: Hub, place: Path) -> None:
    before = len(hub.sent)
    again = [["snapshot_download", "local/dense"], ["hf_hub_download", "local/dense", "model.safetensors"]]
    snapshot, file = hub.asked(again)
    assert [snapshot, file] == [answers["snapshot"], f"{snapshot}/model.safetensors"]
    assert len(hub.sent) == before  # nothing but what is asked before
    assert hub.asked(again, HF_HUB_OFFLINE="1", HF_ENDPOINT="http://127.0.0.1:9") == [snapshot, file]


def test_the_command_of_the_hub_beside_the_run(hub: Hub, place: Path) -> None:
    """A client could take `runs/dense` for a folder, where it is one."""
    hf = Path(sys.executable).with_name("hf")
    words = ("download", "local/dense", "--revision", OLDER, "--local-dir", place / "local")
    hub.client(hf, *words, cwd=place / "runs")
    assert contents(place / "local") == contents(place / "plain" / OLDER)


def test_a_download_goes_on_when_the_server_was_killed_and_started_again(
    hf_model: Models, tmp_path: Path
) -> None:
    """A file of several parts, of which only those that had not come are asked for again."""
    model = hf_model("llama", vocab_size=20_000, hidden_size=256, num_hidden_layers=1)
    reshard.convert(model, tmp_path / "runs" / "big", to="megatron", tp=2)
    reshard.convert(tmp_path / "runs" / "big", tmp_path / "plain")
    size = (tmp_path / "plain" / "model.safetensors").stat().st_size
    with served(tmp_path / "home", tmp_path / "runs") as first:
        process, port = first.server.process, first.server.port
        asked = asking([["killing", "local/big", "model.safetensors", process.pid]])
        with subprocess.Popen(
            asked, env=first.environment(), cwd=tmp_path, stdout=subprocess.PIPE, text=True
        ) as client:
            process.wait(timeout=120)
            with served(tmp_path / "home", tmp_path / "runs", port=port) as second:
                out, _ = client.communicate()
                second.server.process.terminate()
                second.server.process.wait()
                [rest] = second.sent
    [[path, parts]] = json.loads(out.splitlines()[-1])
    assert Path(path).read_bytes() == (tmp_path / "plain" / "model.safetensors").read_bytes()
    assert rest["path"] == "model.safetensors" and not rest["error"]
    assert 0 < rest["bytes"] <= size - ANSWERED
    assert sum(parts) == size  # none came twice


@pytest.mark.slow
def test_an_older_client_goes_on_where_it_was_in_another_process(hf_model: Models, tmp_path: Path) -> None:
    """huggingface_hub before 1.0 keeps what has come, and asks the next server for the rest only."""
    model = hf_model("llama", vocab_size=60_000, hidden_size=256, num_hidden_layers=1)
    reshard.convert(model, tmp_path / "runs" / "big", to="megatron", tp=2)
    reshard.convert(tmp_path / "runs" / "big", tmp_path / "plain")
    words = [
        str(Path(python("transformers-4.57")).with_name("hf")),
        "download",
        "local/big",
        "model.safetensors",
    ]
    with (
        served(tmp_path / "home", tmp_path / "runs") as first,
        subprocess.Popen(words, env=first.environment(), cwd=tmp_path, stderr=subprocess.PIPE) as client,
    ):
        while sum(each.stat().st_size for each in first.home.rglob("*.incomplete")) < ANSWERED:
            assert client.poll() is None
        first.server.process.kill()
        assert client.communicate() and client.returncode
    [incomplete] = first.home.rglob("*.incomplete")
    begun, expected = incomplete.stat().st_size, (tmp_path / "plain" / "model.safetensors").read_bytes()
    with served(tmp_path / "home", tmp_path / "runs") as second:
        path = Path(second.client(*words).strip())
        second.server.process.terminate()
        second.server.process.wait()
    assert path.read_bytes() == expected
    assert [each["bytes"] for each in second.sent] == [len(expected) - begun]
    assert 0 < begun < len(expected)


@pytest.mark.slow
def test_the_token_of_a_client(place: Path) -> None:
    """What a client sends as HF_TOKEN; without it, the answer says what to do."""
    with served(place / "secret", place / "runs", "--token", "cobalt") as hub:
        [[commit, _]] = hub.asked([["info", "local/dense"]], HF_TOKEN="cobalt")
        [wrong] = hub.asked([["info", "local/dense"]], HF_TOKEN="other")
        [none] = hub.asked([["snapshot_download", "local/dense"]])
    assert len(commit) == 40
    assert all("this server requires a token: set HF_TOKEN" in each for each in (wrong, none)), (wrong, none)


def assert_same_logits(
    hub: Hub, out: Path, *pairs: tuple[dict[str, Any], dict[str, Any]], interpreter: str = sys.executable
) -> None:
    """Assert that transformers computes the same from both models of each pair, and makes the same tokens of a text."""
    out.mkdir()
    cases = json.dumps([case for pair in pairs for case in pair], default=str)
    hub.client(interpreter, "-m", "tests.genuine.load_served", cases, out / "logits.pt", cwd=out)
    found = torch.load(out / "logits.pt")
    for pair, ours, expected in zip(pairs, found[::2], found[1::2], strict=True):
        assert not isinstance(ours, str) and not isinstance(expected, str), (pair, ours, expected)
        assert torch.equal(ours[0], expected[0]) and ours[0].std() > 0.1, pair
        assert ours[1] == expected[1], pair


def test_transformers_computes_the_same(hub: Hub, place: Path, tmp_path: Path) -> None:
    """By name as from the model before it was saved, and as from the folder that `convert` writes."""
    assert_same_logits(
        hub,
        tmp_path / "out",
        ({"name": "local/dense", "revision": OLDER}, {"name": place / "hub-7"}),
        ({"name": "local/experts"}, {"name": place / "plain" / "experts"}),
    )


def assert_same_files(hub: Hub, models: dict[str, Path]) -> None:
    """Assert that huggingface_hub downloads the files of each folder for a model, by name and revision."""
    questions = [
        ["snapshot_download", *name.split("@")[:1], {"revision": name.partition("@")[2] or "main"}]
        for name in models
    ]
    for (name, folder), snapshot in zip(models.items(), hub.asked(questions), strict=True):
        assert Path(snapshot).is_dir(), (name, snapshot)
        ours, expected = contents(Path(snapshot)), contents(folder)
        assert ours.keys() == expected.keys(), name
        assert [file for file in expected if ours[file] != expected[file]] == [], name


@pytest.mark.slow
def test_older_releases_of_transformers(hub: Hub, place: Path, tmp_path: Path) -> None:
    """Version 4 has another client of the Hub, and asks for other files."""
    pairs = (
        ({"name": "local/dense", "revision": OLDER}, {"name": place / "plain" / OLDER}),
        ({"name": "local/experts"}, {"name": place / "plain" / "experts"}),
    )
    assert_same_logits(hub, tmp_path / "out", *pairs, interpreter=python("transformers-4.57"))


@pytest.mark.slow
def test_every_format_is_a_model_of_transformers(hf_model: Models, tmp_path: Path) -> None:
    runs, plain = tmp_path / "runs", tmp_path / "plain"
    dense, tied, stacked = (hf_model(each) for each in ("qwen3", "llama_tied", "gpt_oss"))
    models = {
        "tied": (tied, "megatron-legacy", {"tp": 2, "pp": 2}),
        "tied-dist": (tied, "megatron", {"pp": 2}),
        "stacked": (stacked, "megatron", {"tp": 2, "ep": 2, "etp": 1}),
        "fsdp": (dense, "dcp", {}),
        "zero": (dense, "deepspeed", {}),
        "latent": (hf_model("deepseek_v3"), "megatron", {"tp": 2, "pp": 2, "ep": 2, "etp": 1}),
    }
    for name, (model, to, layout) in models.items():
        reshard.convert(model, runs / name, to=to, **layout)
        reshard.convert(runs / name, plain / name)
    pairs = [({"name": f"local/{name}"}, {"name": model}) for name, (model, *_) in models.items()]
    with served(tmp_path / "home", runs) as hub:
        assert_same_logits(hub, tmp_path / "out", *pairs)
        assert_same_files(hub, {f"local/{name}": plain / name for name in models})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "overrides"),
    [("qwen3_vl", {}), ("gemma3", {}), ("qwen3_5", {"as_saved": True}), ("qwen3_vl_moe", {})],
)
def test_models_with_towers(name: str, overrides: dict[str, Any], tmp_path: Path) -> None:
    base = make_model_type(name, tmp_path / "hub", **overrides)
    reshard.convert(base, tmp_path / "runs" / "seeing", to="megatron", engine="megatron-bridge", tp=2)
    reshard.convert(tmp_path / "runs" / "seeing", tmp_path / "plain", base=base)
    kind = {"auto": "AutoModelForImageTextToText", "bare": True}
    with served(tmp_path / "home", tmp_path / "runs", "--base", base) as hub:
        assert_same_files(hub, {"local/seeing": tmp_path / "plain"})
        pair = ({"name": "local/seeing", **kind}, {"name": base, **kind})
        assert_same_logits(hub, tmp_path / "out", pair)


@pytest.mark.slow
def test_what_megatron_bridge_saved_of_a_model_with_a_tower(tmp_path: Path) -> None:
    base = make_model_type("gemma3", tmp_path / "base", **SMALL_GEMMA3)
    reshard.convert(DATA / "peers/bridge/gemma3", tmp_path / "plain", base=base)
    kind = {"auto": "AutoModelForImageTextToText", "bare": True}
    with served(tmp_path / "home", DATA / "peers/bridge/gemma3", "--base", base) as hub:
        assert_same_files(hub, {"local/gemma3@iter_0000000": tmp_path / "plain"})
        assert_same_logits(hub, tmp_path / "out", ({"name": "local/gemma3", **kind}, {"name": base, **kind}))


@pytest.mark.slow
def test_runs_of_megatron_core(genuine: Callable[..., Any], tmp_path: Path) -> None:
    """Steps that megatron-core saved of models that it trained, in both of its formats."""
    models: dict[str, Path] = {}
    for variant in ("qwen3-moe-tp2-pp2-ep2-etp2", "qwen2-tied-pp2", "gpt-oss", "deepseek-v3-te"):
        for format, root in genuine(variant).roots.items():
            run = shutil.copytree(root, tmp_path / "runs" / f"{variant}-{format}")
            reshard.convert(run, tmp_path / "plain" / run.name, no_tokenizer=True)
            models[f"local/{run.name}"] = tmp_path / "plain" / run.name
    bare = {"bare": True}
    pairs = [({"name": name, **bare}, {"name": folder, **bare}) for name, folder in models.items()]
    with served(tmp_path / "home", tmp_path / "runs", "--no-tokenizer") as hub:
        assert_same_files(hub, {f"{name}@iter_0000002": folder for name, folder in models.items()})
        assert_same_logits(hub, tmp_path / "out", *pairs)


@pytest.mark.slow
def test_an_adapter_and_its_base(hub: Hub, place: Path, tmp_path: Path) -> None:
    base = {"name": "local/dense"}, {"name": place / "hub-0"}
    ours = {"name": "local/adapter", "base": base[0]}
    assert_same_logits(hub, tmp_path / "out", (ours, {"name": place / "runs/adapter", "base": base[1]}))
    reshard.convert(place / "runs/adapter", tmp_path / "plain", to="peft")
    assert_same_files(hub, {"local/adapter": tmp_path / "plain"})


@pytest.mark.slow
def test_an_adapter_merged_into_its_base(hf_model: Models, tmp_path: Path) -> None:
    """PEFT merges it, too. What Megatron saved of adapters is served for PEFT, or merged."""
    base = hf_model("qwen3")
    adapter = make_adapter(base, tmp_path / "runs" / "lora", r=4, target_modules=["q_proj", "down_proj"])
    reshard.convert(adapter, tmp_path / "plain", base=base, merge=True)
    with served(tmp_path / "home", tmp_path / "runs", "--base", base, "--merge") as hub:
        assert_same_files(hub, {"local/lora": tmp_path / "plain"})
        assert_same_logits(hub, tmp_path / "out", ({"name": "local/lora"}, {"name": tmp_path / "plain"}))
    saved, megatron = DATA / "megatron_lora", DATA / "megatron_lora" / "base-llama"
    options = ("--base", megatron, "--no-tokenizer")
    for words, how in (((), {}), (("--merge",), {"merge": True})):
        out = tmp_path / f"megatron{len(words)}"
        reshard.convert(saved / "bridge-tp2", out, base=megatron, no_tokenizer=True, **how)
        with served(tmp_path / "home", saved / "bridge-tp2", *options, *words) as hub:
            assert_same_files(hub, {"local/bridge-tp2": out})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "options"),
    [
        (
            ("--dtype", "bfloat16", "--max-shard-size", "100KB"),
            {"dtype": "bfloat16", "max_shard_size": "100KB"},
        ),
        (("--quantize", "fp8"), {"quantize": "fp8"}),
        (("--quantize", "nvfp4"), {"quantize": "nvfp4"}),
    ],
)
def test_options_of_convert(words: Any, options: dict[str, Any], place: Path, tmp_path: Path) -> None:
    for name in ("dense", "experts"):
        reshard.convert(place / "runs" / name, tmp_path / name, **options)
    with served(tmp_path / "home", place / "runs", *words) as hub:
        assert_same_files(hub, {f"local/{name}": tmp_path / name for name in ("dense", "experts")})
        if "dtype" in options:
            pairs = (({"name": f"local/{name}"}, {"name": tmp_path / name}) for name in ("dense", "experts"))
            assert_same_logits(hub, tmp_path / "out", *pairs)


def saved_as(model: str) -> Path:
    """The run in tests/data of which a server makes this name."""
    folders = (each for each in sorted(DATA.rglob("*")) if each.is_dir())
    return next(each for each in folders if f"local/{'-'.join(each.relative_to(DATA).parts)}" == model)


def convert_step(path: Path, run: Path, out: Path) -> None:
    """Convert a step of a run, by its own path or by that of the run, where its config may lie."""
    to = "huggingface" if detect(path) == "huggingface" else None
    try:
        reshard.convert(path, out, to=to, no_tokenizer=True)
    except ReshardError:
        reshard.convert(run, out, to=to, no_tokenizer=True)


@pytest.mark.slow
def test_everything_that_a_framework_saved(tmp_path: Path) -> None:
    """Every checkpoint in tests/data is served as `convert` writes it, or refused as that refuses it."""
    plain: dict[str, Path] = {}
    with served(tmp_path / "home", DATA, "--no-tokenizer") as hub:
        [models] = hub.asked([["named", ""]])
        answers = dict(zip(models, hub.asked([["refs", each] for each in models]), strict=True))
        refused = {model: answers.pop(model) for model in models if isinstance(answers[model], str)}
        for model, refs in answers.items():
            for step in refs.keys() - {"main"}:
                run = saved_as(model)
                path = run if step == "final" else next(run.rglob(step))
                plain[f"{model}@{step}"] = tmp_path / "plain" / f"{len(plain)}"
                convert_step(path, run, plain[f"{model}@{step}"])
        assert_same_files(hub, plain)
    assert len(plain) > 60
    for model in (each for each in refused if "maxtext" not in each):  # whose files tensorstore opens
        assert "404" in refused[model] and any(each in refused[model] for each in ("expected:", "fix:")), (
            model
        )


def curl(*words: object) -> subprocess.CompletedProcess[bytes]:
    """What curl says and receives."""
    return subprocess.run(["curl", "-sS", *map(str, words)], capture_output=True, check=True)


def test_curl_reads_ranges(hub: Hub, place: Path) -> None:
    expected = (place / "plain" / NEWER / "model.safetensors").read_bytes()
    url, size = f"{hub.server.address}/local/dense/resolve/{NEWER}/model.safetensors", len(expected)
    said = ["-w", "%{stderr}%{http_code} %header{content-range}"]
    for asked, code, begin, end in (
        ("0-7", 206, 0, 8),
        ("100000-299999", 206, 100_000, 300_000),
        ("-17", 206, size - 17, size),
        (f"-{size + 5}", 206, 0, size),
        (f"{size - 3}-", 206, size - 3, size),
        (f"5-{size + 100}", 206, 5, size),
        (f"{size}-", 416, 0, 0),
        (f"{size + 7}-{size + 9}", 416, 0, 0),
        ("-0", 416, 0, 0),
    ):
        got = curl("-r", asked, *said, url)
        where = f"bytes {begin}-{end - 1}/{size}" if code == 206 else f"bytes */{size}"
        assert (got.stderr.decode(), got.stdout) == (f"{code} {where}", expected[begin:end]), asked
    several = curl("-r", "0-3,1000-1009,-4", "-D", "-", url).stdout
    head, _, body = several.partition(b"\r\n\r\n")
    mark = b"--" + head.partition(b"boundary=")[2].partition(b"\r\n")[0]
    parts = [each.partition(b"\r\n\r\n")[2].removesuffix(b"\r\n") for each in body.split(mark)[1:-1]]
    assert parts == [expected[:4], expected[1000:1010], expected[-4:]]
    assert f"content-length: {len(body)}".encode() in head.lower()
    assert b"content-range:" not in head.lower()  # which only each of the parts has
    lines = curl("-I", url).stdout.lower().decode().splitlines()
    assert lines[0].startswith("http/1.1 200") and f"content-length: {size}" in lines
    assert {each.partition(":")[0] for each in lines} >= {"accept-ranges", "etag", "x-repo-commit"}
