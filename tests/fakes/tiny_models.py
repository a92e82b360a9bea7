"""Models of a few thousand parameters, one of each architecture."""

from dataclasses import replace

from wattune.catalog.models import ModelSpec

LLAMA = ModelSpec(
    name="llama", num_layers=2, hidden_size=16, ffn_hidden_size=24, num_heads=4, num_kv_heads=2, vocab_size=40
)
MIXTRAL = replace(LLAMA, name="mixtral", num_experts=4, num_experts_per_token=2)
GPT = replace(
    LLAMA,
    name="gpt",
    num_kv_heads=4,
    norm="layernorm",
    activation="gelu",
    positions="learned",
    max_positions=8,
    bias=True,
    tied_embeddings=True,
)
