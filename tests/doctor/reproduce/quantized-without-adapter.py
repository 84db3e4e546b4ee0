"""A purely quantized model cannot be fine-tuned."""

from small import CURED, arguments, dataset, load, with_lora
from transformers import Trainer


class Gptq:
    """What `from_pretrained` leaves on a model that GPTQ has quantized, for which it takes a GPU."""

    is_trainable = True
    is_qat_trainable = False
    quantization_config = type("Config", (), {"quant_method": "gptq"})()


model = load()
model.is_quantized = True
model.hf_quantizer = Gptq()
Trainer(model=with_lora(model) if CURED else model, args=arguments(), train_dataset=dataset())
