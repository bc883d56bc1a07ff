"""The toy task: sums to answer, a tokenizer of bytes and a small random Qwen2, made in a second and never downloaded.

Beside ``model`` (259 tokens, two layers) there are ``model_even`` (260 tokens) for tensor parallelism, and
``model_deep`` (four layers) for virtual pipeline stages. ``model_teacher`` was taught to answer with digits.

The reward (`reward.py`) is the share of digits in the answer. A random model scores about 0.04, and its answers
have all lengths, since half of the punctuation ends an answer.
"""

import json
import random
import sys
from pathlib import Path

SPEC = {"version": 3, "seed": 0, "hidden_size": 64, "layers": 2, "train": 256, "val": 16}
SPECIAL = ["<pad>", "<|im_end|>", "<|im_start|>"]
UNUSED = "<|unused|>"  # Makes the number of tokens even, which two tensor-parallel ranks share.
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'][:1] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>a\n{% endif %}"
)


def make_tokenizer(special: list[str] = SPECIAL):
    """Return a tokenizer with one token for each byte: verl wants one for a line break and one for <|im_end|>."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    symbols = special + sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(symbols)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<|im_end|>",
        additional_special_tokens=["<|im_start|>"],
        chat_template=CHAT_TEMPLATE,
    )


def make_model(folder: Path, special: list[str] = SPECIAL, layers: int = SPEC["layers"]) -> None:
    """Save a random Qwen2 and its tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig, Qwen2Config

    torch.manual_seed(SPEC["seed"])
    tokenizer = make_tokenizer(special)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=SPEC["hidden_size"],
        intermediate_size=2 * SPEC["hidden_size"],
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        tie_word_embeddings=False,
    )
    model = AutoModelForCausalLM.from_config(config)
    ends = tokenizer.convert_tokens_to_ids(["<|im_end|>", *"!\"#$%&'()*+,-./:;<=>?"])
    model.generation_config = GenerationConfig(pad_token_id=tokenizer.pad_token_id, eos_token_id=ends)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def make_teacher(folder: Path, student: Path, steps: int = 60) -> None:
    """Save the student's model after some steps on random sums that are answered with seven digits and an end."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer, model = AutoTokenizer.from_pretrained(student), AutoModelForCausalLM.from_pretrained(student)
    draw, optimizer = random.Random(SPEC["seed"]), torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(steps):
        texts = []
        for _ in range(16):
            question = "+".join(str(draw.randrange(1000)) for _ in range(3))
            digits = "".join(draw.choice("0123456789") for _ in range(7))
            asked = tokenizer.apply_chat_template(
                [{"role": "user", "content": question}], add_generation_prompt=True, tokenize=False
            )
            texts.append(asked + digits + "<|im_end|>")
        batch = tokenizer(texts, return_tensors="pt", padding=True, padding_side="left")
        labels = batch["input_ids"].clone()
        labels[:, :-8] = -100
        model(**batch, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def make_prompts(file: Path, count: int, seed: int) -> None:
    """Save ``count`` different sums of ragged length in the columns that verl reads."""
    import pandas as pd

    draw = random.Random(seed)
    sums: dict[str, int] = {}
    while len(sums) < count:
        terms = [draw.randrange(10 ** draw.randint(1, 4)) for _ in range(draw.randint(2, 4))]
        sums["+".join(map(str, terms))] = sum(terms)
    rows = [
        {
            "data_source": "toy",
            "prompt": [{"role": "user", "content": text}],
            "ability": "arithmetic",
            "reward_model": {"style": "rule", "ground_truth": str(total)},
            "extra_info": {"index": index},
        }
        for index, (text, total) in enumerate(sums.items())
    ]
    pd.DataFrame(rows).to_parquet(file)


def make(folder: Path) -> None:
    """Make model and data in ``folder``, unless they are there already."""
    done = folder / "spec.json"
    if done.exists() and json.loads(done.read_text()) == SPEC:
        return
    folder.mkdir(parents=True, exist_ok=True)
    make_model(folder / "model")
    make_model(folder / "model_even", [*SPECIAL, UNUSED])
    make_model(folder / "model_deep", layers=2 * SPEC["layers"])
    make_teacher(folder / "model_teacher", folder / "model")
    make_prompts(folder / "train.parquet", SPEC["train"], SPEC["seed"])
    make_prompts(folder / "val.parquet", SPEC["val"], SPEC["seed"] + 1)
    done.write_text(json.dumps(SPEC))


if __name__ == "__main__":
    make(Path(sys.argv[1]))
