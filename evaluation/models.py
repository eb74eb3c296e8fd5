"""What evaluate.py measures: a run, a checkpoint, a Hugging Face model or a chat endpoint, ready to play."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from extras.baselines import METHODS, Agent
from config import HERE, PRESETS, Config, first_instruction, read_config, read_instruction
from engines import Engine
from extras.prompts import wording
from plumbing.faults import CheckpointFault, Fault
from journal.directory import RunDirectory, step_of
from plumbing.servers import Child
from tasks.tools import Search

WITHOUT_SEARCH = ("direct", "sft", "grpo")
OF_RUN = {"supervised": "sft_reject", "static": "search_r1"}  # a run's mode -> its method; others are played as inspo


@dataclasses.dataclass(frozen=True)
class Subject:
    """A model to measure. `I_star`: "" if it has none; `method`: the one it was trained by."""

    name: str
    model: str  # directory, hub id or URL
    cfg: Config
    I_star: str = ""
    method: str = "search_r1"


@contextlib.contextmanager
def subject(what: str) -> Iterator[Subject]:
    """Yields what a command line names; a checkpoint's weights are written to a temporary directory meanwhile.

    `what`: directory of a run, one of its checkpoints, a preset (world), a Hugging Face directory or id, or a URL.
    Raises Fault for a run that has not finished.
    """
    path = Path(what)
    if what.startswith(("http://", "https://")):
        yield Subject(what.split("//")[1].split("/")[0].replace(":", "-"), what, Config())
    elif what in PRESETS:
        cfg = Config(**PRESETS[what])
        yield Subject(what, cfg.model, cfg)
    elif path.parent.name == "checkpoints" and path.is_dir():
        run, cfg, method = path.parents[1], *_run(path.parents[1])
        with tempfile.TemporaryDirectory() as folder:
            to = _export(run, cfg.model, step_of(path), Path(folder) / path.name)
            yield Subject(f"{run.name}-{path.name}", str(to), cfg, (to / "I_star.txt").read_text().strip(), method)
    elif (path / "checkpoints").is_dir():
        cfg, method = _run(path)
        if not (path / "I_star.txt").is_file():
            saved = RunDirectory(path).checkpoints()
            other = f"evaluate {saved[-1]}" if saved else "there is no checkpoint yet"
            raise Fault(f"{path} has no I_star.txt, so it has not finished: resume it, or {other}")
        yield Subject(path.name, str(path / "policy"), cfg, (path / "I_star.txt").read_text().strip(), method)
    else:
        I_star = path / "I_star.txt"
        text = I_star.read_text().strip() if I_star.is_file() else ""
        yield Subject(path.name, what, Config(model=what), text, "inspo" if text else "search_r1")


def _run(path: Path) -> tuple[Config, str]:
    """Returns a run's configuration, and the method that it trained by."""
    cfg = read_config(path)
    if cfg.tools == "none":
        return cfg, "sft" if cfg.mode == "supervised" else "grpo"
    return cfg, OF_RUN.get(cfg.mode, "inspo")


def _export(run: Path, model: str, step: int, to: Path) -> Path:
    """Writes a checkpoint of a run of `model` to a Hugging Face directory; Fault if the two do not fit."""
    from export import export_checkpoint

    try:
        export_checkpoint(run, step, False, False, to)
    except (CheckpointFault, ValueError, RuntimeError) as e:  # torch's, about shapes and names
        raise Fault(
            f"{run}: the checkpoint of step {step} does not fit {model}: it is of another model or tokenizer ({e})"
        ) from None
    return to


@contextlib.contextmanager
def agent(chosen: Subject, method: str, args: Any) -> Iterator[Agent]:
    """Yields the agent that plays `method`; closes its engine and its search server.

    `args`: evaluate.py's flags. Raises Fault where model, instruction or something to search is missing.
    """
    import torch

    flags = {f.name: getattr(args, f.name, None) for f in dataclasses.fields(Config)}
    cfg = dataclasses.replace(chosen.cfg, **{k: v for k, v in flags.items() if v is not None})
    words = wording(chosen.cfg.model)
    instruction = _instruction(chosen, method, args.instruction)
    device = cfg.device or ("cuda" if torch.cuda.is_available() else "cpu")
    with contextlib.ExitStack() as stack:
        search = Search.__new__(Search)  # a method without tools asks nobody
        if method not in WITHOUT_SEARCH:
            if not cfg.retriever and not cfg.corpus:
                raise Fault(f"--method {method} searches: give --retriever (a server's URL) or --corpus (passages)")
            url = cfg.retriever
            if not url:
                log = stack.enter_context(tempfile.TemporaryDirectory())
                server = [str(HERE / "retrieval_server.py"), "--corpus", cfg.corpus]
                url = stack.enter_context(Child(server, f"{log}/log")).url
            search = Search(url, cfg.topk, retries=cfg.search_retries)
        engine, tokenizer = _engine(chosen.model, cfg, METHODS[method].stop(cfg, words), device, args.served_model)
        stack.callback(engine.close)
        yield Agent(engine, tokenizer, search, cfg, words, instruction, args.temperature, args.seed)


def _instruction(chosen: Subject, method: str, file: str | None) -> str:
    """Returns the instruction of a method that has one: --instruction, INSPO's I_star, or the first one."""
    if file:
        return read_instruction("instruction", file)
    if method == "inspo":
        if not chosen.I_star:
            raise Fault(f"--method inspo: {chosen.name} has no I_star.txt; give it with --instruction")
        return chosen.I_star
    return first_instruction(chosen.cfg)


def _engine(model: str, cfg: Config, stop: tuple[str, ...], device: str, served: str) -> tuple[Engine, Any]:
    """Returns (engine, tokenizer) of a directory, a hub id or a URL."""
    if model.startswith(("http://", "https://")):
        from engines.chat_engine import ChatEngine, Words

        words = Words()
        return ChatEngine(model, served, words, stop, api_key=os.environ.get("OPENAI_API_KEY", "")), words
    from engines.torch_engine import TorchEngine
    from models.model import load_model, load_tokenizer, weights
    from training.worker import choose_engine

    tokenizer, loaded = load_tokenizer(model, stop), load_model(model)
    rows = loaded.get_input_embeddings().weight.shape[0]
    if len(tokenizer) > rows:
        raise Fault(f"{model}: its tokenizer has {len(tokenizer)} tokens and its model {rows}: use the model's own")
    if choose_engine(cfg, device)[0] == "torch":
        return TorchEngine(loaded.to(device), tokenizer, stop, cfg.max_rows), tokenizer
    from engines.vllm_engine import VllmEngine

    engine = VllmEngine(
        model, tokenizer, stop, max_len=cfg.max_prompt + cfg.max_response, memory=cfg.vllm_memory, seed=cfg.seed,
        dtype="bfloat16" if device == "cuda" else "float32",
    )  # fmt: skip
    engine.load(weights(loaded))
    return engine, tokenizer
