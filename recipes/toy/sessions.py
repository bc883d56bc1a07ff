"""An agent loop whose sessions are one to four rows: what a loop hands over that begins a row anew now and then.

A row's prompt is everything before it, so that each token is predicted from the same text, whichever row it stands in:
the sessions are the same however they are split, and so is a loss whose unit is the session.
"""

from typing import Any

from verl.experimental.agent_loop.agent_loop import AgentLoopOutput
from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop

from recipes.toy.reward import compute_score


class SessionLoop(SingleTurnAgentLoop):
    """Answers in one turn and hands the answer over in rows.

    Args:
        max_rows: Most rows of a session; how many one has hangs on its answer.
    """

    def __init__(self, *values: Any, max_rows: int, **named: Any) -> None:
        super().__init__(*values, **named)
        self.max_rows = max_rows

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> list[AgentLoopOutput]:
        """Return the rows of one session, the reward of the whole answer in each."""
        whole = await super().run(sampling_params, **kwargs)
        # verl would score the last row alone.
        text = self.tokenizer.decode(whole.response_ids, skip_special_tokens=True)
        result = compute_score(kwargs["data_source"], text, kwargs["reward_model"]["ground_truth"])
        whole.reward_score = result["score"]
        whole.extra_fields["reward_extra_info"] = result
        return split(whole, 1 + sum(whole.response_ids) % self.max_rows)


def split(whole: AgentLoopOutput, rows: int) -> list[AgentLoopOutput]:
    """Return an answer as so many rows, as far as it has the tokens, of nearly equal length."""
    size = len(whole.response_ids)
    rows = min(rows, max(1, size))
    ends = [size * (row + 1) // rows for row in range(rows)]
    parts = []
    for start, end in zip([0, *ends], ends, strict=False):
        part = whole.model_copy(deep=True)
        part.prompt_ids = whole.prompt_ids + whole.response_ids[:start]
        part.response_ids, part.response_mask = whole.response_ids[start:end], whole.response_mask[start:end]
        if whole.response_logprobs is not None:
            part.response_logprobs = whole.response_logprobs[start:end]
        parts.append(part)
    return parts
