"""The pages of `inspect --html` and `verify --html`: their content, and that a browser draws them without a network."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import reshard
from reshard.algebra.layout import SavedLayout
from reshard.commands.verification import Change
from reshard.families.dialect import MEGATRON
from reshard.pages import difference_map, rank_board
from tests import browser
from tests.commandline import reshard as command

MOST = 1_000_000
"""Bytes of a page of a small model."""


@pytest.fixture(scope="module")
def model(hf_model: Callable[..., Path]) -> Path:
    return hf_model("qwen3_moe")


@pytest.fixture(scope="module")
def run(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pages") / "run"
    reshard.convert(model, path, to="megatron-legacy", tp=2, pp=2, ep=2, etp=1)
    return path


@pytest.fixture(scope="module")
def tuned(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model with two layers changed by known amounts."""
    path = tmp_path_factory.mktemp("pages") / "tuned"
    reshard.convert(model, path, to="huggingface")
    (file,) = path.glob("*.safetensors")
    tensors: dict[str, Any] = load_file(file)
    for name in tensors:
        if name.startswith("model.layers.1.mlp.experts.2."):
            tensors[name] = tensors[name] * np.float32(1.5)
    tensors["model.layers.0.self_attn.q_proj.weight"][0, 0] += 3
    save_file(tensors, file, metadata={"format": "pt"})
    return path


def data_of(page: Path) -> dict[str, Any]:
    """The data of a page's charts."""
    (text,) = re.findall(r"(?m)^const data = (.*);$", page.read_text(encoding="utf-8"))
    found: dict[str, Any] = json.loads(text)
    return found


def leaves(nodes: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [leaf for node in nodes for leaf in (leaves(node["children"]) if "children" in node else [node])]


def test_a_page_is_one_file_without_addresses(run: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    assert command("inspect", run, "--html", page, "--quiet").code == 0
    text = page.read_text(encoding="utf-8")
    assert len(text) < MOST and [*tmp_path.iterdir()] == [page]
    assert not re.findall(r"""(?:src|href)\s*=\s*["']""", re.sub(r"(?s)<script>.*?</script>", "", text))
    assert "url(http" not in text and "@import" not in text


def test_the_tree_holds_every_weight(run: Path, tmp_path: Path) -> None:
    found = reshard.inspect(run, html=tmp_path / "page.html")
    nodes = data_of(tmp_path / "page.html")["tree"]
    assert sum(leaf["value"] for leaf in leaves(nodes)) == found.checkpoint.parameters
    assert sum(node["value"] for node in nodes) == found.checkpoint.parameters
    experts = [leaf for leaf in leaves(nodes) if "experts" in leaf["path"]]
    assert experts and not [leaf for leaf in experts if re.search(r"experts\.\d", leaf["path"])]
    assert all(".pt" in leaf["told"][2] for leaf in leaves(nodes))


def test_the_board_says_what_the_files_of_the_ranks_hold(run: Path) -> None:
    """megatron-legacy has a file for each rank of tensor, pipeline and expert parallelism, which torch reads."""
    import torch

    found = rank_board.board_of(reshard.inspect(run))
    assert found.title == "Ranks" and [title for title, _ in found.rows] == ["stage 0", "stage 1"]
    for title, cells in found.rows:
        stage = title.split()[1]
        for index, cell in enumerate(cells):
            (file,) = run.rglob(f"mp_rank_{index % 2:02d}_{int(stage):03d}_{index % 2:03d}/*.pt")
            content = torch.load(file, weights_only=False)["model"]
            names = [name for name in content if ".layers." in name]
            layers = {int(re.search(r"layers\.(\d+)", name)[1]) for name in names}  # type: ignore[index]
            begin, end = map(int, re.findall(r"layers (\d+)–(\d+)", cell.lines[0])[0])
            assert end - begin + 1 == len(layers)
            assert ("embedding" in cell.details) == any("word_embeddings" in name for name in content)
            experts = {
                int(each[1])
                for name in names
                if (each := re.search(r"(?:local_experts\.|fc1\.weight)(\d+)", name))
            }
            (told,) = re.findall(r"experts (\d+)–(\d+)", cell.details)
            assert int(told[1]) - int(told[0]) + 1 == len(experts)
            assert int(told[0]) == index % 2 * len(experts)


def test_a_format_without_ranks_shows_its_files(model: Path) -> None:
    found = rank_board.board_of(reshard.inspect(model))
    ((_, cells),) = found.rows
    assert found.title == "Files" and [cell.name for cell in cells] == ["model.safetensors"]
    assert cells[0].weight == 1.0 and "layers 0–3" in cells[0].details


def test_a_large_board_is_cut(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_board, "MAX_CELLS", 3)
    found = rank_board.board_of(reshard.inspect(run))
    assert sum(len(cells) for _, cells in found.rows) == 3 and found.left == 1


def test_the_heat_map_has_the_relative_change_that_numpy_computes(
    model: Path, tuned: Path, tmp_path: Path
) -> None:
    found = reshard.verify(model, tuned, html=tmp_path / "page.html")
    heat = data_of(tmp_path / "page.html")["heat"]
    before, after = (load_file(folder / "model.safetensors") for folder in (model, tuned))
    cells = {(heat["layers"][x], heat["modules"][y]): value for x, y, value, _ in heat["cells"]}
    name = "model.layers.*.mlp.experts.*.up_proj.weight"
    assert {key for key, value in cells.items() if value} == {
        ("0", "model.layers.*.self_attn.q_proj.weight"),
        *(("1", name.replace("up", which)) for which in ("up", "gate", "down")),
    }
    experts = [key for key in before if key.startswith("model.layers.1.mlp.experts.") and "up_proj" in key]
    moved = sum(float(((before[key] - after[key]).astype(np.float64) ** 2).sum()) for key in experts)
    norm = sum(float((before[key].astype(np.float64) ** 2).sum()) for key in experts)
    assert cells["1", name] == pytest.approx((moved / norm) ** 0.5, rel=1e-6)
    whole = {each.tensor: each for each in found.changes}
    assert whole["model.layers.1.mlp.experts.2.up_proj.weight"].relative == pytest.approx(0.5, rel=1e-6)
    assert whole["model.norm.weight"].relative == 0 and len(whole) == found.tensors
    text = (tmp_path / "page.html").read_text()
    assert text.count("<tr>") == 1 + len(found.rows)


def test_what_is_measured_is_measured_only_for_a_page(model: Path, tuned: Path) -> None:
    assert reshard.verify(model, tuned).changes == []


def test_zeros_and_nan_have_a_place() -> None:
    moved = [
        Change("a.0.w", 4, 4, 1.0, 0.0),
        Change("a.1.w", 4, 4, float("nan"), 1.0),
        Change("b", 4, 0, 0.0, 0.0),
    ]
    heat = difference_map.heat_of(moved)
    assert heat["layers"] == ["no layer", "0", "1"] and heat["modules"] == ["b", "a.*.w"]
    assert [cell[2] for cell in heat["cells"]] == [1.0, None, 0.0]
    json.dumps(heat, allow_nan=False)


def test_foreign_text_is_no_markup(tmp_path: Path) -> None:
    evil = "</script><img src=x onerror=alert(1)>\x1b[31m"
    save_file({f"model.{evil}.weight": np.ones(3, np.float32)}, tmp_path / "model.safetensors")
    reshard.inspect(tmp_path, html=tmp_path / "inspect.html")
    shutil.copytree(tmp_path, tmp_path / "b")
    save_file({f"model.{evil}.weight": np.zeros(3, np.float32)}, tmp_path / "b" / "model.safetensors")
    reshard.verify(tmp_path, tmp_path / "b", html=tmp_path / "verify.html")
    for name in ("inspect.html", "verify.html"):
        text = (tmp_path / name).read_text(encoding="utf-8")
        assert "<img" not in text and "\x1b" not in text and text.count("</script>") == 2, name


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("verify", "A", "--html", "p.html"), "compare both"),
        (("verify", "A", "B", "--proof", "--html", "p.html"), "compare both"),
        (("inspect", "A", "B", "--html", "p.html"), "pass one PATH"),
        (("inspect", "A", "--html", "absent/p.html"), "the page cannot be written"),
        (("verify", "A", "B", "--html", "absent/p.html"), "the page cannot be written"),
        (("inspect", "A", "--html", "A/config.json"), "a file that reshard did not write"),
        (("verify", "A", "B", "--html", "A"), "found: a folder"),
    ],
)
def test_what_a_page_cannot_be_made_of(
    words: tuple[str, ...], told: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("A", "B"):
        (tmp_path / name).symlink_to(model)
    before = (model / "config.json").read_bytes()
    done = command(*words)
    assert (model / "config.json").read_bytes() == before
    assert done.code == 2 and told in " ".join(done.err.split()) and not (tmp_path / "p.html").exists()


def chart(page: Path, name: str) -> str:
    """A chart of a page as a browser draws it."""
    (svg,) = re.findall(rf'(?s)<div[^>]* id="{name}".*?</svg>', browser.drawn(page.as_uri()))
    return str(svg)


@pytest.mark.slow
@browser.needed
def test_a_browser_draws_the_layers_from_the_first_to_the_last(tmp_path: Path) -> None:
    layers = {f"model.layers.{index}.mlp.up.weight": np.ones((8, 8), np.float32) for index in range(12)}
    save_file(layers, tmp_path / "model.safetensors")
    reshard.inspect(tmp_path, html=tmp_path / "inspect.html")
    (root,) = data_of(tmp_path / "inspect.html")["tree"]
    assert [each["path"] for each in root["children"]] == list(layers)
    drawn = chart(tmp_path / "inspect.html", "tree")
    texts = [text for _, _, text in sorted(browser.labels(drawn)) if text.startswith("layers.")]
    assert drawn.count("<path") > 12
    assert texts[:3] == [f"layers.{index}.mlp.up" for index in range(3)]


@pytest.mark.slow
@browser.needed
def test_a_browser_draws_the_modules_from_the_first_to_the_last(
    model: Path, tuned: Path, tmp_path: Path
) -> None:
    reshard.verify(model, tuned, html=tmp_path / "verify.html")
    modules = data_of(tmp_path / "verify.html")["heat"]["modules"]
    assert ["*" in module for module in modules] == sorted("*" in module for module in modules)
    drawn = chart(tmp_path / "verify.html", "heat")
    names = [re.sub(r"^(model\.)?(layers\.\*\.)?|\.weight$", "", module) for module in modules]
    texts = [text for _, _, text in sorted(browser.labels(drawn), key=lambda label: label[1])]
    assert drawn.count("<path") > 20
    assert [text for text in texts if text in names] == names


def test_files_are_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    for index in range(12):
        save_file({f"layers.{index}.w": np.ones(4, np.float32)}, tmp_path / f"model-{index}.safetensors")
    weights = {f"layers.{index}.w": f"model-{index}.safetensors" for index in range(12)}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weights}))
    ((_, cells),) = rank_board.board_of(reshard.inspect(tmp_path)).rows
    assert [cell.name for cell in cells] == list(weights.values())


def test_a_long_table_says_how_many_tensors_it_leaves_out(
    model: Path, tuned: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(difference_map, "MAX_ROWS", 2)
    found = reshard.verify(model, tuned, html=tmp_path / "verify.html")
    assert f"The first 2 of {len(found.rows)} tensors." in (tmp_path / "verify.html").read_text()


def test_layouts_that_nothing_records_show_files() -> None:
    checkpoint = reshard.Checkpoint(Path("x"), "megatron", MEGATRON, {}, Path("x"), SavedLayout(tp=2, pp=2))
    found = rank_board.board_of(reshard.Inspection(checkpoint, None, [], [], ""))
    assert found.title == "Files" and found.rows == ()
