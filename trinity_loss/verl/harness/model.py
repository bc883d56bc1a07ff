"""A random Qwen2 small enough that starting the engine is what takes time."""

from __future__ import annotations

from pathlib import Path

VOCABULARY = 64


def save_tiny_model(path: Path | str, layers: int = 2, seed: int = 0, tied: bool = False) -> None:
    """Save a randomly initialised Qwen2 with a word-level tokenizer, loadable by transformers and mbridge.

    Args:
        path: The folder to write.
        layers: Transformer layers, at least as many as there are pipeline stages and chunks together.
        seed: Of the weights, which are float32.
        tied: Whether the head is the embedding.
    """
    import torch
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen2Config

    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=1,
        tie_word_embeddings=tied,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(path)
    words = {"<pad>": 0, "<eos>": 1, **{f"w{i}": i for i in range(2, VOCABULARY)}}
    PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="<eos>")),
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<eos>",
    ).save_pretrained(path)
