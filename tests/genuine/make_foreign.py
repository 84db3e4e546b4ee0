"""Makes tests/data/foreign: small files as other tools write them, from llama.cpp's gguf to h5py.

    python -m tests.genuine.make_foreign FOLDER

runs in an environment with gguf 0.19, onnx 1.23, orbax-checkpoint 0.12.8, lightning 2.6.6, mlx[cpu] 0.32.4,
ctranslate2 4.8, h5py 3.16 and torch. The tests themselves make the files of torch and tar.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np


def gguf_file(path: Path) -> None:
    """A llama with two tensors, as llama.cpp's converters write one."""
    import gguf

    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(8)
    writer.add_embedding_length(4)
    writer.add_tensor("token_embd.weight", np.ones((8, 4), np.float32))
    writer.add_tensor("output_norm.weight", np.ones(4, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def onnx_file(path: Path) -> None:
    """One matrix product."""
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    weight = numpy_helper.from_array(np.ones((8, 4), np.float32), "w")
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 8])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 4])
    graph = helper.make_graph([helper.make_node("MatMul", ["x", "w"], ["y"])], "g", [x], [y], [weight])
    onnx.save(helper.make_model(graph), path)


def orbax_folder(path: Path) -> None:
    """Two arrays of JAX."""
    import jax.numpy as jnp
    import orbax.checkpoint as ocp

    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path.absolute(), {"params": {"embedding": jnp.ones((8, 4)), "norm": jnp.ones(4)}})


def lightning_file(path: Path) -> None:
    """A linear layer after one step."""
    import lightning
    import torch

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.model = torch.nn.Linear(4, 2)

        def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
            return self.model(batch).sum()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = lightning.Trainer(max_steps=1, accelerator="cpu", default_root_dir=str(path.parent), **quiet)
    trainer.fit(Module(), torch.utils.data.DataLoader(torch.ones(4, 4)))
    trainer.save_checkpoint(path)


def mlx_weights(archive: Path) -> None:
    """An archive of older versions of MLX."""
    import mlx.core as mx

    mx.savez(str(archive), **{"model.norm.weight": mx.ones(4)})


def packed_model(folder: Path) -> None:
    """The beginning of a model of CTranslate2."""
    import ctranslate2

    from tests.genuine.huggingface import make_model

    converter = ctranslate2.converters.TransformersConverter(
        str(make_model("llama", folder.parent / "llama"))
    )
    converter.convert(str(folder))
    (folder / "model.bin").write_bytes((folder / "model.bin").read_bytes()[:2048])


def keras_weights(path: Path) -> None:
    """One array in HDF5."""
    import h5py

    with h5py.File(path, "w") as file:
        file["model/embed"] = np.ones((8, 4), np.float32)


def main(folder: Path) -> None:
    """Make all of them."""
    folder.mkdir(parents=True, exist_ok=True)
    gguf_file(folder / "model.gguf")
    onnx_file(folder / "model.onnx")
    orbax_folder(folder / "orbax")
    lightning_file(folder / "lightning.ckpt")
    mlx_weights(folder / "weights.npz")
    packed_model(folder / "ct2")
    keras_weights(folder / "tf_model.h5")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
