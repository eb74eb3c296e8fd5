"""Compiles every variant of the row kernels for sm_75, 80 and 90, without a GPU; prints registers
and memory accesses.

A script, because a process in which Triton's interpreter is on cannot compile. The output is JSON.
"""

import json
import os
import re
import subprocess
import tempfile

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kernels import rows_triton as rows

cuobjdump = os.path.join(os.path.dirname(triton.__file__), "backends/nvidia/bin/cuobjdump")
TYPES = {
    "Y": "*i64",
    "DZ": "*bf16",
    "CLIPPED": "*u1",
    "V": "i32",
    "dz_stride": "i32",
    "inv_t": "fp32",
    "beta": "fp32",
}
TYPES |= {"WITH_KL": True, "BLOCK": rows.BLOCK}
SETTINGS = {
    "loss and bf16 gradient": (rows.loss_kernel, {}),
    "loss and fp32 gradient": (rows.loss_kernel, {"DZ": "*fp32"}),
    "bf16 logits": (rows.loss_kernel, {"Z": "*bf16"}),
    "on-policy, no KL": (rows.loss_kernel, {"OLD": None, "REF": None, "WITH_KL": False}),
    "V = 1187": (rows.loss_kernel, {"BLOCK": 2048}),  # not a multiple of 16
    "loss alone": (rows.loss_kernel, {"DZ": None}),
    "log-probs": (rows.logp_kernel, {}),
    "bf16 gradient": (rows.grad_kernel, {}),
    "bf16 gradient of bf16 logits": (rows.grad_kernel, {"Z": "*bf16"}),
}
found = []
for capability in (75, 80, 90):
    for setting, (kernel, changed) in SETTINGS.items():
        names = kernel.arg_names
        # a type, or the value of a constant
        kinds = dict.fromkeys(names, "*fp32") | TYPES | changed
        signature = {
            name: kinds[name] if type(kinds[name]) is str else "constexpr" for name in names
        }
        constants = {
            (k,): kinds[name] for k, name in enumerate(names) if signature[name] == "constexpr"
        }
        # As the launcher specializes: matrices, and a V such as Qwen's, are multiples of 16.
        aligned = ("Z", "Y", "DZ", "V", "dz_stride") if setting != "V = 1187" else ("Z", "Y", "DZ")
        attrs = {(k,): [["tt.divisibility", 16]] for k, name in enumerate(names) if name in aligned}
        attrs = {key: value for key, value in attrs.items() if key not in constants}
        source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attrs)
        target = GPUTarget("cuda", capability, 32)
        compiled = triton.compile(source, target=target, options={"num_warps": rows.WARPS})
        with tempfile.NamedTemporaryFile(suffix=".cubin") as f:
            f.write(compiled.asm["cubin"])
            f.flush()
            usage = subprocess.run(
                [cuobjdump, "-res-usage", f.name], capture_output=True, text=True, check=True
            ).stdout
        registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", usage).groups()
        ptx = compiled.asm["ptx"]
        steps = re.findall(r"(ld|st)\.global\S*\.v4|(bar)\.sync", ptx)  # in the order of the code
        found.append(
            {
                "capability": capability,
                "setting": setting,
                "writes": (writes := "DZ" in names and kinds["DZ"] is not None),
                "passes": 1 + (writes and kernel is rows.loss_kernel),
                "registers": int(registers),
                "stack": int(stack),
                "local": len(re.findall(r"(ld|st)\.local", ptx)),
                "steps": "".join({"ld": "L", "st": "S", "": "B"}[move] for move, _ in steps),
                "loads": re.findall(r"ld\.global\S*\.(v\d\.\w+)", ptx),
                "stores": re.findall(r"st\.global\S*\.(v\d\.\w+)", ptx),
            }
        )
print(json.dumps(found))
