"""Make the small models that the cases start from, in ./models, with transformers 5."""

import json
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SIZES = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
MOE = {"moe_intermediate_size": 64, "num_experts": 4, "num_experts_per_tok": 2, "decoder_sparse_step": 1}
CONFIGS = {
    "qwen2": Qwen2Config(**SIZES, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**SIZES, head_dim=16, tie_word_embeddings=False),
    "qwen3-tied": Qwen3Config(**SIZES, head_dim=16, tie_word_embeddings=True),
    "qwen3-rope": Qwen3Config(
        **SIZES,
        head_dim=16,
        tie_word_embeddings=False,
        rope_parameters={"rope_theta": 1e6, "rope_type": "default"},
    ),
    "qwen3moe": Qwen3MoeConfig(**SIZES, **MOE, head_dim=16, tie_word_embeddings=False),
}


def make_tokenizer():
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trained.decoder = decoders.ByteLevel()
    chats = [f"What is {a} plus {b}? The answer is {a + b}." for a in range(40) for b in range(40)]
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=512, special_tokens=special, initial_alphabet=alphabet)
    trained.train_from_iterator(chats, trainer)
    made = PreTrainedTokenizerFast(
        tokenizer_object=trained, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    made.chat_template = TEMPLATE
    return made


def of_transformers_4(folder):
    """Change a config into what transformers 4 writes."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config |= {"rope_theta": config.pop("rope_parameters")["rope_theta"], "torch_dtype": config.pop("dtype")}
    path.write_text(json.dumps(config))


if __name__ == "__main__":
    tokenizer = make_tokenizer()
    for name, config in CONFIGS.items():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config)
        for folder in (name, f"{name}-v4"):
            model.save_pretrained(Path("models") / folder)
            tokenizer.save_pretrained(Path("models") / folder)
        of_transformers_4(Path("models") / f"{name}-v4")
