"""A token id is beyond the embedding."""

import torch
from small import CURED, load

model = load()
if CURED:
    model.resize_token_embeddings(601)
model(input_ids=torch.tensor([[600]]))
