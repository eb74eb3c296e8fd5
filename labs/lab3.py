import marimo

__generated_with = "0.25.2"
app = marimo.App(width="medium", app_title="Lab 3: one token, one gradient")

with app.setup:
    import marimo as mo
    import numpy as np
    import torch

    from config import Config
    from kernels import grpo_head
    from labs import desk


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    # Lab 3: one token, one gradient

    *Paper: §2.2, Eq. 2. You need: lab 2, a derivative of a softmax. 30 minutes.*

    The loss of GRPO is a sum over tokens. For token $t$ of trajectory $i$, with
    $\rho = \pi_\theta(y_t) / \pi_{\mathrm{old}}(y_t)$,

    $$S = \min\bigl(\rho \hat A,\; \operatorname{clip}(\rho, 1 - \epsilon, 1 + \epsilon)\, \hat A\bigr), \qquad
    L = -\frac 1G \sum_i \frac 1{|\tau_i|} \sum_t I_{i,t} \, (S_{i,t} - \beta D_{\mathrm{KL}})
    \quad \text{(Eq. 2)}$$

    The mask $I$ is 1 on tokens that the policy sampled and 0 on what it was given. In the project the averages are
    in `grpo.py`, `Learner.make_loss_inputs`, and $S$, KL and the gradient in `kernels/head.py`.

    ## Before anything else: predict

    A token has the advantage $\hat A = -1$. The policy has already moved, the wrong way: $\rho = 1.5$. With
    $\epsilon = 0.2$, **what is $S$?** Write it into `predicted` before you compute anything.
    """)
    return


@app.cell
def _():
    predicted = None  # your guess
    return (predicted,)


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    ## The clip
    """)
    return


@app.function
def surrogate(rho, A, eps):
    """Returns S of Eq. 2, an array, for arrays or numbers rho and A."""
    ...


@app.function(hide_code=True)
def check_surrogate(surrogate):
    rho, A = np.array([(1.1, 1), (1.5, 1), (0.5, 1), (0.9, -1), (0.5, -1), (1.5, -1)], float).T
    cut = np.clip(rho, 0.7, 1.3)
    return desk.judge(
        f"for rho = {rho}, A = {A} and eps = 0.3", surrogate(rho, A, 0.3), np.minimum(rho * A, cut * A),
        (np.minimum(rho * A, np.clip(rho, 0.8, 1.2) * A), "its bounds are 0.8 and 1.2 whatever eps is."),
        (rho * A, "it never clips."),
        (cut * A, "it always clips. The min lets a token through that is worse than the clip says: try A = -1, rho = "
                  "1.5."),
        (np.maximum(rho * A, cut * A), "it takes the max. Eq. 2 is the pessimist: the min of the two products."),
    )


@app.cell(hide_code=True)
def _():
    right_surrogate = desk.verdict(check_surrogate, surrogate)
    return (right_surrogate,)


@app.cell
def _(right_surrogate):
    desk.need("The figure", right_surrogate)
    _rho = np.linspace(0, 2, 401)
    desk.draw("rho", "S", *((f"A = {A:+g}", _rho, surrogate(_rho, A, 0.2)) for A in (1.0, -1.0)))
    return


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    Where a line is flat, the token has no gradient: it has moved far enough in the direction that its advantage asks
    for. Where does a token that moved the wrong way have a gradient?

    ## The distance to the first policy

    $D_{\mathrm{KL}}$ keeps the policy near the reference $\pi_{\mathrm{ref}}$. The sampled token alone has to estimate
    it: with $d = \log \pi_{\mathrm{ref}}(y) - \log \pi_\theta(y)$ the k3 estimate is $e^d - d - 1$ (CHOICE-23).
    """)
    return


@app.function
def k3(logp, ref_logp):
    """Returns the k3 estimate (N,) of the KL from log-probs (N,) of sampled tokens: the policy's, the reference's."""
    ...


@app.function(hide_code=True)
def check_k3(k3):
    logp, ref = np.array([-1.0, -2.0, -0.5]), np.array([-1.5, -1.0, -0.5])
    d = ref - logp
    return desk.judge(
        f"for d = {d}", k3(logp, ref), np.exp(d) - d - 1,
        (-d, "that is k1, log pi - log pi_ref: right on average, but below 0 for some tokens. k3 never is."),
        (np.exp(-d) + d - 1, "its d is the wrong way round: d = log pi_ref - log pi, since the token was sampled from "
                             "pi."),
        (np.exp(d) - 1, "it forgets the -d; without that it is not 0 on average where the policies agree."),
    )


@app.cell(hide_code=True)
def _():
    right_k3 = desk.verdict(check_k3, k3)
    desk.say(r"""
    ## The mask and the averages

    Eq. 2 averages over the tokens of a trajectory first, then over the group. $|\tau_i|$ counts the tokens that the
    policy sampled (CHOICE-9), so a trajectory is not worth less because a search returned much.
    """)
    return (right_k3,)


@app.function
def average(x, mask):
    """Returns the average of Eq. 2 of x (G, T), a value for each token, with the mask (G, T) of 0 and 1."""
    ...


@app.function(hide_code=True)
def check_average(average):
    x = np.array([[1.0, 2, 9, 9], [4, 9, 4, 7]])
    mask = np.array([[1, 1, 0, 0], [1, 0, 1, 1]])
    return desk.judge(
        "for the rows (1, 2, -, -) and (4, -, 4, 7)", average(x, mask), 3.25,
        (x.mean(), "it ignores the mask: what the search returned is trained on as if the policy had written it."),
        ((x * mask).sum() / mask.sum(), "it averages over all tokens at once: a long trajectory then counts for more."),
        ((x * mask).mean(), "it divides by the padded length T; |tau| is the number of tokens with mask 1."),
        (((x * mask).sum(1) / mask.sum(1)).sum(), "it forgets 1/G."),
    )


@app.cell(hide_code=True)
def _():
    right_average = desk.verdict(check_average, average)
    desk.say(r"""
    ## One gradient by hand

    Now what reaches the logits. For one token with logits $z$ (one for each word of the vocabulary), sampled word $y$
    and no KL, the loss is $-S$. Two rules are enough:

    $$\frac{\partial \log \pi(y)}{\partial z_j} = 1[j = y] - \pi(j), \qquad
    \frac{\partial \rho}{\partial \log \pi(y)} = \rho$$

    Where the clip holds, the gradient is 0.
    """)
    return (right_average,)


@app.function
def gradient(z, y, old_logp, A, eps):
    """Returns d(-S)/dz (V,) of a token y with logits z (V,), log-prob old_logp under the old policy, advantage A."""
    ...


@app.function(hide_code=True)
def check_gradient(gradient):
    x = np.random.default_rng(0).normal(size=7)
    for A, log_rho, where in (
        (1.0, 0.25, "inside the clip, with rho = 1.28 and eps = 0.3,"),
        (-1.0, 0.1, "with A < 0"),
        (1.0, 0.5, "where A > 0 and rho is above the clip"),
        (-1.0, 0.5, "where A < 0 and rho is above 1 + eps, which is no place to clip"),
        (-1.0, -0.5, "where A < 0 and rho is below the clip"),
    ):
        z = torch.tensor(x, requires_grad=True)
        logp = torch.log_softmax(z, 0)[2]
        rho = (logp - logp.item() + log_rho).exp()
        (-torch.minimum(rho * A, rho.clamp(0.7, 1.3) * A)).backward()
        want = z.grad.numpy()
        says = desk.judge(
            where, gradient(x, 2, logp.item() - log_rho, A, 0.3), want,
            (-want, "its sign is flipped: the loss is -S, and the optimizer descends."),
            (want / rho.item(), "it forgets rho: d rho / d log pi = rho."),
            (want * np.eye(7)[2], "it is right for the sampled word alone. The softmax ties all words: the others get "
                                  "+ pi(j)."),
            (rho.item() * A * (torch.softmax(z, 0).detach().numpy() - np.eye(7)[2]),
             f"{where} S does not depend on the policy, and it returns a gradient instead of zeros."),
        )  # fmt: skip
        if says:
            return says
    return ""


@app.cell(hide_code=True)
def _():
    right_gradient = desk.verdict(check_gradient, gradient)
    desk.say(r"""
    ## Against the kernel

    `kernels/rows_triton.py` computes all of this on a GPU, loss and gradient in one launch; without one
    `kernels/head.py` differentiates the lines of `grpo.py`. Here it gets 16 tokens with a vocabulary of 300, and so do
    you.
    """)
    return (right_gradient,)


@app.cell
def _(right_average, right_gradient, right_k3, right_surrogate):
    desk.need("The run", right_surrogate, right_k3, right_average, right_gradient)
    N, V, eps = 16, 300, Config().eps
    rng = np.random.default_rng(0)
    z, y = 2 * rng.normal(size=(N, V)), rng.integers(V, size=N)
    logp = z[np.arange(N), y] - np.log(np.exp(z).sum(1))
    old, ref = logp - 0.4 * rng.normal(size=N), logp - 0.4 * rng.normal(size=N)
    A = np.repeat([1.0, -1.0], N // 2)  # two trajectories of 8 sampled tokens
    w = np.full(N, 1 / 16)  # 1/G 1/|tau|
    columns = {"adv": A, "token_weight": w, "old_logp": old, "ref_logp": ref}
    columns = {name: torch.tensor(x) for name, x in columns.items()}
    _logits, _one = torch.tensor(z, requires_grad=True), torch.eye(V, dtype=torch.float64)
    _loss, theirs = grpo_head(
        _logits, _one, torch.tensor(y), eps_low=eps, eps_high=eps, **columns
    )
    _loss.backward()
    theirs = {"J": -_loss.item(), "dz": _logits.grad.numpy(), **{name: x.numpy() for name, x in theirs.items()}}
    yours = {
        "kl": k3(logp, ref),
        "dz": np.array([w[n] * gradient(z[n], y[n], old[n], A[n], eps) for n in range(N)]),
    }
    apart = {name: abs(theirs[name] - x).max() for name, x in yours.items()}
    _average = average(surrogate(np.exp(logp - old), A, eps).reshape(2, -1), np.ones((2, N // 2)))
    apart["loss"] = abs(_average - theirs["J"])
    return apart, eps, theirs


@app.cell(hide_code=True)
def _(apart, eps, predicted, theirs):
    found = {
        "S of the predicted token": surrogate(1.5, -1.0, eps),
        "clipped tokens": theirs["clipped"].sum(),
        "largest distance of a gradient": apart["dz"],
        "largest distance of a KL": apart["kl"],
        "distance of the loss": apart["loss"],
    }
    desk.conclude(
        "S with A = -1 and rho = 1.5", predicted, found, "S of the predicted token", "A clipped token has no gradient."
    )
    return


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    ## A last question, without a single answer

    A clipped token has no gradient at all, which may silence just the rare words that matter (CISPO and DAPO change the
    clip for this reason), and a token that went the wrong way has one without bound. **How would you cut differently,
    and how would you find out on a small run whether it helps?** Start from `Learner.surrogate` in
    grpo.py, and docs/objectives.md.
    """)
    return


if __name__ == "__main__":
    app.run()
