"""The GRPO head and its peers behind one interface, and the batches on which `bench/kernels.py` measures them."""

from functools import partial
from types import SimpleNamespace

import torch
import torch.nn.functional as F

from kernels import grpo_head, token_logprobs

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32
EPS, CHUNK = 0.2, 4096
SEQUENCES = 8  # the N tokens are 8 sequences: Liger takes an advantage a sequence, not a token


def make_batch(N, H, V, masked, seed):
    """Returns N tokens with peaked logits, N(0, 3), and targets drawn from them; a share `masked` of them masked."""
    g = torch.Generator(DEVICE).manual_seed(seed)
    hidden, weight = (torch.randn(n, H, generator=g, device=DEVICE, dtype=DTYPE) for n in (N, V))
    weight *= 3 / H**0.5
    targets, logp = torch.empty(N, dtype=torch.int64, device=DEVICE), torch.empty(N, device=DEVICE)
    for rows in torch.arange(N, device=DEVICE).split(512):
        logp_all = F.linear(hidden[rows], weight).float().log_softmax(1)
        targets[rows] = (logp_all.exp() / torch.empty_like(logp_all).exponential_(generator=g)).argmax(1)
        logp[rows] = logp_all.gather(1, targets[rows, None])[:, 0]
    # rho = 0.67, 0.92, 1.08 or 1.5, away from the edges of the clip: there, rounding decides whether a token has a
    # gradient, and the error would measure the batch more than the implementation.
    noise = torch.tensor([-0.4, -0.08, 0.08, 0.4], device=DEVICE)[torch.randint(4, (N,), generator=g, device=DEVICE)]
    mask = torch.ones(N, dtype=torch.bool, device=DEVICE)
    mask[torch.randperm(N, generator=g, device=DEVICE)[: int(N * masked)]] = False
    rows = mask if masked else slice(None)
    adv = torch.tensor([1.5, -0.5], device=DEVICE).repeat(SEQUENCES // 2)
    per_token = {"targets": targets, "adv": adv.repeat_interleave(N // SEQUENCES), "w": mask / mask.sum(),
                 "old_logp": logp - noise}  # fmt: skip
    return SimpleNamespace(
        hidden=hidden.requires_grad_(), weight=weight.requires_grad_(), mask=mask, **per_token, rows=rows,
        kept={name: x[rows] for name, x in per_token.items()}, sequences=(SEQUENCES, N // SEQUENCES), adv_sequences=adv,
    )  # fmt: skip


# The runs: batch -> (loss, dX, dW), or (logp of the unmasked tokens,), or nothing.


def gradients(loss_of):
    def run(b, **kw):
        loss = loss_of(b, **kw)
        return loss.detach(), *torch.autograd.grad(loss, (b.hidden, b.weight))

    return run


@gradients
def ours(b, chunk=CHUNK):
    """Drops masked rows of the hidden states, as training does; the tensors in `b.kept` are without them already."""
    return grpo_head(b.hidden[b.rows], b.weight, **b.kept, eps_low=EPS, eps_high=EPS, chunk=chunk)[0]


@gradients
def liger_fused(b, precision="highest"):
    """Takes all sequences as one chunk: Liger chunks them again inside, and outer chunks only add passes over dW."""
    from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

    # bnpo is the mean over unmasked tokens; compiling would only fuse a few operations on N numbers.
    head = LigerFusedLinearGRPOLoss(beta=0.0, epsilon_low=EPS, epsilon_high=EPS, loss_type="bnpo", compiled=False,
                                    use_ref_model=False, chunk_size=SEQUENCES)  # fmt: skip
    hidden = b.hidden.view(*b.sequences, -1)
    targets, mask, old = (x.view(b.sequences) for x in (b.targets, b.mask, b.old_logp))
    torch.set_float32_matmul_precision(precision)  # it computes its gradients in the forward pass, as float32 products
    try:
        return head(hidden, b.weight, targets, mask, b.adv_sequences, old_per_token_logps=old)[0]
    finally:
        torch.set_float32_matmul_precision("highest")


@gradients
def liger_triton(b):
    from liger_kernel.transformers.grpo_loss import triton_grpo_loss

    hidden = F.pad(b.hidden.view(*b.sequences, -1), (0, 0, 0, 1))  # it ignores the logits of the last position
    targets, mask, old = (x.view(b.sequences) for x in (b.targets, b.mask.long(), b.old_logp))
    return triton_grpo_loss(F.linear(hidden, b.weight), old, None, targets, b.adv_sequences, mask, temperature=1.0,
                            beta=0.0, eps_low=EPS, eps_high=EPS, loss_type="bnpo", reduce=True)[0]  # fmt: skip


@gradients
def cce(b):
    from cut_cross_entropy import linear_cross_entropy

    targets = b.targets.masked_fill(~b.mask, -100)  # it skips these rows
    return clipped_loss(-linear_cross_entropy(b.hidden, b.weight, targets, reduction="none"), b.old_logp, b.adv, b.w)


def clipped_loss(logp, old, adv, w):
    rho = torch.exp(logp - old)
    return -(w * torch.minimum(rho * adv, rho.clamp(1 - EPS, 1 + EPS) * adv)).sum()


def whole_logp(hidden, weight, targets):
    z = F.linear(hidden, weight)  # (N, V)
    z = z.to(torch.promote_types(z.dtype, torch.float32))
    return z.gather(1, targets[:, None])[:, 0] - z.logsumexp(1)


def whole_loss(hidden, weight, targets, old, adv, w):
    return clipped_loss(whole_logp(hidden, weight, targets), old, adv, w)


@gradients
def eager(b, loss=whole_loss):
    return loss(b.hidden, b.weight, b.targets, b.old_logp, b.adv, b.w)


@torch.no_grad()
def gemms(b):
    """Computes the products of forward and backward for the unmasked rows, without accumulating them."""
    for x in b.hidden[b.rows].split(CHUNK):
        z = x @ b.weight.T
        z @ b.weight
        z.T @ x
    return ()


def ours_forward(b):
    return (token_logprobs(b.hidden[b.rows], b.weight, b.kept["targets"], chunk=CHUNK)[0],)


@torch.no_grad()
def eager_forward(b):
    return (whole_logp(b.hidden, b.weight, b.targets)[b.rows],)


RUNS = {  # name: (number of products, run); "x ours" compares with the first run with the same number
    "ours": (3, ours),
    "Liger fused": (3, liger_fused),
    "Liger fused, TF32": (3, partial(liger_fused, precision="high")),
    "logits + Liger Triton": (3, liger_triton),
    "CCE + torch": (3, cce),
    "torch eager": (3, eager),
    "torch.compile": (3, partial(eager, loss=torch.compile(whole_loss, dynamic=False))),
    "three bare GEMMs": (3, gemms),
    "ours, forward only": (1, ours_forward),
    "eager, forward only": (1, eager_forward),
}
TRITON_PEERS = ("logits + Liger Triton", "CCE + torch")
NEED_CUDA = ("Liger fused, TF32", *TRITON_PEERS, "torch.compile")
