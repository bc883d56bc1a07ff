"""What holds for all tests: none of them needs a model hub, and one that asks for it fails instead of waiting."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"  # Before anything imports huggingface_hub; what the tests start inherits it.
