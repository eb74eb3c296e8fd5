"""Compiles every variant of the row kernel for sm_80 and sm_90, without a GPU; prints registers and memory accesses.

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
from kernels.head import KINDS


class Constant(str):
    """A value of a constant that is text, and no type."""


cuobjdump = os.path.join(os.path.dirname(triton.__file__), "backends/nvidia/bin/cuobjdump")
names = rows.rows_kernel.arg_names
usual = dict.fromkeys(names, "*fp32") | {"Y": "*i64", "DZ": "*bf16", "CLIPPED": "*u1", "V": "i32", "dz_stride": "i32"}
usual |= dict.fromkeys(("inv_t", "delta", "beta", "entropy_coef"), "fp32")
usual |= {"KIND": Constant("clip"), "WITH_KL": True, "BLOCK": rows.BLOCK}
settings = {
    "loss and bf16 gradient": {},
    "loss and fp32 gradient": {"DZ": "*fp32"},
    "bf16 logits": {"Z": "*bf16"},
    **{kind: {"KIND": Constant(kind)} for kind in KINDS[1:]},
    "on-policy, no KL": {"OLD": None, "REF": None, "WITH_KL": False},
    "V = 1187": {"BLOCK": 2048},  # not a multiple of 16
    "loss alone": {"DZ": None},
    "log-probs": dict.fromkeys(("DZ", "ADV", "W", "OLD", "REF", "EPS_LOW", "EPS_HIGH", "J", "KL", "CLIPPED")),
}
found = []
for capability in (80, 90):
    for setting, changed in settings.items():
        kinds = usual | changed  # a type, or the value of a constant
        signature = {name: kinds[name] if type(kinds[name]) is str else "constexpr" for name in names}
        constants = {(k,): kinds[name] for k, name in enumerate(names) if signature[name] == "constexpr"}
        # As the launcher specializes: matrices, and a V such as Qwen's, are multiples of 16.
        aligned = ("Z", "Y", "DZ", "V", "dz_stride") if setting != "V = 1187" else ("Z", "Y", "DZ")
        attrs = {(k,): [["tt.divisibility", 16]] for k, name in enumerate(names) if name in aligned}
        attrs = {key: value for key, value in attrs.items() if key not in constants}
        source = ASTSource(fn=rows.rows_kernel, signature=signature, constexprs=constants, attrs=attrs)
        target = GPUTarget("cuda", capability, 32)
        compiled = triton.compile(source, target=target, options={"num_warps": rows.WARPS})
        with tempfile.NamedTemporaryFile(suffix=".cubin") as f:
            f.write(compiled.asm["cubin"])
            f.flush()
            usage = subprocess.run([cuobjdump, "-res-usage", f.name], capture_output=True, text=True, check=True).stdout
        registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", usage).groups()
        ptx = compiled.asm["ptx"]
        steps = re.findall(r"(ld|st)\.global\S*\.v4|(bar)\.sync", ptx)  # in the order of the code
        found.append(
            {
                "capability": capability,
                "setting": setting,
                "registers": int(registers),
                "stack": int(stack),
                "local": len(re.findall(r"(ld|st)\.local", ptx)),
                "steps": "".join({"ld": "L", "st": "S", "": "B"}[move] for move, _ in steps),
                "loads": re.findall(r"ld\.global\S*\.(v\d\.\w+)", ptx),
                "stores": re.findall(r"st\.global\S*\.(v\d\.\w+)", ptx),
            }
        )
print(json.dumps(found))
