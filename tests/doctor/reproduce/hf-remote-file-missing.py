"""The code files of a remote-code model were not copied along."""

from small import load, remote_code

folder = remote_code()
(folder / "modeling_custom.py").unlink()
(folder / "configuration_custom.py").unlink()
load(folder, trust_remote_code=True)
