"""For mypy, never run: every engine implements the protocol. (`test_engine.py` compares the signatures at run time.)

mypy --strict --follow-imports=silent tests/check_types.py
"""

from engines import Engine
from engines.torch_engine import TorchEngine
from engines.vllm_engine import VllmEngine
from engines.vllm_server import VllmServer


def engines(torch_engine: TorchEngine, vllm_engine: VllmEngine, vllm_server: VllmServer) -> list[Engine]:
    return [torch_engine, vllm_engine, vllm_server]
