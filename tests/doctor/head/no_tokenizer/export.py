"""Export the fine-tuned Qwen3-30B-A3B: `export.py --model out/megatron_output/Qwen3-30B-A3B`."""

import argparse

from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

parser = argparse.ArgumentParser()
parser.add_argument("--model", required=True, help="the folder that training wrote")
parser.add_argument("--output_dir", default="out/Qwen3-30B-A3B-hf")
args = parser.parse_args()

print(f"exporting the mcore_model {args.model}", flush=True)
tokenizer = AutoTokenizer.from_pretrained(args.model)
config = AutoConfig.from_pretrained(args.model)
model = AutoModelForCausalLM.from_pretrained(args.model, config=config)
model.save_pretrained(args.output_dir)
tokenizer.save_pretrained(args.output_dir)
