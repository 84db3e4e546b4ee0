"""Embedding rows are padded by TP and resized without an error."""

from mcore import QWEN2, build, start

start()
for padded in (256, 512):
    model = build({**QWEN2, "padded_vocab_size": padded})
    embedding = model.sharded_state_dict()["embedding.word_embeddings.weight"]
    assert embedding.global_shape[0] == padded and embedding.allow_shape_mismatch
