#!/bin/bash
# trl 1.16.0: two defaults of GRPOConfig change the objective that its name promises. With beta > 0 the KL estimate k3
# is multiplied by the importance ratio (use_bias_correction_kl=True); its gradient changes on-policy, too, where the
# ratio is 1: with d = log pi_ref - log pi it is -d a token, and not k3's 1 - exp(d).
# With loss_type="cispo" epsilon_high bounds the weight itself, not 1 + epsilon_high, and is epsilon, 0.2, unless it is
# given: every weight is then at most 0.2, on-policy, too, a fifth of GRPO's step. Its help recommends 5.0.
#
# Seen on 2026-11-27, Python 3.11, Linux, the loss's slope in a token's log-prob, on-policy:
#     advantage 1: grpo -1.0, cispo -0.2, cispo with epsilon_high=5 -1.0
#     KL alone, beta 1, d = 2: -2.0, with use_bias_correction_kl=False -6.389
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/python -m pip install -qq --no-compile trl==1.16.0 transformers==5.24.0 torch==2.13.0 numpy==2.3.5
HF_HOME="$folder" venv/bin/python - <<'EOF'
import math

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, logging
from trl import GRPOConfig, GRPOTrainer

logging.disable_progress_bar()
words = Tokenizer(models.WordLevel({"Who?": 0, "<pad>": 1, "<eos>": 2}, unk_token="<pad>"))
words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")
tokenizer.save_pretrained("model")
small = dict(hidden_size=4, intermediate_size=4, num_hidden_layers=1, num_attention_heads=1)
LlamaForCausalLM(LlamaConfig(vocab_size=3, **small)).save_pretrained("model")


def slope(advantage, d, **settings):
    """The gradient of the trainer's loss in the log-prob of the only token of the only completion."""
    trainer = GRPOTrainer(
        LlamaForCausalLM.from_pretrained("model"),
        lambda completions, **_: [0.0] * len(completions),
        args=GRPOConfig(output_dir="out", use_cpu=True, bf16=False, report_to="none", **settings),
        train_dataset=Dataset.from_list([{"prompt": "Who?"}]),
        processing_class=tokenizer,
    )
    logp = torch.tensor([[-3.0]], requires_grad=True)
    trainer._get_per_token_logps_and_entropies = lambda *_, **__: (logp, torch.zeros(1, 1), None)
    trainer.current_gradient_accumulation_steps = 1
    token, old = torch.ones(1, 1, dtype=torch.long), logp.detach()
    batch = {name: token for name in ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")}
    batch |= {"old_per_token_logps": old, "ref_per_token_logps": old + d, "advantages": torch.tensor([advantage])}
    trainer.compute_loss(trainer.model.train(), batch | {"num_items_in_batch": torch.tensor(1)}).backward()
    return round(logp.grad.item(), 3)


reward = [
    slope(1.0, 0.0, loss_type="grpo"),
    slope(1.0, 0.0, loss_type="cispo"),
    slope(1.0, 0.0, loss_type="cispo", epsilon_high=5.0),
]
print("advantage 1: grpo, cispo, cispo with epsilon_high=5", reward)
kl = [slope(0.0, 2.0, beta=1.0), slope(0.0, 2.0, beta=1.0, use_bias_correction_kl=False)]
print("KL alone, d = 2: default, use_bias_correction_kl=False", kl)
assert reward == [-1.0, -0.2, -1.0]
assert kl == [-2.0, round(1 - math.exp(2), 3)]
EOF
