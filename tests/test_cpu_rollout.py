"""The demonstration's rollout server: what it samples depends on prompt, step and count, not on order or batch."""

import asyncio
import sys
from pathlib import Path

import pytest

pytest.importorskip("verl")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "recipes" / "toy"))

PROMPTS = [[5, 6, 7], [8, 9], [10, 11, 12, 13]]


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    import task

    folder = tmp_path_factory.mktemp("toy") / "model"
    task.make_model(folder)
    return str(folder)


def make_server(model_folder, seed=1, step=3):
    from trinity_loss.verl.cpu.rollout import TransformersServer

    server = TransformersServer(model_folder, response_length=8, max_num_seqs=64, seed=seed)
    asyncio.run(server.load_weights(server.model.state_dict(), step))
    return server


def answers(server, prompts, temperature=1.0, **parameters):
    async def ask_all():
        requests = (server.generate("", prompt, {"temperature": temperature, **parameters}) for prompt in prompts)
        return await asyncio.gather(*requests)

    outputs = asyncio.run(ask_all())
    return sorted((prompt, output.token_ids) for prompt, output in zip(prompts, outputs, strict=True))


def test_samples_do_not_depend_on_order_or_batch(model_folder):
    asked = PROMPTS * 4
    together = answers(make_server(model_folder), asked)
    assert answers(make_server(model_folder), asked[::-1]) == together
    one_by_one = make_server(model_folder)
    assert sorted(row for prompt in asked for row in answers(one_by_one, [prompt])) == together


def test_samples_differ_between_samples_steps_and_seeds(model_folder):
    four = answers(make_server(model_folder), PROMPTS[:1] * 4)
    assert len({tuple(tokens) for _, tokens in four}) == 4
    assert answers(make_server(model_folder, step=4), PROMPTS[:1] * 4) != four
    assert answers(make_server(model_folder, seed=2), PROMPTS[:1] * 4) != four


@pytest.mark.parametrize("top_k", [0, 5])
def test_a_teacher_tells_of_the_token_that_follows(model_folder, top_k):
    import torch

    server = make_server(model_folder)
    asked = {"max_tokens": 1, "temperature": 1.0, "prompt_logprobs": top_k}
    told = asyncio.run(server.generate("", PROMPTS[0], asked)).extra_fields
    with torch.no_grad():
        expected = server.model(torch.tensor([PROMPTS[0]])).logits[0].log_softmax(-1)
    log_probs, ids = torch.tensor(told["prompt_logprobs"]), torch.tensor(told["prompt_ids"])
    assert log_probs.shape == ids.shape == (len(PROMPTS[0]), max(top_k, 1))
    torch.testing.assert_close(log_probs[:-1], expected[:-1].gather(-1, ids[:-1]))
    if top_k:
        torch.testing.assert_close(log_probs[:-1], expected[:-1].topk(top_k).values)
    else:
        assert ids[:-1, 0].tolist() == PROMPTS[0][1:]


def test_log_probs_are_those_of_the_softmax_at_the_temperature(model_folder):
    import torch

    server = make_server(model_folder)
    output = asyncio.run(server.generate("", PROMPTS[0], {"temperature": 0.5}))
    tokens = torch.tensor([PROMPTS[0] + output.token_ids])
    with torch.no_grad():
        logits = server.model(tokens).logits[0, len(PROMPTS[0]) - 1 : -1]
    expected = (logits / 0.5).log_softmax(-1).gather(-1, torch.tensor(output.token_ids)[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(output.log_probs), expected, atol=1e-5, rtol=0)


def test_zero_temperature_is_greedy(model_folder):
    first, second = (tokens for _, tokens in answers(make_server(model_folder), PROMPTS[:1] * 2, temperature=0))
    assert first == second


def test_what_the_server_cannot_do_is_refused(model_folder):
    with pytest.raises(NotImplementedError, match="top_p"):
        answers(make_server(model_folder), PROMPTS[:1], top_p=0.9)


def test_nothing_begins_between_abort_and_resume(model_folder):
    """An asynchronous trainer exchanges the weights there: no answer may see both versions."""
    server = make_server(model_folder)

    async def exchange():
        running = asyncio.gather(*(server.generate("", prompt, {"temperature": 1.0}) for prompt in PROMPTS))
        await asyncio.sleep(0.1)
        await server.abort_all_requests()
        late = asyncio.create_task(server.generate("", PROMPTS[0], {"temperature": 1.0}))
        before = await running
        await server.load_weights(server.model.state_dict(), 4)
        await asyncio.sleep(0.2)
        assert not late.done()
        await server.resume_generation()
        return before, await late

    before, late = asyncio.run(exchange())
    assert [output.extra_fields["global_steps"] for output in before] == [3, 3, 3]
    assert late.extra_fields["global_steps"] == 4
    assert late.token_ids


def test_a_server_that_leaves_sends_requests_back(model_folder):
    server = make_server(model_folder)

    async def leave():
        waiting = asyncio.create_task(server.generate("", PROMPTS[0], {"temperature": 1.0}))
        await asyncio.sleep(0)
        await server.abort_all_requests(reject_request=True)
        return await waiting, await server.generate("", PROMPTS[1], {"temperature": 1.0})

    for output in asyncio.run(leave()):
        assert (output.stop_reason, output.token_ids) == ("aborted", [])
    assert len(answers(make_server(model_folder), PROMPTS[:1])) == 1
