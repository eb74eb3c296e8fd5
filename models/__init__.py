"""The policy as a Hugging Face model: loading, scoring, shards, LoRA, fused layers."""
