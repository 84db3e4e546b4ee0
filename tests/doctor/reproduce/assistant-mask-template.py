"""The chat template cannot mark the assistant's tokens."""

import trl
from datasets import Dataset
from small import CURED, load, tokenizer

MASKED = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }} {% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] }}{% endgeneration %}{% else %}{{ m['content'] }}{% endif %}{% endfor %}"
)
chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
with_template = tokenizer()
if CURED:
    with_template.chat_template = MASKED
trl.SFTTrainer(
    model=load(),
    args=trl.SFTConfig("out", use_cpu=True, bf16=False, report_to="none", assistant_only_loss=True),
    processing_class=with_template,
    train_dataset=Dataset.from_list([{"messages": chat}] * 4),
)
