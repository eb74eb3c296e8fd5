#!/bin/bash
# peft 0.21.2 with transformers 5.24.0: a mixture's experts are one three-dimensional parameter and no linear layer.
# What target_modules="all-linear" makes of them depends on the family. In Mixtral, Qwen 3 MoE, GLM-4 MoE and OLMoE
# experts and router get adapters, the fused up projection at twice the rank, with warnings that its pattern matched
# nothing. In gpt-oss, Qwen 2 MoE, Llama 4 and Granite MoE the experts get none, and nothing says so: LoRA of
# gpt-oss-120b reaches 1 % of its weights. Name them in target_parameters, and look at which parameters are trained.
#
# Seen on 2026-11-28, Python 3.11, Linux, share of weights with an adapter, each family's default sizes:
#     mixtral 0.99   qwen3_moe 0.96   glm4_moe 0.98   olmoe 0.98
#     gpt_oss 0.01   qwen2_moe 0.09   llama4_text 0.08   granitemoe 0.06
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/python -m pip install -qq --no-compile peft==0.21.2 transformers==5.24.0 torch==2.13.0 numpy==2.3.5
venv/bin/python - 2> warnings <<'EOF'
import peft
import torch
import transformers
from peft.tuners.lora import LoraLayer

print("peft", peft.__version__, "transformers", transformers.__version__)


def adapt(family):
    """Returns the share of the weights that get an adapter, and whether an expert's does. Nothing is allocated."""
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(family))
        sizes = {name: weight.numel() for name, weight in model.named_parameters()}
        model = peft.get_peft_model(model, peft.LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM"))
    adapted = set(model.targeted_parameter_names)
    for name, layer in model.base_model.model.named_modules():
        if isinstance(layer, LoraLayer) and isinstance(layer.get_base_layer(), torch.nn.Linear):
            adapted.add(f"{name}.weight")
    share = sum(sizes[name] for name in adapted) / sum(sizes.values())
    experts = any(".experts." in name for name in adapted)
    print(f"{family}: {sum(sizes.values()) / 1e9:.0f}B, share {share:.3f}, experts {experts}")
    return share, experts


for family in ("mixtral", "qwen3_moe", "glm4_moe", "olmoe"):
    share, experts = adapt(family)
    assert experts and share > 0.95
for family in ("gpt_oss", "qwen2_moe", "llama4_text", "granitemoe"):
    share, experts = adapt(family)
    assert not experts and share < 0.1
EOF
grep -m1 "did not match any targeted module" warnings
