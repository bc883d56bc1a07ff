"""A rollout server made of ``transformers``' `generate`, in place of vLLM; for demonstration and tests.

Every sample is drawn with a seed made of the configured seed, the step, the prompt, and how many samples of that
prompt the server has been asked for in the step. With one server for all ranks
(``rollout.tensor_model_parallel_size`` equal to the number of ranks) the samples of a step therefore do not depend
on the order in which the requests arrive.
"""

import asyncio
import hashlib
import os
from collections import Counter
from collections.abc import AsyncIterator, Generator
from dataclasses import dataclass
from typing import Any, NamedTuple

import ray
import torch
from transformers import AutoModelForCausalLM, GenerationConfig, LogitsProcessor, LogitsProcessorList
from verl.workers.config import DistillationTeacherModelConfig
from verl.workers.rollout.base import _ROLLOUT_REGISTRY, BaseRollout
from verl.workers.rollout.replica import RolloutMode, RolloutReplica, RolloutReplicaRegistry, TokenOutput

NAME = "transformers"
"""What ``actor_rollout_ref.rollout.name`` has to be."""

_WAVE_SECONDS = 0.02  # How long the server waits for other requests to share a batch with.


class Request(NamedTuple):
    """One answer to generate."""

    prompt: tuple[int, ...]
    max_tokens: int
    temperature: float
    seed: int
    answer: asyncio.Future[TokenOutput]


class GumbelNoise(LogitsProcessor):
    """Makes the greedy choice a draw from the softmax: adds noise that belongs to a row, whatever its batch.

    Args:
        noise: [rows, tokens, vocabulary] Gumbel noise; zeros leave a row greedy.
        temperature: Divides the logits.
        prompt_length: Length of the padded prompts.
    """

    def __init__(self, noise: torch.Tensor, temperature: float, prompt_length: int) -> None:
        self.noise, self.temperature, self.prompt_length = noise, temperature, prompt_length

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores / self.temperature + self.noise[:, input_ids.shape[1] - self.prompt_length]


class TransformersServer:
    """Answers verl's generation requests with one copy of the model; requests of one moment share a batch.

    Args:
        model_path: A folder with the model and its tokenizer's special tokens.
        response_length: Longest answer where a request sets no limit.
        max_num_seqs: Most requests in a batch.
        seed: Changes all samples.
    """

    def __init__(self, model_path: str, response_length: int, max_num_seqs: int, seed: int) -> None:
        torch.set_num_threads(1)
        model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32, attn_implementation="sdpa")
        self.model = model.eval()
        ends = model.generation_config.eos_token_id
        self.ends = set(ends if isinstance(ends, list) else [ends])
        self.response_length, self.max_num_seqs, self.seed = response_length, max_num_seqs, seed
        self.step: int | None = None
        self.asked: Counter[tuple[int, ...]] = Counter()
        self.waiting: list[Request] = []
        self.running: asyncio.Task[None] | None = None
        self.paused = self.rejects = False

    async def load_weights(self, weights: dict[str, torch.Tensor], step: int | None) -> None:
        """Take the weights of ``step``; every weight of the model has to be there."""
        if self.model.config.tie_word_embeddings:
            weights.setdefault("lm_head.weight", weights["model.embed_tokens.weight"])
        self.model.load_state_dict(weights)
        self.step = step
        self.asked.clear()

    async def generate(
        self, request_id: str, prompt_ids: list[int], sampling_params: dict[str, Any], **inputs: Any
    ) -> TokenOutput:
        """Answer one prompt, as verl's client asks; what this server cannot do is an error."""
        given = sorted(name for name, value in inputs.items() if value)
        wanted = {name: sampling_params.get(name, default) for name, default in _NEUTRAL.items()}
        if given or wanted != _NEUTRAL:
            raise NotImplementedError(
                f"the rollout {NAME!r} takes text only and samples from the whole softmax ({_NEUTRAL}); "
                f"it was given {wanted} and inputs {given}"
            )
        if self.rejects:
            return self._aborted()
        if sampling_params.get("prompt_logprobs") is not None:
            return await asyncio.to_thread(self._judge, prompt_ids, sampling_params["prompt_logprobs"])
        prompt = tuple(prompt_ids)
        temperature = float(sampling_params.get("temperature", 1.0))
        request = Request(
            prompt=prompt,
            max_tokens=int(sampling_params.get("max_tokens") or self.response_length),
            temperature=temperature,
            seed=self._seed(prompt) if temperature else 0,
            answer=asyncio.get_running_loop().create_future(),
        )
        self.waiting.append(request)
        self._start()
        return await request.answer

    async def abort_all_requests(self, reject_request: bool = False, **_: Any) -> None:
        """Finish the batch that is running and begin no other, so that no answer sees two versions of the weights.

        Args:
            reject_request: Send requests back, unanswered, to be asked elsewhere; else they wait here.
        """
        self.paused, self.rejects = True, reject_request
        if reject_request:
            for request in self.waiting:
                request.answer.set_result(self._aborted())
            self.waiting = []
        if self.running is not None:
            await self.running

    async def resume_generation(self) -> None:
        """Answer what waits, and what comes."""
        self.paused = self.rejects = False
        self._start()

    def _start(self) -> None:
        if not self.paused and (self.running is None or self.running.done()):
            self.running = asyncio.create_task(self._answer_waiting())

    def _seed(self, prompt: tuple[int, ...]) -> int:
        key = repr((self.seed, self.step, self.asked[prompt], prompt)).encode()
        self.asked[prompt] += 1
        return int.from_bytes(hashlib.blake2b(key, digest_size=7).digest(), "big")

    async def _answer_waiting(self) -> None:
        await asyncio.sleep(_WAVE_SECONDS)
        while self.waiting and not self.paused:
            first = self.waiting[0]
            alike = [r for r in self.waiting if r[1:3] == first[1:3]][: self.max_num_seqs]
            self.waiting = [r for r in self.waiting if all(r is not a for a in alike)]
            try:
                outputs = await asyncio.to_thread(self._generate, alike)
            except Exception as error:
                for request in alike:
                    request.answer.set_exception(error)
            else:
                for request, output in zip(alike, outputs, strict=True):
                    request.answer.set_result(output)

    @torch.inference_mode()
    def _generate(self, requests: list[Request]) -> list[TokenOutput]:
        _, max_tokens, temperature, _, _ = requests[0]
        prompts = [r.prompt for r in requests]
        width = max(map(len, prompts))
        padding = self.model.generation_config.pad_token_id
        shape = max_tokens, self.model.config.vocab_size
        noise = torch.stack([_gumbel(r.seed, shape) if temperature else torch.zeros(shape) for r in requests])
        output = self.model.generate(
            input_ids=torch.tensor([[padding] * (width - len(p)) + list(p) for p in prompts]),
            attention_mask=torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts]),
            logits_processor=LogitsProcessorList([GumbelNoise(noise, temperature or 1.0, width)]),
            generation_config=GenerationConfig(
                do_sample=False,
                max_new_tokens=max_tokens,
                pad_token_id=padding,
                eos_token_id=sorted(self.ends),
                output_logits=True,
                return_dict_in_generate=True,
            ),
        )
        tokens = output.sequences[:, width:]
        log_probs = (torch.stack(output.logits, dim=1) / (temperature or 1.0)).log_softmax(-1)
        log_probs = log_probs.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
        return [self._output(*row) for row in zip(tokens.tolist(), log_probs.tolist(), strict=True)]

    @torch.inference_mode()
    def _judge(self, ids: list[int], top_k: int) -> TokenOutput:
        """What a teacher is asked for: at each place the log-prob of the token after it, or the ``top_k`` likely ones.

        The last place, which no token follows, holds zeros, as of verl's servers.
        """
        log_probs = self.model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
        chosen = log_probs.topk(top_k).indices if top_k else torch.tensor(ids[1:])[:, None]
        nothing = [0] * max(top_k, 1)
        told = {
            "prompt_ids": [*chosen.tolist(), nothing],
            "prompt_logprobs": [*log_probs.gather(-1, chosen).tolist(), [0.0 for _ in nothing]],
        }
        return TokenOutput(token_ids=[], log_probs=[], stop_reason="completed", num_preempted=0, extra_fields=told)

    def _output(self, tokens: list[int], log_probs: list[float]) -> TokenOutput:
        end = next((i + 1 for i, token in enumerate(tokens) if token in self.ends), None)
        return TokenOutput(
            token_ids=tokens[:end],
            log_probs=log_probs[:end],
            stop_reason="length" if end is None else "completed",
            num_preempted=0,
            extra_fields={"global_steps": self.step},
        )

    def _aborted(self) -> TokenOutput:
        return TokenOutput(
            token_ids=[], log_probs=[], stop_reason="aborted", num_preempted=0, extra_fields={"global_steps": self.step}
        )

    async def _nothing(self, *args: object, **kwargs: object) -> None:
        """There is no memory to give back between generation and training."""

    ready = wake_up = sleep = clear_kv_cache = release_kv_cache = resume_kv_cache = _nothing
    start_profile = stop_profile = _nothing


_NEUTRAL = {"top_p": 1, "top_k": -1, "repetition_penalty": 1.0}


def _gumbel(seed: int, shape: tuple[int, int]) -> torch.Tensor:
    uniform = torch.rand(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return -(-uniform.clamp_min(1e-300).log()).log().float()


def _server_name(replica_rank: int) -> str:
    return f"{NAME}_server_{replica_rank}"


@dataclass
class TeacherModelConfig(DistillationTeacherModelConfig):
    """A teacher on this server, which can be asked for the likely tokens; verl knows that of its own servers only."""

    def _validate_topk_logprobs(self, use_topk: bool, topk: int | None) -> None:
        """Any number will do."""


class TransformersReplica(RolloutReplica):
    """The driver's side: starts a server."""

    async def init_colocated(self, resource_pool: Any) -> None:
        """Start a teacher's server alone: no rank hands weights to it."""
        self.rollout_mode, self.resource_pool = RolloutMode.COLOCATED, resource_pool
        await self.launch_servers()

    async def launch_servers(self) -> None:
        """Start this replica's server and wait until its model stands."""
        name = _server_name(self.replica_rank)
        if self.is_teacher_model:
            name = f"{name}_teacher{self.name_suffix}"
        actor_class: Any = ray.remote(TransformersServer)
        server = actor_class.options(name=name, num_cpus=0, max_concurrency=self.max_concurrency).remote(
            model_path=self.model_config.path,
            response_length=self.config.response_length,
            max_num_seqs=self.config.max_num_seqs,
            seed=self.config.seed,
        )
        await server.ready.remote()
        self.servers, self._server_handle, self._server_address = [server], server, name


class TransformersRollout(BaseRollout):
    """The training worker's side: hands the weights to the server of its ranks."""

    def __init__(self, config: Any, model_config: Any, device_mesh: Any, replica_rank: int = -1) -> None:
        super().__init__(config, model_config, device_mesh)
        ranks = self.config.tensor_model_parallel_size * self.config.data_parallel_size
        replica, rank_in_replica = divmod(int(os.environ["RANK"]), ranks * self.config.pipeline_model_parallel_size)
        self.server_name = _server_name(replica if replica_rank == -1 else replica_rank)
        self.is_leader = rank_in_replica == 0

    async def resume(self, tags: list[str]) -> None:
        """Do nothing: the server keeps its memory."""

    async def release(self) -> None:
        """Do nothing: the server keeps its memory."""

    async def update_weights(
        self,
        weights: Generator[tuple[str, torch.Tensor], None, None] | AsyncIterator[tuple[str, torch.Tensor]],
        wire_format: str = "named_tensors",
        global_steps: int | None = None,
        peft_config: Any = None,
        **kwargs: Any,
    ) -> None:
        """Send the weights of step ``global_steps``; all ranks read them, since gathering one is collective."""
        if wire_format != "named_tensors" or peft_config is not None:
            raise NotImplementedError(f"the rollout {NAME!r} takes a model's own, whole weights: no LoRA, no deltas")
        if isinstance(weights, AsyncIterator):  # From a checkpoint engine.
            state = {name: weight async for name, weight in weights}
        else:
            state = {name: weight.detach().clone() for name, weight in weights}
        if self.is_leader:
            await ray.get_actor(self.server_name).load_weights.remote(state, global_steps)


def register_rollout() -> None:
    """Make ``rollout.name=transformers`` known to verl, in the driver and in the workers."""
    RolloutReplicaRegistry.register(NAME, lambda: TransformersReplica)
    _ROLLOUT_REGISTRY[(NAME, "async")] = f"{__name__}.{TransformersRollout.__name__}"
