"""What torch and NumPy say of graphs, devices, shapes, dtypes and batches, as posted: the cause and its cure."""

from __future__ import annotations

import pytest

from tests.doctor.test_classes import first

TENSORS = {
    "RuntimeError: One of the differentiated Tensors appears to not have been used in the graph. Set allow_unused=True"
    " if this is the desired behavior.": ("autograd-unused", "requires_grad_(True)"),
    "RuntimeError: a leaf Variable that requires grad is being used in an in-place operation.": (
        "leaf-in-place",
        "torch.no_grad()",
    ),
    "ValueError: can't optimize a non-leaf Tensor": ("tensor-not-leaf", "requires_grad_()"),
    "RuntimeError: Can't call numpy() on Tensor that requires grad. Use tensor.detach().numpy() instead.": (
        "tensor-to-numpy",
        ".detach().cpu().numpy()",
    ),
    "RuntimeError: Expected target size [16, 50257], got [16, 128]": ("loss-of-sequence", "reshape(-1, "),
    "RuntimeError: view size is not compatible with input tensor's size and stride (at least one dimension spans"
    " across two contiguous subspaces). Use .reshape(...) instead.": ("view-of-strided", "x.reshape(shape)"),
    "RuntimeError: stack expects each tensor to be equal size, but got [3, 224, 224] at entry 0 and [1, 224, 224] at"
    " entry 3": ("batch-not-stacked", 'convert("RGB")'),
    "TypeError: default_collate: batch must contain tensors, numpy arrays, numbers, dicts or lists; found"
    " <class 'NoneType'>": ("batch-of-none", "is not None"),
    "TypeError: default_collate: batch must contain tensors, numpy arrays, numbers, dicts or lists; found"
    " <class 'PIL.Image.Image'>": ("batch-of-objects", "ToTensor()"),
    "ValueError: num_samples should be a positive integer value, but got num_samples=0": (
        "dataset-empty",
        "os.listdir",
    ),
    "RuntimeError: cannot pin 'torch.cuda.FloatTensor' only dense CPU tensors can be pinned": (
        "batch-pinned-on-gpu",
        "pin_memory=False",
    ),
    "RuntimeError: unscale_() has already been called on this optimizer since the last update().": (
        "scaler-unscaled-twice",
        "scaler.update()",
    ),
    "ValueError: setting an array element with a sequence. The requested array has an inhomogeneous shape after 1"
    " dimensions. The detected shape was (2,) + inhomogeneous part.": (
        "arrays-of-different-shapes",
        "dtype=object",
    ),
    "ValueError: Object arrays cannot be loaded when allow_pickle=False": (
        "array-of-objects",
        "allow_pickle=True",
    ),
    "torch._inductor.exc.TritonMissing: Cannot find a working triton installation.": (
        "triton-not-there",
        "triton-windows",
    ),
    "RuntimeError: Given groups=1, weight of size [64, 3, 7, 7], expected input[32, 1, 224, 224] to have 3 channels,"
    " but got 1 channels instead": ("convolution-channels", 'convert("RGB")'),
    "ValueError: Expected more than 1 value per channel when training, got input size torch.Size([1, 256, 1, 1])": (
        "batch-norm-one",
        "drop_last=True",
    ),
    "ValueError: optimizer got an empty parameter list": ("optimizer-empty", "requires_grad]"),
    "KeyError: \"param 'initial_lr' is not specified in param_groups[0] when resuming an optimizer\"": (
        "scheduler-resumed",
        "scheduler.load_state_dict",
    ),
    "RuntimeError: Expected tensor for argument #1 'indices' to have one of the following scalar types: Long, Int; but"
    " got torch.cuda.FloatTensor instead (while checking arguments for embedding)": (
        "indices-of-fractions",
        "input_ids.long()",
    ),
    "RuntimeError: Boolean value of Tensor with more than one value is ambiguous": (
        "tensor-as-condition",
        "torch.equal",
    ),
    "AttributeError: Can't get attribute 'Net' on <module '__main__' from 'serve.py'>": (
        "pickle-class-missing",
        "import Net",
    ),
    "EOFError: Ran out of input": ("file-is-empty", "ls -l"),
    "RuntimeError: probability tensor contains either `inf`, `nan` or element < 0": (
        "sampling-not-finite",
        "bfloat16",
    ),
    "RuntimeError: Sizes of tensors must match except in dimension 1. Expected size 33 but got size 32 for tensor"
    " number 1 in the list.": ("cat-sizes-differ", "F.interpolate"),
    "RuntimeError: result type Float can't be cast to the desired output type Long": (
        "result-not-castable",
        "x.float()",
    ),
    "RuntimeError: all elements of input should be between 0 and 1": (
        "loss-of-probabilities",
        "BCEWithLogitsLoss",
    ),
    "TypeError: linear(): argument 'input' (position 1) must be Tensor, not tuple": (
        "argument-no-tensor",
        "layer(x)[0]",
    ),
    "RuntimeError: Parent directory checkpoints/run1 does not exist.": (
        "save-folder-missing",
        "mkdir -p checkpoints/run1",
    ),
    "ValueError: Tried to step 1001 times. The specified number of total steps is 1000": (
        "scheduler-over",
        "epochs * len(train_loader)",
    ),
    "AttributeError: cannot assign module before Module.__init__() call": (
        "module-not-set-up",
        "super().__init__()",
    ),
    'NotImplementedError: Module [Net] is missing the required "forward" function': (
        "module-not-set-up",
        "def forward",
    ),
    "ValueError: only one element tensors can be converted to Python scalars": (
        "tensor-to-number",
        "torch.stack",
    ),
    "RuntimeError: grad can be implicitly created only for scalar outputs": (
        "loss-not-scalar",
        "loss.mean()",
    ),
    "AttributeError: 'tuple' object has no attribute 'size'": ("value-not-tensor", "x[0]"),
    "RuntimeError: `fused=True` requires all the params to be floating point Tensors of supported devices: ['cuda'].": (
        "optimizer-not-fusable",
        "adamw_torch",
    ),
    "RuntimeError: Dynamo is not supported on Python 3.12+": ("compile-not-here", "python=3.11"),
    "TypeError: h5py objects cannot be pickled": ("file-in-worker", "h5py.File(self.path"),
    "RuntimeError: Expected 3D (unbatched) or 4D (batched) input to conv2d, but got input of size: [64, 784]": (
        "input-dimensions",
        "unsqueeze",
    ),
    "AttributeError: 'collections.OrderedDict' object has no attribute 'eval'": (
        "weights-for-model",
        "model.load_state_dict(torch.load(",
    ),
    "RuntimeError: Output 0 of UnbindBackward0 is a view and is being modified inplace.": (
        "view-written",
        "x.clone()",
    ),
    "RuntimeError: indices should be either on cpu or on the same device as the indexed tensor (cpu)": (
        "device-of-index",
        "index.to(x.device)",
    ),
    "ValueError: Input contains NaN.": ("values-are-nan", "dropna"),
    "ValueError: Using a target size (torch.Size([64])) that is different to the input size (torch.Size([64, 1])) is"
    " deprecated. Please ensure they have the same size.": ("labels-shape", "logits.squeeze(-1)"),
    "OMP: Error #15: Initializing libiomp5md.dll, but found libiomp5md.dll already initialized.": (
        "openmp-twice",
        "KMP_DUPLICATE_LIB_OK",
    ),
}


POSSIBLE = {"cat-sizes-differ", "sampling-not-finite", "value-not-tensor", "values-are-nan"}
"""Messages that have several causes."""


@pytest.mark.parametrize("said", TENSORS)
def test_what_torch_says_of_tensors(said: str) -> None:
    found = first(said)
    code, cure = TENSORS[said]
    assert (found.code, found.certainty) == (code, "possible" if code in POSSIBLE else "likely")
    assert cure in found.remedy.en and found.remedy.zh


def test_the_exception_of_a_worker_is_the_one_it_raised() -> None:
    frames = '  File "/home/user/train.py", line 9, in collate\n    return torch.stack(batch, 0, out=out)\n'
    said = "RuntimeError: stack expects each tensor to be equal size, but got [2] at entry 0 and [3] at entry 1\n"
    outer = "Traceback (most recent call last):\n" + frames
    outer += "RuntimeError: Caught RuntimeError in DataLoader worker process 0.\n"
    found = first(f"{outer}Original Traceback (most recent call last):\n{frames}{said}")
    assert found.code == "batch-not-stacked" and "[2] at entry 0" in found.places[0].text
    assert "process 0" in first(outer).places[0].text


def test_a_pickled_model_needs_its_repository() -> None:
    frame = 'Traceback (most recent call last):\n  File "/opt/torch/serialization.py", line 9, in find_class\n    x()\n'
    found = first(frame + "ModuleNotFoundError: No module named 'models'")
    assert found.code == "pickle-module-missing" and "sys.path.insert" in found.remedy.en


SITE = 'File "/home/user/venv/lib/python3.11/site-packages'
COMPUTED = {
    "RuntimeError: Input type (torch.cuda.FloatTensor) and weight type (torch.FloatTensor) should be the same": (
        "device-of-layer",
        "model.to(device)",
    ),
    "RuntimeError: Input type (torch.FloatTensor) and weight type (torch.cuda.FloatTensor) should be the same or input"
    " should be a MKLDNN tensor and weight is a dense tensor": ("device-of-input", "images.to(device)"),
    "RuntimeError: Input type (float) and bias type (c10::Half) should be the same": (
        "matmul-dtypes",
        "autocast",
    ),
    "RuntimeError: Input type (double) and bias type (float) should be the same": (
        "dtype-of-numpy",
        ".float()",
    ),
    "RuntimeError: mat1 and mat2 must have the same dtype, but got Double and Float": (
        "dtype-of-numpy",
        ".float()",
    ),
    "RuntimeError: expected scalar type Long but found Float": ("label-dtype", "labels.long()"),
    "RuntimeError: expected scalar type Float but found Long": ("dtype-of-whole-numbers", "x.float()"),
    "RuntimeError: shape '[-1, 400]' is invalid for input of size 179776": ("shape-uneven", "x.flatten(1)"),
    "RuntimeError: mat1 and mat2 shapes cannot be multiplied (64x2304 and 400x120)": (
        "layer-width",
        "nn.Linear(2304, 120)",
    ),
    "RuntimeError: The expanded size of the tensor (721) must match the existing size (512) at non-singleton dimension"
    " 1.  Target sizes: [1, 721].  Tensor sizes: [1, 512]": ("shape-positions", "truncation=True"),
    "RuntimeError: Error(s) in loading state_dict for ResNet:\n\tsize mismatch for fc.weight: copying a param with"
    " shape torch.Size([1000, 2048]) from checkpoint, the shape in current model is torch.Size([10, 2048]).": (
        "shape-labels",
        "own.update(",
    ),
    f'Traceback (most recent call last):\n  {SITE}/transformers/models/bert/modeling_bert.py", line 9, in forward\n'
    "    embeddings = self.position_embeddings(position_ids)\nIndexError: index out of range in self": (
        "positions-beyond",
        "max_length=512",
    ),
    f'Traceback (most recent call last):\n  {SITE}/torch/optim/adam.py", line 9, in _single_tensor_adam\n'
    "    exp_avg.mul_(beta1)\nRuntimeError: Expected all tensors to be on the same device, but found at least two"
    " devices, cuda:0 and cpu!": ("device-of-optimizer", "optimizer.load_state_dict"),
    'Traceback (most recent call last):\n  File "/home/user/train.py", line 9, in f\n    h, w = img.shape[:2]\n'
    "AttributeError: 'NoneType' object has no attribute 'shape'": ("image-is-none", "os.path.isfile"),
    'Traceback (most recent call last):\n  File "/home/user/train.py", line 9, in f\n'
    "    for x, y in train_loader:\nValueError: too many values to unpack (expected 2)": (
        "batch-unpacked",
        "next(iter(train_loader))",
    ),
    "FileNotFoundError: [Errno 2] No such file or directory: 'numactl'": (
        "program-missing",
        "--bind_cores_to_rank",
    ),
    "RuntimeError: Error(s) in loading state_dict for EmbeddingPipe: size mismatch for word_embeddings.weight: copying"
    " a param with shape torch.Size([25216, 6144]) from checkpoint, the shape in current model is torch.Size([50304,"
    " 6144]).": ("shape-shard", "reshard convert CHECKPOINT"),
    "RuntimeError: Error(s) in loading state_dict for F:\n\tsize mismatch for lm_head.weight: copying a param with"
    " shape torch.Size([50272, 512]) from checkpoint, the shape in current model is torch.Size([50272, 1024]).": (
        "shape-other-size",
        "config.json",
    ),
    "[NeMo E 2026-08-10] Model instantiation failed!\n    Error(s):   Key 'frobs' is not in struct\n"
    "        full_key: decoding.frobs\n        object_type=dict\n    Traceback (most recent call last):": (
        "config-lacks-key",
        "+decoding.frobs=VALUE",
    ),
    "ImportError: cannot import name '_frob' from 'unsloth_zoo.loss_utils'": (
        "import-of-other-release",
        "-U unsloth unsloth_zoo",
    ),
    f'Traceback (most recent call last):\n  {SITE}/vllm/entrypoints/llm.py", line 212, in __init__\n'
    "    engine_args = EngineArgs(\nTypeError: EngineArgs.__init__() got an unexpected keyword argument"
    " 'worker_extension_cls'": ("api-came-later", "vllm>=0.8.0"),
    "ValueError: Call to add_lora method failed: vLLM only supports modules_to_save being None.": (
        "adapter-with-whole-layers",
        "--merge --base BASE",
    ),
    "huggingface_hub.errors.HFValidationError: Repo id must use alphanumeric chars or '-', '_', '.', '--' and '..' are"
    " forbidden, '-' and '.' cannot start or end the name, max length is 96: './lora-out'.": (
        "hf-path-taken-for-repo",
        "ls -d",
    ),
    "ERROR: Could not install packages due to an OSError: [Errno 2] No such file or directory: "
    f"'C:\\\\Temp\\\\{'frob' * 70}.hpp'": ("path-too-long", "LongPathsEnabled"),
    f'Traceback (most recent call last):\n  {SITE}/frob/a/__init__.py", line 9, in <module>\n    open(path)\n'
    f"FileNotFoundError: [Errno 2] No such file or directory: '{SITE[6:]}/frob/a/version'": (
        "package-without-part",
        "pip uninstall -y frob",
    ),
    "TypeError: _unsloth_frob() takes 3 positional arguments but 4 were given": (
        "unsloth-of-other-release",
        "unsloth unsloth_zoo",
    ),
    "Usage:\n  pip install [options] ...\nno such option: --config-settings": (
        "pip-option-of-later-release",
        "pip>=23.1",
    ),
    "numpy  2.1\ntorch  2.9\nvllm  0.16.0\n\nValueError: Following weights were not initialized from checkpoint: "
    "{'model.layers.16.eh_proj.weight', 'model.layers.16.enorm.weight'}": (
        "mtp-not-saved",
        "--speculative-config",
    ),
}


@pytest.mark.parametrize("log", COMPUTED)
def test_what_follows_from_shapes_dtypes_and_frames(log: str) -> None:
    code, cure = COMPUTED[log]
    found = first(log)
    assert found.code == code
    assert cure in found.remedy.en and cure in found.remedy.zh
