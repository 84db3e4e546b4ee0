"""DeepSpeed waits for ever for a lock of an earlier build."""

import signal
from pathlib import Path

from torch.utils.cpp_extension import load

Path("out/kernel.cpp").write_text("")
Path("out/lock").touch()  # its owner was killed
signal.signal(signal.SIGALRM, signal.default_int_handler)
signal.alarm(2)  # what somebody does who has waited long enough
load("kernel", "out/kernel.cpp", build_directory="out")
