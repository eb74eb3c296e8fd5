"""Text -> vectors: a BERT-type Hugging Face model with the prefixes and the pooling of its
family."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import MODEL_FOR_MASKED_LM_MAPPING, AutoConfig, AutoModel, AutoTokenizer
from transformers.utils import cached_file, logging

from plumbing.faults import Fault, first_line
from retrieval import FAMILIES


def infer_family(model: str) -> str:
    """Infers the family of a model without prompts from its name."""
    name = model.rstrip("/").rsplit("/", 1)[-1].lower()
    if "e5" in name:
        return "e5-instruct" if "instruct" in name else "e5"
    if "bge" in name:
        return "bge" if "-en" in name else "cls"
    return "own"


def read_published(model: str) -> tuple[str, str, str]:
    """Returns prefix of queries, prefix of passages and pooling by a model's files for
    sentence-transformers, "" for what they do not say. Raises ValueError where layers follow, or
    prefixes are not pooled."""

    def read(name: str) -> Any:
        file = cached_file(
            model,
            name,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
        )
        return json.loads(Path(file).read_bytes()) if file else {}

    if any(module["type"].endswith("Dense") for module in read("modules.json")):
        raise ValueError("a dense layer follows its pooling")
    said = read("1_Pooling/config.json")
    flags = [name.split("_")[2] for name, on in said.items() if on is True and "_mode_" in name]
    pooling = str(said.get("pooling_mode") or "+".join(flags))
    prompts = read("config_sentence_transformers.json").get("prompts") or {}
    query = prompts.get("query") or ""
    passage = prompts.get("document") or prompts.get("passage") or prompts.get("corpus") or ""
    if (query or passage) and said.get("include_prompt") is False:
        raise ValueError("its pooling leaves its prompts out")
    return query, passage, pooling


class Encoder:
    """Encodes queries and passages as unit vectors, whose inner product is their cosine.

    `family` is a key of FAMILIES, or "" to infer it from the model's files and name; texts are
    truncated to `max_length` tokens, or as many as the model takes. fp16 on a GPU, fp32 on the CPU.
    Raises Fault if the model cannot be loaded.
    """

    def __init__(self, model: str, family: str = "", max_length: int = 256, device: str = ""):
        self.name = model
        self.device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        on_gpu = self.device.startswith("cuda")
        logging.disable_progress_bar()
        logging.set_verbosity_error()  # the pooler's weights are often absent, and unused here
        try:
            config = AutoConfig.from_pretrained(model, trust_remote_code=False)
            if config.is_encoder_decoder or type(config) not in MODEL_FOR_MASKED_LM_MAPPING:
                raise ValueError(f"a {config.model_type} is not a BERT-type encoder")
            self.dimension = config.hidden_size
            query, passage, published = read_published(model)
            self.family = family or ("own" if query or passage else infer_family(model))
            self.query_prefix, self.passage_prefix, self.pooling = FAMILIES[self.family]
            if self.family == "own":
                self.query_prefix, self.passage_prefix = query, passage
                self.pooling = "cls" if published == "cls" else "mean"
            # the model as it was published
            self._tokenizer = AutoTokenizer.from_pretrained(model, trust_remote_code=False)
            dtype = torch.float16 if on_gpu else torch.float32
            loaded = AutoModel.from_pretrained(model, dtype=dtype, trust_remote_code=False)
            self._model = loaded.to(self.device).eval()
            # RoBERTa's positions follow it
            padding = getattr(getattr(loaded, "embeddings", None), "padding_idx", -1)
            places = config.max_position_embeddings - padding - 1
            self.max_length = min(max_length, self._tokenizer.model_max_length, places)
            # fails here rather than in the middle of a build
            alone, beside = self._forward(["a"]), self._forward(["a", "a " * self.max_length])
            if np.abs(alone - beside[:1]).max() > 0.01:
                raise ValueError(f"a vector of a {config.model_type} depends on those beside it")
        except Exception as e:  # a damaged directory can raise anything
            reason = first_line(e).rstrip(".")
            if "trust_remote_code" in str(e):
                reason = "it needs code of its own (auto_map), which is never run"
            raise Fault(
                f"--encoder {model}: {reason}; give a Hugging Face id or a local directory of a BERT-type model,"
                " and a device of this machine"
            ) from None
        if family in ("", "own") and published not in ("", self.pooling):
            raise Fault(
                f"--encoder {model}: it pools by {published}, a model of family {self.family} by {self.pooling}; "
                "name its --family"
            )
        self._rows = 128 if on_gpu else 16  # texts in a forward pass

    def queries(self, texts: list[str]) -> np.ndarray:
        """The vectors of queries, (N, d) fp32."""
        return self._encode([self.query_prefix + text for text in texts])

    def passages(self, texts: list[str]) -> np.ndarray:
        """The vectors of passages, (N, d) fp32."""
        return self._encode([self.passage_prefix + text for text in texts])

    def _encode(self, texts: list[str]) -> np.ndarray:
        # similar lengths together: little padding
        order = np.argsort([len(text) for text in texts], kind="stable")
        out = np.empty((len(texts), self.dimension), dtype=np.float32)
        for first in range(0, len(order), self._rows):
            rows = order[first : first + self._rows]
            out[rows] = self._forward([texts[k] for k in rows])
        return out

    @torch.inference_mode()
    def _forward(self, texts: list[str]) -> np.ndarray:
        padded = self._tokenizer(
            texts, truncation=True, max_length=self.max_length, padding=True, return_tensors="pt"
        ).to(self.device)
        if not padded["attention_mask"].any():  # no text has a token
            return np.zeros((len(texts), self.dimension), np.float32)
        hidden = self._model(**padded).last_hidden_state.float()  # (B, T, d)
        if self.pooling == "cls":
            pooled = hidden[:, 0]  # (B, d)
        else:
            mask = padded["attention_mask"][..., None]  # (B, T, 1)
            # a text may have no token
            pooled = (hidden * mask).sum(1) / mask.sum(1).clamp(min=1)  # (B, d)
        return torch.nn.functional.normalize(pooled, dim=-1).cpu().numpy()
