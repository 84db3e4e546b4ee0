"""Folders of torch.distributed.checkpoint: FSDP1 and FSDP2 on any mesh, accelerate, Trainer, torchtitan, OLMo-core.

`.metadata` maps every tensor of a flattened state dict to chunks in `__<rank>_<n>.distcp` files, so names do not depend
on ranks. The model may be nested in the user's state dict, and optimizer states may be next to it:

    pytorch_model_fsdp_0/, optimizer_0/    accelerate and Trainer, SHARDED_STATE_DICT: `model.<name>`
    checkpoint/step-5/                     torchtitan: `<name>`, `optimizer.state.<name>.exp_avg`, `train_state` …
    step5/model_and_optim/                 OLMo-core: `model.<name>`, `optim.state.<name>.exp_avg` …

Sources: torch 2.4 to 2.13, accelerate 1.15, torchtitan 0.3.0, OLMo-core 3.0.0; folders that they wrote.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from math import prod
from pathlib import Path

from reshard.algebra.tensors import Replica, Tensor
from reshard.algebra.views import assemble, overlaps
from reshard.base.errors import Problem, ReshardError, cause_of, listed, raise_all
from reshard.containers.dcp_chunks import ChunkFolder
from reshard.containers.dcp_metadata import DcpMetadata, DcpTensor, chunk_spans, read_metadata
from reshard.containers.file_names import DCP_METADATA
from reshard.containers.torchfiles.read import ChunkReader
from reshard.families.dialect import HUB
from reshard.families.dialects.torchtitan import TORCHTITAN
from reshard.folders.iterations import Iteration
from reshard.formats.checkpoint import Checkpoint, ModelDescription
from reshard.formats.contract import Writing, stateless
from reshard.formats.copied_files import CopyFinder, explained
from reshard.formats.dcp import olmo_core, torchtitan
from reshard.formats.dcp.optimizer_states import OPTIMIZER_KEY as OPTIMIZER_NEST
from reshard.formats.dcp.optimizer_states import DcpOptimizer, read_optimizer, step_tensor
from reshard.formats.detection import DCP
from reshard.formats.dropped import OTHER_OBJECTS, PROGRESS, RANDOM_STATES, SCHEDULES, rule_of
from reshard.formats.optimizer import MOMENTS, OPTIMIZER_STATES, OptimizerContents, OptimizerStates
from reshard.formats.state_dict_names import prefix_of
from reshard.transfer.plan import OutputFile
from reshard.transfer.source_files import Sources

NAMINGS = (torchtitan.in_its_dialect, olmo_core.in_its_dialect)
"""For each engine with names of its own: the checkpoint in its dialect or the Hub's; None if the names are not its."""

SAVE_MODEL_ALONE = "load the model that you want with dcp.load, and save it alone with dcp.save"
WEIGHTS_ONLY = "a Trainer FSDP checkpoint: weights only, no config or tokenizer; pass --base"
NOT_WEIGHTS = tuple(
    (re.compile(rf"(\w+\.){{0,2}}{pattern}"), rule)
    for pattern, rule in (
        (r"optim(izer)?s?(_state)?(_dict)?\..*", OPTIMIZER_STATES),
        (r"(lr_)?schedulers?(\..*)?", SCHEDULES),
        (r"(rng|random)(_\w+)?(\..*)?", RANDOM_STATES),
        (r"data_?loader\w*(\..*)?", "data loader states"),
        (r"(train_state|trainer_state|progress)(\..*)?", PROGRESS),
        (r".*\b_extra_state\b.*", "extra states"),
        (r".*\.rotary_emb\.inv_freq|freqs_cis|.*\brope\.cache", "rotary buffers"),
    )
)
"""Entries that are not weights: the pattern of their keys, below at most two levels of nesting, and the rule."""

SCALAR_PROGRESS = re.compile(
    r"(\w+\.){0,2}((\w+_)?(steps?|epochs?|iters?|iterations?|loss|samples|tokens|seed|lr|learning_rate)|best_\w+)"
)
"""Scalars among a model's tensors that a training loop saved with them; other scalars there are weights."""

ACCELERATE = re.compile(r"pytorch_model_fsdp_(\d+)")
STEP_FOLDER = re.compile(r"(?:(?:global_)?step|checkpoint)[_-]?(\d+)")


def open_checkpoint(path: Path, sources: Sources, iteration: Iteration | None = None) -> Checkpoint:
    """Open a folder. Raises ReshardError naming all that is missing, damaged, or ambiguous."""
    names = [folder.name for folder in (path.resolve(), path.resolve().parent)]
    step = next((int(match[1]) for name in names if (match := STEP_FOLDER.fullmatch(name))), None)
    if iteration is not None and iteration != step:
        raise ReshardError(
            "dcp-iteration-mismatch",
            "this is not the folder of that iteration",
            file=str(path),
            expected=f"--iteration {iteration}",
            found="a folder without a step in its name" if step is None else f"step {step}",
            remedy="pass the folder of the step itself, without --iteration",
        )
    try:
        return _open(path, sources, step)
    except ReshardError as error:
        raise ReshardError(explained(error.problems, path.glob("*.distcp"))) from cause_of(error)


def _open(path: Path, sources: Sources, step: int | None) -> Checkpoint:
    metadata = read_metadata(path / DCP_METADATA, sources)
    parts = _SortedKeys(metadata)
    weights = parts.weights(path)
    optimizer = _optimizer_beside(path, sources, parts)
    reader = _ChunkAssembler([*weights.values(), *(tensor for _, _, tensor in parts.again)], sources)
    tensors = {name: reader.tensor(name, tensor) for name, tensor in weights.items()}
    again = [
        _copy(parts.prefix, prefix, name, tensors[name], reader.tensor(name, tensor))
        for prefix, name, tensor in parts.again
    ]
    reader.finish()
    checkpoint = Checkpoint(
        path=path,
        format=DCP,
        dialect=HUB,
        tensors=tensors,
        description=ModelDescription(path),
        iteration=step,
        optimizer=OptimizerContents(
            _states(parts.optimizer | (optimizer.tensors if optimizer else {}), weights, sources),
            read_optimizer(optimizer or metadata, sources),
        ),
        dropped=parts.dropped,
        replicas=again,
        problems=reader.copies.problems(),
        notes=[*_notes(path), *_copy_notes(parts)],
        variant=f"names below {parts.prefix}" if parts.prefix else "",
        sources=sources,
    )
    named = (in_its_dialect(checkpoint) for in_its_dialect in NAMINGS)
    return next((renamed for renamed in named if renamed), checkpoint)


def _notes(path: Path) -> list[str]:
    if not ACCELERATE.fullmatch(path.name) or (path / "config.json").is_file():
        return []
    command = f"reshard convert {path.as_posix()} OUTPUT --base HF_FOLDER"
    return [f"{WEIGHTS_ONLY} (accelerate writes the same; {command})"]


def _copy(prefix: str, other: str, name: str, tensor: Tensor, copy: Tensor) -> Replica:
    """What is below another prefix must be the same model."""
    return Replica(
        name,
        tensor,
        copy,
        f"a checkpoint has one model, and those below {prefix!r} and {other!r} are equal",
        SAVE_MODEL_ALONE,
        "dcp-models-differ",
        "the checkpoint contains two models that differ",
    )


def _copy_notes(parts: _SortedKeys) -> list[str]:
    return [
        f"the tensors below {prefix!r} are below {parts.prefix!r} too: a conversion requires that they are equal"
        for prefix in dict.fromkeys(prefix for prefix, _, _ in parts.again)
    ]


# ------------------------------------------------------------------------------- which keys are the weights


class _SortedKeys:
    """The keys of a flattened state dict, sorted into weights below `prefix`, optimizer states, and the rest."""

    def __init__(self, metadata: DcpMetadata) -> None:
        self.metadata = metadata
        self.dropped: Counter[str] = Counter()
        self.optimizer: dict[str, DcpTensor] = {}
        self.again: list[tuple[str, str, DcpTensor]] = []
        """Prefix, name and tensor of those that are in the model too."""
        self.prefix = ""
        self._candidates: dict[str, DcpTensor] = {}
        for key, tensor in metadata.tensors.items():
            rule = rule_of(key, NOT_WEIGHTS)
            if rule == OPTIMIZER_STATES:
                self.optimizer[key] = tensor
            if not rule and not tensor.shape and SCALAR_PROGRESS.fullmatch(key):
                rule = PROGRESS
            if rule:
                self.dropped[rule] += tensor.nbytes
            else:
                self._candidates[key] = tensor
        for key, chunk in metadata.objects.items():
            self.dropped[rule_of(key, NOT_WEIGHTS) or OTHER_OBJECTS] += chunk.length

    def weights(self, folder: Path) -> dict[str, DcpTensor]:
        """The tensors of the one model, by name. Raises ReshardError if there is none, or more than one."""
        nests = self._nests()
        for prefix in [each for each, nest in nests.items() if not any(t.shape for t in nest.values())]:
            self.dropped[PROGRESS] += _nbytes(nests.pop(prefix))  # scalars beside the model
        if not nests:
            raise ReshardError(
                "dcp-without-weights",
                "this folder contains no weights",
                file=str(folder),
                found=", ".join(sorted(self.dropped)) or "an empty state dict",
                remedy="pass the folder of the model next to it, such as pytorch_model_fsdp_0",
            )
        self.prefix = max(nests, key=lambda prefix: _nbytes(nests[prefix]))
        weights = nests.pop(self.prefix)
        problems = []
        for prefix, others in nests.items():
            if others.keys() <= weights.keys() and all(_is_alike(weights[n], t) for n, t in others.items()):
                self.again += [(prefix, name, tensor) for name, tensor in others.items()]
            else:
                problems.append(_another_model(folder, self.prefix, prefix, others))
        problems += _mixed_engine_problems(folder, weights)
        raise_all(problems)
        return weights

    def _nests(self) -> dict[str, dict[str, DcpTensor]]:
        """Tensors by their state dict, given as its path in the saved one ("", "model.", "app.model." …)."""
        paths = self.metadata.planner_data or {}
        outer: dict[str, dict[str, DcpTensor]] = defaultdict(dict)
        for key, tensor in self._candidates.items():
            path = paths.get(key) or (key,)
            nest = "".join(f"{part}." for part in path[:-1])
            outer[nest if key.startswith(nest) else ""][key] = tensor
        nests: dict[str, dict[str, DcpTensor]] = defaultdict(dict)
        for nest, tensors in outer.items():
            names = [key.removeprefix(nest) for key in tensors]
            inner = nest + (torchtitan.unnested(names) or prefix_of(names))
            for key, tensor in tensors.items():
                prefix = inner if key.startswith(inner) else nest
                nests[prefix][key.removeprefix(prefix)] = tensor
        return dict(nests)


def _nbytes(tensors: Mapping[str, DcpTensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())


def _is_alike(one: DcpTensor, other: DcpTensor) -> bool:
    return (one.dtype, one.shape) == (other.dtype, other.shape)


def _another_model(folder: Path, prefix: str, other: str, tensors: Mapping[str, DcpTensor]) -> Problem:
    return Problem(
        "dcp-several-models",
        "the checkpoint contains more than one model",
        tensor=f"{other}{listed(list(tensors), 1)}",
        file=str(folder / DCP_METADATA),
        rule="one conversion converts one model; nothing is dropped silently",
        expected=f"all weights below {prefix!r}" if prefix else "all weights at the top",
        found=f"others below {other!r}" if other else "others at the top",
        remedy=SAVE_MODEL_ALONE,
    )


EMBEDDINGS = (*HUB.embeddings[:2], *TORCHTITAN.embeddings)


def _mixed_engine_problems(folder: Path, names: Iterable[str]) -> Iterator[Problem]:
    """A problem if the names of two engines are mixed."""
    embeddings = sorted(set(EMBEDDINGS) & set(names))
    if len(embeddings) > 1:
        yield Problem(
            "dcp-models-mixed",
            "tensors of two models are mixed",
            tensor=", ".join(embeddings),
            file=str(folder / DCP_METADATA),
            rule="a model has one embedding",
            remedy="two models were saved into this folder: save each model into its own folder",
        )


# ------------------------------------------------------------------------------------------------ chunks


class _ChunkAssembler:
    """Assembles tensors from their chunks, and collects problems. `coming` are the tensors to read, in order."""

    def __init__(self, coming: Iterable[DcpTensor], sources: Sources) -> None:
        self.copies = CopyFinder()
        self._chunks = ChunkReader(sources, chunk_spans(coming))
        self._problems: list[Problem] = []

    def tensor(self, name: str, stored: DcpTensor) -> Tensor:
        """A complete tensor as a view over its chunks."""
        parts = []
        for chunk in stored.chunks:
            cells = self._chunks.read(chunk.file, chunk.offset, chunk.length, stored.dtype, chunk.sizes)
            self.copies.add(chunk.file, name, chunk.offsets, cells)
            parts.append((chunk.offsets, Tensor.stored(cells).view))
        if len(parts) == 1 and parts[0][1].shape == stored.shape:
            return Tensor(stored.dtype, parts[0][1])
        view = assemble(stored.shape, parts)
        elements = sum(prod(chunk.sizes) for chunk in stored.chunks)
        if elements != view.numel or overlaps(view):
            self._problems.append(
                Problem(
                    "dcp-chunks-missing" if elements < view.numel else "dcp-chunks-overlap",
                    "chunks of a tensor are missing"
                    if elements < view.numel
                    else "chunks of a tensor overlap",
                    tensor=name,
                    rule="the chunks of a tensor cover it exactly",
                    expected=f"{view.numel} elements of {list(stored.shape)}",
                    found=f"{elements} elements in {len(parts)} chunks",
                    remedy="the save did not finish, or two saves were mixed: take another checkpoint of the run",
                )
            )
        return Tensor(stored.dtype, view)

    def finish(self) -> None:
        """Close all files. Raises ReshardError listing the tensors that are incomplete."""
        self._chunks.close()
        raise_all(self._problems)


# ------------------------------------------------------------------------------------- optimizer states

_STATE = re.compile(r"(?:.*?\.)?state\.(?P<name>.+)\.(?P<kind>\w+)")


def _optimizer_beside(path: Path, sources: Sources, parts: _SortedKeys) -> DcpMetadata | None:
    """The optimizer in `optimizer_0`, which accelerate writes next to `pytorch_model_fsdp_0`; counted as dropped."""
    match = ACCELERATE.fullmatch(path.name)
    folder = path.parent / f"optimizer_{match[1]}" if match else None
    if folder is None or not (folder / DCP_METADATA).is_file():
        return None
    metadata = read_metadata(folder / DCP_METADATA, sources)
    parts.dropped[OPTIMIZER_STATES] += _nbytes(metadata.tensors)
    parts.dropped[OPTIMIZER_STATES] += sum(chunk.length for chunk in metadata.objects.values())
    return metadata


def _states(
    optimizer: Mapping[str, DcpTensor], weights: Mapping[str, DcpTensor], sources: Sources
) -> OptimizerStates:
    """The states that have the shape of a weight, under its name; read on first use.

    Those of Adam are included whatever their shape, so that one that does not fit is not taken for a frozen weight's.
    """
    kinds: dict[str, dict[str, DcpTensor]] = defaultdict(dict)
    for key, tensor in optimizer.items():
        match = _STATE.fullmatch(key)
        name = match["name"] if match else ""
        if match is None or name not in weights:
            continue
        if tensor.shape == weights[name].shape or (tensor.shape and match["kind"] in MOMENTS):
            kinds[match["kind"]][name] = tensor
    return OptimizerStates(kinds, lambda kind: _read_state(kinds[kind], sources))


def _read_state(stored: Mapping[str, DcpTensor], sources: Sources) -> dict[str, Tensor]:
    reader = _ChunkAssembler(stored.values(), sources)
    tensors = {name: reader.tensor(name, tensor) for name, tensor in stored.items()}
    reader.finish()
    return tensors


# ---------------------------------------------------------------------------------------------- writing

MODEL_KEY = "model"
"""The key of the model in the state dict, as in torch's own examples, accelerate and Trainer."""


class DcpWriting(Writing):
    """A folder that torch loads at any layout."""

    def files(self) -> list[OutputFile]:
        """The files of a folder that `dcp.load({"model": state_dict}, checkpoint_id=folder)` loads at any layout."""
        tensors = self.request.tensors
        writer = _DcpWriter(self.request.options.shard_size)
        for tensor in tensors:
            writer.name((MODEL_KEY, tensor.name), writer.add(tensor))
        stored = writer.metadata.tensors
        for again, name in self.request.tied_names.items():
            if f"{MODEL_KEY}.{again}" not in stored and f"{MODEL_KEY}.{name}" in stored:
                writer.name(
                    (MODEL_KEY, again), stored[f"{MODEL_KEY}.{name}"]
                )  # the live model's state dict has both names
        if self.request.states and self.request.optimizer:
            optimizer = DcpOptimizer(self.request.states, self.request.optimizer)
            writer.add_optimizer(optimizer, {tensor.name for tensor in tensors if len(tensor.shape) < 2})
        return writer.finished()

    def notes(self) -> list[str]:
        """How to load the folder with torch."""
        model = 'load it with dcp.load({"model": model.state_dict()}, checkpoint_id=FOLDER)'
        return [model, LOADS_STATES, *stateless(self.request)] if self.request.states else [model]


LOADS_STATES = (
    'load the optimizer with dcp.load({"optimizer": states}, checkpoint_id=FOLDER), where states = '
    "get_optimizer_state_dict(model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True))"
)


class _DcpWriter(ChunkFolder):
    """The folder of a model, and of its optimizer."""

    def add_optimizer(self, optimizer: DcpOptimizer, vectors: Collection[str]) -> None:
        """Add the states, and the step and settings that all parameters share; `vectors` have no weight decay."""
        for key, tensor in optimizer.tensors():
            self.name((OPTIMIZER_NEST, key), self.add(tensor))
        step = self.append(optimizer.step())
        settings = {key: self.append(content) for key, content in optimizer.settings().items()}
        undecayed = {**settings, "weight_decay": self.append(optimizer.without_decay())}
        for name in optimizer.names():
            self.name((OPTIMIZER_NEST, f"state.{name}.step"), step_tensor(step))
            for key, chunk in (undecayed if name in vectors else settings).items():
                self.name((OPTIMIZER_NEST, f"param_groups.{name}.{key}"), chunk)
