"""Megatron's rank files: their content must belong to the rank in their names."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from itertools import combinations, product
from pathlib import Path

import pytest

pytest.importorskip("megatron.core")

import torch
import torch.distributed.checkpoint as dcp
from megatron.core.parallel_state import RankGenerator
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

import reshard
from reshard.algebra.layout import Layout
from reshard.base.errors import ReshardError
from reshard.formats.megatron.rank_files import coordinates
from reshard.formats.megatron.rank_seeds import seed_owners
from tests.genuine.mcore.checkpoint_io import MegatronFormat, SaveOptions
from tests.genuine.megatron import QWEN2, VARIANTS, Genuine, tokens
from tests.genuine.train_megatron import train_and_save

Maker = Callable[..., Genuine]

LAYOUTS = [
    (tp, cp, pp, ep, etp, dp)
    for tp, cp, pp, ep, etp, dp in product((1, 2, 4), (1, 2), (1, 2, 3), (1, 2, 4), (1, 2), (1, 2, 3))
    if tp * cp * dp % (etp * ep) == 0
]


@pytest.mark.parametrize("order", ["tp-cp-ep-dp-pp", "tp-cp-ep-pp-dp"])
def test_a_rank_stands_where_megatron_puts_it(order: str) -> None:
    """In every layout that megatron-core accepts, with the groups of its own generator."""
    seen = 0
    for tp, cp, pp, ep, etp, dp in LAYOUTS:
        world = tp * cp * pp * dp
        dense = RankGenerator(tp=tp, ep=1, dp=dp, pp=pp, cp=cp, order=order)
        expert = RankGenerator(tp=etp, ep=ep, dp=world // (etp * ep * pp), pp=pp, cp=1, order=order)
        if dense.get_ranks("pp") != expert.get_ranks("pp"):
            continue  # initialize_model_parallel refuses it
        places = [_places(dense, "tp"), _places(dense, "pp"), _places(expert, "ep")]
        layout = Layout(tp, pp, 1, ep, etp)
        args = {"expert_tensor_parallel_size": etp, "context_parallel_size": cp, "world_size": world}
        args["use_tp_pp_dp_mapping"] = order.endswith("dp")
        for rank in range(world):
            seen += 1
            found = coordinates({**args, "rank": rank}, layout)
            assert found == tuple(place[rank] for place in places), (args, layout, rank)
    assert seen > 1000


def _places(ranks: RankGenerator, axis: str) -> dict[int, int]:
    return {rank: place for group in ranks.get_ranks(axis) for place, rank in enumerate(group)}


def exchange(a: Path, b: Path) -> None:
    a.rename(a.with_name("spare"))
    b.rename(a)
    a.with_name("spare").rename(b)


@pytest.mark.core("qwen3-moe-tp2-pp2-ep4-etp1", "qwen3-pp2-vpp2", "qwen2-tied-pp2")
@pytest.mark.parametrize(
    "name",
    [
        name
        for name, variant in VARIANTS.items()
        if "torch" in variant.formats and variant.layout.world_size > variant.layout.dp
    ],
)
def test_folders_of_ranks_that_were_exchanged(name: str, genuine: Maker, tmp_path: Path) -> None:
    """Any two of them that differ along one axis, although their shards have the same names and shapes; the genuine
    ones are accepted.
    """
    source = genuine(name).iteration("torch")
    folders = sorted(path.name for path in source.iterdir())
    assert len(folders) > 1 and reshard.open(source).checkpoint.problems == []
    for (at, a), (to, b) in combinations(enumerate(folders), 2):
        if len(folders) > 4 and (at ^ to).bit_count() > 1:
            continue
        run = Path(shutil.copytree(source, tmp_path / f"{a} {b}"))
        exchange(run / a, run / b)
        with pytest.raises(ReshardError) as caught:
            reshard.convert(run, tmp_path / "out", no_tokenizer=True)
        problems = caught.value.problems
        assert {problem.message for problem in problems} == {"a file belongs to another rank"}, str(problems)
        assert {Path(str(problem.file)).parent.name for problem in problems} == {a, b}
        assert not (tmp_path / "out").exists()


def test_a_rank_of_another_iteration(genuine: Maker, tmp_path: Path) -> None:
    source = genuine("qwen2-fp32")
    later = train_and_save(
        QWEN2,
        tmp_path / "later",
        tokens(),
        layout=source.layout,
        bf16=False,
        steps=1,
        iteration=3,
        save=SaveOptions(format="torch"),
    ).folder
    run = Path(shutil.copytree(source.roots["torch"], tmp_path / "run"))
    shutil.rmtree(run / "iter_0000002" / "mp_rank_01")
    shutil.copytree(later / "mp_rank_01", run / "iter_0000002" / "mp_rank_01")
    for file in run.rglob("model_optim_rng.pt"):
        content = torch.load(file, weights_only=False)
        content["args"].iteration = 0  # where the run began, as Megatron-LM has it
        torch.save(content, file)
    with pytest.raises(ReshardError, match="another run or iteration") as caught:
        reshard.convert(run, tmp_path / "out", no_tokenizer=True)
    (problem,) = caught.value.problems
    assert "mp_rank_01" in str(problem.file) and problem.found == "iteration 3"
    assert str(problem.expected).startswith("iteration 2, as in ")


@pytest.fixture(scope="module")
def four_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four tensor-parallel ranks in torch_dist, of which all but the first save the same chunks."""
    args = {**QWEN2, "num_query_groups": 4}
    layout, out = Layout(tp=4), tmp_path_factory.mktemp("tp4")
    return train_and_save(args, out, tokens(), layout=layout, lr=1e-2, steps=1, iteration=2).folder


@pytest.mark.core("pair1", "pair3")
@pytest.mark.parametrize("pair", combinations(range(4), 2))
def test_chunk_files_of_two_ranks_that_were_exchanged(
    pair: tuple[int, int], four_ranks: Path, tmp_path: Path
) -> None:
    """Found by their sizes and offsets, or else by the seeds of their random number states."""
    assert reshard.open(four_ranks).checkpoint.problems == []
    run = Path(shutil.copytree(four_ranks, tmp_path / four_ranks.name))
    for file in ("0.distcp", "1.distcp"):
        exchange(*(run / f"__{rank}_{file}" for rank in pair))
    with pytest.raises(ReshardError) as caught:
        reshard.convert(run, tmp_path / "out", no_tokenizer=True)
    if 0 not in pair:
        assert {problem.message for problem in caught.value.problems} == {"a file belongs to another rank"}
        assert {str(problem.file) for problem in caught.value.problems} <= {
            str(run / f"__{rank}_0.distcp") for rank in pair
        }


def test_seeds_tell_stages_where_they_are_counted_as_megatron_lm_does() -> None:
    """Megatron-LM adds 100 per stage; seeds counted in an unknown way are ignored."""
    right = {(stage, tensor): 42 + 2718 + 100 * stage + tensor for stage in range(3) for tensor in range(2)}
    assert seed_owners(right) == {place: place for place in right}
    moved = {**right, (0, 1): right[2, 1], (2, 1): right[0, 1]}
    assert {place for place, owner in seed_owners(moved).items() if owner != place} == {(0, 1), (2, 1)}
    assert seed_owners({place: seed + 10 * place[1] for place, seed in right.items()}) == {}
    assert seed_owners(dict.fromkeys(right, 7)) == {}


def test_what_is_not_noticed_torch_does_not_notice_either(genuine: Maker, tmp_path: Path) -> None:
    """Single files of the same size, with chunks of the same names and shapes: torch loads the wrong weights too."""
    source = genuine("qwen2-tp2-pp2").iteration("torch_dist")
    right = loaded_by_torch(source)
    undetected = 0
    for a, b in combinations(sorted(path.name for path in source.glob("*.distcp")), 2):
        run = Path(shutil.copytree(source, tmp_path / f"{a} {b}" / source.name))
        exchange(run / a, run / b)
        try:
            reshard.convert(run, tmp_path / "out", no_tokenizer=True, overwrite=True)
        except ReshardError:
            continue
        undetected += 1
        assert (run / a).stat().st_size == (run / b).stat().st_size
        assert not all(torch.equal(tensor, right[key]) for key, tensor in loaded_by_torch(run).items())
    assert undetected <= 2


def loaded_by_torch(folder: Path) -> dict[str, torch.Tensor]:
    """The weights as torch.distributed.checkpoint loads them."""
    reader = FileSystemReader(folder)
    entries = reader.read_metadata().state_dict_metadata
    state = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype)
        for key, entry in entries.items()
        if isinstance(entry, TensorStorageMetadata) and not key.startswith("optimizer")
    }
    dcp.load(state, storage_reader=reader, no_dist=True)
    return state


@pytest.mark.core("qwen3-moe-tp2-pp2-ep4-etp1")
@pytest.mark.parametrize("name", ["qwen3-moe-tp2-pp2-ep2-etp2", "qwen3-moe-tp2-pp2-ep4-etp1"])
def test_ranks_of_files_whose_arguments_do_not_tell_the_model(
    name: str, genuine: Maker, tmp_path: Path
) -> None:
    """As saved by training loops with arguments of their own: without experts, args alone tell no layout."""
    run = Path(shutil.copytree(genuine(name).iteration("torch"), tmp_path / "iter_0000002"))
    for file in run.rglob("model_optim_rng.pt"):
        content = torch.load(file, weights_only=False)
        for key in ("num_experts", "num_layers", "hidden_size"):
            delattr(content["args"], key)
        torch.save(content, file)
    assert reshard.open(run).checkpoint.problems == []
    first, second = sorted(run.iterdir())[:2]
    exchange(first, second)
    assert {problem.message for problem in reshard.open(run).checkpoint.problems} == {
        "a file belongs to another rank"
    }


@pytest.mark.parametrize("format", ["torch", "torch_dist"])
def test_a_folder_that_was_renamed_is_told(format: MegatronFormat, genuine: Maker, tmp_path: Path) -> None:
    source = genuine("qwen2-fp32").iteration(format)
    assert reshard.open(source).checkpoint.notes == []
    run = Path(shutil.copytree(source, tmp_path / "iter_0000500"))
    assert reshard.open(run).checkpoint.notes == ["iter_0000500 was renamed: its files are of iteration 2"]


def test_the_rank_of_a_converter_says_nothing(genuine: Maker, tmp_path: Path) -> None:
    """Megatron-LM's own tools write all files from one process, whose rank is 0."""
    source = genuine("qwen2-tp2-pp2").roots["torch"]
    run = Path(shutil.copytree(source, tmp_path / "run"))
    for file in run.rglob("model_optim_rng.pt"):
        content = torch.load(file, weights_only=False)
        content["args"].rank, content["args"].world_size = 0, 1
        torch.save(content, file)
    assert reshard.open(run).checkpoint.problems == []
    assert reshard.verify(run, source).equal
