"""Files in which several formats store tensors: torch's, safetensors, and the metadata of DCP."""
