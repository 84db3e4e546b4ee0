"""Let torchvision be imported beside a build of torch for CPUs, when Python starts with this folder in its path.

Package registries have torchvision for CUDA, whose compiled operators do not load without it. Processors of images use
none of them, but its import registers their shapes.
"""

import sys
from typing import Any

OPERATORS = ("nms", "qnms")


class BeforeTorchvision:
    """Declares the operators just before torchvision is imported."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name != "torchvision":
            return
        sys.meta_path.remove(self)  # type: ignore[arg-type]
        import torch

        self.__class__.library = torch.library.Library("torchvision", "DEF")  # type: ignore[attr-defined]
        for each in OPERATORS:
            self.library.define(f"{each}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")  # type: ignore[attr-defined]


sys.meta_path.insert(0, BeforeTorchvision())  # type: ignore[arg-type]
