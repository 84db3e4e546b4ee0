"""What vLLM imports in its workers (`worker_extension_cls`), so that they keep weights as they do on a GPU.

On a CPU, vLLM packs weights for its kernels, and keeps no others.
"""

from __future__ import annotations

from vllm.model_executor.layers import utils
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts


class Extension:
    """It adds nothing to a worker."""


utils.dispatch_cpu_unquantized_gemm = lambda *args, **options: None
CPUUnquantizedExperts.process_weights_after_loading = lambda *args: None
