"""What training relies on beyond the documented interfaces of TRL, transformers and accelerate, found in the source.

A new release is checked against this list: `pip install` it, and run this file. Then raise the bound of TRL in
pyproject.toml and in `NEEDS`.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from importlib import import_module
from inspect import Parameter, signature
from pathlib import Path
from typing import Any

import pytest
import tomllib
from packaging.requirements import Requirement

from reshard.training import trl
from reshard.training.trl.trainer_overrides import TrainerOverrides
from reshard.training.trl.trl_methods import TRL_METHODS

SOURCE = Path(trl.__file__).parent

OVERRIDDEN = {
    "_load_from_checkpoint": "weights are loaded before the trainer is made",
    "_load_optimizer_and_scheduler": "states that are DTensors are read by torch.distributed.checkpoint",
    "_load_rng_state": "a damaged file is named",
    "_maybe_log_save_evaluate": "the one place after each optimizer step, before it is logged and saved",
    "_run_epoch": "a run that was killed after its last step must not take another one",
    "_save_checkpoint": "a checkpoint is complete only with its record, and older ones are removed after that",
    "_save_optimizer_and_scheduler": "as for loading",
    "create_model_card": "TRL would write one into each checkpoint",
    "create_optimizer": "PEFT makes the optimizer of LoRA+",
    "evaluate": "an evaluation must not change the random numbers of training",
    "get_eval_dataloader": "the loss must not depend on the number of ranks",
    "get_train_dataloader": "its workers must survive a signal",
    "save_model": "complete weights under every plan",
    "training_step": "the loss of each step, however seldom it is logged",
}
"""Methods of the trainers that our mixin overrides, with the reason."""

USED = {
    "_get_learning_rate": ("transformers:Trainer", "for the message about a loss that is NaN"),
    "_logs": ("trl:GRPOTrainer", "the last completions, for the report"),
    "_step": ("trl:GRPOTrainer", "whether a generation is used up, so that a run can stop there"),
    "_mixed_precision": ("accelerate.state:AcceleratorState", "FSDP2 on a CPU"),
    "_shared_state": (
        "accelerate.state:PartialState",
        "FSDP2 on a CPU; a single rank of torchrun without DDP",
    ),
    "_name_or_path": ("transformers:PreTrainedConfig", "TRL loads the reference model from there"),
    "_no_split_modules": ("transformers:PreTrainedModel", "the layers that FSDP2 shards"),
    "_supports_attention_backend": ("transformers:PreTrainedModel", "whether packed samples are kept apart"),
    "_is_stateful": ("transformers:PreTrainedModel", "the same"),
}
"""Other private attributes, with their owner and the reason."""


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def reached(tree: ast.Module) -> Iterator[str]:
    """Private names that a module takes from objects which it does not define, `getattr` included."""
    nodes = list(ast.walk(tree))
    own = {node.name for node in nodes if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    own |= {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    own |= {
        node.attr
        for node in nodes
        if isinstance(node, ast.Attribute)
        and ast.unparse(node).startswith("self.")
        and isinstance(node.ctx, ast.Store)
    }
    for node in nodes:
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            if node.attr not in own or ast.unparse(node.value) == "super()":
                yield node.attr
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr"):
            name = ast.literal_eval(node.args[1]) if isinstance(node.args[1], ast.Constant) else ""
            if is_private(str(name)):
                yield name


def test_every_private_name_that_training_uses_is_listed() -> None:
    found = {name for file in SOURCE.glob("*.py") for name in reached(ast.parse(file.read_text()))}
    assert found == {*USED, *(name for name in OVERRIDDEN if is_private(name) and name in found)}
    assert found >= {"_run_epoch", "_step"}


@pytest.mark.parametrize("name", USED)
def test_the_frameworks_have_each_of_these_names(name: str) -> None:
    module, _, owner = USED[name][0].partition(":")
    known = getattr(import_module(module), owner)
    source = Path(str(import_module(known.__module__).__file__)).read_text()
    assert hasattr(known, name) or f"self.{name}" in source or f"{name}:" in source


def overridden(mixin: type) -> Iterator[tuple[str, Any, Any]]:
    """Each method of a mixin that a trainer has, ours and theirs."""
    for name, ours in vars(mixin).items():
        for way in TRL_METHODS.values():
            if (
                callable(ours)
                and callable(theirs := getattr(way.trainer_class(), name, None))
                and name[:2] != "__"
            ):
                yield name, ours, theirs


def test_the_overridden_methods_are_those_listed() -> None:
    assert {name for name, _, _ in overridden(TrainerOverrides)} == OVERRIDDEN.keys()


def test_an_override_takes_what_the_frameworks_pass() -> None:
    for name, ours, theirs in overridden(TrainerOverrides):
        asked, takes = parameters(theirs), parameters(ours)
        if Parameter.VAR_POSITIONAL in asked.values():
            continue  # TRL's own passes everything on
        signature(ours).bind(*asked)
        named = [each for each, kind in takes.items() if kind is Parameter.POSITIONAL_OR_KEYWORD]
        assert named == list(asked)[: len(named)], (name, signature(theirs))


def parameters(function: Any) -> dict[str, Any]:
    """The kind of each parameter."""
    return {name: each.kind for name, each in signature(function).parameters.items()}


def test_trl_has_an_upper_bound_and_this_release_is_within_it() -> None:
    project = tomllib.loads((SOURCE.parents[3] / "pyproject.toml").read_text())
    extra = map(Requirement, project["project"]["optional-dependencies"]["train"])
    (bound,) = [each.specifier for each in extra if each.name == "trl"]
    assert str(bound) == str(Requirement(f"trl{trl.NEEDS['trl']}").specifier)
    assert any(each.operator == "<" for each in bound)
    assert bound.contains(import_module("trl").__version__)
