"""From a model's name to its tensors, tokenizer and chat template. Only safetensors and GGUF are read."""
