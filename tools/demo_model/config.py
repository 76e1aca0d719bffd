"""The shape of the demo model, under the published key names, and every size derived from it."""

from __future__ import annotations

import dataclasses
import enum
import json
from bisect import bisect_right
from pathlib import Path


class Role(enum.Enum):
    """What a layer does beyond its sliding window (docs/glossary.md)."""

    WINDOW_ONLY = "window only"
    FULL = "full"
    REINDEX = "reindex"
    REUSE = "reuse"


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """text_config of the checkpoint; the token ids and rope_scaling are flattened into it."""

    vocab_size: int = 3072
    hidden_size: int = 256
    num_hidden_layers: int = 8
    num_attention_heads: int = 8
    head_dim: int = 64
    qk_rope_head_dim: int = 32
    q_lora_rank: int = 128
    o_groups: int = 4
    o_lora_rank: int = 64
    moe_intermediate_size: int = 128
    n_routed_experts: int = 8
    num_experts_per_tok: int = 2
    routed_scaling_factor: float = 1.5
    swiglu_limit: float = 10.0
    rms_norm_eps: float = 1e-20
    sliding_window: int = 64
    max_position_embeddings: int = 16384
    rope_theta: float = 10000.0
    compress_rope_theta: float = 160000.0
    rope_factor: float = 16.0
    rope_beta_fast: float = 32.0
    rope_beta_slow: float = 1.0
    rope_original_positions: int = 1024
    compress_ratios: tuple[int, ...] = (0, 0, 2, 2, 1, 1, 1, 1, 0, 0, 0)
    kv_source_layer_ids: tuple[int, ...] = (2, 4)
    index_source_layer_ids: tuple[int, ...] = (2, 4, 6)
    index_n_heads: int = 4
    index_head_dim: int = 64
    index_topk: int = 128
    candidate_source_layer_id: int = 4
    candidate_topk_blocks: int = 64
    candidate_block_size: int = 8
    hc_mult: int = 4
    hc_sinkhorn_iters: int = 20
    hc_eps: float = 1e-6
    engram_layer_ids: tuple[int, ...] = (1,)
    engram_max_ngram_size: int = 4
    engram_vocab_size: int = 2003
    engram_n_heads: int = 2
    engram_head_dim: int = 32
    engram_pad_token_id: int = 2
    engram_compressed_vocab_size: int = 3072
    num_nextn_predict_layers: int = 3
    dspark_block_size: int = 5
    dspark_noise_token_id: int = 3
    dspark_target_layer_ids: tuple[int, ...] = (5, 6, 7)
    dspark_markov_rank: int = 64
    dspark_n_routed_experts: int = 4
    dspark_num_experts_per_tok: int = 2
    bos_token_id: int = 0
    eos_token_id: int = 1
    pad_token_id: int = 2
    image_token_id: int = 3

    def role(self, layer: int) -> Role:
        if self.compress_ratios[layer] == 0:
            return Role.WINDOW_ONLY
        if layer in self.kv_source_layer_ids:
            return Role.FULL
        return Role.REINDEX if layer in self.index_source_layer_ids else Role.REUSE

    def kv_source(self, layer: int) -> int:
        """The layer whose compressed keys `layer` reads: the largest source id <= layer."""
        return self._source(self.kv_source_layer_ids, layer)

    def index_source(self, layer: int) -> int:
        return self._source(self.index_source_layer_ids, layer)

    def _source(self, ids: tuple[int, ...], layer: int) -> int:
        at = bisect_right(ids, layer)
        return -1 if at == 0 or self.compress_ratios[layer] == 0 else ids[at - 1]

    @property
    def decoder_start(self) -> int:
        layers = self.num_hidden_layers
        return next((i for i in range(layers) if self.compress_ratios[i] == 1), layers)

    @property
    def engram_rows_per_token(self) -> int:
        return (self.engram_max_ngram_size - 1) * self.engram_n_heads


# The vision tower is part of the format; this checkpoint carries the smallest one and no skill
# that uses it.
VISION = {
    "model_type": "deepseek_v41_vision",
    "num_hidden_layers": 1,
    "hidden_size": 16,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "patch_size": 2,
    "rope_theta": 10000.0,
    "downsample_ratio": 1,
    "max_image_tokens": 64,
    "min_pixels": 64,
    "max_wh_ratio": None,
}

_TOP_LEVEL = ("bos_token_id", "eos_token_id", "pad_token_id", "image_token_id")
_ROPE_SCALING = {
    "rope_factor": "factor",
    "rope_beta_fast": "beta_fast",
    "rope_beta_slow": "beta_slow",
    "rope_original_positions": "original_max_position_embeddings",
}
_FIXED_TEXT = {
    "model_type": "deepseek_v41_text",
    "num_key_value_heads": 1,
    "hidden_act": "silu",
    "attention_bias": False,
    "n_shared_experts": 1,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "tie_word_embeddings": False,
}


def published_config(config: ModelConfig, vision: dict | None = None) -> dict:
    """The JSON object of config.json."""
    from .engram import engram_table_rows

    text = dict(_FIXED_TEXT)
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.name not in _TOP_LEVEL and field.name not in _ROPE_SCALING:
            text[field.name] = list(value) if isinstance(value, tuple) else value
    text["rope_scaling"] = {"rope_type": "yarn"} | {
        published: getattr(config, name) for name, published in _ROPE_SCALING.items()
    }
    text["engram_num_embeddings"] = engram_table_rows(config)
    return {
        "architectures": ["DeepseekV41ForCausalLM"],
        "model_type": "deepseek_v41",
        "dtype": "bfloat16",
        **{key: getattr(config, key) for key in _TOP_LEVEL},
        "tie_word_embeddings": False,
        "quantization_config": {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": [32, 32],
            "scale_fmt": "ue8m0",
            "expert_dtype": "fp4",
        },
        "text_config": text,
        "vision_config": vision or VISION,
    }


def parse_published(document: dict) -> ModelConfig:
    """The inverse of published_config. The engine validates files; this reads valid ones."""
    text = document["text_config"]
    values = {}
    for field in dataclasses.fields(ModelConfig):
        if field.name in _TOP_LEVEL:
            value = document[field.name]
        elif field.name in _ROPE_SCALING:
            value = text["rope_scaling"][_ROPE_SCALING[field.name]]
        else:
            value = text[field.name]
        values[field.name] = tuple(value) if isinstance(value, list) else value
    return ModelConfig(**values)


def load_config(directory: str | Path) -> ModelConfig:
    return parse_published(json.loads((Path(directory) / "config.json").read_text()))


def smoke_config() -> ModelConfig:
    """Every mechanism at the smallest width: for tests that run on a CPU in seconds."""
    return dataclasses.replace(
        ModelConfig(),
        vocab_size=512,
        hidden_size=64,
        num_attention_heads=4,
        head_dim=32,
        qk_rope_head_dim=16,
        q_lora_rank=32,
        o_groups=2,
        o_lora_rank=32,
        moe_intermediate_size=32,
        n_routed_experts=4,
        sliding_window=16,
        index_n_heads=2,
        index_head_dim=32,
        index_topk=16,
        candidate_topk_blocks=6,
        candidate_block_size=4,
        engram_vocab_size=101,
        engram_compressed_vocab_size=512,
        dspark_n_routed_experts=2,
        dspark_num_experts_per_tok=1,
    )
