"""The fused GRPO head: from hidden states to loss and gradients without the (N, V) logits matrix.

`head.py` has the algorithm, chunk by chunk; what happens to a chunk's rows of logits is in `rows_triton.py` (one
kernel, for CUDA) and in `rows_torch.py` (its twin, for every other device).
"""

from kernels.head import grpo_head, token_logprobs

__all__ = ["grpo_head", "token_logprobs"]
