"""A GGUF file of a tiny Llama with random weights and a byte-level tokenizer, written by the ``gguf`` package."""

from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, LlamaFileType
from gguf.quants import quantize
from tokenizers.pre_tokenizers import ByteLevel

WIDTH, DEPTH, HEADS, KV, FFN = 64, 2, 4, 2, 96
TOKENS = [*sorted(ByteLevel.alphabet()), "he", "<|end|>"]


def write(path: Path) -> Path:
    """Q8_0 weights, float32 norms."""
    draws = np.random.default_rng(0)
    writer = GGUFWriter(path, "llama")
    writer.add_file_type(LlamaFileType.MOSTLY_Q8_0)
    writer.add_context_length(32)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(DEPTH)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(WIDTH // HEADS)
    writer.add_rope_freq_base(500.0)
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(TOKENS)
    writer.add_token_types([1] * (len(TOKENS) - 1) + [3])
    writer.add_token_merges(["h e"])
    writer.add_bos_token_id(len(TOKENS) - 1)
    writer.add_eos_token_id(len(TOKENS) - 1)

    def matrix(name: str, rows: int, columns: int) -> None:
        packed = quantize(0.2 * draws.standard_normal((rows, columns), dtype=np.float32), GGMLQuantizationType.Q8_0)
        writer.add_tensor(name, packed, raw_dtype=GGMLQuantizationType.Q8_0)

    matrix("token_embd.weight", len(TOKENS), WIDTH)
    matrix("output.weight", len(TOKENS), WIDTH)
    writer.add_tensor("output_norm.weight", np.ones(WIDTH, np.float32))
    for i in range(DEPTH):
        for name in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{i}.{name}.weight", np.ones(WIDTH, np.float32))
        matrix(f"blk.{i}.attn_q.weight", WIDTH, WIDTH)
        for name in ("attn_k", "attn_v"):
            matrix(f"blk.{i}.{name}.weight", WIDTH * KV // HEADS, WIDTH)
        matrix(f"blk.{i}.attn_output.weight", WIDTH, WIDTH)
        for name in ("ffn_gate", "ffn_up"):
            matrix(f"blk.{i}.{name}.weight", FFN, WIDTH)
        matrix(f"blk.{i}.ffn_down.weight", WIDTH, FFN)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
