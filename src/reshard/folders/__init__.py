"""Config, tokenizer and other files beside the weights: which belong to a model, and what tools recorded in them."""
