"""verl on a machine without an accelerator, for demonstration and tests.

verl has registries for platforms, engines and rollouts, but no entry of its own for a CPU. This package adds
them, from outside and without changing anything of verl: a platform (``platform``), the FSDP2 and the Megatron engine
on gloo (``fsdp_engine``, ``megatron_engine``) with a training worker that chooses one (``training_worker``), a rollout
server made of ``transformers`` (``rollout``) and a sampler that makes runs repeatable (``sampler``). A run needs two
switches:

- ``VERL_PLATFORM=cpu`` in the environment: the plugin then registers the platform;
- ``actor_rollout_ref.model.external_lib=trinity_loss.verl.cpu.register``: verl imports that module, which
  registers the rest, in every process that reads the model's configuration, before it makes a worker or a server.

Nothing here is meant for real training: it is slow, and it knows one kind of rollout.
"""
