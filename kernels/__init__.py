"""The fused GRPO head: from hidden states to loss and gradients without the (N, V) logits matrix.

`head.py` holds the algorithm, chunk by chunk. Rows of logits are processed by `rows_triton.py` (for
CUDA, where one launch can compute all of Eq. 2) or by `rows_torch.py` (for every other device).
"""

from kernels.head import clipped_surrogate, eq2, grpo_head, head_logits, token_logprobs

__all__ = ["clipped_surrogate", "eq2", "grpo_head", "head_logits", "token_logprobs"]
