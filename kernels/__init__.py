"""The fused GRPO head: from hidden states to loss and gradients without the (N, V) logits matrix.

Import the two functions from here, never from a module below: this is where an implementation is chosen.
"""

from kernels.torch_head import grpo_head, token_logprobs

__all__ = ["grpo_head", "token_logprobs"]
