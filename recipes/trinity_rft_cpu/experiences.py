"""A toy model and the experiences that all runs train on, made in seconds and never downloaded.

Rows have random tokens, ragged lengths, and log-probabilities off the model's by what a rollout engine could be off.
The lengths are the same in every step, so a token limit cuts every step alike.
"""

import asyncio
import random
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "toy"))

STEPS, PROMPTS, ANSWERS, RANKS = 3, 8, 4, 2


def lengths() -> list[tuple[int, int]]:
    """Prompt and answer lengths of the rows of a step."""
    draw = random.Random(1)
    prompts = [draw.randint(5, 20) for _ in range(PROMPTS)]
    return [(prompt, draw.randint(4, 54)) for prompt in prompts for _ in range(ANSWERS)]


def token_limits(micro_batches: list[int]) -> dict[int, int]:
    """For each number of micro-batches the smallest limit that makes verl cut a rank's rows into so many."""
    from verl.utils.seqlen_balancing import calculate_workload, get_seqlen_balanced_partitions

    def parts(of: torch.Tensor, number: int, equal: bool) -> list[torch.Tensor]:
        return [of[p] for p in get_seqlen_balanced_partitions(calculate_workload(of).tolist(), number, equal)]

    ranks = parts(torch.tensor([sum(row) for row in lengths()]), RANKS, True)
    return {n: max(int(part.sum()) for rank in ranks for part in parts(rank, n, False)) for n in micro_batches}


@torch.inference_mode()
def make_rows(model) -> list:
    """The rows of all steps; the first answer to each prompt is an expert's."""
    from trinity.common.experience import EID, CustomField, Experience

    draw = torch.Generator().manual_seed(2)
    fields = [CustomField("is_expert", "expert_mask", torch.bool), CustomField("step", "step", torch.int32)]
    rows = []
    for step in range(STEPS):
        for index, (prompt, length) in enumerate(lengths()):
            if index % ANSWERS == 0:
                question = torch.randint(3, model.config.vocab_size, (prompt,), generator=draw)
                rewards = torch.rand(ANSWERS, generator=draw)
            tokens = torch.cat([question, torch.randint(3, model.config.vocab_size, (length,), generator=draw)])
            log_probs = model(tokens[None]).logits[0, prompt - 1 : -1].log_softmax(-1)
            log_probs = log_probs.gather(-1, tokens[prompt:, None]).squeeze(-1)
            reward = rewards[index % ANSWERS]
            advantage = (reward - rewards.mean()) / rewards.std()
            rows.append(
                Experience(
                    eid=EID(batch=step, task=f"{step}-{index // ANSWERS}", run=index % ANSWERS),
                    tokens=tokens.int(),
                    prompt_length=prompt,
                    logprobs=log_probs + 0.15 * torch.randn(length, generator=draw),
                    reward=reward.item(),
                    advantages=advantage.expand(length).clone(),
                    returns=advantage.expand(length).clone(),
                    info={"model_version": step, "is_expert": index % ANSWERS == 0, "step": step},
                    custom_fields=fields,
                )
            )
    return rows


def make_pairs(rows: list) -> list:
    """The same rows as preference pairs of two answers to one prompt."""
    from trinity.common.experience import EID, Experience

    pairs = []
    for chosen, rejected in zip(rows[::2], rows[1::2], strict=True):
        answers = [row.tokens[row.prompt_length :] for row in (chosen, rejected)]
        eid = EID(batch=chosen.eid.batch, task=chosen.eid.task, run=chosen.eid.run)
        prompt = chosen.tokens[: chosen.prompt_length]
        pairs.append(Experience(eid=eid, tokens=prompt, chosen=answers[0], rejected=answers[1]))
    return pairs


async def _save(file: Path, schema: str, rows: list) -> None:
    from trinity.buffer.storage.sql import SQLExperienceStorage
    from trinity.common.config import StorageConfig

    config = StorageConfig(name=file.stem, path=f"sqlite:///{file}", schema_type=schema, batch_size=len(rows))
    storage = SQLExperienceStorage(config)
    await storage.write(rows)
    await storage.engine.dispose()


def make(folder: Path) -> None:
    """Make ``model/`` and a sqlite file for each schema in ``folder``, unless they are there."""
    if (folder / "done").exists():
        return
    from task import make_model
    from transformers import AutoModelForCausalLM

    folder.mkdir(parents=True, exist_ok=True)
    make_model(folder / "model")
    rows = make_rows(AutoModelForCausalLM.from_pretrained(folder / "model", attn_implementation="sdpa").eval())
    for schema, of_schema in (("experience", rows), ("sft", rows), ("dpo", make_pairs(rows))):
        (folder / f"{schema}.db").unlink(missing_ok=True)
        asyncio.run(_save(folder / f"{schema}.db", schema, of_schema))
    (folder / "done").touch()


if __name__ == "__main__":
    make(Path(sys.argv[1]))
