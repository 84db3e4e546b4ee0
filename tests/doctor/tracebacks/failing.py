"""What fails in the tracebacks of this folder."""


def cat(tensors):
    raise RuntimeError(f"aten.cat.default: got mixed torch.Tensor and DTensor in {tensors}")


def train(batch):
    return cat(batch)


def main():
    train([1, 2])
