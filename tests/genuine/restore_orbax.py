"""Lets Orbax restore what reshard wrote, and compares it with what Orbax itself wrote of MaxText's arrays.

    python restore_orbax.py RUN ITEMS

runs in an environment with jax and orbax-checkpoint. Prints "equal" if tree, dtypes, shapes and bytes are the same.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import numpy as np
import orbax.checkpoint as ocp


def model_of(tree: dict[str, Any]) -> dict[str, Any]:
    """The model in a tree of Linen or NNX, without NNX's `value`."""

    def plain(node: Any) -> Any:
        if not isinstance(node, dict):
            return np.asarray(node)
        return (
            plain(node["value"])
            if node.keys() == {"value"}
            else {key: plain(each) for key, each in node.items()}
        )

    inner = tree.get("params", tree.get("base", tree))
    inner = inner.get("params", inner)
    return {key: plain(inner[key]) for key in ("decoder", "token_embedder")}


def restored(items: Path) -> dict[str, Any]:
    """All arrays, in every way that MaxText restores them: as they are, and strictly into abstract arrays."""
    found: dict[str, Any] = {}
    for flag in (True, False):
        handler = ocp.PyTreeCheckpointHandler(use_ocdbt=flag, use_zarr3=flag)
        found = ocp.Checkpointer(handler).restore(items)
    return found


def strictly_restored(items: Path) -> dict[str, Any]:
    """The same into arrays of the shapes and dtypes that the metadata tells."""
    tree = ocp.Checkpointer(ocp.PyTreeCheckpointHandler()).metadata(items).item_metadata.tree
    abstract = jax.tree.map(
        lambda each: jax.ShapeDtypeStruct(each.shape, each.dtype),
        tree,
        is_leaf=lambda each: hasattr(each, "shape"),
    )
    found: dict[str, Any] = ocp.StandardCheckpointer().restore(items, abstract)
    return found


def main(run: Path, genuine: Path) -> None:
    """Compare both."""
    manager = ocp.CheckpointManager(run, item_names=("items",))
    assert manager.all_steps() == [0], manager.all_steps()
    want = model_of(ocp.Checkpointer(ocp.PyTreeCheckpointHandler()).restore(genuine))
    for found in (restored(run / "0/items"), strictly_restored(run / "0/items")):
        got = model_of(found)
        rows = got["token_embedder"]["embedding"].shape[0]
        want["token_embedder"]["embedding"] = want["token_embedder"]["embedding"][:rows]
        ours, theirs = jax.tree.flatten(got), jax.tree.flatten(want)
        assert ours[1] == theirs[1]
        for mine, yours in zip(ours[0], theirs[0], strict=True):
            assert (mine.dtype, mine.shape, mine.tobytes()) == (yours.dtype, yours.shape, yours.tobytes())
    print("equal")


if __name__ == "__main__":
    main(*(Path(word).absolute() for word in sys.argv[1:3]))
