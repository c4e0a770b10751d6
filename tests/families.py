"""Tiny configs of the model families that the parity matrix runs, made in memory: 4 blocks, width 32, no dropout."""

from __future__ import annotations

from typing import Any

from transformers import AutoConfig, PretrainedConfig

VOCAB_SIZE = 96
_DECODER = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "attention_dropout": 0.0,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_ENCODER = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "classifier_dropout": 0.0,
    "pad_token_id": 0,
}
_MOE = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}


def _decoder(**changes: Any) -> dict[str, Any]:
    return {**_DECODER, **changes}


def _encoder(**changes: Any) -> dict[str, Any]:
    return {**_ENCODER, **changes}


_GPT = {"vocab_size": VOCAB_SIZE, "n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 64, "bos_token_id": 1, "eos_token_id": 2}

# family -> keys of its config.json. The names are transformers' model types.
CAUSAL_LM: dict[str, dict[str, Any]] = {
    "llama": _decoder(),
    "mistral": _decoder(sliding_window=8),
    "mixtral": _decoder(num_local_experts=4, num_experts_per_tok=2),
    "qwen2": _decoder(tie_word_embeddings=True),
    "qwen3": _decoder(head_dim=8),
    "qwen3_moe": _decoder(head_dim=8, **_MOE),
    "gemma": _decoder(head_dim=8),
    "gemma2": _decoder(head_dim=8, sliding_window=8, query_pre_attn_scalar=8),
    "gemma3_text": _decoder(head_dim=8, sliding_window=8, query_pre_attn_scalar=8),
    "phi": _decoder(num_key_value_heads=4, resid_pdrop=0.0, embd_pdrop=0.0),
    "phi3": _decoder(resid_pdrop=0.0, embd_pdrop=0.0),
    "gpt2": {**_GPT, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "gpt_neo": {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 32,
        "num_layers": 4,
        "num_heads": 4,
        "max_position_embeddings": 64,
        "attention_types": [[["global", "local"], 2]],
        "window_size": 8,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "embed_dropout": 0.0,
        "attention_dropout": 0.0,
        "resid_dropout": 0.0,
    },
    "gpt_neox": _decoder(hidden_dropout=0.0),
    "gptj": {**_GPT, "rotary_dim": 4, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "opt": {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 32,
        "ffn_dim": 48,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "max_position_embeddings": 64,
        "word_embed_proj_dim": 32,
        "dropout": 0.0,
        "attention_dropout": 0.0,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "bloom": {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 32,
        "n_layer": 4,
        "n_head": 4,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "falcon": {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 32,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    },
    "olmo2": _decoder(),
    "cohere": _decoder(),
    "stablelm": _decoder(hidden_dropout=0.0),
    "starcoder2": _decoder(residual_dropout=0.0, embedding_dropout=0.0),
    "smollm3": _decoder(),
    "granite": _decoder(),
    "glm4": _decoder(head_dim=8, partial_rotary_factor=0.5),
    "gpt_oss": _decoder(head_dim=8, sliding_window=8, num_local_experts=4, num_experts_per_tok=2),
    "deepseek_v3": _decoder(
        num_key_value_heads=4,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        n_group=2,
        topk_group=1,
        kv_lora_rank=8,
        q_lora_rank=8,
        qk_rope_head_dim=4,
        qk_nope_head_dim=8,
        v_head_dim=8,
        first_k_dense_replace=1,
        n_shared_experts=1,
    ),
}
SEQUENCE_CLASSIFICATION: dict[str, dict[str, Any]] = {
    "bert": _encoder(),
    "roberta": _encoder(max_position_embeddings=66, type_vocab_size=1, pad_token_id=1),
    "xlm-roberta": _encoder(max_position_embeddings=66, type_vocab_size=1, pad_token_id=1),
    "distilbert": {
        "vocab_size": VOCAB_SIZE,
        "dim": 32,
        "hidden_dim": 48,
        "n_layers": 4,
        "n_heads": 4,
        "max_position_embeddings": 64,
        "dropout": 0.0,
        "attention_dropout": 0.0,
        "seq_classif_dropout": 0.0,
        "pad_token_id": 0,
    },
    "electra": _encoder(embedding_size=16),
    "modernbert": _encoder(
        embedding_dropout=0.0,
        attention_dropout=0.0,
        mlp_dropout=0.0,
        bos_token_id=1,
        eos_token_id=2,
        cls_token_id=1,
        sep_token_id=2,
        local_attention=8,
        reference_compile=False,
    ),
    "mpnet": _encoder(max_position_embeddings=66, pad_token_id=1),
}
# Beyond the 34: blocks that return tuples of a length the stub must keep, and families that are refused with a reason.
DEBERTA_V2 = _encoder(relative_attention=True, max_relative_positions=16, position_buckets=8, pos_att_type=["p2c", "c2p"], norm_rel_ebd="layer_norm")
ALBERT = _encoder(embedding_size=16, classifier_dropout_prob=0.0)
# Its files hold a buffer, as deepseek_v3's do, which its class makes in the type of the weights.
MINIMAX_M2 = _decoder(head_dim=8, rotary_dim=8, **_MOE)
T5 = {"vocab_size": VOCAB_SIZE, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 4, "num_heads": 4, "dropout_rate": 0.0}

FAMILIES: dict[str, dict[str, Any]] = {**CAUSAL_LM, **SEQUENCE_CLASSIFICATION}


def tiny_config(family: str, **changes: Any) -> PretrainedConfig:
    """The tiny config of a family, as transformers builds it."""
    extra = {"deberta-v2": DEBERTA_V2, "albert": ALBERT, "minimax_m2": MINIMAX_M2, "t5": T5}
    keys = FAMILIES.get(family) or extra[family]
    return AutoConfig.for_model(family, **{**keys, **changes})


def task_of(family: str) -> str:
    """The task that the matrix trains a family on."""
    return "causal_lm" if family in CAUSAL_LM else "sequence_classification"
