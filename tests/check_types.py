"""Never run: mypy verifies here that every engine implements the protocol.

`make lint` checks this file, or: mypy --strict --follow-imports=silent tests/check_types.py.
`tests/test_engine.py` compares the signatures at run time.
"""

from engines import Engine
from engines.torch_engine import TorchEngine
from engines.vllm_engine import VllmEngine


def engines(torch_engine: TorchEngine, vllm_engine: VllmEngine) -> list[Engine]:
    return [torch_engine, vllm_engine]
