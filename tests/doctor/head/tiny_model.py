"""Make the small model that the runs start from, with the transformers of this environment.

tiny_model.py FOLDER [experts]
"""

import sys

from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import (
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

CHATS = [f"What is {a} plus {b}? The answer is {a + b}." for a in range(20) for b in range(20)]
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


# The sizes of the checkpoints of tests/genuine/megatron.py.
SIZES = {
    "vocab_size": 250,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "head_dim": 16,
    "norm_topk_prob": True,
}


def main(folder, experts=False):
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trained.train_from_iterator(CHATS, trainers.BpeTrainer(vocab_size=200, special_tokens=special))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=trained, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    if experts:
        from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM  # since 4.51

        Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **EXPERTS)).save_pretrained(folder)
    else:
        Qwen2ForCausalLM(Qwen2Config(**SIZES)).save_pretrained(folder)


if __name__ == "__main__":
    main(sys.argv[1], experts="experts" in sys.argv[2:])
