"""The bytes that cross between processes when a trainer's weights go into an engine, by reshard's plan and by others.

What peers do is counted where they run (`bench/transfer_peers.py`), on ranks of gloo and in the workers of vLLM on a
CPU, once: the files in DATA/transfers keep it. A broadcast costs its size for each receiver, and is sent by its root.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from bench.models import QWEN2_5_3B, QWEN3_MOE, make
from bench.transfer_peers import ENGINE_TP, LAST, Sizes, world
from reshard.algebra.layout import Layout
from reshard.algebra.views import View
from reshard.exchange.engine_recording import EngineRecording, RecordedParameter, read_recordings
from reshard.exchange.megatron_trainer import described_trainer
from reshard.exchange.trainer import Trainer
from reshard.exchange.transfer_plan import plan_transfer

_SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 512,
    "max_position_embeddings": 128,
}
SMALL_MOE: dict[str, Any] = {
    **QWEN3_MOE,
    **_SMALL,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "tie_word_embeddings": False,
}
SMALL_LLAMA: dict[str, Any] = {
    **QWEN2_5_3B,
    **_SMALL,
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "mlp_bias": False,
}
QWEN3_30B_A3B: dict[str, Any] = {**QWEN3_MOE, "num_hidden_layers": 48, "tie_word_embeddings": False}


class Case(NamedTuple):
    """A model, and the TP, PP and EP of its trainer. `recorded` layers are loaded into vLLM, and stand for all."""

    name: str
    config: dict[str, Any]
    sizes: Sizes
    recorded: int = 4

    @property
    def is_real(self) -> bool:
        """Whether the model is too large for the peers that need its weights."""
        return bool(self.recorded != self.config["num_hidden_layers"])

    @property
    def has_experts(self) -> bool:
        return "num_experts" in self.config

    @property
    def layout(self) -> str:
        names = zip(("TP", "PP", "EP"), self.sizes, strict=True)
        return "·".join(f"{name}{size}" for name, size in names if size > 1)


CASES = [
    Case("Qwen3-MoE, small", SMALL_MOE, (2, 1, 2)),
    Case("Qwen3-MoE, small", SMALL_MOE, (1, 2, 2)),
    Case("Llama, tied, small", SMALL_LLAMA, (2, 1, 1)),
    Case("Llama, tied, small", SMALL_LLAMA, (1, 2, 1)),
    Case("Qwen3-30B-A3B", QWEN3_30B_A3B, (2, 2, 8), recorded=1),
]
HEADER = [
    "| model, trainer | who | all, MB | × the least | busiest sender, MB | busiest receiver, MB |",
    "|---|---|---|---|---|---|",
]
RANKS = ["| model, trainer | who | ranks of the trainer send | they receive | ranks of the engine receive |"]
RANKS.append("|---|---|---|---|---|")


@dataclass
class Way:
    """Bytes by rank: what the ranks of the trainer send and receive, and what those of the engine receive."""

    who: str
    sent: list[int]
    received: list[int]
    arrived: list[int]

    @property
    def total(self) -> int:
        """Bytes that cross. What is sent is received."""
        return sum(self.received) + sum(self.arrived)


@dataclass
class Results:
    """What was found for one case, and where the files of the peers are."""

    case: Case
    data: Path
    least: int = 0
    ways: list[Way] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def rows(data: Path) -> Iterator[str]:
    """Two Markdown tables: in all, and by rank; and lines about planning."""
    found = [_measured(case, data.resolve() / "transfers") for case in CASES]
    yield from HEADER
    for each in found:
        for way in each.ways:
            busiest = f"{_mb(max(way.sent))} | {_mb(max(way.received + way.arrived))}"
            start = f"| {_label(each, way)} | {way.who} "
            yield f"{start}| {_mb(way.total)} | {way.total / each.least:.2f} | {busiest} |"
    yield ""
    yield from RANKS
    for each in found:
        for way in each.ways:
            ranks = " | ".join(map(_by_rank, (way.sent, way.received, way.arrived)))
            yield f"| {_label(each, way)} | {way.who} | {ranks} |"
    yield ""
    for each in found:
        yield from (f"{_label(each)}: {note}" for note in each.notes)


def _label(found: Results, way: Way | None = None) -> str:
    """The case, or nothing beside any way but the first."""
    return f"{found.case.name}, {found.case.layout}" if way in (None, found.ways[0]) else ""


def _mb(nbytes: float) -> str:
    return f"{nbytes / 1e6:.3f}" if nbytes < 1e8 else f"{nbytes / 1e6:,.0f}"


def _by_rank(sizes: Sequence[int]) -> str:
    if not any(sizes):
        return "0"
    if len(set(sizes)) == 1:
        return f"{_mb(sizes[0])} each"
    if len(sizes) > 4:
        return f"{_mb(min(sizes))} to {_mb(max(sizes))}"
    return ", ".join(map(_mb, sizes))


def _measured(case: Case, data: Path) -> Results:
    found = Results(case, data)
    model = data / f"{case.name.replace(', ', '-')}-{case.recorded}"
    make(model, {**case.config, "num_hidden_layers": case.recorded}, sparse=case.is_real)
    engine = data / f"engine-{model.name}"
    _run(found, "awex", "vllm", engine / LAST, str(model), str(ENGINE_TP))
    config = data / f"config-{case.name}"
    config.mkdir(exist_ok=True)
    (config / "config.json").write_text(json.dumps(case.config))
    trainer = _trainer(case, config)
    recordings = [_repeated(each, case) for each in read_recordings(engine)]
    found.least = sum(each.nbytes for each in recordings)
    found.ways.append(_planned(found, trainer, recordings))
    found.ways += _broadcast(found, trainer, model)
    found.ways.append(_m2n(found, engine))
    if case.has_experts and not case.is_real:
        found.ways.append(_awex(found, model, engine))
    return found


def _trainer(case: Case, config: Path) -> Trainer:
    tp, pp, ep = case.sizes
    return described_trainer(config, Layout(tp=tp, pp=pp, ep=ep, etp=1 if case.has_experts else tp))


def _repeated(recording: EngineRecording, case: Case) -> EngineRecording:
    """A recording of one layer as that of all layers, which are alike."""
    if not case.is_real:
        return recording
    parameters = dict[str, RecordedParameter]()
    for name, each in recording.parameters.items():
        for of_layer in _names(name, case):
            pieces = (_of_layer(piece, of_layer) for piece in each.view.pieces)
            parameters[of_layer] = replace(each, view=View(each.view.shape, tuple(pieces)))
    shapes = {each: shape for name, shape in recording.shapes.items() for each in _names(name, case)}
    return replace(recording, parameters=parameters, shapes=shapes)


def _names(name: str, case: Case) -> list[str]:
    """A name of the first layer as those of all layers, and any other name as it is."""
    layers = range(case.config["num_hidden_layers"]) if case.is_real else range(1)
    return list(dict.fromkeys(name.replace(".layers.0.", f".layers.{layer}.") for layer in layers))


def _of_layer(piece: Any, parameter: str) -> Any:
    """A piece with the name of its tensor in the layer of a parameter."""
    _, _, rest = parameter.partition(".layers.")
    layer = rest.partition(".")[0]
    return piece._replace(source=str(piece.source).replace(".layers.0.", f".layers.{layer}."))


def _planned(found: Results, trainer: Trainer, recordings: list[EngineRecording]) -> Way:
    began = time.perf_counter()
    plan = plan_transfer(trainer, recordings)
    seconds = time.perf_counter() - began
    found.notes.append(f"reshard planned {len(plan.transfers):,} pieces in {seconds:.2f} s")
    sent, arrived = plan.sent(), plan.received()
    return Way(
        "reshard's plan",
        [sent[rank] for rank in range(trainer.ranks)],
        [0] * trainer.ranks,
        [arrived[rank] for rank in range(ENGINE_TP)],
    )


# ------------------------------------------------------------------------------------------------ complete tensors


def _broadcast(found: Results, trainer: Trainer, model: Path) -> Iterator[Way]:
    """vLLM's backend `nccl`: tensors are gathered on the trainer, and rank 0 broadcasts them to the engine."""
    if found.case.is_real:
        yield _then_broadcast("weight_source", _gathered_by_plan(trainer))
        return
    peers = {
        "weight_source": ("tests", "weight_source"),
        "mcore-bridge": ("ms-swift", "mcore_bridge"),
        "Megatron-Bridge": ("megatron-bridge-0.6", "megatron_bridge"),
    }
    for name, (environment, command) in peers.items():
        out = found.data / f"{command}-{model.name}-{found.case.layout}.json"
        _run(found, environment, command, out, str(model), *map(str, found.case.sizes))
        yield _then_broadcast(name, json.loads(out.read_text()))
        if command == "weight_source":
            counted = [each["sent"] for each in json.loads(out.read_text())]
            ruled = [each["sent"] for each in _gathered_by_plan(trainer)]
            found.notes.append(f"weight_source sent {counted} bytes by rank; by its plan {ruled}")


def _gathered_by_plan(trainer: Trainer) -> list[dict[str, int]]:
    """What `weight_source` moves: its plan is that for one rank with the Hub's tensors, broadcast to all others."""
    parameters = {
        name: RecordedParameter(each.dtype, View.of(name, *each.shape))
        for name, each in trainer.tensors.items()
    }
    sent = plan_transfer(trainer, [EngineRecording("hub", 0, 1, parameters)]).sent()
    whole = sum(sent.values())
    others = trainer.ranks - 1
    return [
        {"sent": sent[rank] * others, "received": whole - sent[rank], "whole": whole}
        for rank in range(trainer.ranks)
    ]


def _then_broadcast(name: str, gathered: Sequence[Mapping[str, int]]) -> Way:
    whole = gathered[0]["whole"]
    sent = [each["sent"] for each in gathered]
    sent[0] += whole * ENGINE_TP
    return Way(
        f"vLLM `nccl`, from {name}", sent, [each["received"] for each in gathered], [whole] * ENGINE_TP
    )


# ------------------------------------------------------------------------------------------------ other plans


def _m2n(found: Results, engine: Path) -> Way:
    """vLLM's backend `nccl_m2n`: its planner chose what each worker gets; the trainer's ranks share the sending."""
    arrived, direct, names = [0] * ENGINE_TP, 0, 0
    for rank, destinations in enumerate(json.loads((engine / LAST).read_text())):
        for name, (nbytes, is_direct) in destinations.items():
            many = len(_names(name, found.case))
            arrived[rank] += nbytes * many
            direct, names = direct + is_direct * many, names + many
    ranks = world(found.case.sizes)
    found.notes.append(f"`nccl_m2n` sends {direct // ENGINE_TP} of {names // ENGINE_TP} tensors directly")
    return Way("vLLM `nccl_m2n`", [sum(arrived) // ranks] * ranks, [0] * ranks, arrived)


def _awex(found: Results, model: Path, engine: Path) -> Way:
    at = f"{model.name}-{found.case.layout}"
    trainer, out = found.data / f"awex-{at}.pickle", found.data / f"awex-{at}.json"
    _run(found, "awex", "awex_trainer", trainer, str(model), *map(str, found.case.sizes))
    _run(found, "awex", "awex_plan", out, str(model), str(trainer), str(engine / "awex.pickle"))
    plan = json.loads(out.read_text())
    found.notes.append(f"awex planned {plan['operations']:,} operations in {plan['seconds']:.2f} s")
    found.notes.append(f"awex to vLLM: {plan['vllm']}")
    return Way("awex, to SGLang", plan["sent"], [0] * len(plan["sent"]), plan["received"])


def _run(found: Results, environment: str, command: str, out: Path, source: str, *words: str) -> None:
    """Let a peer write `out`, unless it is there. Raises CalledProcessError."""
    from tests.environments import python

    if out.exists():
        return
    interpreter = sys.executable if environment == "tests" else python(environment)
    variables = {
        "PYTHONPATH": os.pathsep.join((str(Path.cwd()), str(Path.cwd() / "src"))),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "0|1",
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # functions of this project, sent to its workers
        "VLLM_PLUGINS": "reshard",
    }
    argv = [interpreter, "-m", "bench.transfer_peers", command, source, str(out), *words]
    with (found.data / "log").open("a") as log:
        subprocess.run(argv, check=True, stdout=log, stderr=log, env={**os.environ, **variables})
